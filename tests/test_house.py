"""The house: data flows one way; every import, also inside functions, points upwards."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "matcha"

FLOORS = (
    ("errors",),
    ("documents",),
    ("_numerics",),
    ("topology",),
    ("timing",),
    ("matchings",),
    ("activation",),
    ("rounds",),
    ("mixing",),
    ("wires",),
    ("schedules",),
    ("plans",),
    ("theory",),
    ("strategies",),
    ("sweeps",),
    ("tuning",),
    ("__init__",),
    ("records",),
    ("tasks",),
    ("simulation", "distributed", "report"),
    ("experiments",),
    ("cli",),
)
"""From the top of the house down; a module imports only what stands above it."""

HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}


def modules():
    """Every module's dotted name below matcha and its file; a package is its `__init__`."""
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        yield ".".join(name), file


MODULES = dict(modules())


def imported(file):
    """The matcha modules that a file imports, at the top or anywhere inside."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if short(inner) in MODULES else base
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def short(module):
    return module.partition(".")[2] or "__init__"


def edges():
    """Each module with the matcha modules that it imports."""
    for name, file in MODULES.items():
        found = {short(module) for module in imported(file) if module.split(".")[0] == "matcha"}
        unknown = found - MODULES.keys()
        assert not unknown, f"{name} imports {unknown}, which do not exist"
        yield name, found


def room(module):
    return module.partition(".")[0]


def test_every_entry_of_the_house_has_its_floor():
    entries = {
        path.stem for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed")
    }
    assert entries <= HEIGHT.keys()
    assert len(entries) <= 24


def test_every_import_points_upwards():
    wrong = [
        f"{name} imports {other}"
        for name, found in edges()
        for other in found
        if room(name) != room(other) and HEIGHT[room(other)] >= HEIGHT[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_cycle():
    try:
        graphlib.TopologicalSorter(dict(edges())).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_file_is_two_nouns_long():
    long = {name: len(file.read_text().splitlines()) for name, file in MODULES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 450}
