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


def test_no_file_is_two_nouns_long():
    long = {name: len(file.read_text().splitlines()) for name, file in modules().items()}
    assert not {name: lines for name, lines in long.items() if lines > 450}


def test_a_module_has_a_test_file_of_its_name():
    """Or of its room's: `tasks/models/` has tests/tasks/test_models.py for all that is in it."""
    without = [name for name in modules() if not has_test(name)]
    assert not without, "\n".join(without)


def has_test(name):
    *rooms, stem = name.split(".")
    tests = ROOT / "tests"
    inner = [tests.joinpath(*rooms[:k], f"test_{rooms[k]}.py") for k in range(len(rooms))]
    inner += [file.parent / rooms[k] / file.name for k, file in enumerate(inner)]
    own = tests.joinpath(*rooms, f"test_{stem}.py")
    is_room = modules()[name].name in ("__init__.py", "__main__.py")
    return is_room or any(file.exists() for file in (own, *inner))
