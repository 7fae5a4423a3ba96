"""Events: a script of what happens to a network while it trains, by iteration, for either engine.

Meetings of a lost worker are left out; when the worker returns it takes the state that a neighbour
then has, and takes part from that iteration on. Meetings over a cut link are left out. A slower
link only costs time. Workers that join or leave for good change the plan.
"""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matcha.errors import InputError
from matcha.plans.staged import PlanLike
from matcha.rounds import Round, check_links, check_losable, check_workers
from matcha.timing import Timing, all_reduce_time
from matcha.topology import Link, Matching, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that is gone from iteration `at` on, and back at iteration `back`, if ever."""

    worker: int
    at: int
    back: int | None = None
    donor: int | None = None
    """The worker whose state it takes then; None: the lowest-ranked neighbour that is present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A worker that was not planned for, and takes part from iteration `at` on."""

    worker: int
    links: tuple[int, ...]
    """Its neighbors."""
    at: int
    donor: int | None = None
    """As for `Loss`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A worker that is gone for good from iteration `at` on."""

    worker: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A link that carries nothing from iteration `at` on, until it is mended, if ever."""

    link: Link
    at: int
    until: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown(Cut):
    """A link that takes `factor` times as long."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A worker that comes, for the first time or again, with the state of another."""

    worker: int
    donor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """A script of losses, cuts, slowdowns, and workers that join or leave for good.

    >>> events = Events(losses=(Loss(worker=1, at=2, back=5),))
    >>> [sorted(events.gone(k)) for k in (1, 2, 4, 5)]
    [[], [1], [1], []]
    """

    losses: tuple[Loss, ...] = ()
    cuts: tuple[Cut, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    joins: tuple[Join, ...] = ()
    leaves: tuple[Leave, ...] = ()

    def __post_init__(self) -> None:
        spans = [(loss.at, loss.back) for loss in self.losses]
        spans += [(cut.at, cut.until) for cut in (*self.cuts, *self.slowdowns)]
        spans += [(join.at, None) for join in self.joins]
        spans += [(leave.at, None) for leave in self.leaves]
        for start, end in spans:
            if start < 0 or (end is not None and end <= start):
                raise InputError(f"an event goes from iteration {start} to {end}.")
        for slowdown in self.slowdowns:
            if not slowdown.factor > 0:
                raise InputError(f"a link cannot take {slowdown.factor!r} times as long.")

    @property
    def takes_workers(self) -> bool:
        """Whether workers come or go."""
        return bool(self.losses or self.joins or self.leaves)

    def check(self, plan: PlanLike) -> None:
        """Refuse events that do not fit a plan: of unknown workers, or leaving no worker.

        Args:
            plan: With stages for those that join or leave, as `strategies.with_events` makes them.
        """
        topology = plan.topology
        for level in plan.levels if self.takes_workers or self.cuts else ():
            check_losable(level.mixing, "a script that loses workers or cuts links")
        named = [worker for loss in self.losses for worker in (loss.worker, loss.donor)]
        check_workers(topology, [worker for worker in named if worker is not None])
        check_links(topology, [event.link for event in (*self.cuts, *self.slowdowns)])
        for loss in self.losses:
            if len(self.gone(loss.at)) >= topology.num_workers:
                raise InputError(f"at iteration {loss.at} no worker would be left.")
        back = {loss.back for loss in self.losses if loss.back is not None}
        for k in sorted(back | {join.at for join in self.joins}):
            self.returns(k, topology)  # each finds a donor

    # -- what holds when --------------------------------------------------------------------------

    def gone(self, k: int) -> frozenset[int]:
        """The workers that are away at iteration k."""
        lost = {loss.worker for loss in self.losses if _holds(loss.at, loss.back, k)}
        comes = [(join.at, join.worker, True) for join in self.joins]
        comes += [(leave.at, leave.worker, False) for leave in self.leaves]
        last: dict[int, bool] = {}  # of a worker that joins and leaves, or again
        for at, worker, joins in sorted(comes):
            if at <= k or (joins and worker not in last):
                last[worker] = joins and at <= k
        return frozenset(lost | {worker for worker, there in last.items() if not there})

    def for_good(self, k: int) -> tuple[frozenset[int], frozenset[int]]:
        """The workers that join at iteration k, and those that leave."""
        joined = frozenset(join.worker for join in self.joins if join.at == k)
        return joined, frozenset(leave.worker for leave in self.leaves if leave.at == k)

    def cut(self, k: int) -> frozenset[Link]:
        """The links that carry nothing at iteration k."""
        links = (cut.link for cut in self.cuts if _holds(cut.at, cut.until, k))
        return frozenset(pair for i, j in links for pair in ((i, j), (j, i)))

    def changes(self, start: int, stop: int) -> list[list[int]]:
        """The workers that left or came in some iterations: iteration, worker, and 1 for coming.

        >>> Events(losses=(Loss(worker=1, at=2, back=5),)).changes(0, 9)
        [[2, 1, 0], [5, 1, 1]]
        """
        left: list[Loss | Leave] = [*self.losses, *self.leaves]
        found = [[event.at, event.worker, 0] for event in left]
        found += [[loss.back, loss.worker, 1] for loss in self.losses if loss.back is not None]
        found += [[join.at, join.worker, 1] for join in self.joins]
        return sorted(change for change in found if start <= change[0] < stop)

    def round(self, plan: PlanLike, k: int) -> Round:
        """What is left of a plan's round k."""
        return plan.round(k).without(self.gone(k), self.cut(k))

    def round_time(self, plan: PlanLike, round: Round, k: int) -> float:
        """The communication time of a round at iteration k, slower links counted."""
        slower: dict[Link, float] = {}
        for slowdown in self.slowdowns:
            if _holds(slowdown.at, slowdown.until, k):
                for link in (slowdown.link, slowdown.link[::-1]):
                    slower[link] = slower.get(link, 1.0) * slowdown.factor
        usual = plan.round_time(round)
        if not any(link in slower for link in round.links):
            return usual
        if round.is_all_reduce:
            return all_reduce_time(plan.timing, plan.topology, slower)
        return usual + sum(_longer(plan.timing, m, slower) for m in round.matchings)

    def returns(self, k: int, topology: Topology) -> tuple[Return, ...]:
        """The workers that come at the beginning of iteration k, and whose state they take."""
        return tuple(
            Return(worker=worker, donor=self._donor(worker, k, donor, topology))
            for worker, donor in self._coming(k).items()
        )

    def new_connections(self, k: int, topology: Topology) -> frozenset[Link]:
        """The links that are new connections at iteration k: mended, or of a returning worker.

        >>> ring = Topology.from_links([(0, 1), (1, 2), (2, 0)])
        >>> sorted(Events(losses=(Loss(worker=1, at=2, back=5),)).new_connections(5, ring))
        [(0, 1), (1, 2)]
        """
        back, mended = self._coming(k), {cut.link for cut in self.cuts if cut.until == k}
        return frozenset(
            li
            for li in topology.links
            if li in mended or li[::-1] in mended or not back.keys().isdisjoint(li)
        )

    def _coming(self, k: int) -> dict[int, int | None]:
        """The workers that come at iteration k, and the donor that each names."""
        back = {loss.worker: loss.donor for loss in self.losses if loss.back == k}
        return back | {join.worker: join.donor for join in self.joins if join.at == k}

    def _donor(self, worker: int, k: int, donor: int | None, topology: Topology) -> int:
        away, cut = self.gone(k) | self._coming(k).keys(), self.cut(k)
        for each in topology.neighbors(worker) if donor is None else (donor,):
            if each not in away and (each, worker) not in cut:
                return each
        raise InputError(
            f"worker {worker} cannot come at iteration {k}: no neighbour that is there then has a "
            "state for it."
        )

    # -- in and out -------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | Path) -> Events:
        """The events in a JSON file: a list of objects, each one event.

        `{"worker": 3, "lost": 200, "back": 500}`, `{"link": [1, 2], "cut": 100, "mended": 160}`,
        `{"link": [4, 5], "slower": 10, "from": 300}`; `back`, `mended` and `until` may be missing.
        `{"at": 300, "join": {"worker": 8, "links": [1, 5]}}` and `{"at": 700, "leave": 2}`.

        Raises:
            InputError: The file cannot be read, or an entry is none of these.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise InputError(f"{str(path)!r} is not JSON: it is a list of events.") from None
        if not isinstance(document, list):
            raise InputError(f"{str(path)!r} does not hold a list of events.")
        return cls.from_json(document)

    @classmethod
    def from_json(cls, document: Sequence[Any]) -> Events:
        """The events in a list of plain values."""
        found: dict[type, list[Any]] = defaultdict(list)
        for event in map(_event, document):
            found[type(event)].append(event)
        return cls(
            losses=tuple(found[Loss]),
            cuts=tuple(found[Cut]),
            slowdowns=tuple(found[Slowdown]),
            joins=tuple(found[Join]),
            leaves=tuple(found[Leave]),
        )


def _holds(at: int, until: int | None, k: int) -> bool:
    """Whether what begins at an iteration, and ends at another if ever, holds at iteration k."""
    return at <= k and (until is None or k < until)


def _longer(timing: Timing, matching: Matching, slower: Mapping[Link, float]) -> float:
    """What slower links add to a matching's time; queues on shared channels stay as they are."""
    alone = {link: timing.matching_time((link,)) for link in matching}
    now = max(seconds * slower.get(link, 1.0) for link, seconds in alone.items())
    return now - max(alone.values())


_WORDS: dict[str, tuple[type, dict[str, str]]] = {
    "lost": (Loss, {"worker": "worker", "lost": "at", "back": "back", "state_of": "donor"}),
    "cut": (Cut, {"link": "link", "cut": "at", "mended": "until"}),
    "slower": (Slowdown, {"link": "link", "slower": "factor", "from": "at", "until": "until"}),
    "join": (Join, {"worker": "worker", "links": "links", "at": "at", "state_of": "donor"}),
    "leave": (Leave, {"leave": "worker", "at": "at"}),
}
"""By the word that only such an event has: what it is, and its members by their words in files."""
_READERS: dict[str, Callable[[Any], Any]] = {
    "link": lambda ends: _link(*map(operator.index, ends)),
    "links": lambda workers: tuple(map(operator.index, workers)),
    "factor": float,
}
"""Of members that are no whole numbers."""


def _link(i: int, j: int) -> Link:
    return min(i, j), max(i, j)


def _event(entry: Any) -> Any:
    try:
        given = dict(entry)
        kind, names = next(_WORDS[word] for word in _WORDS if word in given)
        given = dict(given.pop("join", {})) | given
        members = {names[word]: value for word, value in given.items() if value is not None}
        return kind(**{m: _READERS.get(m, operator.index)(v) for m, v in members.items()})
    except (KeyError, OverflowError, StopIteration, TypeError, ValueError):
        raise InputError(
            f"{entry!r:.200} is not an event: events are a worker lost (and back), a link cut "
            "(and mended), a link slower from an iteration (until another), or at an iteration a "
            "worker that joins, with its links, or leaves."
        ) from None
