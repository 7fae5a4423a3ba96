"""A round: what is exchanged in one iteration, and what it does to the workers' values.

This is the one definition of the mixing; the simulator and the runtime are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from matcha.topology import Link, Matching

_F = TypeVar("_F", np.float32, np.float64)
Mixing: TypeAlias = Literal["laplacian", "pairwise"]
MIXINGS: tuple[Mixing, ...] = get_args(Mixing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What is active in one iteration: an ordered list of matchings, often empty.

    `laplacian` mixing (the paper's I − αL) reads the values before the round on every link;
    `pairwise` mixing lets each matching see the result of the one before.

    >>> swap = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    >>> swap.mix(np.array([[0.0], [2.0], [5.0]])).ravel().tolist()
    [1.0, 1.0, 5.0]
    """

    matchings: tuple[Matching, ...]
    """In the order of exchange; empty when nobody talks."""
    indices: tuple[int, ...]
    """Their positions in `plan.matchings`."""
    mixing: Mixing
    weight: float
    """α for Laplacian mixing; the partner's share for pairwise: ½, or above it where that pays."""

    def __hash__(self) -> int:
        # Equal rounds have equal positions; hashing thousands of links would take long.
        return hash((self.indices, self.weight))

    def __bool__(self) -> bool:
        return bool(self.matchings)

    @property
    def links(self) -> tuple[Link, ...]:
        """All links of the round, in the order of exchange."""
        return tuple(link for matching in self.matchings for link in matching)

    def partners(self, worker: int) -> tuple[int | None, ...]:
        """Whom `worker` exchanges with in each matching; None where it rests."""
        return tuple(_partner(matching, worker) for matching in self.matchings)

    def mix(self, x: npt.NDArray[_F]) -> npt.NDArray[_F]:
        """The workers' values after the round; rows are workers, `x` is left alone.

        The order of the floating-point operations is part of the definition: engines that follow
        it get the same bits.
        """
        mixed: npt.NDArray[_F] = x.copy()
        w = np.asarray(self.weight, dtype=x.dtype)
        for matching in self.matchings:
            i, j = np.array(matching).T
            if self.mixing == "laplacian":
                difference = x[j] - x[i]
                mixed[i] += w * difference
                mixed[j] -= w * difference
            else:
                a, b = mixed[i], mixed[j]
                mixed[i], mixed[j] = (1 - w) * a + w * b, (1 - w) * b + w * a
        return mixed

    def matrix(self, num_workers: int) -> npt.NDArray[np.float64]:
        """W(k), with which the new values are W(k) @ x."""
        return self.mix(np.eye(num_workers))


def _partner(matching: Matching, worker: int) -> int | None:
    for i, j in matching:
        if i == worker:
            return j
        if j == worker:
            return i
    return None
