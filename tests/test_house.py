"""The house: data flows one way; every import, also inside functions, points upwards."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

from house import FLOORS, SOURCE, edges, entries, modules, room

HEIGHT = {name: height for height, floor in enumerate(FLOORS) for name in floor}
ROOT = Path(__file__).parent.parent


def test_every_entry_has_its_floor_and_its_line():
    """CONTRIBUTING has a line an entry; `tests/test_docs.py` checks that it is the entry's own."""
    assert entries().keys() <= HEIGHT.keys()
    assert len(entries().keys() - {"__init__"}) <= 24
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


def test_a_room_has_at_most_fourteen_entries():
    """What stands side by side must be seen at a glance; `__init__` and assets do not count."""
    rooms: dict[Path, set[str]] = {}
    for file in modules().values():
        for entry in (file, *file.parents):
            if SOURCE in entry.parents:
                rooms.setdefault(entry.parent, set()).add(entry.stem)
    found = {str(room): len(names - {"__init__"}) for room, names in rooms.items()}
    assert not {room: n for room, n in found.items() if n > 14 and room != str(SOURCE)}


OPEN_PROTOCOLS = {"KnownLoss", "KnownGradient", "Trials"}
"""Capabilities of a user's own task or search, of which ours is one example."""


def test_every_protocol_has_several_implementations():
    """A Protocol with one implementation is a detour: name the class."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in modules().values()]
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    by_name = {node.name: node for node in classes}

    def bases(node: ast.ClassDef) -> list[str]:
        return [ast.unparse(base).partition("[")[0] for base in node.bases]

    def members(node: ast.ClassDef) -> set[str]:
        found = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        found |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        inherited = [members(by_name[base]) for base in bases(node) if base in by_name]
        return found.union(*inherited)

    def required(node: ast.ClassDef) -> set[str]:
        named = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
        return named | {field.id for field in fields if isinstance(field, ast.Name)}

    alone = {}
    for protocol in classes:
        if "Protocol" in bases(protocol) and protocol.name not in OPEN_PROTOCOLS:
            having = [n for n in classes if "Protocol" not in bases(n)]
            found = [n.name for n in having if required(protocol) <= members(n)]
            if len(found) < 2:
                alone[protocol.name] = found
    assert not alone


def test_a_name_of_a_class_means_one_thing():
    """A reader who searches for a class finds one."""
    places: dict[str, list[str]] = {}
    for name, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


ARCHAIC = re.compile(
    r"\b(anew|lately|afresh|in earnest|nobody|everybody|somebody|whoever)\b", re.IGNORECASE
)
"""Say again, recently, none, all workers, a worker."""
_COUNTED = "bytes|values|seconds|units|messages|iterations|steps|one|megabytes|megabits|images"
_COUNTED += "|examples|links|rounds|sockets|once|twice|exchanges|models"
_EACH = "block|value|iteration|message|link|worker|round|step|epoch|batch|second|megabyte"
_EACH += "|gigabyte|host|rank|core|row|meeting|run|pass|process|task|partner|pod|bucket"
DISTRIBUTIVE = re.compile(rf"\b(?:{_COUNTED})\s+an?\s+(?:{_EACH})\b(?! (?:has|holds|had|may|is))")
"""Say bytes per block, not bytes with an article."""


def _prose() -> dict[str, str]:
    """What people read: the docs, and the source with its docstrings, comments and messages."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    files = [*pages, *modules().values()]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


@pytest.mark.parametrize("pattern", [ARCHAIC, DISTRIBUTIVE])
def test_prose_is_plain(pattern):
    """The two commonest ways to be hard to read; CONTRIBUTING asks for plain English."""
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for name, text in _prose().items()
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("bytes a block", DISTRIBUTIVE), ("once an\nepoch", DISTRIBUTIVE), ("Nobody", ARCHAIC)],
)
def test_the_word_list_finds(text, pattern):
    assert pattern.search(text)
