"""A round: what is exchanged in one iteration, and what it does to the workers' values.

This is the one definition of the mixing; the simulator and the runtime are tested against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError
from matcha.topology import Link, Matching

_F = TypeVar("_F", np.float32, np.float64)
Mixing: TypeAlias = Literal["laplacian", "pairwise", "push", "average", "windows"]
MIXINGS: tuple[Mixing, ...] = get_args(Mixing)
ONE_WAY: tuple[Mixing, ...] = ("push", "windows")
"""Whose links are messages (sender, receiver)."""
EXACT: tuple[Mixing, ...] = ("average", "windows")
"""Whose rounds leave everybody with the exact mean."""
Shares: TypeAlias = tuple[tuple[float, ...], ...]


def check_separable(mixing: Mixing) -> None:
    """Refuse to leave some meetings out where a round is all or nothing.

    Raises:
        InputError: Says what to do instead.
    """
    if mixing == "windows":
        raise InputError(
            "sums that hop (ceca) pass through every worker, so none can be left out: plan anew "
            "for those who are left, or use greedy or one-peer."
        )


def check_losable(mixing: Mixing, what: str) -> None:
    """Refuse what loses messages where only meetings of two can do without.

    Raises:
        InputError: Names what was asked for.
    """
    if mixing in ONE_WAY:
        raise InputError(
            f"{what} needs meetings of two: a one-way message that is lost takes its share of the "
            "sum with it. Plan with pairwise or laplacian mixing."
        )


class OneWayRole(NamedTuple):
    """A worker's part in a set of one-way messages."""

    to: int | None
    """Whom it sends to."""
    given: float
    """The share of its value that it gives away."""
    source: int | None
    """Whom it hears from."""
    taken: float
    """The share of the sender's value that it takes in."""

    @property
    def peer(self) -> int:
        """Whom it waits for, or at least sends to."""
        peer = self.to if self.source is None else self.source
        assert peer is not None  # a role has at least one of them
        return peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What is active in one iteration: an ordered list of matchings, often empty.

    `laplacian` mixing (the paper's I − αL) reads the values before the round on every link;
    `pairwise` mixing lets each matching see the result of the one before. So does `push`, whose
    links are messages (sender, receiver): the sender keeps the rest of the share that it sends.
    `average` gives everybody on the round's links the exact mean of them all, as an all-reduce;
    `windows` does so for all workers by messages that hop, of sums over ever longer stretches.

    >>> swap = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    >>> swap.mix(np.array([[0.0], [2.0], [5.0]])).ravel().tolist()
    [1.0, 1.0, 5.0]
    >>> sent = Round(matchings=(((1, 0),),), indices=(0,), mixing="push", weight=0.5)
    >>> sent.mix(np.array([[0.0], [2.0], [5.0]])).ravel().tolist()
    [1.0, 1.0, 5.0]
    """

    matchings: tuple[Matching, ...]
    """In the order of exchange; empty when nobody talks."""
    indices: tuple[int, ...]
    """Their positions in `plan.matchings`."""
    mixing: Mixing
    weight: float
    """α for Laplacian mixing; the partner's share for pairwise: ½, or above it where that pays;
    what a sender gives away for push."""
    weights: Shares | None = None
    """One for each link of each matching; None: `weight` for all."""

    @classmethod
    def of_active(
        cls,
        matchings: Sequence[Matching],
        active: tuple[int, ...],
        *,
        mixing: Mixing,
        weight: float,
        weights: Shares | None = None,
    ) -> Round:
        """The round in which some of a plan's matchings are active, in that order.

        >>> Round.of_active([((0, 1),), ((1, 2),)], (1,), mixing="pairwise", weight=0.5).links
        ((1, 2),)
        """
        return cls(
            matchings=tuple(matchings[j] for j in active),
            indices=active,
            mixing=mixing,
            weight=weight,
            weights=None if weights is None else tuple(weights[j] for j in active),
        )

    def __hash__(self) -> int:
        # Equal rounds have equal positions; hashing thousands of links would take long.
        return hash((self.indices, self.weight))

    def __bool__(self) -> bool:
        return bool(self.matchings)

    @property
    def links(self) -> tuple[Link, ...]:
        """All links of the round, in the order of exchange."""
        return tuple(link for matching in self.matchings for link in matching)

    def shares(self, position: int) -> tuple[float, ...]:
        """The weight of each link of the matching at a position."""
        if self.weights is None:
            return (self.weight,) * len(self.matchings[position])
        return self.weights[position]

    def partners(self, worker: int) -> tuple[int | None, ...]:
        """Whom `worker` exchanges with in each matching; None where it rests."""
        return tuple(_partner(matching, worker) for matching in self.matchings)

    def one_way_roles(self, worker: int) -> tuple[OneWayRole | None, ...]:
        """What `worker` sends and hears in each matching of a push; None where it rests."""
        return tuple(
            self._one_way_role(position, worker) for position in range(len(self.matchings))
        )

    def _one_way_role(self, position: int, worker: int) -> OneWayRole | None:
        to, given, source, taken = None, 0.0, None, 0.0
        for (i, j), w in zip(self.matchings[position], self.shares(position), strict=True):
            if i == worker:
                to, given = j, w
            if j == worker:
                source, taken = i, w
        return None if to is None and source is None else OneWayRole(to, given, source, taken)

    def without(self, workers: Collection[int] = (), links: Collection[Link] = ()) -> Round:
        """The same round, the meetings of some workers and over some links left out.

        >>> pair = Round(matchings=(((0, 1), (2, 3)),), indices=(0,), mixing="pairwise", weight=0.5)
        >>> pair.without([3]).matchings, pair.without(links=[(0, 1)]).links
        ((((0, 1),),), ((2, 3),))
        """
        places = [
            [k for k, li in enumerate(m) if li not in links and not set(li) & set(workers)]
            for m in self.matchings
        ]
        if all(len(ks) == len(m) for ks, m in zip(places, self.matchings, strict=True)):
            return self
        check_separable(self.mixing)
        left = [position for position, ks in enumerate(places) if ks]
        return replace(
            self,
            matchings=tuple(tuple(self.matchings[p][k] for k in places[p]) for p in left),
            indices=tuple(self.indices[p] for p in left),
            weights=None
            if self.weights is None
            else tuple(tuple(self.weights[p][k] for k in places[p]) for p in left),
        )

    def among(self, workers: list[int]) -> Round:
        """The same round for workers numbered anew, all of whose partners are among them."""
        number = {worker: k for k, worker in enumerate(workers)}
        return Round(
            matchings=tuple(
                tuple((number[i], number[j]) for i, j in matching) for matching in self.matchings
            ),
            indices=self.indices,
            mixing=self.mixing,
            weight=self.weight,
            weights=self.weights,
        )

    def mix(self, x: npt.NDArray[_F]) -> npt.NDArray[_F]:
        """The workers' values after the round; rows are workers, `x` is left alone.

        The order of the floating-point operations is part of the definition: engines that follow
        it get the same bits.
        """
        mixed: npt.NDArray[_F] = x.copy()
        if self.mixing == "average" and self.matchings:
            there = sorted({worker for link in self.links for worker in link})
            mixed[there] = x[there].mean(axis=0, dtype=x.dtype)
            return mixed
        if self.mixing == "windows" and self.matchings:
            return self._summed(x)
        for i, j, w in self._steps(x):
            if self.mixing == "laplacian":
                difference = x[j] - x[i]
                mixed[i] += w * difference
                mixed[j] -= w * difference
            elif self.mixing == "push":
                share = w * mixed[i]
                mixed[i] -= share
                mixed[j] += share
            else:
                a, b = mixed[i], mixed[j]
                mixed[i], mixed[j] = (1 - w) * a + w * b, (1 - w) * b + w * a
        return mixed

    def _summed(self, x: npt.NDArray[_F]) -> npt.NDArray[_F]:
        """The mean, by everybody's sums over the workers before it, and with itself."""
        whole: npt.NDArray[_F] = x.copy()
        behind, count = np.zeros_like(x), 0
        for matching in self.matchings:
            i, j = np.array(matching, dtype=np.int64).T
            arrived, hop = np.empty_like(x), (matching[0][1] - matching[0][0]) % len(x)
            arrived[j] = (whole if hop > count else behind)[i]
            whole += arrived
            behind += arrived
            count += hop
        whole /= len(x)
        return whole

    def _steps(
        self, x: npt.NDArray[_F]
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[_F]]]:
        """For each matching, the ends of its links and their weights, shaped to multiply rows."""
        for position, matching in enumerate(self.matchings):
            i, j = np.array(matching, dtype=np.int64).reshape(-1, 2).T
            w = np.asarray(self.weight, dtype=x.dtype)
            if self.weights is not None:
                w = np.array(self.weights[position], dtype=x.dtype)
                w = w.reshape(-1, *(1,) * (x.ndim - 1))
            yield i, j, w

    @property
    def keeps_shares(self) -> bool:
        """Whether everyone receives as much weight as it gives away: W is doubly stochastic.

        All rounds but a push's always do; its messages do where they go round in circles.
        """
        if self.mixing != "push":
            return True
        for position, matching in enumerate(self.matchings):
            shares = self.shares(position)
            given = {i: w for (i, _), w in zip(matching, shares, strict=True)}
            taken = {j: w for (_, j), w in zip(matching, shares, strict=True)}
            if given != taken:
                return False
        return True

    def matrix(self, num_workers: int) -> npt.NDArray[np.float64]:
        """W(k), with which the new values are W(k) @ x."""
        return self.mix(np.eye(num_workers))


class PushSum:
    """Push-sum: what workers hold where messages go one way and shares do not come back.

    Worker i holds x_i and a weight ω_i, and trains at z_i = x_i / ω_i; both x and ω are mixed by
    the same rounds. Columns of W sum to one, so Σ x_i is kept and every z_i tends to the average.

    >>> gather = Round(matchings=(((0, 1),),), indices=(0,), mixing="push", weight=0.5)
    >>> state = PushSum(np.array([[1.0], [4.0]]))
    >>> state.mix(gather, np.array([[1.0], [4.0]])).ravel().tolist(), state.omega.tolist()
    ([1.0, 3.0], [0.5, 1.5])
    """

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        self.x = values.copy()
        self.omega = np.ones(len(values))

    def mix(self, round: Round, z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """New z after a round: `z` as a step of the optimizer left them; x takes the same step."""
        columns = (-1, *(1,) * (z.ndim - 1))
        self.x += z - self.x / self.omega.reshape(columns)
        self.x = round.mix(self.x)
        self.omega = round.mix(self.omega)
        z = self.x / self.omega.reshape(columns)
        return z


def _partner(matching: Matching, worker: int) -> int | None:
    for i, j in matching:
        if i == worker:
            return j
        if j == worker:
            return i
    return None
