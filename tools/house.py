"""The house: what stands in src/matcha, in which order, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src" / "matcha"

FLOORS = (
    ("errors",),
    ("_io",),
    ("_numerics",),
    ("topology",),
    ("timing",),
    ("matchings",),
    ("activation",),
    ("schedules",),
    ("rounds",),
    ("mixing",),
    ("wires",),
    ("theory",),
    ("plans",),
    ("strategies",),
    ("sweeps",),
    ("tuning",),
    ("records",),
    ("training",),
    ("zoo",),
    ("simulation", "report"),
    ("distributed",),
    ("testing",),
    ("__init__",),
    ("cli",),
)
"""From the top of the house down; a module imports only what stands above it."""

_COLORS = ("#00796b", "#0072b2", "#d55e00", "#8c6d31", "#cc79a7", "#546e7a")


# -- what there is ---------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    """Every entry of src/matcha and the first line of what it says of itself, from the top down."""
    found = {}
    for path in SOURCE.iterdir():
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix == ".py" and file.exists():
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            found[path.stem] = text.split("\n")[0]
    order = [name for floor in FLOORS for name in floor]
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def modules() -> dict[str, Path]:
    """Every module's dotted name below matcha and its file; a package is its `__init__`."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found[".".join(name)] = file
    return found


def edges() -> Iterator[tuple[str, set[str]]]:
    """Each module with the matcha modules that it imports, at the top or anywhere inside."""
    known = modules()
    for name, file in known.items():
        found = {_short(m, known) for m in _imported(file) if m.split(".")[0] == "matcha"}
        unknown = found - known.keys()
        assert not unknown, f"{name} imports {unknown}, which do not exist"
        yield name, found


def room(module: str) -> str:
    """The entry of src/matcha in which a module stands."""
    return module.partition(".")[0]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _short(module: str, known: Mapping[str, Path]) -> str:
    """A module's name below matcha; of a name inside a module, the module's."""
    inner = module.partition(".")[2]
    return inner if inner in known else inner.rpartition(".")[0] or "__init__"


# -- as a table and as a picture -------------------------------------------------------------------


def house_table() -> str:
    """The entries as Markdown, a line each."""
    lines = [f"| `{_title(name)}` | {line} |" for name, line in entries().items()]
    return "\n".join(["| in src/matcha | what it is |", "| --- | --- |", *lines])


def house_data() -> dict[str, Any]:
    """Each entry, its line, and those that it imports directly and not already through another."""
    direct: dict[str, set[str]] = {name: set() for name in entries()}
    for name, found in edges():
        direct[room(name)] |= {room(other) for other in found} - {room(name)}

    @cache
    def above(name: str) -> frozenset[str]:
        return frozenset(direct[name]).union(*(above(other) for other in direct[name]))

    return {
        name: {"line": line, "uses": sorted(direct[name].difference(*map(above, direct[name])))}
        for name, line in entries().items()
    }


def draw_house(data: Mapping[str, Any]) -> Any:
    """The entries from the top down, with an arc up to each that an entry uses."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Arc

    names = list(data)
    figure = Figure(figsize=(9.2, 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot(aspect="equal")
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.3", "fc": "#e3f2ef", "ec": "#00796b", "lw": 0.8}
    for row, (name, entry) in enumerate(data.items()):
        color = _COLORS[row % len(_COLORS)]
        for other in entry["uses"]:
            top = names.index(other)
            span, middle = row - top, -(row + top) / 2
            axes.add_patch(Arc((0, middle), 1.6 * span, span, theta1=90, theta2=270, color=color))
        axes.plot([0], [-row], marker="o", ms=4, color=color)
        axes.text(0.5, -row, _title(name), va="center", fontsize=9, bbox=box)
        axes.text(5.2, -row, entry["line"], va="center", fontsize=7.5, color="#37474f")
    longest = max(row - names.index(o) for row, n in enumerate(names) for o in data[n]["uses"])
    axes.set_xlim(-0.8 * longest - 0.2, 27)
    axes.set_ylim(-len(names) + 0.3, 0.7)
    return figure


def _title(name: str) -> str:
    if name == "__init__":
        return "matcha"
    return f"{name}/" if (SOURCE / name).is_dir() else name
