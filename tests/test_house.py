"""The house: data flows one way; every import, also inside functions, points upwards."""

from __future__ import annotations

import graphlib
from pathlib import Path

import pytest

from house import FLOORS, edges, entries, modules, room

HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}
ROOT = Path(__file__).parent.parent


def test_every_entry_has_its_floor_and_its_line():
    """CONTRIBUTING has a line an entry; `tests/test_docs.py` checks that it is the entry's own."""
    assert entries().keys() <= HEIGHT.keys()
    assert len(entries()) <= 24
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    for name, line in entries().items():
        assert line, f"{name} does not say what it is"
        named = f"| `{'matcha' if name == '__init__' else name}"
        assert sum(text.startswith((f"{named}`", f"{named}/`")) for text in lines) == 1, name


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


def test_no_file_is_above_the_line_limit():
    """A smoke alarm: a longer file probably holds a noun that wants a room of its own."""
    long = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert not {name: lines for name, lines in long.items() if lines > 700}
