"""What benchmarks share: options, a table from columns, a result file, and the machine it ran on.

A benchmark is a script with `measure`, which gives a document in the words of JSON, and `describe`,
which makes of that document the text that is printed, committed and shown in the docs:
`python benchmarks/harness.py` writes the texts of all committed results again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMITTED = HERE / "results"
RESULTS = Path(os.environ.get("MATCHA_RESULTS", COMMITTED))
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table: text to the left, numbers to the right, and – for what is missing."""

    heading: str
    value: str | Callable[[Row], Any]
    """A key of the row, or a function of it."""
    form: str = ""
    """How numbers are formatted."""

    def cell(self, row: Row) -> str:
        """A row's value as text."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        if value is None:
            return "–"
        return format(value, self.form) if not isinstance(value, str) else value


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Rows as text, each column as wide as it needs."""
    rows = list(rows)
    cells = [[column.cell(row) for row in rows] for column in columns]
    lines = [""] * (len(rows) + 1)
    for place, (column, column_cells) in enumerate(zip(columns, cells, strict=True)):
        width = max(map(len, [column.heading, *column_cells]))
        left = "<" if not column.form else ">"
        for k, text in enumerate([column.heading, *column_cells]):
            lines[k] += f"{'  ' if place else ''}{text:{left}{width}}"
    return "\n".join(line.rstrip() for line in lines)


def parser(doc: str | None, *, output: str | None = None) -> argparse.ArgumentParser:
    """A parser with the module's docstring and --output; `output` names a committed result."""
    found = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = None if output is None else RESULTS / output
    found.add_argument(
        "--output", type=Path, default=default, help="write OUTPUT.json and OUTPUT.txt"
    )
    return found


def machine() -> str:
    """The machine in a few words."""
    kind = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {kind}, load {os.getloadavg()[1]:.1f}"


def earlier(output: Path | None) -> Any:
    """The document that OUTPUT.json holds; None without one."""
    path = output and output.with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else None


def write(output: Path, document: Any, text: str = "") -> None:
    """Write OUTPUT.json, and OUTPUT.txt where there is text."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(document, indent=1) + "\n"
    output.with_suffix(".json").write_text(content, encoding="utf-8")
    if text:
        output.with_suffix(".txt").write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def finish(output: Path | None, document: Any, text: str) -> None:
    """Print a result, and write it where there is a place for it."""
    print(text)
    if output is not None:
        write(output, document, text)


def script(*arguments: object) -> list[str]:
    """The command line that runs the benchmark which is running now, with other arguments."""
    return [sys.executable, str(Path(sys.argv[0]).resolve()), *map(str, arguments)]


def described() -> Iterable[tuple[Path, str]]:
    """The committed texts whose benchmark can write them again from its committed document."""
    for path in sorted(COMMITTED.glob("*.json")):
        name = path.stem.partition("-")[0]
        if not path.with_suffix(".txt").exists():
            continue
        places = [p for p in (HERE / f"{name}.py", HERE / "network" / f"{name}.py") if p.exists()]
        if not places or "\ndef describe(" not in places[0].read_text(encoding="utf-8"):
            continue
        sys.path[:0] = [str(HERE), str(places[0].parent)]
        text = importlib.import_module(name).describe(json.loads(path.read_text(encoding="utf-8")))
        yield path.with_suffix(".txt"), text.rstrip("\n") + "\n"


if __name__ == "__main__":
    for place, text in described():
        place.write_text(text, encoding="utf-8")
        print(f"wrote {place.name}")
