"""Gossip: one line that makes a PyTorch training loop decentralized."""

from __future__ import annotations

import copy
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from matcha.distributed.checkpoint import load_checkpoint, save_checkpoint
from matcha.distributed.elastic.growth import Growth
from matcha.distributed.elastic.membership import Membership
from matcha.distributed.elastic.shard import Shard
from matcha.distributed.exchange.background import Asynchrony
from matcha.distributed.exchange.buckets import gather_shards, is_sharded
from matcha.distributed.exchange.meeting import RUNNING, PlanCursor
from matcha.distributed.exchange.momentum import describe_optimizers
from matcha.distributed.launch.placement import (
    TOKEN_VARIABLE,
    Placement,
    ask_to_join,
    find_placement,
    own_facts,
)
from matcha.distributed.links.listener import refuse_newcomer
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.optimizer_hooks import OptimizerHooks, check_free, check_stepped
from matcha.distributed.options import (
    GossipOptions,
    Optimizers,
    Setup,
    as_list,
    check_setup,
    combine,
    find_exclusion,
    hookable,
    unwrap,
)
from matcha.distributed.transports.base import Transport
from matcha.distributed.transports.collectives import gather, roll_call
from matcha.distributed.transports.waiting import START
from matcha.distributed.worker_state import WorkerState
from matcha.errors import InputError
from matcha.plans import PlanLike, check_plan
from matcha.records import Span
from matcha.strategies import has_budget
from matcha.training.momentum import Momentum, automatic, parse_momentum, with_outer

_FOREVER = 1e6  # seconds
_FAR = 10_000  # iterations within which a round with links should come
_log = logging.getLogger("matcha")


_ATTACHED: weakref.WeakKeyDictionary[Transport, weakref.WeakSet[Gossip]] = (
    weakref.WeakKeyDictionary()
)
"""The Gossips that use each transport."""


class Gossip:
    """Consensus after every `optimizer.step()`: decentralized SGD on a plan.

    Each worker is one process with a whole model. After a step it mixes its parameters with the
    partners that the plan's round gives it, if any: x ← W(x − ηg), eq. 2.

    The model's trainable parameters move into a few flat buckets; they keep their identity, so the
    optimizer, its state and compiled versions of the model are left alone. Construction is a
    collective call: the workers check that they agree, and all start from worker 0's values.

    Args:
        model: the module that this process trains.
        optimizer: what steps its parameters; any `torch.optim.Optimizer`, or several: then a round
            follows when the last of them has stepped. None when updates are written by hand: then
            call `step()` after each.
        plan: who talks when, for as many workers as there are processes; a process that was
            started alone exchanges nothing and says so once. None where it joins a running team.
        transport: how messages travel; by default torch.distributed, or MPI under `mpirun`.
        mesh: the dimension along which workers differ, where a worker is a group of processes with
            DDP, FSDP or tensor parallelism between them: `mesh=mesh["node"]`. Each process then
            exchanges its shard with its counterparts.
        scaler: the `GradScaler` through which the optimizer steps, if any: a step that it leaves
            out still takes part in its round.
        also: further modules whose parameters the optimizer steps (a criterion with weights of its
            own) or that follow the model (an EMA model): exchanged, averaged and saved like it.
        on_span: called with a `Span` (in seconds of `time.perf_counter`) for each stretch of time.
        options: how to exchange.
        **keywords: fields of `GossipOptions`, in place of `options` or beside it.

    Attributes:
        state: buckets, exchange, position in the plan: for tools and tests, not for scripts.
        membership: of a team that goes on when some are lost; None with `on_loss="stop"`.

    Raises:
        InputError: the plan is for another number of workers, the optimizer cannot be used, choices
            do not go together (`docs/limits.md` has the table), or the workers do not agree.
        ExchangeError: a worker does not answer.

    Example: `gossip = Gossip(model, optimizer, plan)`; the training loop stays as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        plan: PlanLike | None = None,
        *,
        transport: Transport | None = None,
        mesh: DeviceMesh | None = None,
        scaler: torch.amp.GradScaler | None = None,
        also: Sequence[nn.Module] = (),
        on_span: Callable[[Span], None] | None = None,
        options: GossipOptions | None = None,
        **keywords: Any,
    ) -> None:
        options = replace(options or GossipOptions(), **keywords).with_launcher()
        joining = None
        if options.join is not None and transport is None:
            joining = ask_to_join(options.join)
            plan = joining.given
            joining.check(own_facts(plan, options.describe()))
        if plan is None:
            raise InputError("Gossip needs a plan, or join='HOST:PORT' of a running team.")
        given = as_list(optimizer)
        optimizers = tuple(map(hookable, given))
        setup = Setup(
            options=options,
            plan=check_plan(plan),
            model=model,
            optimizers=given,
            has_mesh=mesh is not None,
            transport_given=transport is not None,
        )
        setup = _decide_momentum(setup, optimizers)
        check_setup(setup)
        self._model = model
        modules = combine(model, also)
        check_stepped(modules, optimizers)
        check_free(modules)
        placement = find_placement(plan, transport, mesh, options.timeout or START, joining)
        try:
            self._start(placement, setup, modules, optimizers, scaler, on_span)
        except BaseException:
            placement.close(after_error=True)
            raise

    def _start(
        self,
        placement: Placement,
        setup: Setup,
        modules: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        scaler: torch.amp.GradScaler | None,
        on_span: Callable[[Span], None] | None,
    ) -> None:
        """Agree with the other workers, start from the same values, and attach."""
        self.state: WorkerState
        self._is_detached: bool = False
        transport = placement.transport
        others = [gossip for gossip in _ATTACHED.get(transport, ()) if not gossip._is_detached]
        beside = tuple(gossip.state.setup.options for gossip in others)
        setup = replace(setup, transport=transport, num_parts=placement.num_parts, others=beside)
        check_setup(setup)
        _ATTACHED.setdefault(transport, weakref.WeakSet()).add(self)
        transport.period += 1
        state = self.state = WorkerState(setup, modules, optimizers, placement, on_span)
        if state.asynchrony is not None:
            state.asynchrony.open(state.exchange, state.stopwatch, state.timeout)
        self.membership: Membership | None = None
        self._growth: Growth | None = None
        if state.team is not None:
            self.membership = Membership(state, state.team)
            self._growth = self._take_part(self.membership, state.team)
        elif isinstance(transport, LinkTransport):
            transport.sponsor = refuse_newcomer
        self._hooks = OptimizerHooks(state, scaler, self.membership, self._growth)
        # The optimizers keep their hooks: dropping this object alone ends nothing.
        leaving = transport, state.cursor, state.asynchrony
        self._farewell = weakref.finalize(self._hooks, _say_finished, *leaving)
        if self.num_workers > 1 and self.rank == 0 and placement.part == 0:
            _log.info("%s", self)

    def _take_part(self, membership: Membership, team: LinkTransport) -> Growth:
        """Be one of a team that goes on without lost workers: as it began, or as it is by now."""
        state, was_taken_in = self.state, team.team.stage > 0
        excluded = find_exclusion(replace(state.setup, call="grow"))
        growth = Growth(
            state,
            membership,
            team,
            facts=own_facts(state.setup.plan, state.setup.options.describe()),
            refusal="" if excluded is None else excluded.message,
            token=os.environ.get(TOKEN_VARIABLE, ""),
        )
        membership.start(0)
        if membership.returns:
            state.follow_network()
        if was_taken_in:
            growth.hold(frozenset(range(team.num_workers)))
        growth.look()
        return growth

    # -- where this worker is ---------------------------------------------------------------------

    @property
    def plan(self) -> PlanLike:
        """The plan in use: as given, or in stages where it follows the network."""
        return self.state.plan

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.state.rank

    @property
    def num_workers(self) -> int:
        """How many workers train together."""
        if self.state.has_changed:
            return len(self.plan.level_at(self.iteration).members)
        return self.state.transport.num_workers

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that are there now, as far as this one knows; without it once it has left."""
        found = self.state.transport.members
        if self._growth is not None and self._growth.has_left:
            found = tuple(worker for worker in found if worker != self.rank)
        return found

    @property
    def iteration(self) -> int:
        """The index of the next round: how many steps this worker has taken."""
        return self.state.iteration

    def __str__(self) -> str:
        """Who exchanges what, and from when on, in a line."""
        plan, count = self.plan, self.num_workers
        ahead = islice(plan.rounds(self.iteration), _FAR)
        first = next((k for k, found in enumerate(ahead, self.iteration) if found), None)
        when = f"{'next' if self.iteration else 'first'} round at iteration {first}"
        if count == 1 or first is None:
            when = "nothing to exchange"
        workers = "1 worker" if count == 1 else f"{count} workers"
        named = plan.strategy + (f" at {plan.budget:g}" if has_budget(plan.strategy) else "")
        return ", ".join([workers, named, plan.wire.name, when])

    # -- steps ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take part in an iteration without a step of an optimizer.

        With `Gossip(model, None, plan)` it follows each update that the script makes. With an
        optimizer it stands for a step that is left out (a bad batch): every worker must come to
        every round. With a `GradScaler` given to Gossip this happens by itself.
        """
        self._hooks.take()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train inside this when workers have unequal amounts of data: one epoch, or all of them.

        A worker that leaves it early takes part in the rounds of those who still train, without a
        step of its own. In the end all go on at the iteration of the worker that took most steps.
        A collective call.
        """
        state = self.state
        state.check_call("join")
        yield
        last = self.iteration
        if self.num_workers > 1 and state.asynchrony is None:  # there no partner waits
            self._answer_partners()
        roll_call(state.transport, "join()", _FOREVER)
        # Rounds after the last step of any worker were only there to say goodbye.
        ends = gather(state.transport, str(last).encode(), _FOREVER)
        state.cursor.seek(max(map(int, ends)))

    def _answer_partners(self) -> None:
        """Come to the meetings of those who still train, until none does.

        Each meeting tells both ends whether the other has finished; two that have do not meet
        again. So this needs no word from workers that are never met.
        """
        exchange, cursor = self.state.exchange, self.state.cursor
        exchange.timeout = _FOREVER  # those who still train may take their time
        self.state.finish_overlap()  # it may have told partners that this worker trains, or not yet
        exchange.finished_at = cursor.iteration
        cursor.passed = exchange.finished
        while not exchange.finished.issuperset(cursor.partners()):
            if cursor.met:
                self._hooks.take()
            else:
                cursor.advance()
        exchange.timeout = self.state.timeout
        exchange.finished_at = RUNNING
        exchange.finished.clear()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Do long work on this worker alone inside it: others wait beyond their timeout."""
        self.state.transport.set_note("away", "yes")
        try:
            yield
        finally:
            self.state.transport.set_note("away", "")

    def leave(self) -> None:
        """Leave the team for good: it plans its next stage without this worker.

        Go on with the loop while `rank` is among `members`, for a second or so: what this worker
        has learnt stays with the others, whose average does not change, and `shard` loses none of
        its data. Steps after that are its own.

        Raises:
            InputError: this team cannot change; the sentence says why.
        """
        check_setup(replace(self.state.setup, call="grow"))
        if self._growth is None:
            raise InputError(
                "a team that ends with its first loss cannot do without this worker: start it with "
                "on_loss='continue' (`matcha train --elastic`)."
            )
        self._growth.leave()

    def shard(self, dataset: Sized, batch_size: int, *, seed: int = 0) -> Shard:
        """This worker's batches of a data set, for a `DataLoader`'s `batch_sampler`.

        Which examples are whose is a function of the plan and the seed: when workers join or leave
        for good, none is lost and none counted twice. Iterating over it is one pass over the data.
        """
        return Shard(
            lambda: self.plan,
            lambda: self.iteration if self.rank in self.members else -1,
            self.rank,
            size=len(dataset),
            batch_size=batch_size,
            seed=seed,
        )

    # -- averages ---------------------------------------------------------------------------------

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with all workers' values averaged, BatchNorm's statistics too, for evaluation.

        A collective call; own values come back after. To keep it: `copy.deepcopy(model)` inside.
        """
        self._meet_all("averaged()")
        with self.state.averaging.averaged():
            yield self._model

    def averaged_state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """Return the average model's `state_dict()`, in memory of its own. A collective call.

        Its keys are the model's own, also where DDP or `torch.compile` wrap it.

        Args:
            full: gather parameters that are sharded over the processes of a worker (FSDP, tensor
                parallelism), on the CPU of each; False leaves shards, for
                `torch.distributed.checkpoint`.
        """
        with self.averaged() as model:
            state = unwrap(model).state_dict()
            whole = {name: gather_shards(t) for name, t in state.items() if full and is_sharded(t)}
            state.update(whole)
            return copy.deepcopy(state, {id(tensor): tensor for tensor in whole.values()})

    def consensus_distance(self) -> float:
        """(1/m) Σ ‖x_i − x̄‖², how far the workers' parameters are apart. A collective call."""
        self._meet_all("consensus_distance()")
        return self.state.averaging.consensus_distance()

    def _meet_all(self, call: str) -> None:
        self.state.settle()
        when = "" if self.state.asynchrony is not None else f" at iteration {self.iteration}"
        roll_call(self.state.transport, f"{call}{when}", self.state.timeout)

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where in which plan this worker is, in plain values; for scripts that save by themselves.

        Save it beside the model's and optimizer's own state, and give it to `load_state_dict`.
        """
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; model and optimizer are the script's to load.

        Raises:
            InputError: it was taken under another plan, model or number of workers.
        """
        self.state.check_call("load_state_dict")
        self.state.load_state_dict(state)

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        keep: int = 2,
        identity: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint of all workers; see `distributed.checkpoint`. A collective call."""
        self.state.leave_average("save()")
        self.state.momentum.check_saving()
        return save_checkpoint(
            self.state,
            directory,
            extra=extra,
            generators=generators,
            keep=keep,
            identity=identity,
        )

    def load(
        self,
        directory: str | Path,
        *,
        iteration: int | None = None,
        average: bool = False,
        generators: Mapping[str, torch.Generator] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Continue from a checkpoint; see `distributed.checkpoint`. A collective call.

        A worker that came while the others train has a neighbour's state already: until its first
        step it loads nothing, does not wait, and returns what `membership.carry` brought along.
        One that was away when the checkpoint was written takes the state of a neighbour that loads
        it, at that one's first step.
        """
        if self.membership is not None and self.membership.is_placed:
            return self.membership.taken
        self.state.leave_average("load()")
        extra = load_checkpoint(
            self.state,
            directory,
            iteration=iteration,
            average=average,
            generators=generators,
            identity=identity,
            continues=self.membership is not None,
        )
        if extra is None:  # this worker was away when it was written
            assert self.membership is not None
            self.membership.rejoin()
            self.state.follow_network()
            return self.membership.taken
        return extra

    # -- the end ----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Stop exchanging; the model and optimizer go on as ordinary ones. May be called twice."""
        if not self._is_detached:
            self._is_detached = True
            self._hooks.detach()
            leaving = self._farewell.detach()
            if leaving is not None:
                _say_finished(*leaving[2], at_exit=False)
            self.state.close()

    def __enter__(self) -> Gossip:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error partners may be gone: waiting for them would hide it.
        if kind is None:
            self.detach()
            return
        self._farewell.detach()
        if self.state.asynchrony is not None:
            self.state.asynchrony.rendezvous.stop()


def _say_finished(
    transport: Transport,
    cursor: PlanCursor,
    asynchrony: Asynchrony | None,
    *,
    at_exit: bool = True,
) -> None:
    """Note that this worker has finished, for workers that wait for it.

    At the interpreter's exit no one can tell a script that has finished from `sys.exit(1)`.
    """
    # After an uncaught error it has not, nor after one of ours.
    if getattr(sys, "last_value", None) is None and not transport.failed:
        if asynchrony is not None:
            asynchrony.rendezvous.leave()  # so that no meeting breaks off
        transport.set_note(
            f"finished/{transport.period}", f"{cursor.iteration}{' at exit' if at_exit else ''}"
        )


def _decide_momentum(setup: Setup, optimizers: Sequence[torch.optim.Optimizer]) -> Setup:
    """Decide what `auto` is: what is best for the optimizers, or `local` where that is excluded."""
    asked, plan = parse_momentum(setup.options.momentum), setup.plan
    if plan.outer is not None and (asked is None or asked.kind == "local"):
        return replace(setup, momentum=with_outer(Momentum(), plan))
    if asked is not None:
        return replace(setup, momentum=asked)
    best = replace(setup, momentum=automatic(describe_optimizers(optimizers), plan))
    return best if find_exclusion(best) is None else replace(setup, momentum=Momentum())
