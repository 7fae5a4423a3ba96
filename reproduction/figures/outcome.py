"""What reproducing a figure yields, and how it is written down."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from reproduction.claims import Claim, table
from reproduction.trials import Result, Trial

Train: TypeAlias = Callable[[Sequence[Trial]], Iterable[Result]]
"""Trains trials, or finds the results of trials that were trained before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A figure made again: the drawing, the claims, and the tables behind both."""

    name: str
    title: str
    figure: Any
    """A matplotlib figure."""
    claims: tuple[Claim, ...]
    sections: dict[str, str] = field(default_factory=dict)
    """Markdown tables by heading."""
    results: tuple[Result, ...] = ()

    def markdown(self, image: str) -> str:
        """A page: claims, figure, tables."""
        parts = [f"## {self.title}", f"![{self.title}]({image})", table(self.claims)]
        for heading, text in self.sections.items():
            parts += [f"### {heading}", text]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path, format: str = "png") -> list[Path]:
        """Write figure, page, claims and results; say which files."""
        folder.mkdir(parents=True, exist_ok=True)
        image = folder / f"{self.name}.{format}"
        self.figure.savefig(image, dpi=150, bbox_inches="tight")
        page = folder / f"{self.name}.md"
        page.write_text(self.markdown(image.name), encoding="utf-8")
        claims = folder / f"{self.name}.claims.json"
        claims.write_text(json.dumps([asdict(c) for c in self.claims], indent=1) + "\n")
        written = [image, page, claims]
        if self.results:
            lines = folder / f"{self.name}.results.jsonl"
            lines.write_text("".join(r.to_line() + "\n" for r in self.results), encoding="utf-8")
            written.append(lines)
        return written


class Maker(Protocol):
    """Makes a figure from runs that ``train`` carries out or has at hand."""

    def __call__(self, train: Train, *, quick: bool) -> Outcome:
        """Make the figure; ``quick`` on small data in minutes."""
        ...
