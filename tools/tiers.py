"""The two tiers of tests: `make test` leaves out those marked `long`, `make test-all` runs all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"


def long_tests() -> Iterator[tuple[str, str, str]]:
    """Of each test marked `long`: its file below tests/, its name, and why it is marked."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.long":
                    why = ast.literal_eval(mark.args[0])
                    yield file.relative_to(TESTS).as_posix(), node.name, why


def long_table() -> str:
    """They as Markdown, a line each."""
    lines = [f"| `{file}` | `{name}` | {why} |" for file, name, why in long_tests()]
    return "\n".join(
        ["| in tests | only in `make test-all` | why |", "| --- | --- | --- |", *lines]
    )
