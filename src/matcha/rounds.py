"""Rounds: what is exchanged when, and what it does to the workers' values.

`Round.mix` is the one definition of mixing; the simulator and the runtime are tested against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import compress, repeat
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError, PlanError
from matcha.schedules import Active, Schedule, check_iteration
from matcha.timing import count_chances
from matcha.topology import Link, Matching, Topology, check_matchings

_F = TypeVar("_F", np.float32, np.float64)
Mixing: TypeAlias = Literal["laplacian", "pairwise", "push", "average", "windows", "relay"]
MIXINGS: tuple[Mixing, ...] = get_args(Mixing)
ONE_WAY: tuple[Mixing, ...] = ("push", "windows")
"""Rules whose links are messages (sender, receiver)."""
EXACT: tuple[Mixing, ...] = ("average", "windows")
"""Rules whose rounds leave every worker with the exact mean."""
Shares: TypeAlias = tuple[tuple[float, ...], ...]
"""A weight for each link of each matching."""

RARE = 1e-6
"""Rounds that come less often than this do not count: a long training has a million iterations."""
_KNOWN_ROUNDS = 1 << 16  # rounds repeat; beyond this many different ones, build them again


def check_separable(mixing: Mixing) -> None:
    """Refuse to leave meetings out where a round is all or nothing."""
    if mixing == "windows":
        raise InputError(
            "sums that hop (ceca) pass through every worker, so none can be left out: plan again "
            "for the workers that are left, or use greedy or one-peer."
        )
    if mixing == "relay":
        raise InputError(
            "relayed sums (relaysum) need the whole tree, so none can be left out: plan again for "
            "the workers that are left, or use greedy."
        )


def check_losable(mixing: Mixing, what: str) -> None:
    """Refuse what may lose messages where a lost message takes part of the sum with it."""
    if mixing == "relay":
        check_separable(mixing)
    if mixing in ONE_WAY:
        raise InputError(
            f"{what} needs meetings of two: a one-way message that is lost takes its share of the "
            "sum with it. Plan with pairwise or laplacian mixing."
        )


class OneWayRole(NamedTuple):
    """A worker's part in a set of one-way messages."""

    to: int | None
    """The worker it sends to."""
    given: float
    """The share of its value that it gives away."""
    source: int | None
    """The worker it receives from."""
    taken: float
    """The share of the sender's value that it takes in."""

    @property
    def peer(self) -> int:
        """The worker it waits for, or else the one it sends to."""
        peer = self.to if self.source is None else self.source
        assert peer is not None  # a role has at least one of them
        return peer


class _Mixed:
    """What the mixing rule of a round, or of all rounds of a process, implies."""

    __slots__ = ()
    mixing: Mixing

    @property
    def is_one_way(self) -> bool:
        """Whether links are messages (sender, receiver)."""
        return self.mixing in ONE_WAY

    @property
    def is_exact(self) -> bool:
        """Whether a round leaves every worker with the exact mean."""
        return self.mixing in EXACT

    @property
    def is_all_reduce(self) -> bool:
        """Whether a round is one all-reduce over its workers, not a meeting per link."""
        return self.mixing == "average"

    @property
    def has_meetings(self) -> bool:
        """Whether a round is meetings of two workers, each of which can be left out alone."""
        return self.mixing in ("laplacian", "pairwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(_Mixed):
    """What is active in one iteration: an ordered list of matchings, often empty.

    `laplacian` mixing (the paper's I − αL) reads the values before the round on every link;
    `pairwise` mixing lets each matching see the result of the one before. So does `push`, whose
    links are messages (sender, receiver): the sender keeps the rest of the share that it sends.
    `average` gives every worker on the round's links their exact mean, as an all-reduce does;
    `windows` does so for all workers by messages that hop, of sums over ever longer stretches.
    `relay` depends on earlier rounds (see `Relay`); by itself it is the first of them.

    >>> swap = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)
    >>> swap.mix(np.array([[0.0], [2.0], [5.0]])).ravel().tolist()
    [1.0, 1.0, 5.0]
    >>> sent = Round(matchings=(((1, 0),),), indices=(0,), mixing="push", weight=0.5)
    >>> sent.mix(np.array([[0.0], [2.0], [5.0]])).ravel().tolist()
    [1.0, 1.0, 5.0]
    """

    matchings: tuple[Matching, ...]
    """In the order of exchange; empty when no worker talks."""
    indices: tuple[int, ...]
    """Their positions in `plan.matchings`."""
    mixing: Mixing
    weight: float
    """α for Laplacian mixing; the partner's share for pairwise: ½, or above it where that pays;
    what a sender gives away for push."""
    weights: Shares | None = None
    """One for each link of each matching; None: `weight` for all."""

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
        """The partner of `worker` in each matching; None where it rests."""
        return tuple(
            next((j if i == worker else i for i, j in matching if worker in (i, j)), None)
            for matching in self.matchings
        )

    def one_way_roles(self, worker: int) -> tuple[OneWayRole | None, ...]:
        """What `worker` sends and receives in each matching; None where it rests."""
        roles = []
        for position, matching in enumerate(self.matchings):
            to, given, source, taken = None, 0.0, None, 0.0
            for (i, j), w in zip(matching, self.shares(position), strict=True):
                if i == worker:
                    to, given = j, w
                if j == worker:
                    source, taken = i, w
            rests = to is None and source is None
            roles.append(None if rests else OneWayRole(to, given, source, taken))
        return tuple(roles)

    def without(self, workers: Collection[int] = (), links: Collection[Link] = ()) -> Round:
        """The same round without the meetings of some workers and over some links.

        >>> pair = Round(matchings=(((0, 1), (2, 3)),), indices=(0,), mixing="pairwise", weight=0.5)
        >>> pair.without([3]).matchings, pair.without(links=[(0, 1)]).links
        ((((0, 1),),), ((2, 3),))
        """
        matchings, weights = _meetings_left(self.matchings, self.weights, workers, links)
        if matchings == self.matchings:
            return self
        check_separable(self.mixing)
        return replace(
            self,
            matchings=tuple(filter(None, matchings)),
            indices=tuple(compress(self.indices, matchings)),
            weights=None if weights is None else tuple(filter(None, weights)),
        )

    def renumber(self, workers: list[int]) -> Round:
        """The same round for some workers, renumbered from 0; all their partners are among them."""
        number = {worker: k for k, worker in enumerate(workers)}
        return replace(self, matchings=_renumber(self.matchings, number))

    def mix(self, x: npt.NDArray[_F]) -> npt.NDArray[_F]:
        """The workers' values after the round; rows are workers, `x` is left alone.

        The order of the floating-point operations is part of the definition: engines that follow
        it get the same bits.
        """
        mixed: npt.NDArray[_F] = x.copy()
        if self.mixing == "average" and self.matchings:
            present = sorted({worker for link in self.links for worker in link})
            mixed[present] = x[present].mean(axis=0, dtype=x.dtype)
            return mixed
        if self.mixing == "windows" and self.matchings:
            return self._sum_windows(x)
        for position, matching in enumerate(self.matchings):
            i, j = np.array(matching, dtype=np.int64).reshape(-1, 2).T
            w = np.asarray(self.weight, dtype=x.dtype)
            if self.weights is not None:
                w = np.array(self.weights[position], dtype=x.dtype)
                w = w.reshape(-1, *(1,) * (x.ndim - 1))
            if self.mixing == "push":
                share = w * mixed[i]
                mixed[i] -= share
                mixed[j] += share
            elif self.mixing == "pairwise":
                a, b = mixed[i], mixed[j]
                mixed[i], mixed[j] = (1 - w) * a + w * b, (1 - w) * b + w * a
            else:
                difference = x[j] - x[i]
                mixed[i] += w * difference
                mixed[j] -= w * difference
        return mixed

    def _sum_windows(self, x: npt.NDArray[_F]) -> npt.NDArray[_F]:
        """The mean, from each worker's sums over the workers before it, with and without itself."""
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

    @property
    def keeps_shares(self) -> bool:
        """Whether every worker receives as much weight as it gives away: W is doubly stochastic.

        Always so but for a push; there it holds where messages go round in circles.
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


@dataclass(frozen=True, kw_only=True)
class RoundProcess(_Mixed):
    """Rounds without end: matchings, which are active at iteration k, and how they mix.

    This is all that theory and engines need of a plan. `dataclasses.replace` changes parts.

    >>> from matcha.schedules import Cycle
    >>> from matcha.topology import families
    >>> process = RoundProcess(
    ...     topology=families.path(3),
    ...     matchings=(((0, 1),), ((1, 2),)),
    ...     schedule=Cycle(cycle=((0,), (1,)), num_matchings=2),
    ...     mixing="pairwise",
    ...     alpha=0.5,
    ... )
    >>> process.round(3).links
    ((1, 2),)
    """

    topology: Topology
    matchings: tuple[Matching, ...]
    """The matchings that rounds are made of; disjoint except for `greedy`."""
    schedule: Schedule
    """Which of the matchings are active when; it owns their probabilities and the seed."""
    mixing: Mixing
    alpha: float
    """The weight of a neighbour's value: α of eq. 8, or ½ for pairwise mixing."""
    weights: Shares | None = None
    """One for each link of each matching, in place of α."""
    gone: frozenset[int] = frozenset()
    """Workers that are not there, and of which these rounds have no meetings: see `without`."""
    figures: dict[str, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    """ρ and the like, as far as known; a process with other parts starts without."""

    def __post_init__(self) -> None:
        number = len(self.schedule.probabilities)
        if self.mixing not in MIXINGS:
            raise PlanError(f"mixing is {self.mixing!r}, but it is {' or '.join(MIXINGS)}.")
        if number != len(self.matchings):
            raise PlanError(
                f"{number} probabilities were given for {len(self.matchings)} matchings."
            )
        if not 0 < self.alpha <= 1:
            raise PlanError(f"the mixing weight is {self.alpha!r}, but it must be in (0, 1].")
        check_matchings(self.topology, self.matchings, push=self.is_one_way)
        gone = check_workers(self.topology, self.gone)
        if any(not gone.isdisjoint(link) for matching in self.matchings for link in matching):
            raise PlanError("a worker that is not there has meetings.")
        if self.weights is None:
            return
        if self.schedule.period is None and self.mixing != "laplacian":
            raise PlanError("weights per link need rounds that repeat, or laplacian mixing.")
        if [len(shares) for shares in self.weights] != [len(links) for links in self.matchings]:
            raise PlanError("weights need one value for each link of each matching.")
        if not all(0 <= w <= 1 for shares in self.weights for w in shares):
            raise PlanError("the weight of a link must be in [0, 1].")

    # -- rounds -----------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.topology.num_workers

    def round(self, k: int) -> Round:
        """The round of iteration k: the same on every worker, in any order of k."""
        check_iteration(k)
        return self.round_of(self.schedule.active(k))

    def rounds(self, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order; quicker than one by one."""
        check_iteration(start)
        return map(self.round_of, self.schedule.actives(start, stop))

    @cached_property
    def round_of(self) -> Callable[[Active], Round]:
        """Build the round in which some matchings, by position, are active in that order."""

        @lru_cache(maxsize=_KNOWN_ROUNDS)
        def build(active: Active) -> Round:
            active = tuple(j for j in active if self.matchings[j])  # of some nothing may be left
            return Round(
                matchings=tuple(self.matchings[j] for j in active),
                indices=active,
                mixing=self.mixing,
                weight=self.alpha,
                weights=None if self.weights is None else tuple(self.weights[j] for j in active),
            )

        return build

    @property
    def link_uses(self) -> dict[Link, float]:
        """How often each link carries an exchange, or a one-way message, per iteration."""
        found = dict.fromkeys(self.topology.links, 0.0)
        for matching, uses in zip(self.matchings, self.schedule.uses, strict=True):
            for i, j in matching:
                found[(i, j) if (i, j) in found else (j, i)] += uses
        return found

    @property
    def link_scale(self) -> float:
        """What a link's Laplacian is multiplied by: α, or 1 where links have their own weights."""
        return self.alpha if self.weights is None else 1.0

    @cached_property
    def needs_push_sum(self) -> bool:
        """Whether messages go one way without coming round, so that x needs a weight ω beside it.

        Where every worker receives as much as it gives away ω stays 1, and nothing extra is sent.
        """
        return not all(self.round_of(active).keeps_shares for active in self.schedule.largest)

    @cached_property
    def smallest_self_weight(self) -> float:
        """The least weight that a worker gives its own value in a round that really happens.

        Under Laplacian mixing it is 1 − dα for a worker with d active links; below zero the
        update extrapolates, which amplifies noise and may diverge at large learning rates. Drawn
        rounds count where they come at least once in a million iterations.
        """
        if self.is_exact:
            return self.alpha
        if self.mixing != "laplacian":
            shares = ((self.alpha,),) if self.weights is None else self.weights
            return 1 - max((w for some in shares for w in some), default=0.0)
        return float(1 - self.link_scale * _most_given_away(self))

    # -- when workers or links are gone -----------------------------------------------------------

    def without(self, workers: Iterable[int] = (), links: Iterable[Link] = ()) -> RoundProcess:
        """The same rounds without the meetings of some workers and over some links.

        All workers keep their numbers. Nothing is planned again, so the result is exact, takes no
        time, and is the same wherever it is made. Its figures are those of the workers left.

        Raises:
            InputError: There is no such worker or link, or fewer than two workers would be left.
        """
        gone = check_workers(self.topology, workers)
        cut = check_links(self.topology, links)
        if not gone and not cut:
            return self
        gone |= self.gone
        if self.num_workers - len(gone) < 2:
            raise InputError("a plan is for at least two workers, but fewer would be left.")
        check_separable(self.mixing)
        if self.mixing == "push" and not self.topology.directed:
            cut |= {(j, i) for i, j in cut}
        matchings, weights = _meetings_left(self.matchings, self.weights, gone, cut)
        return replace(self, matchings=matchings, weights=weights, gone=gone)

    @cached_property
    def present(self) -> RoundProcess:
        """The rounds of the workers left alone, renumbered; all of them where they fall apart."""
        if not self.gone:
            return self
        left = [worker for worker in range(self.num_workers) if worker not in self.gone]
        matchings = _renumber(self.matchings, {worker: k for k, worker in enumerate(left)})
        links = {link for matching in matchings for link in matching}
        if not self.topology.directed:
            links = {(min(link), max(link)) for link in links}
        try:
            rest = Topology.from_links(sorted(links), len(left), directed=self.topology.directed)
        except InputError:
            return self  # no consensus over all
        return replace(self, topology=rest, matchings=matchings, gone=frozenset())

    # -- figures ----------------------------------------------------------------------------------

    def figure(self, name: str, compute: Callable[[RoundProcess], float]) -> float:
        """A figure of these rounds, computed once; of the workers left where some are gone."""
        if name not in self.figures:
            self.figures[name] = compute(self.present)
        return self.figures[name]

    def remember(self, **figures: float) -> RoundProcess:
        """Note figures that were found on the way, so that they are not computed again."""
        self.figures.update(figures)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle holds parts and figures; what was derived is derived again.
        return {part.name: getattr(self, part.name) for part in fields(self)}


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


class Relay:
    """RelaySum: what workers remember where sums are relayed along a tree (Vogels et al., 2021).

    Worker i sends neighbor j its own values and all that its other neighbors sent it a round ago.
    So a worker has all workers' values, each as many rounds late as there are workers between
    them, and takes their mean. What has not come yet counts as the worker's own values.

    >>> path = Round(matchings=(((0, 1),), ((1, 2),)), indices=(0, 1), mixing="relay", weight=1 / 3)
    >>> x, state = np.array([[0.0], [3.0], [9.0]]), Relay()
    >>> state.mix(path, x).ravel().tolist(), state.mix(path, x).ravel().tolist()
    ([1.0, 4.0, 7.0], [4.0, 4.0, 4.0])
    """

    def __init__(self) -> None:
        self._sums: dict[Link, tuple[Any, int]] = {}
        """By sender and receiver: the sum that was sent last, and over how many workers it is."""

    def mix(self, round: Round, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """New values after a round."""
        before, m, mixed = self._sums, len(x), np.array(x, dtype=np.float64)
        if not round:
            return mixed
        x, self._sums = mixed.copy(), {}
        for i, j in (arrow for a, b in round.links for arrow in ((a, b), (b, a))):
            sums = [part for (k, to), part in before.items() if to == i and k != j]
            total = sum((part for part, _ in sums), x[i])
            self._sums[i, j] = total, 1 + sum(count for _, count in sums)
        for i in range(m):
            sums = [part for (_, to), part in self._sums.items() if to == i]
            own = m - sum(count for _, count in sums)
            mixed[i] = sum((part for part, _ in sums), own * x[i]) / m
        return mixed


# -- parts ----------------------------------------------------------------------------------------


def check_workers(topology: Topology, workers: Iterable[int]) -> frozenset[int]:
    """The workers as a set."""
    found = frozenset(workers)
    for worker in sorted(found):
        if not 0 <= worker < topology.num_workers:
            raise InputError(f"there is no worker {worker} among {topology.num_workers}.")
    return found


def check_links(topology: Topology, links: Iterable[Link]) -> frozenset[Link]:
    """The links as the topology spells them."""
    found = set()
    for i, j in links:
        link = (i, j) if topology.directed or i < j else (j, i)
        if link not in topology.links:
            raise InputError(f"there is no link between workers {i} and {j}.")
        found.add(link)
    return frozenset(found)


def _meetings_left(
    matchings: Sequence[Matching],
    weights: Shares | None,
    workers: Collection[int],
    links: Collection[Link],
) -> tuple[tuple[Matching, ...], Shares | None]:
    """Matchings, and the weights of their links, without some workers and some links."""
    gone = set(workers)
    left = [[link not in links and gone.isdisjoint(link) for link in m] for m in matchings]
    kept = tuple(tuple(compress(m, some)) for m, some in zip(matchings, left, strict=True))
    if weights is not None:
        weights = tuple(tuple(compress(w, some)) for w, some in zip(weights, left, strict=True))
    return kept, weights


def _renumber(matchings: Sequence[Matching], number: dict[int, int]) -> tuple[Matching, ...]:
    return tuple(tuple((number[i], number[j]) for i, j in m) for m in matchings)


def _most_given_away(process: RoundProcess) -> float:
    """The most links that a worker has active at once, or the most that they weigh."""
    schedule = process.schedule
    if schedule.period is not None or schedule.exclusive:
        sums = (_given_away(process, active) for active in schedule.largest)
        return max((max(given.values(), default=0) for given in sums), default=0)
    if process.weights is not None:  # sums of unequal weights have no short table of frequencies
        likely = tuple(j for p, members in schedule.coins if p >= RARE for j in members)
        return max(_given_away(process, likely).values(), default=0)
    coins: dict[int, list[tuple[float, int]]] = defaultdict(list)  # by worker
    for p, members in schedule.coins:
        for worker, links in _given_away(process, members).items():
            coins[worker].append((p, int(links)))
    tails = (np.cumsum(count_chances(some)[::-1])[::-1] for some in coins.values())
    return max((int(np.flatnonzero(tail >= RARE)[-1]) for tail in tails), default=0)


def _given_away(process: RoundProcess, active: Active) -> dict[int, float]:
    """Each worker's active links, counted or weighed."""
    given: dict[int, float] = defaultdict(float)
    for j in active:
        shares = repeat(1.0) if process.weights is None else process.weights[j]
        for link, w in zip(process.matchings[j], shares, strict=False):
            for worker in link:
                given[worker] += w
    return given
