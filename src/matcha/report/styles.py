"""How strategies and runs look: colours and markers in figures, styles on the page.

Every strategy has a style of its own, by its place in the registry; a second run of a strategy,
or a user's own, takes a spare one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matcha.strategies import STRATEGIES


class Look(NamedTuple):
    """How a strategy is drawn."""

    color: str
    """In figures, on white."""
    marker: str
    """Matplotlib's name for it."""
    light: str
    """On the page, with contrast enough for its background."""
    dark: str


# Okabe and Ito's palette, told apart by colour-blind readers too.
LOOKS = {
    "vanilla": Look("#000000", "x", "#30363d", "#c9d1d9"),
    "periodic": Look("#D55E00", "^", "#d55e00", "#ff9d57"),
    "matcha": Look("#0072B2", "o", "#0072b2", "#5fb7ec"),
    "greedy": Look("#009E73", "s", "#00875f", "#46cf9f"),
    "allreduce": Look("#7A4FBF", "p", "#a33b3b", "#f09090"),
    "local": Look("#A6761D", "h", "#8a4b00", "#e0a25e"),
    "silent": Look("#999999", "+", "#767b76", "#9aa39a"),
    "single": Look("#CC79A7", "D", "#b3508a", "#f09cca"),
    "hypercube": Look("#E69F00", "v", "#8a6d00", "#e3c04b"),
    "base": Look("#56B4E9", "P", "#6b4fb5", "#b7a2f5"),
    "one-peer": Look("#F0E442", "<", "#6f7d00", "#d4e157"),
    "ceca": Look("#1B9E9E", ">", "#0f7c7c", "#5fd3d3"),
    "rounds": Look("#8C6D31", "*", "#7a5c3e", "#d0ae8a"),
}
_OWN = Look("#666666", "o", "#555c52", "#a9b1a6")
_SYMBOLS = {
    "x": "x", "^": "triangle-up", "o": "circle", "s": "square", "D": "diamond",
    "v": "triangle-down", "<": "triangle-left", ">": "triangle-right", "P": "cross", "*": "star",
    "p": "pentagon", "h": "hexagon", "d": "diamond-tall", "+": "cross-thin-open",
}  # fmt: skip
"""Matplotlib's markers, as plotly calls them."""
_DASHES = (3, 1, 0, 4, 2, 5)
_SPARE_COLORS = (
    ("#b0306a", "#f7a1c4"), ("#1f7a8c", "#6fd0e0"), ("#5b7a1f", "#b0d468"), ("#8c4a9e", "#dba3ea"),
    ("#3f6f9f", "#9cc4ee"), ("#7f5a00", "#d8b26a"), ("#4f5b66", "#b4c0cc"),
)  # fmt: skip
_SPARE_SYMBOLS = ("bowtie", "hourglass", "star-square", "octagon", "hexagram", "y-up", "asterisk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way to draw a run, told from others by more than its colour."""

    light: str
    dark: str
    symbol: str
    dash: int
    """Position in the page's list of dashes."""


def look_of(strategy: str) -> Look:
    """How a strategy is drawn; grey dots for a user's own."""
    return LOOKS.get(strategy, _OWN)


def _styles() -> tuple[Style, ...]:
    known = [look_of(name) for name in STRATEGIES]
    colors = [(look.light, look.dark) for look in known]
    symbols = [_SYMBOLS.get(look.marker, "circle") for look in known]
    looks = zip((*colors, *_SPARE_COLORS), (*symbols, *_SPARE_SYMBOLS), strict=True)
    return tuple(
        Style(light=light, dark=dark, symbol=symbol, dash=_DASHES[number % len(_DASHES)])
        for number, ((light, dark), symbol) in enumerate(looks)
    )


STYLES = _styles()


def place(strategy: str) -> int:
    """Where a strategy stands among styles and in lists; after all others where it is unknown."""
    return list(STRATEGIES).index(strategy) if strategy in STRATEGIES else len(STRATEGIES)


def styles_of(strategies: Sequence[str]) -> list[int]:
    """A style for each run, by number: its strategy's own where that is still free."""
    free = list(range(len(STYLES)))
    chosen: list[int] = []
    for strategy in strategies:
        spare = [s for s in free if s >= len(STRATEGIES)] or free
        wanted = place(strategy) if strategy in STRATEGIES else -1
        slot = wanted if wanted in free else spare[0] if spare else len(chosen) % len(STYLES)
        if slot in free:
            free.remove(slot)
        chosen.append(slot)
    return chosen


def style_sheet() -> str:
    """The colours as variables `--s0`, `--s1`, … of the page, in its two themes."""
    light = " ".join(f"--s{n}: {style.light};" for n, style in enumerate(STYLES))
    dark = " ".join(f"--s{n}: {style.dark};" for n, style in enumerate(STYLES))
    return f':root {{ {light} }}\n:root[data-theme="dark"] {{ {dark} }}\n'
