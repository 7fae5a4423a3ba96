"""The house: data flows one way, and engines and report meet only in plans and records."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "matcha"


def imports(file):
    """The matcha modules a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "matcha")


def floor(module):
    """The first part of a module's name below matcha."""
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("simulation", {"distributed", "report", "experiments", "cli"}),
        ("distributed", {"simulation", "report", "experiments", "cli"}),
        ("report", {"simulation", "distributed", "experiments", "cli"}),
        ("strategies", {"simulation", "distributed", "report", "experiments", "cli"}),
        ("experiments", {"cli"}),
    ],
)
def test_packages_never_import_what_stands_beside_or_below(package, forbidden):
    for file in (SOURCE / package).rglob("*.py"):
        found = {floor(module) for module in imports(file)} & forbidden
        assert not found, f"{file.name} imports {found}"


def test_the_planner_imports_nothing_below_it():
    below = {"simulation", "distributed", "report", "experiments", "cli"}
    for file in SOURCE.glob("*.py"):
        found = {floor(module) for module in imports(file)} & below
        assert not found, f"{file.name} imports {found}"


def test_stages_of_the_pipeline_import_only_what_stands_above():
    order = ["errors", "topology", "graphfiles", "families", "timing", "certificates", "matchings",
             "rounds", "activation", "mixing", "schedules", "plans"]  # fmt: skip
    for number, name in enumerate(order):
        found = {floor(module) for module in imports(SOURCE / f"{name}.py")}
        later = found & set(order[number + 1 :]) - {"graphfiles"}
        assert not later, f"{name}.py imports {later}, which stands below it"
