"""Growth: workers that join a running training, and workers that leave it for good.

The lowest member plans the next stage, and asks all to say an iteration that they will not pass
before they hear more (a fence, some way ahead, so that none has to wait as a rule). The latest of
these is where the change comes about. There all members make one collective call, in which the one
that planned sends the stage, and the average model is made: workers that join start from it, and
the others take over the share of those that leave, so that the average stays what it was.

What is said travels as notes, from neighbour to neighbour. If the worker that planned is lost, the
next one begins again.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from matcha.distributed.elastic.membership import Membership, Welcome
from matcha.distributed.links.joining import Sponsorship, usual_degree
from matcha.distributed.links.listener import RefusedError, keep_running
from matcha.distributed.links.peers import Peers, Team, in_words
from matcha.distributed.links.transport import LinkTransport, Phase
from matcha.distributed.transports.collectives import gather, mean_
from matcha.distributed.worker_state import WorkerState
from matcha.errors import InputError, MatchaError
from matcha.plans import Plan, StagedPlan
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
_MOST_REQUEST = 1000  # characters


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A change that this worker plans."""

    wanted: frozenset[str]
    """The requests that it answers."""
    started: float
    number: int = 0
    """Of the proposal; 0: not proposed."""
    committed: bool = False
    content: str | None = None
    """What all are sent; None while it is planned."""
    refused: Mapping[str, str] | None = None


class Growth:
    """One worker's part in changes of the team.

    Args:
        state: Of the worker.
        membership: Of the worker.
        transport: Its links.
        facts: What must be the same on every worker.
        refusal: Why this team cannot change; empty if it can.
        token: What workers show that join without keys.

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
        self._facts, self._refusal = dict(facts), refusal
        self.has_left = False
        self._position = 0  # the first iteration at which this worker has not looked yet
        self._fence: tuple[int, int] | None = None  # a proposal, and where this worker waits for it
        self._fenced_since = 0.0
        self._due: dict[int, int] = {}  # proposals that will come about, and at which iteration
        self._applied = 0  # the latest proposal that is over
        self._taken: dict[str, int] = {}  # requests that are in the plan, and their workers
        self._refused: dict[str, str] = {}
        self._slots: dict[str, int] = {}  # places of the requests for which this worker speaks
        self._arriving: dict[int, float] = {}
        self._draft: _Draft | None = None
        self._wanted: tuple[frozenset[str], float, float] = (frozenset(), 0.0, 0.0)
        state.describe_team, state.adopt_team = self._describe, self._adopt
        sponsorship = Sponsorship(
            rank=transport.rank,
            token=token,
            has_keys=transport.has_keys,
            greet=self._greet,
            publish=self._publish,
            find=self._find,
            is_open=lambda: transport.phase is Phase.RUNNING and not self.has_left,
        )
        transport.take_newcomers(sponsorship)
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
            if f"-{transport.rank}" in self._refused:
                _log.warning("worker %d: leaves, and the plan stays as it is", transport.rank)
                self.has_left = True
                return
            with transport.lock:
                number = min(self._due, key=lambda n: self._due[n], default=None)
                if number is None or iteration < self._due[number]:
                    number = None
                    if self._fence is None or iteration < self._fence[1]:
                        self._position = iteration + 1
                        return
            if number is not None:
                self._change(number, self._due[number], iteration)
                if not transport.is_behind:
                    continue
            self._membership.tend()  # one that joins may wait for this worker's state
            with transport.lock:
                transport.changed.wait(0.02)

    def _change(self, number: int, due: int, iteration: int) -> None:
        """Carry out a change with all others."""
        transport, state = self._transport, self._state
        draft = self._draft
        mine = b""
        if draft is not None and draft.number == number and draft.content is not None:
            mine = draft.content.encode()
        started = time.monotonic()
        found = gather(transport, mine, self._state.timeout) if iteration == due else []
        content = next((each for each in found if each), b"")
        change, level, team = None, None, None
        if content:
            try:
                change = json.loads(content)
                level, team = self._read(change)
            except (MatchaError, ValueError, TypeError, LookupError) as error:
                _log.warning("iteration %d: a change that cannot be used: %s", iteration, error)
        with transport.lock:
            self._due.pop(number, None)
            self._applied = max(self._applied, number)
            transport.is_changing = bool(self._due)
        if change is None or level is None or team is None:
            _log.warning("iteration %d: the team stays as it is", iteration)
            if len(found) < len(transport.members):  # the others were done with it long ago
                transport.is_behind = True
            return
        left = frozenset(change["left"])
        values = self._settle(transport.rank in left, any_leaves=bool(left))
        if transport.rank in left:
            self.has_left = True
            _log.info("worker %d: has left for good at iteration %d", transport.rank, iteration)
            transport.close()
            return
        joined = {int(worker): name for worker, name in change["names"].items()}
        state.replanning.plan = in_stages(state.plan).with_stage(iteration, level)
        state.cursor.follow(state.plan)
        for worker in joined:
            state.exchange.forget(worker)
        transport.grow(team)
        with transport.lock:
            self._taken |= {name: worker for worker, name in joined.items()}
            now = time.monotonic()
            self._arriving = {w: t for w, t in self._arriving.items() if w not in left}
            self._arriving |= dict.fromkeys(joined, now)
        if joined:
            self._membership.welcome = Welcome(workers=frozenset(joined), values=values)
            self.hold(frozenset(joined))
            self._membership.welcome = None
        _log.info(
            "worker %d: iteration %d: %s joined, %s left, %d are in the plan (%.2f s)",
            transport.rank, iteration, sorted(joined) or "none", sorted(left) or "none",
            len(level.members), time.monotonic() - started,
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

    def _read(self, change: Mapping[str, Any]) -> tuple[Plan, Team]:
        """The plan of the next stage, and the team that it is for.

        Raises:
            InputError: It was made for another stage than this one, or is damaged.
        """
        now = self._transport.team
        level = Plan.from_json(change["plan"])
        if change["stage"] != now.stage + 1 or level.digest != change["digest"]:
            raise InputError("it was planned for another stage")
        addresses = list(now.peers.addresses)
        addresses += [None] * (level.num_workers - len(addresses))
        for worker, address in change["addresses"].items():
            addresses[int(worker)] = None if address is None else (address[0], int(address[1]))
        gone = frozenset(range(level.num_workers)) - {*level.members}
        for worker in gone:
            addresses[worker] = None
        team = replace(
            now,
            topology=level.topology,
            peers=Peers(addresses=tuple(addresses)),
            gone=gone,
            stage=now.stage + 1,
        )
        return level, team

    # -- what travels with a state -----------------------------------------------------------------

    def _describe(self) -> dict[str, Any] | None:
        with self._transport.lock:
            team = self._transport.team
            if not team.stage:
                return None
            return {
                "peers": team.peers.addresses,
                "gone": sorted(team.gone),
                "stage": team.stage,
                "applied": self._applied,
                "taken": self._taken,
            }

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Be in the team that a neighbour is in, whose state this worker takes."""
        told, transport = state.get("team"), self._transport
        if told is None or told["stage"] < transport.team.stage:
            return
        with transport.lock:
            self._applied = int(told["applied"])
            self._taken = {str(name): int(worker) for name, worker in told["taken"].items()}
            self._due = {n: at for n, at in self._due.items() if n > self._applied}
        if told["stage"] == transport.team.stage:
            return
        addresses = (None if a is None else (a[0], int(a[1])) for a in told["peers"])
        team = replace(
            transport.team,
            topology=StagedPlan.from_json(state["replanning"]["stages"]).topology,
            peers=Peers(addresses=tuple(addresses)),
            gone=frozenset(told["gone"]),
            stage=int(told["stage"]),
        )
        transport.grow(team)

    # -- for workers that want to join; on the sponsor's thread ------------------------------------

    def _greet(self) -> dict[str, Any]:
        if self._refusal:
            raise RefusedError(f"this team takes in no others, as {self._refusal}")
        transport, state = self._transport, self._state
        with transport.lock:
            there = self._there()
            return {
                "given": state.replanning.given.to_json(),
                "facts": self._facts,
                "peers": transport.team.peers.addresses,
                "members": transport.members,
                "there": sorted(there),
                "timeout": transport.patience,
                "degree": usual_degree(transport.team.topology, there),
            }

    def _publish(self, name: str, request: str) -> None:
        with self._transport.lock:
            if request:
                if len(request) + len(name) > _MOST_REQUEST:
                    raise RefusedError("it has too many links")
                free = set(range(len(self._slots) + 1)) - {*self._slots.values()}
                self._slots[name] = min(free)
                request = json.dumps([name, json.loads(request)])
            elif name not in self._slots:
                return
            slot = self._slots[name] if request else self._slots.pop(name)
            self._transport.set_note(f"join/{slot}", request)

    def _find(self, name: str, worker: int) -> dict[str, Any] | None:
        with self._transport.lock:
            there = self._there()
            if worker not in there or name in self._slots:
                if name in self._refused:
                    raise RefusedError(self._refused[name])
                if name not in self._taken:
                    return None
                worker = self._taken[name]
            team = self._transport.team
            return {
                "rank": worker,
                "plan": self._state.plan.to_json(),
                "peers": team.peers.addresses,
                "gone": sorted(team.gone),
                "network": team.network,
                "stage": team.stage,
            }

    def _there(self) -> set[int]:
        return {*self._level().members}

    def _level(self) -> Plan:
        plan = self._state.plan
        return plan.levels[plan.stages[-1].level] if isinstance(plan, StagedPlan) else plan

    # -- what all hear; on a thread of its own -----------------------------------------------------

    def _attend(self) -> None:
        transport = self._transport
        transport.news.wait(_POLL)
        transport.news.clear()
        with transport.lock:
            if transport.phase is Phase.RUNNING:
                self._hear()
                content = self._lead()
            else:
                content = None
        if content is not None:
            content()

    def _hear(self) -> None:
        """Answer a proposal, and note when it comes about; the lock is held."""
        transport = self._transport
        for text in transport.get_notes("refused").values():
            self._refused |= {str(name): str(why) for name, why in json.loads(text)}
        said = {}
        for (rank, _), text in transport.get_notes("change", everyone=True).items():
            number, at = _numbers(text)
            if number > self._applied:
                said[number] = at, rank
                if at:
                    if number not in self._due and at < self._position:
                        # A partner in its meeting waits for this one in the call that it missed.
                        transport.start_over("missed a change of the team")
                    self._due[number] = at
                    transport.is_changing = True
        if self._fence is not None:
            number = self._fence[0]
            lost = number in said and said[number][1] not in transport.members
            if (
                number in self._due
                or number not in said
                or number <= self._applied
                or (lost and time.monotonic() > self._fenced_since + _PLANNER_LOST)
            ):
                self._fence = None
            transport.changed.notify_all()
        members = transport.members
        open_ones = [n for n, (at, rank) in said.items() if not at and rank in members]
        newest = max(open_ones, default=0)
        if newest and (self._fence is None or newest > self._fence[0]):
            pace = self._state.pace.seconds or 0.1
            position = max(self._position, transport.next_iteration)
            fence = position + max(2, math.ceil(_AHEAD / pace))
            self._fence, self._fenced_since = (newest, fence), time.monotonic()
            transport.set_note("fence", json.dumps([newest, fence]))

    def _lead(self) -> Callable[[], None] | None:
        """The lowest member's part; the lock is held. Returns what is to be done without it."""
        transport, now = self._transport, time.monotonic()
        members, there = {*transport.members}, self._there()
        leaving = {rank for rank, _ in transport.get_notes("leave", everyone=True)} & there
        if transport.rank != min(members - leaving, default=transport.rank) or self._refusal:
            self._withdraw()
            return None
        leaving -= {worker for worker in leaving if f"-{worker}" in self._refused}
        requests = {}
        for text in transport.get_notes("join/").values():
            name, request = _request(text)
            if name not in self._taken and name not in self._refused:
                requests[name] = request
        self._arriving = {w: t for w, t in self._arriving.items() if w not in members}
        lost = {w for w, t in self._arriving.items() if now > t + _NEVER_CAME} & there
        wanted = frozenset(requests) | {f"-{worker}" for worker in leaving | lost}
        draft = self._draft
        if draft is not None and (draft.committed or draft.wanted <= wanted):
            self._promote(draft)
            return None
        if draft is not None:  # a worker that wanted to join is gone
            self._withdraw()
        if not wanted or 2 * len(members & there) <= len(there) or self._due:
            return None
        if wanted != self._wanted[0]:
            first = self._wanted[1] if self._wanted[0] else now
            self._wanted = wanted, first, now
        _, first, last = self._wanted
        if now < last + _GATHER and now < first + _MOST_GATHER:
            return None
        self._draft = draft = _Draft(wanted=wanted, started=now)
        self._wanted = frozenset(), 0.0, 0.0
        return lambda: self._plan(draft, requests, leaving | lost, members)

    def _promote(self, draft: _Draft) -> None:
        """Propose what is planned, and fix the iteration when all have answered."""
        transport, members = self._transport, self._transport.members
        if draft.committed:
            if draft.number <= self._applied:
                self._draft = None
            return
        if draft.refused is not None:
            self._refused |= draft.refused
            told = list(self._refused.items())[-6:]
            transport.set_note("refused", json.dumps(told))
            draft.refused = None
        planned = draft.content is not None
        if draft.content == "":  # none could be taken
            self._withdraw()
            return
        if not draft.number:
            if planned or time.monotonic() > draft.started + _ALONE:
                notes = transport.get_notes("change", everyone=True).values()
                latest = max([self._applied, *(_numbers(text)[0] for text in notes)])
                draft.number = ((latest >> 16) + 1 << 16) + transport.rank
                transport.set_note("change", json.dumps([draft.number, 0]))
            return
        fences = transport.get_notes("fence")
        said = [_numbers(fences.get((member, ""), "[0, 0]")) for member in members]
        if planned and all(number == draft.number for number, _ in said):
            at = max(fence for _, fence in said)
            draft.committed = True
            transport.set_note("change", json.dumps([draft.number, at]))

    def _withdraw(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None and draft.number and not draft.committed:
            self._transport.set_note("change", "")

    def _plan(
        self, draft: _Draft, requests: Mapping[str, Any], left: set[int], members: set[int]
    ) -> None:
        """Plan in a thread; what fails is refused."""

        def work() -> None:
            try:
                draft.content, refused = self._planned(requests, left, members)
            except Exception as error:
                _log.exception("the next stage could not be planned")
                reason = str(error) if isinstance(error, MatchaError) else "it cannot be planned"
                refused = dict.fromkeys(draft.wanted, reason)
                draft.content = ""
            draft.refused = refused
            self._transport.news.set()

        threading.Thread(target=work, name="matcha-planner", daemon=True).start()

    def _planned(
        self, requests: Mapping[str, Any], left: set[int], members: set[int]
    ) -> tuple[str, dict[str, str]]:
        level, team = self._level(), self._transport.team
        known = {address for address in team.peers.addresses if address is not None}
        joined: dict[int, list[int]] = {}
        names: dict[int, str] = {}
        addresses: dict[int, Any] = {}
        refused: dict[str, str] = {}
        there = {*level.members} - left
        following = max([level.num_workers - 1, *(r["rank"] for r in requests.values())]) + 1
        for name, request in sorted(requests.items()):
            worker = request["rank"]
            if worker < 0:
                worker, following = following, following + 1
            address = None if request["address"] is None else tuple(request["address"])
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
        if not joined and not left:
            return "", refused
        made = with_workers(self._state.plan, joined, left)
        change = {
            "stage": team.stage + 1,
            "plan": made.to_json(),
            "digest": made.digest,
            "left": sorted(left),
            "names": names,
            "addresses": addresses,
        }
        return json.dumps(change), refused


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
