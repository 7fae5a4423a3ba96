"""How runs look on the page.

Every strategy has a style of its own, by its place in the registry; a second run of a strategy,
or a user's own, takes a spare one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matcha.strategies import STRATEGIES
from matcha.strategies.registry import look_of

_SYMBOLS = {
    "x": "x", "^": "triangle-up", "o": "circle", "s": "square", "D": "diamond",
    "v": "triangle-down", "<": "triangle-left", ">": "triangle-right", "P": "cross", "*": "star",
    "p": "pentagon", "h": "hexagon", "d": "diamond-tall", "H": "hexagon2",
    "8": "octagon", "X": "x-thin-open", "1": "y-down-open", "+": "cross-thin-open",
}  # fmt: skip
"""Matplotlib's markers, as plotly calls them."""
_DASHES = (3, 1, 0, 4, 2, 5)
_SPARE_COLORS = (
    ("#b0306a", "#f7a1c4"), ("#1f7a8c", "#6fd0e0"), ("#5b7a1f", "#b0d468"), ("#8c4a9e", "#dba3ea"),
    ("#3f6f9f", "#9cc4ee"), ("#7f5a00", "#d8b26a"), ("#4f5b66", "#b4c0cc"),
)  # fmt: skip
_SPARE_SYMBOLS = ("bowtie", "hourglass", "star-square", "pentagon", "hexagram", "y-up", "asterisk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """One way to draw a run, told from others by more than its colour."""

    light: str
    dark: str
    symbol: str
    dash: int
    """Position in the page's list of dashes."""


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
