"""Growth: workers that join a running training, and workers that leave it for good.

The lowest member plans the next stage; a change goes through these steps there (`_Draft`):

    planned ──▶ proposed ──▶ committed ──▶ carried out
       └────────────┴───────▶ withdrawn

    planned      In a thread, beside training.
    proposed     All members are asked for an iteration that they will not pass before they hear
                 more: a fence, some way ahead, so that none has to wait as a rule.
    committed    All have answered: the change comes about at the latest of the fences.
    carried out  There all make one collective call, in which the one that planned sends the stage.
                 The average model is made: workers that join start from it, and the others take
                 over the share of those that leave, so that the average stays what it was.
    withdrawn    One that wanted to join is gone, or members are lost.

Only where more than half of the workers in the plan are there a change is proposed, committed and
carried out: those who are cut off, be it the one that planned, change nothing by themselves.

What is said travels as notes, from neighbour to neighbour. If the worker that planned is lost, the
next one begins again.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from matcha.distributed.elastic.membership import Membership, Welcome
from matcha.distributed.elastic.sponsor import Sponsor, last_level
from matcha.distributed.links.listener import keep_running
from matcha.distributed.links.peers import Peers, Team, in_words
from matcha.distributed.links.transport import LinkTransport, Phase
from matcha.distributed.transports.collectives import gather, mean_
from matcha.distributed.worker_state import WorkerState
from matcha.errors import InputError, MatchaError
from matcha.plans import Plan, PlanLike, StagedPlan
from matcha.strategies.planning import in_stages, with_workers

__all__ = ["Growth"]

_log = logging.getLogger("matcha.links")
_POLL = 0.1  # seconds between two looks, where nothing is heard
_GATHER = 0.15  # seconds without a further request after which a change is planned
_MOST_GATHER = 1.0  # seconds that the first request waits at most
_ALONE = 1.0  # seconds of planning beside training; then the others wait, so that it ends
_AHEAD = 0.3  # seconds of training to a fence
_HOLD = 1.2  # seconds that neighbours wait for a worker that joins
_NEVER_CAME = 30.0  # seconds after which a worker that never came is taken out again
_PLANNER_LOST = 3.0  # seconds after which a proposal counts for nothing whose planner is gone


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A change that this worker plans."""

    requests: Mapping[str, Mapping[str, Any]]
    """Of those that want to join, by name."""
    leaving: frozenset[int]
    started: float = field(default_factory=time.monotonic)
    number: int = 0
    """Of the proposal; 0: not proposed."""
    committed: bool = False
    content: str | None = None
    """What all are sent; None while it is planned, empty where none can be taken."""
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def wanted(self) -> frozenset[str]:
        """The requests that it answers."""
        return frozenset(self.requests) | {f"-{worker}" for worker in self.leaving}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What all carry out: the plan of the next stage, and for whom it is."""

    level: Plan
    team: Team
    left: frozenset[int]
    joined: Mapping[int, str]
    """Those who joined, and the names of their requests."""


class Growth:
    """One worker's part in changes of the team; `facts`, `refusal` and `token` as for `Sponsor`.

    Attributes:
        has_left: Whether this worker has left for good.
    """

    def __init__(
        self,
        state: WorkerState,
        membership: Membership,
        transport: LinkTransport,
        *,
        facts: Mapping[str, str],
        refusal: str,
        token: str,
    ) -> None:
        self._state, self._membership, self._transport = state, membership, transport
        self._refusal = refusal
        self.has_left = False
        self._position = 0  # the first iteration at which this worker has not looked yet
        self._fence: tuple[int, int] | None = None  # a proposal, and where this worker waits for it
        self._fenced_since = 0.0
        self._due: dict[int, int] = {}  # proposals that will come about, and at which iteration
        self._applied = 0  # the latest proposal that is over
        self._arriving: dict[int, float] = {}
        self._draft: _Draft | None = None
        self._wanted: tuple[frozenset[str], float, float] = (frozenset(), 0.0, 0.0)
        state.describe_team, state.adopt_team = self._describe, self._adopt
        self._sponsor = Sponsor(state, transport, facts, refusal, token)
        transport.take_newcomers(self._sponsor)
        own = transport.team.peers.addresses[transport.rank]
        if own is not None and not refusal and (token or transport.has_keys):
            where = in_words(own)
            _log.info("worker %d: others may join this team at %s", transport.rank, where)
        arguments = self._attend, lambda: transport.phase is not Phase.CLOSED and not self.has_left
        name = "matcha-growth"
        threading.Thread(target=keep_running, args=arguments, name=name, daemon=True).start()

    # -- for the script ----------------------------------------------------------------------------

    def leave(self) -> None:
        """Ask to leave for good; the worker goes on until `has_left`."""
        if self._refusal:
            raise InputError(self._refusal)
        self._transport.set_note("leave", "yes")

    # -- between two iterations, on the script's thread --------------------------------------------

    def look(self) -> None:
        """Before an iteration: wait where others still decide, and change where all do."""
        transport = self._transport
        while not self.has_left:
            iteration = self._state.iteration
            if f"-{transport.rank}" in self._sponsor.refused:
                _log.warning("worker %d: leaves, and the plan stays as it is", transport.rank)
                self.has_left, self._sponsor.is_open = True, False
                return
            with transport.lock:
                number = min(self._due, key=lambda n: self._due[n], default=0)
                due = self._due.get(number, math.inf)
                if iteration < due and (self._fence is None or iteration < self._fence[1]):
                    self._position = iteration + 1
                    return
            if iteration >= due:
                self._change(number, int(due), iteration)
                if not transport.is_behind:
                    continue
            self._membership.tend()  # one that joins may wait for this worker's state
            with transport.lock:
                transport.changed.wait(0.02)

    def _change(self, number: int, due: int, iteration: int) -> None:
        """Carry out a change with all others."""
        transport, state, draft = self._transport, self._state, self._draft
        planned = draft is not None and draft.number == number
        mine = (draft.content or "").encode() if draft is not None and planned else b""
        started = time.monotonic()
        found = gather(transport, mine, state.timeout) if iteration == due else []
        content = next(filter(None, found), None)
        change = None
        try:
            if content is not None and not self._are_enough(len(found)):
                raise InputError("most of the team cannot be reached")
            change = None if content is None else _read_change(content, transport.team)
        except (MatchaError, ValueError, TypeError, LookupError) as error:
            _log.warning("iteration %d: a change that cannot be used: %s", iteration, error)
        with transport.lock:
            self._due.pop(number, None)
            self._applied = max(self._applied, number)
            transport.is_changing = bool(self._due)
            if planned:
                self._draft = None
                if change is None:  # none who comes back shall think that it missed something
                    transport.set_note("change", "")
        if change is None:
            _log.warning("iteration %d: the team stays as it is", iteration)
            if len(found) < len(transport.members):  # the others were done with it long ago
                transport.is_behind = True
            return
        left, joined = change.left, change.joined
        values = self._settle(transport.rank in left, any_leaves=bool(left))
        if transport.rank in left:
            self.has_left = True
            _log.info("worker %d: has left for good at iteration %d", transport.rank, iteration)
            transport.close()
            return
        state.replanning.plan = in_stages(state.plan).with_stage(iteration, change.level)
        state.cursor.follow(state.plan)
        for worker in joined:
            state.exchange.forget(worker)
        transport.grow(change.team)
        with transport.lock:
            self._sponsor.taken |= {name: worker for worker, name in joined.items()}
            self._arriving = {w: t for w, t in self._arriving.items() if w not in left}
            self._arriving |= dict.fromkeys(joined, time.monotonic())
        if joined:
            self._membership.welcome = Welcome(workers=frozenset(joined), values=values)
            self.hold(frozenset(joined))
            self._membership.welcome = None
        _log.info(
            "worker %d: iteration %d: %s joined, %s left, %d are in the plan (%.2f s)",
            transport.rank, iteration, sorted(joined) or "none", sorted(left) or "none",
            len(change.level.members), time.monotonic() - started,
        )  # fmt: skip

    def hold(self, workers: frozenset[int]) -> None:
        """Wait a moment until the links to workers that join are up."""
        end = time.monotonic() + _HOLD
        near = workers & self._transport.team.neighbors(self._transport.rank)
        while time.monotonic() < end:
            self._membership.tend()
            with self._transport.lock:
                if near <= {each.peer for each in self._transport.live_connections()}:
                    return
                self._transport.changed.wait(0.02)

    def _settle(self, leaves: bool, *, any_leaves: bool) -> list[torch.Tensor]:
        """Take over the share of those that leave; the average model, by bucket."""
        averaging = self._state.averaging
        own = [value.clone() for value in averaging.values()]
        sums = [value for value in own if value.is_floating_point() or value.is_complex()]
        means = [value.clone() for value in sums]
        rest = [torch.zeros_like(v) if leaves else v.clone() for v in sums] if any_leaves else []
        share = torch.tensor([0.0 if leaves else 1.0], dtype=torch.float64)
        mean_(self._transport, [*means, *rest, share], self._state.timeout)
        for value, mean, stays in zip(sums, means, rest, strict=False):
            value.add_(mean - stays / float(share))
        if any_leaves and not leaves:
            averaging.take(own)
        for value, mean in zip(sums, means, strict=True):
            value.copy_(mean)
        return own

    def _are_enough(self, workers: int) -> bool:
        """Whether so many of the workers in the plan may change it: no others can then."""
        return 2 * workers > len(last_level(self._state.plan).members)

    # -- what travels with a state -----------------------------------------------------------------

    def _describe(self) -> dict[str, Any] | None:
        with self._transport.lock:
            team = self._transport.team
            if not team.stage:
                return None
            return {**team.to_json(), "applied": self._applied, "taken": self._sponsor.taken}

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Be in the team that a neighbour is in, whose state this worker takes."""
        told, transport = state.get("team"), self._transport
        now = transport.team
        if told is None or told["stage"] < now.stage:
            return
        with transport.lock:
            self._applied = int(told["applied"])
            self._sponsor.taken = {str(name): int(w) for name, w in told["taken"].items()}
            self._due = {n: at for n, at in self._due.items() if n > self._applied}
        if told["stage"] > now.stage:
            topology = StagedPlan.from_json(state["replanning"]["stages"]).topology
            transport.grow(Team.from_json(told, topology, now.network))

    # -- what all hear; on a thread of its own -----------------------------------------------------

    def _attend(self) -> None:
        transport = self._transport
        transport.news.wait(_POLL)
        transport.news.clear()
        with transport.lock:
            if transport.phase is Phase.RUNNING:
                self._hear()
                self._lead()

    def _hear(self) -> None:
        """Answer a proposal, and note when it comes about; the lock is held."""
        transport, members = self._transport, self._transport.members
        for text in transport.get_notes("refused").values():
            self._sponsor.refused |= {str(name): str(why) for name, why in json.loads(text)}
        proposed: dict[int, int] = {}
        for (rank, _), text in transport.get_notes("change", everyone=True).items():
            number, at = _numbers(text)
            if number <= self._applied:
                continue
            if not at:
                proposed[number] = rank
                continue
            if number not in self._due and at < self._position:
                # A partner in its meeting waits for this one in the call that it missed.
                transport.start_over("missed a change of the team")
            self._due[number] = at
            transport.is_changing = True
        if self._fence is not None:
            planner = proposed.get(self._fence[0])
            is_late = time.monotonic() > self._fenced_since + _PLANNER_LOST
            if planner is None or (planner not in members and is_late):
                self._fence = None
            transport.changed.notify_all()
        newest = max((n for n, rank in proposed.items() if rank in members), default=0)
        if newest and (self._fence is None or newest > self._fence[0]):
            pace = self._state.pace.seconds or 0.1
            position = max(self._position, transport.next_iteration)
            fence = position + max(2, math.ceil(_AHEAD / pace))
            self._fence, self._fenced_since = (newest, fence), time.monotonic()
            transport.set_note("fence", json.dumps([newest, fence]))

    def _lead(self) -> None:
        """The lowest member's part; the lock is held."""
        transport, now, refused = self._transport, time.monotonic(), self._sponsor.refused
        members, there = {*transport.members}, {*last_level(self._state.plan).members}
        draft = self._draft
        if draft is not None and draft.committed:
            if draft.number <= self._applied:
                self._draft = None
            return
        leaving = {rank for rank, _ in transport.get_notes("leave", everyone=True)} & there
        if transport.rank != min(members - leaving, default=transport.rank) or self._refusal:
            return self._withdraw()
        leaving -= {worker for worker in leaving if f"-{worker}" in refused}
        requests = dict(map(_request, transport.get_notes("join/").values()))
        for name in [n for n in requests if n in self._sponsor.taken or n in refused]:
            del requests[name]
        self._arriving = {w: t for w, t in self._arriving.items() if w not in members}
        lost = {w for w, t in self._arriving.items() if now > t + _NEVER_CAME} & there
        coming = _Draft(requests=requests, leaving=frozenset(leaving | lost))
        wanted, are_enough = coming.wanted, self._are_enough(len(members & there))
        if draft is not None and (not are_enough or not draft.wanted <= wanted):
            self._withdraw()
        elif draft is not None:
            return self._promote(draft)
        if not wanted or not are_enough or self._due:
            return
        if wanted != self._wanted[0]:
            self._wanted = wanted, self._wanted[1] if self._wanted[0] else now, now
        _, first, last = self._wanted
        if now >= last + _GATHER or now >= first + _MOST_GATHER:
            self._wanted = frozenset(), 0.0, 0.0
            self._draft = coming
            threading.Thread(
                target=self._plan, args=(coming,), name="matcha-planner", daemon=True
            ).start()

    def _promote(self, draft: _Draft) -> None:
        """Propose what is planned, and fix the iteration when all have answered."""
        transport, members = self._transport, self._transport.members
        if draft.refused:
            self._sponsor.refused |= draft.refused
            told = list(self._sponsor.refused.items())[-6:]
            transport.set_note("refused", json.dumps(told))
            draft.refused = {}
        if draft.content == "":
            self._withdraw()
        elif draft.number:
            fences = transport.get_notes("fence")
            said = [_numbers(fences.get((member, ""), "[0, 0]")) for member in members]
            if draft.content is not None and all(number == draft.number for number, _ in said):
                at = max(fence for _, fence in said)
                draft.committed = True
                transport.set_note("change", json.dumps([draft.number, at]))
        elif draft.content is not None or time.monotonic() > draft.started + _ALONE:
            notes = transport.get_notes("change", everyone=True).values()
            latest = max([self._applied, *(_numbers(text)[0] for text in notes)])
            draft.number = ((latest >> 16) + 1 << 16) + transport.rank
            transport.set_note("change", json.dumps([draft.number, 0]))

    def _withdraw(self) -> None:
        if self._draft is not None and self._draft.number:
            self._transport.set_note("change", "")
        self._draft = None

    def _plan(self, draft: _Draft) -> None:
        """Plan, in a thread; what fails is refused."""
        try:
            content, draft.refused = _plan_change(draft, self._state.plan, self._transport.team)
        except Exception as error:
            _log.exception("the next stage could not be planned")
            reason = str(error) if isinstance(error, MatchaError) else "it cannot be planned"
            content, draft.refused = "", dict.fromkeys(draft.wanted, reason)
        draft.content = content
        self._transport.news.set()


def _plan_change(draft: _Draft, plan: PlanLike, team: Team) -> tuple[str, dict[str, str]]:
    """What all are sent, empty where nothing changes; and which requests are refused, and why."""
    level = last_level(plan)
    known = {address for address in team.peers.addresses if address is not None}
    joined: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    addresses: dict[int, Any] = {}
    refused: dict[str, str] = {}
    there = {*level.members} - draft.leaving
    asked = [request["rank"] for request in draft.requests.values()]
    following = max([level.num_workers - 1, *asked]) + 1
    for name, request in sorted(draft.requests.items()):
        worker, address = request["rank"], request["address"]
        if worker < 0:
            worker, following = following, following + 1
        links = [peer for peer in request["links"] if peer in there]
        if worker in there or worker in joined:
            refused[name] = f"worker {worker} is there already"
        elif address in known:
            refused[name] = "another worker listens at its address"
        elif not links:
            refused[name] = "all to whom it has links have left"
        else:
            joined[worker], names[worker], addresses[worker] = links, name, address
            known |= {address} if address is not None else set()
    if not joined and not draft.leaving:
        return "", refused
    made = with_workers(plan, joined, draft.leaving)
    change = {
        "stage": team.stage + 1,
        "plan": made.to_json(),
        "digest": made.digest,
        "left": sorted(draft.leaving),
        "names": names,
        "addresses": addresses,
    }
    return json.dumps(change), refused


def _read_change(content: bytes, now: Team) -> _Change:
    """Read what `_plan_change` made; raises where it was made for another stage, or is damaged."""
    change = json.loads(content)
    level = Plan.from_json(change["plan"])
    if change["stage"] != now.stage + 1 or level.digest != change["digest"]:
        raise InputError("it was planned for another stage")
    addresses = dict(enumerate(now.peers.addresses))
    addresses |= {int(worker): address for worker, address in change["addresses"].items()}
    there = [addresses.get(w) if w in level.members else None for w in range(level.num_workers)]
    team = replace(
        now,
        topology=level.topology,
        peers=Peers.from_json(there),
        gone=frozenset(range(level.num_workers)) - {*level.members},
        stage=now.stage + 1,
    )
    joined = {int(worker): str(name) for worker, name in change["names"].items()}
    return _Change(level=level, team=team, left=frozenset(change["left"]), joined=joined)


def _numbers(text: str) -> tuple[int, int]:
    """A proposal, and an iteration or 0; zeros where a note makes no sense."""
    try:
        number, iteration = json.loads(text)
    except (ValueError, TypeError):
        return 0, 0
    return (number, iteration) if type(number) is type(iteration) is int else (0, 0)


def _request(text: str) -> tuple[str, dict[str, Any]]:
    """The name of a request and what it says; raises what a note leads to that makes no sense."""
    name, request = json.loads(text)
    host, port = request["address"] or ("", 0)
    return str(name), {
        "rank": int(request["rank"]),
        "links": [int(peer) for peer in request["links"]],
        "address": (str(host), int(port)) if host else None,
    }
