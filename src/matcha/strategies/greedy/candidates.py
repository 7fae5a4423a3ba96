"""What the search for a cycle works on: a network, and candidate cycles of matchings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from matcha._numerics.spectra import Array, Indices
from matcha.strategies.greedy.max_weight import max_weight_matching, max_weight_permutation
from matcha.strategies.strategy import timeline
from matcha.theory import cycles
from matcha.theory.cycles import Step, Turn

_MAX_CLASSES = 12
_PRICES = np.array([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0])


@dataclass(frozen=True, kw_only=True)
class SearchNetwork:
    """What the search may use: links, the time each takes, and the time that accrues."""

    num_workers: int
    links: Indices
    """Pairs of ends; (receiver, sender) where messages go one way."""
    times: tuple[Fraction, ...]
    """The time of each link; a matching takes as long as its slowest."""
    rate: Fraction
    """Communication time that accrues per iteration."""
    seed: int = 0
    """Breaks ties between equally good matchings, and decides where kicks go."""
    directed: bool = False
    """Whether messages go one way: a step then lets workers send round in circles."""
    samples: Array | None = None
    """Measured times, a row per measurement and a column per link: a matching takes the mean of
    its slowest link's."""
    loads: Array | None = None
    """Seconds that each wire (row) is busy with a message over each link (column); a matching then
    takes as long as its busiest wire, where that is longer than its slowest link."""

    @cached_property
    def seconds(self) -> Array:
        """The time of each link as a float."""
        return np.array([float(t) for t in self.times])

    @cached_property
    def limits(self) -> tuple[Fraction, ...]:
        """Times up to which links are considered together: a quick matching has no slow links."""
        distinct = sorted(set(self.times))
        count = min(len(distinct), _MAX_CLASSES)
        return tuple(
            distinct[n] for n in np.linspace(0, len(distinct) - 1, count).round().astype(int)
        )

    def cost(self, chosen: Indices) -> Fraction:
        """The time of a matching."""
        if self.samples is not None:
            return Fraction(float(self.samples[:, chosen].max(axis=1).mean()))
        slowest = self.times[int(chosen[np.argmax(self.seconds[chosen])])]
        if self.loads is None:
            return slowest
        busiest = Fraction(float(self.loads[:, chosen].sum(axis=1).max(initial=0.0)))
        return max(slowest, busiest.limit_denominator(10**9))

    def best_by_time(
        self, gains: Array, find: Callable[[Array], Indices] | None = None
    ) -> Indices | None:
        """The matching with the best gain for its time; None where no link gains.

        Compared are the heaviest ones of all links up to each limit on the time, by `find` where
        one is given. Only the exact search also looks at what wires that links share would cost.
        """
        weights = [np.where(self.seconds <= float(limit), gains, 0.0) for limit in self.limits]
        if self.loads is not None and find is None:
            # A second on a wire has a price: the dearer it is, the fewer links queue there.
            queued = self.loads.sum(axis=0) / self.loads.max()
            weights += [gains - price * queued for price in gains.max(initial=0.0) * _PRICES]
        best, best_rate = None, 0.0
        for chosen in map(find or self.max_weight, weights):
            if len(chosen):
                rate = float(gains[chosen].sum()) / float(self.cost(chosen))
                if rate > best_rate:
                    best, best_rate = chosen, rate
        return best

    def max_weight(self, weights: Array) -> Indices:
        """The matching of greatest total weight; of one-way links, the best permutation."""
        find = max_weight_permutation if self.directed else max_weight_matching
        return find(self.links, weights, self.num_workers, seed=self.seed)

    def ends(self, chosen: Indices, weights: Array | None = None) -> Step:
        """The ends of a matching's links."""
        return Step(self.links[chosen, 0], self.links[chosen, 1], weights, self.directed)

    def sides(self, price: Array) -> Array:
        """Of V, what a link's gain multiplies: b_eᵀV of a pair, the receiver's row of a message."""
        i, j = self.links.T
        rows: Array = price[i]
        return rows if self.directed else rows - price[j]

    def across(self, sides: Array, chosen: Indices | None = None) -> Array:
        """b_eᵀV b_f for all links e and the chosen links f as columns; without any, for f = e."""
        i, j = self.links.T if chosen is None else self.links[chosen].T
        rows = np.arange(len(i)) if chosen is None else slice(None)
        found: Array = sides[rows, i]
        return found if self.directed else found - sides[rows, j]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A cycle of matchings with one weight for all of them, or one for each link."""

    network: SearchNetwork
    matchings: tuple[Indices, ...]
    """Positions of links, in the order of exchange."""
    costs: tuple[Fraction, ...]
    weight: float
    weights: tuple[Array, ...] | None = None
    """One for each link of each matching; None: `weight`."""
    error: float = math.inf

    def numbers(self) -> list[tuple[int, list[int]]]:
        """For each turn, its iterations and which of the matchings are exchanged in the last."""
        return timeline(self.costs, self.network.rate)

    def turns(self) -> list[Turn]:
        """The cycle with the ends of its matchings."""
        weights = self.weights or (None,) * len(self.matchings)
        steps = list(map(self.network.ends, self.matchings, weights))
        return [(wait, [steps[n] for n in numbers]) for wait, numbers in self.numbers()]

    def with_matchings(self, matchings: Iterable[Indices]) -> Candidate:
        """The same with other matchings; its error is that of those before."""
        chosen = tuple(matchings)
        return replace(self, matchings=chosen, costs=tuple(map(self.network.cost, chosen)))

    def with_error(self) -> Candidate:
        """The same with its exact steady-state error."""
        turns, m = self.turns(), self.network.num_workers
        state = cycles.steady_state(turns, m, self.weight) if cycles.connects(turns, m) else None
        return replace(self, error=math.inf if state is None else state.error)
