"""Wires: what a message holds. Values here, kernels for torch beside them."""

from matcha.wires.wire import (
    WIRES,
    Float,
    LowRank,
    Modulo,
    TopK,
    Wire,
    needs_meetings,
    parse_wire,
)

__all__ = [
    "WIRES",
    "Float",
    "LowRank",
    "Modulo",
    "TopK",
    "Wire",
    "needs_meetings",
    "parse_wire",
]
