"""What the search for a cycle works on: a network, and candidate cycles of matchings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from matcha.strategies.greedy.heaviest import Indices
from matcha.theory import cycles
from matcha.theory.cycles import Array, Step

_MAX_CLASSES = 12


@dataclass(frozen=True, kw_only=True)
class Network:
    """What the search may use: links, the time each takes, and the time that accrues."""

    num_workers: int
    links: Indices
    times: tuple[Fraction, ...]
    """The time of each link; a matching takes as long as its slowest."""
    rate: Fraction
    """Communication time that accrues an iteration."""
    samples: Array | None = None
    """Measured times, a row a measurement and a column a link; then a matching takes the mean of
    its slowest link's."""
    seconds: Array = field(init=False, repr=False)
    limits: tuple[Fraction, ...] = field(init=False, repr=False)
    """Times up to which links are considered together: a quick matching leaves slow links out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", np.array([float(t) for t in self.times]))
        distinct = sorted(set(self.times))
        if len(distinct) > _MAX_CLASSES:
            places = np.linspace(0, len(distinct) - 1, _MAX_CLASSES).round().astype(int)
            distinct = [distinct[place] for place in places]
        object.__setattr__(self, "limits", tuple(distinct))

    def cost(self, chosen: Indices) -> Fraction:
        """The time of a matching."""
        if self.samples is not None:
            return Fraction(float(self.samples[:, chosen].max(axis=1).mean()))
        slowest = int(chosen[np.argmax(self.seconds[chosen])])
        return self.times[slowest]

    def ends(self, chosen: Indices) -> Step:
        """The ends of a matching's links."""
        return self.links[chosen, 0], self.links[chosen, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cycle of matchings with one weight for all of them."""

    network: Network
    matchings: tuple[Indices, ...]
    """Positions of links, in the order of exchange."""
    costs: tuple[Fraction, ...]
    weight: float
    error: float = math.inf

    def numbers(self) -> list[list[int]]:
        """For each iteration, which of the matchings are exchanged in it."""
        return timeline(self.costs, self.network.rate)

    def rounds(self) -> list[list[Step]]:
        """For each iteration, the ends of its matchings."""
        steps = [self.network.ends(chosen) for chosen in self.matchings]
        return [[steps[n] for n in numbers] for numbers in self.numbers()]

    def scored(self) -> Candidate:
        """The same with its exact steady-state error."""
        rounds, m = self.rounds(), self.network.num_workers
        state = cycles.steady_state(rounds, m, self.weight) if cycles.connects(rounds, m) else None
        return replace(self, error=math.inf if state is None else state.error)


def timeline(costs: Sequence[Fraction], rate: Fraction) -> list[list[int]]:
    """Spend time as it accrues: for each iteration, the matchings that become affordable in it.

    >>> timeline([Fraction(1)] * 3, Fraction(1, 2))
    [[], [0], [], [1], [], [2]]
    >>> timeline([Fraction(1)] * 5, Fraction(5, 2))
    [[0, 1], [2, 3, 4]]
    """
    total = sum(costs, start=Fraction(0))
    rounds: list[list[int]] = [[] for _ in range(math.ceil(total / rate))]
    spent = Fraction(0)
    for n, cost in enumerate(costs):
        spent += cost
        rounds[math.ceil(spent / rate) - 1].append(n)
    return rounds
