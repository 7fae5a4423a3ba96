"""What the user asked for: what every strategy is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias, get_args

from matcha.rounds import Mixing
from matcha.timing import Timing
from matcha.topology import Link, Matching, Topology

Effort: TypeAlias = Literal["none", "default", "high"]
Decomposition: TypeAlias = Literal["matchings", "links", "cliques"]

EFFORTS: tuple[Effort, ...] = get_args(Effort)
DECOMPOSITIONS: tuple[Decomposition, ...] = get_args(Decomposition)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; what every strategy is given, checked."""

    topology: Topology
    budget: float
    strategy: str
    """The name that the plan will have."""
    seed: int
    mixing: Mixing
    timing: Timing
    matchings: tuple[Matching, ...] | None = None
    """The user's own decomposition; None: find one."""
    decomposition: Decomposition = "matchings"
    effort: Effort = "default"
    probabilities: tuple[float, ...] | None = None
    """The user's own, one a matching; None: find the best."""
    rounds: tuple[tuple[Matching, ...], ...] | None = None
    """The user's own rounds, to be repeated."""
    alpha: float | None = None
    """The user's own mixing weight; None: find the best."""
    weights: Mapping[Link, float] | None = None
    """The user's own for each link, in place of a mixing weight."""
    progress: Callable[[int, int, str], None] | None = None
    """Called with (steps done, steps at most, what they are); None: nobody watches."""

    def counted(self, steps: str) -> Callable[[int, int], None] | None:
        """What calls `progress` for steps of one kind."""
        progress = self.progress
        return None if progress is None else lambda done, most: progress(done, most, steps)


def stepper(most: int, progress: Callable[[int, int], None] | None) -> Callable[[], None]:
    """What a search calls after each of its steps, of which there are so many at most.

    >>> step = stepper(3, print)
    >>> step(), step()
    1 3
    2 3
    (None, None)
    """
    done = count(1)
    return lambda: None if progress is None else progress(next(done), most)
