"""Shards: on which of the examples each worker trains in a team that grows and shrinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.training.task import generator


@lru_cache(maxsize=4)
def _order(seed: int, turn: int, size: int) -> npt.NDArray[np.int64]:
    return generator(seed, turn).permutation(size)


def batch_of(
    plan: PlanLike, k: int, worker: int, *, size: int, batch_size: int, seed: int = 0
) -> list[int]:
    """The examples of one worker in iteration k: a function of the plan and the seed alone.

    Examples have an order, another one in each pass. The workers that the plan has at an iteration
    take the next ones, by their numbers: so each is seen once in each pass, in a team that changes.

    >>> import matcha
    >>> plan = matcha.plan(matcha.families.ring(3), 0.5, "greedy")
    >>> seen = [n for k in range(2) for w in range(3)
    ...         for n in batch_of(plan, k, w, size=12, batch_size=2)]
    >>> sorted(seen) == list(range(12))
    True
    """
    place = plan.level_at(k).members.index(worker)
    first = (plan.steps_before(k) + place) * batch_size
    numbers = (divmod(n, size) for n in range(first, first + batch_size))
    return [int(_order(seed, turn, size)[n]) for turn, n in numbers]


@dataclass(frozen=True)
class Shard:
    """Batches of a data set's examples for one worker, for one pass at a time.

    A `batch_sampler` for a `DataLoader` with `num_workers=0`: which examples come next is known
    when the iteration is, as workers may join and leave. All workers end a pass at one iteration.
    """

    plan: Callable[[], PlanLike]
    """The one in force."""
    iteration: Callable[[], int]
    """Of this worker; -1 once it has left for good."""
    worker: int
    _: KW_ONLY
    size: int
    """How many examples there are."""
    batch_size: int
    """How many a worker takes per iteration."""
    seed: int
    """Of their order."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.batch_size < 1:
            raise InputError("a shard needs examples, and a batch of at least one.")

    def _turn(self, k: int) -> int:
        return self.plan().steps_before(k) * self.batch_size // self.size

    def __iter__(self) -> Iterator[list[int]]:
        turn, before = self._turn(self.iteration()), -1
        while (k := self.iteration()) >= 0 and self._turn(k) == turn:
            if k == before:
                raise InputError(
                    "a second batch was taken within one iteration: leave num_workers at 0, and "
                    "for several gradients per step split a larger batch."
                )
            before = k
            given = {"size": self.size, "batch_size": self.batch_size, "seed": self.seed}
            yield batch_of(self.plan(), k, self.worker, **given)
