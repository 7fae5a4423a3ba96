"""Wires: what a message holds. Values and their definition; kernels for torch stand beside them."""

from matcha.wires.delays import Transfers
from matcha.wires.wire import WIRES, Float, LowRank, Modulo, Wire, parse_wire

__all__ = ["WIRES", "Float", "LowRank", "Modulo", "Transfers", "Wire", "parse_wire"]
