"""Rows of several parameters for tests of wires: values that drift, and where they lie."""

from __future__ import annotations

import math

import numpy as np
import torch

from matcha import Round
from matcha.wires import wire
from matcha.wires.wire import Segment

SHAPES = ((40, 30), (300,), (1,), (24, 8, 3, 3), (7, 3))
LENGTHS = [math.prod(shape) for shape in SHAPES]
WIRES = ("float32", "bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2")
MATCHINGS = (((0, 1), (2, 3)), ((1, 2), (0, 4)), ((3, 4),))
LINKS = tuple(sorted(link for matching in MATCHINGS for link in matching))


def segments() -> list[Segment]:
    found, end = [], 0
    for shape in SHAPES:
        found.append(Segment(offset=end, shape=shape))
        end += -(-math.prod(shape) // wire.BLOCK) * wire.BLOCK
    return found


def padded(x: np.ndarray) -> torch.Tensor:
    """Rows with every parameter at the start of a block."""
    places = segments()
    last = places[-1]
    size = last.offset + -(-last.size // wire.BLOCK) * wire.BLOCK
    rows = torch.zeros(len(x), size, dtype=torch.from_numpy(x).dtype)
    for place, part in zip(places, np.split(x, np.cumsum(LENGTHS)[:-1], axis=1), strict=True):
        rows[:, place.offset : place.offset + place.size] = torch.from_numpy(part)
    return rows


def compact(rows: torch.Tensor) -> np.ndarray:
    parts = [rows[:, p.offset : p.offset + p.size] for p in segments()]
    return torch.cat(parts, 1).numpy()


def drift(k: int, dtype: str = "float64", jump: float = 1.0) -> np.ndarray:
    """What five workers' values move by before round k."""
    random = np.random.default_rng(k)
    return (0.01 * jump * random.normal(size=(5, sum(LENGTHS)))).astype(dtype)


def start(dtype: str = "float64") -> np.ndarray:
    values = np.random.default_rng(99).normal(size=sum(LENGTHS))
    return np.repeat(values[None], 5, 0).astype(dtype)


def round_of(k: int, mixing: str) -> Round:
    """The k-th of a few rounds: one matching, two, all three."""
    chosen = [(0,), (1, 2), (0, 1, 2), (2, 0)][k % 4]
    weight = 0.3 if mixing == "laplacian" else 0.5
    matchings = tuple(MATCHINGS[j] for j in chosen)
    return Round(matchings=matchings, indices=chosen, mixing=mixing, weight=weight)
