"""Gossip: one line that makes a PyTorch training loop decentralized."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from matcha.distributed.collectives import gather, roll_call
from matcha.distributed.elastic.membership import Membership
from matcha.distributed.equipment import Equipment
from matcha.distributed.exchange.averaging import Averaging
from matcha.distributed.exchange.buckets import describe_layout, fill_buckets, layout_digest
from matcha.distributed.exchange.exchange import alignment
from matcha.distributed.exchange.plan_cursor import PlanCursor, answer, say_finished
from matcha.distributed.exchange.shards import gathered, is_sharded
from matcha.distributed.exchange.timers import Stopwatch
from matcha.distributed.launch.environment import goes_on, replan_every
from matcha.distributed.launch.placement import find_placement, shared_facts
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.momentum import describe_optimizers
from matcha.distributed.optimizer_hooks import OptimizerHooks
from matcha.distributed.options import GossipOptions, Setup, check_setup, find_exclusion
from matcha.distributed.ownership import (
    Optimizers,
    ParameterOwnership,
    as_list,
    check_in_place,
    check_parallel,
    check_stepped,
    combine,
    hookable,
    unwrap,
)
from matcha.distributed.savable import Savable
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import Span
from matcha.rounds import Round
from matcha.training.momentum import Momentum, automatic, parse_momentum

__all__ = ["Gossip"]

_FOREVER = 1e6  # seconds


class Gossip(Savable):
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
            started alone exchanges nothing and says so once.
        transport: how messages travel; by default torch.distributed, or MPI under `mpirun`.
        mesh: the dimension along which workers differ, where a worker is a group of processes with
            DDP, FSDP or tensor parallelism between them: `mesh=mesh["node"]`. Each process then
            exchanges its shard with its counterparts.
        scaler: the `GradScaler` through which the optimizer steps, if any: a step that it leaves
            out still takes part in its round.
        also: further modules whose parameters the optimizer steps (a criterion with weights of its
            own) or that follow the model (an EMA model): exchanged, averaged and saved like it.
        iteration: where to start in the plan, when resuming by hand.
        on_span: called with a `Span` (in seconds of `time.perf_counter`) for each stretch of time.
        options: how to exchange.
        **keywords: fields of `GossipOptions`, in place of `options` or beside it.

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
        plan: PlanLike,
        *,
        transport: Transport | None = None,
        mesh: DeviceMesh | None = None,
        scaler: torch.amp.GradScaler | None = None,
        also: Sequence[nn.Module] = (),
        iteration: int = 0,
        on_span: Callable[[Span], None] | None = None,
        options: GossipOptions | None = None,
        **keywords: Any,
    ) -> None:
        options = replace(options or GossipOptions(), **keywords)
        continues = goes_on(options.on_loss)
        options = replace(
            options,
            on_loss="continue" if continues else "stop",
            replan=replan_every(options.replan),
        )
        given = as_list(optimizer)
        self.optimizers = hookable(given)
        setup = Setup(
            options=options,
            plan=plan,
            model=model,
            optimizers=given,
            has_mesh=mesh is not None,
            transport_given=transport is not None,
        )
        setup = _decide_momentum(setup, self.optimizers)
        check_setup(setup)
        self.model = model
        self.modules = combine(model, also)
        check_stepped(self.modules, self.optimizers)
        ownership = ParameterOwnership(
            {n: p for n, p in self.modules.named_parameters() if p.requires_grad}, self.optimizers
        )
        self.deadline = deadline = options.deadline
        self.placement = find_placement(plan, transport, mesh, deadline)
        self.transport = self.placement.transport
        self.setup = replace(setup, transport=self.transport, num_parts=self.placement.num_parts)
        check_setup(self.setup)
        self.rank = self.transport.rank
        alone = self.transport.num_workers == 1
        self.transport.period += 1

        self.buckets = fill_buckets(
            self.modules,
            bucket_bytes=int(options.bucket_mb * 1e6),
            buffers=options.buffers == "average",
            sharded=mesh is not None,
            alignment=alignment(plan.wire),
        )
        values = (*self.modules.parameters(), *self.modules.buffers())
        self.transport.expect_model(sum(value.nbytes for value in values))
        self._averaging = Averaging(self.placement, self.modules, self.buckets, deadline)
        self.layout = layout_digest(self.buckets)
        self._frozen = [p for p in self.modules.parameters() if not p.requires_grad]
        how = replace(options, momentum=setup.momentum, replan=0 if alone else options.replan)
        facts = shared_facts(plan, self.placement, options.describe(), iteration)
        team = self.transport if isinstance(self.transport, LinkTransport) and continues else None
        if team is None or not team.needs_state:
            parameters = describe_layout(self.buckets)
            self.placement.agree(facts, self.layout, parameters, deadline)
            self._averaging.start_equal()

        tools = Equipment(plan, self.placement, self.buckets, self.optimizers, team, how)
        self._tools, self.exchange, self.meetings = tools, tools.exchange, tools.meetings
        self.following, self.replanning = tools.following, tools.replanning
        self.clipping = tools.clipping
        self._overlap, self._asynchrony = tools.overlap, tools.asynchrony
        self.push_sum = self._averaging.push_sum = tools.push_sum
        self._stopwatch = Stopwatch(self.rank, on_span)
        self._cursor = PlanCursor(plan, self.rank, iteration, alone=alone)
        if self._asynchrony is not None:
            self._asynchrony.open(self.exchange, self._stopwatch, deadline)
        bye = self.transport, self._cursor, self._asynchrony
        self._farewell = weakref.finalize(self, say_finished, *bye)
        self._is_checked = self._is_detached = False
        self._hooks = OptimizerHooks(
            self.optimizers,
            ownership,
            begin=self._begin,
            change=self._change,
            end=self._end,
            scaler=scaler,
        )
        self._membership: Membership | None = None
        if team is not None:
            self._membership = Membership(self, team, deadline)
            self._membership.start(iteration)
            if self._membership.returns:
                self._look()

    # -- the hot path -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._averaging.is_open:
            raise InputError(
                "a step inside averaged() would be lost when the workers' own values come back: "
                "leave the with statement first."
            )
        if self._asynchrony is not None:
            self._asynchrony.want(self._cursor)
        elif self._overlap is not None and self._cursor.met:
            self._overlap.start(self._run)  # does nothing when already on its way

    def _change(self, optimizer: torch.optim.Optimizer | None) -> None:
        if not self._is_checked:  # a wrapper may have come after us, so not at construction
            check_parallel(self.model, group_size=self.placement.num_parts)
            self._is_checked = True
        if self._stopwatch.listens:
            self._stopwatch.computed(self.iteration)
        if self._overlap is not None:
            self._overlap.finish()
        if self.following.is_needed and optimizer is not None:
            self.following.before_step(optimizer, meets=bool(self._cursor.met))

    def _end(self) -> None:
        if self.following.is_needed:
            self.following.after_step()
        moved = bool(self._cursor.met or self.push_sum)
        if moved or self._asynchrony is not None:
            check_in_place(self.buckets, self._frozen)
            if self._asynchrony is not None:
                moved = self._asynchrony.merge()
            elif self._overlap is not None:
                self._overlap.merge()
            else:
                for bucket in self.buckets:
                    bucket.pack()
                self._run()
                for bucket in self.buckets:
                    bucket.unpack()
            if moved:
                self._hooks.restart_curvature()
        if self.following.is_needed:
            self.following.after_round(met=bool(self._cursor.met) and self._tools.has_met)
        self._cursor.advance()
        if self._membership is not None:
            self._membership.tend()
        self._look()
        self._begin()
        if self._stopwatch.listens:
            self._stopwatch.restart()

    def _run(self) -> None:
        with self._stopwatch.exchanging(self.exchange, self.iteration):
            self._tools.run(self._cursor)

    def _look(self) -> None:
        if self.replanning.look(self.iteration):
            self._cursor.follow(self.plan)

    # -- for the script ---------------------------------------------------------------------------

    @property
    def plan(self) -> PlanLike:
        """Who talks when: as given, or in stages where the plan follows the network."""
        return self.replanning.plan

    @property
    def round(self) -> Round:
        """The round that comes next."""
        return self._cursor.round

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, or the first of several."""
        return self.optimizers[0]

    @property
    def num_workers(self) -> int:
        """How many workers train together."""
        return self.transport.num_workers

    @property
    def members(self) -> tuple[int, ...]:
        """The workers that are there now, as far as this one knows."""
        return self.transport.members

    @property
    def changes(self) -> list[list[int]]:
        """Who went or came so far, as far as this worker knows: iteration, worker, 1 if it came."""
        return [] if self._membership is None else self._membership.changes()

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run beside the gradient."""
        return self._overlap is not None or self._asynchrony is not None

    @property
    def exchange_seconds(self) -> float:
        """Spent in exchanges so far, waiting for partners included."""
        return self._stopwatch.exchange_seconds

    def restart_clock(self) -> None:
        """Count the next stretch of computing from now."""
        self._stopwatch.restart()

    def step(self) -> None:
        """End an iteration whose update was written by hand, with `Gossip(model, None, plan)`."""
        self._hooks.take()

    def skip_step(self) -> None:
        """Take part in this iteration's round without a step of the optimizer (a bad batch).

        Every worker must come to every round. With GradScaler this happens by itself.
        """
        self._hooks.take()

    def carry(
        self, give: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Let something of the script's own (plain JSON) travel with the state of a late worker.

        Returns whether this worker came late; then `take` was called with a neighbour's.
        """
        return self._membership is not None and self._membership.carry(give, take)

    def tend(self) -> None:
        """Answer workers that came back, as every step does: for where none is taken for long."""
        if self._membership is not None:
            self._membership.tend()

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with all workers' values averaged, BatchNorm's statistics too, for evaluation.

        A collective call; own values come back after.
        """
        self._meet_all("averaged()")
        with self._averaging.averaged():
            yield self.model

    def averaged_model(self) -> nn.Module:
        """A copy of the model with all workers' values averaged. A collective call."""
        with self.averaged() as model:
            return copy.deepcopy(model)

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
            whole = {name: gathered(t) for name, t in state.items() if full and is_sharded(t)}
            state.update(whole)
            return copy.deepcopy(state, {id(tensor): tensor for tensor in whole.values()})

    def consensus_distance(self) -> float:
        """(1/m) Σ ‖x_i − x̄‖², how far the workers' parameters are apart. A collective call."""
        self._meet_all("consensus_distance()")
        return self._averaging.consensus_distance()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train inside it when workers have unequal amounts of data, for an epoch or for all.

        A worker that leaves it early takes part in the rounds of those who still train, without a
        step of its own. In the end all go on at the iteration of the worker that took most steps.
        A collective call.
        """
        check_setup(replace(self.setup, call="join"))
        yield
        last = self.iteration
        if self.num_workers > 1 and self._asynchrony is None:  # there nobody is waited for
            self.exchange.timeout = _FOREVER  # who still trains may take its time
            answer(self.exchange, self._cursor, self._hooks.take)
            self.exchange.timeout = self.deadline
        roll_call(self.transport, "join()", _FOREVER)
        # Rounds after the last step of anybody were only there to say goodbye.
        ends = gather(self.transport, str(last).encode(), _FOREVER)
        self.seek(max(map(int, ends)))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Do long work on this worker alone inside it: others wait beyond their deadline."""
        self.transport.set_note("away", "yes")
        try:
            yield
        finally:
            self.transport.set_note("away", "")

    def detach(self) -> None:
        """Stop exchanging; the model and optimizer go on as ordinary ones. May be called twice."""
        if self._is_detached:
            return
        self._is_detached = True
        self._hooks.detach()
        self._farewell()
        if self._overlap is not None:
            self._overlap.discard()
            self._overlap.close()
        if self._asynchrony is not None:
            self._asynchrony.close()
        self.replanning.close()
        self.placement.close()

    def __enter__(self) -> Gossip:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error partners may be gone: waiting for them would hide it.
        if kind is None:
            self.detach()
            return
        self._farewell.detach()
        if self._asynchrony is not None:
            self._asynchrony.rendezvous.stop()

    # -- parts ------------------------------------------------------------------------------------

    def _meet_all(self, call: str) -> None:
        self.settle()
        when = "" if self._asynchrony is not None else f" at iteration {self.iteration}"
        roll_call(self.transport, f"{call}{when}", self.deadline)

    def settle(self) -> None:
        """Let the exchange under way end: collective calls must not run beside it.

        With `asynchronous=True` a collective call itself: meetings end at both ends alike.
        """
        if self._asynchrony is not None:
            self._asynchrony.settle()
        elif self._overlap is not None:
            self._overlap.finish()

    def forget(self) -> None:
        """Drop the exchange under way: the values it started from are about to be replaced."""
        if self._asynchrony is not None:
            self._asynchrony.settle()
        elif self._overlap is not None:
            self._overlap.discard()


def _decide_momentum(setup: Setup, optimizers: Sequence[torch.optim.Optimizer]) -> Setup:
    """Decide what `auto` is: what is best for the optimizers, or `local` where that is excluded."""
    asked = parse_momentum(setup.options.momentum)
    if asked is not None:
        return replace(setup, momentum=asked)
    best = replace(setup, momentum=automatic(describe_optimizers(optimizers)))
    return best if find_exclusion(best) is None else replace(setup, momentum=Momentum())
