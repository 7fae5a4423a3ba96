"""How each strategy is drawn, in all figures and on the page."""

from __future__ import annotations

from typing import NamedTuple


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
    "relaysum": Look("#3B5BA5", "d", "#3b5ba5", "#8fb0ff"),
    "diloco": Look("#B22222", "H", "#a62a2a", "#f2918c"),
    "noloco": Look("#4B6EAF", "8", "#41609c", "#9db8ee"),
    "gasloc": Look("#6B8E23", "X", "#55741a", "#b5d46a"),
    "sparseloco": Look("#8B5A8B", "1", "#7d4a7d", "#d3a3d3"),
    "rounds": Look("#8C6D31", "*", "#7a5c3e", "#d0ae8a"),
}
_OWN = Look("#666666", "o", "#555c52", "#a9b1a6")


def look_of(strategy: str) -> Look:
    """How a strategy is drawn; grey dots for a user's own."""
    return LOOKS.get(strategy, _OWN)
