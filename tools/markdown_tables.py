"""Committed results read, and a table written as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
Data = Any


def result(name: str) -> Data:
    """A committed result file."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def result_lines(name: str) -> list[Data]:
    """A committed result file with one document per line."""
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], align: str = "") -> str:
    """A Markdown table; `align` has l or r for each column, all left by default."""
    marks = {"l": "---", "r": "---:"}
    lines = [headings, [marks[a] for a in align or "l" * len(headings)], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)
