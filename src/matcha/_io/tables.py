"""Tables and counts in words: for a terminal, a notebook and pandas."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matcha.errors import PackageError


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows of text; words stand at the left, numbers at the right.

    >>> print(Table(["strategy", "budget"], [["greedy", "0.1"], ["vanilla", "1"]]))
    strategy  budget
    greedy       0.1
    vanilla        1
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds a number, perhaps with its unit."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headings)
        return [any(cell[:1].isdigit() for cell in column) for column in columns]

    def __str__(self) -> str:
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(line, widths, self.numeric, strict=True)
            ).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            sides = ("right" if right else "left" for right in self.numeric)
            return "".join(
                f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )

        body = "".join(f"<tr>{line('td', row)}</tr>" for row in self.rows)
        head = line("th", self.headings)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def count_noun(n: int, noun: str) -> str:
    """A number and its noun.

    >>> count_noun(1, "link"), count_noun(1200, "link")
    ('1 link', '1,200 links')
    """
    return f"1 {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith('s') else 's'}"


def amount(value: float, units: str) -> str:
    """A quantity and its unit, which is given in the plural.

    >>> amount(1.0, "units"), amount(0.5, "seconds")
    ('1 unit', '0.5 seconds')
    """
    number = f"{value:.4g}"
    return f"{number} {units.removesuffix('s') if number == '1' else units}"


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame; columns that none of them fills are left out."""
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise PackageError("this needs pandas: pip install pandas") from None
    return pandas.DataFrame(list(rows)).dropna(axis=1, how="all")
