"""Worker state: everything that one worker trains with, and what each iteration does to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from matcha.distributed.elastic.replanning import Replanning
from matcha.distributed.exchange.averaging import Averaging, PushSumValues, push_sum_of
from matcha.distributed.exchange.background import Asynchrony, Overlap
from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.exchange import Exchange, Stopwatch, make_exchange
from matcha.distributed.exchange.hooks import Clipping, ElasticMeetings, LinkTimer
from matcha.distributed.exchange.meeting import PlanCursor
from matcha.distributed.launch.placement import Placement
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.momentum import MomentumRules
from matcha.distributed.options import GossipOptions
from matcha.distributed.transports.base import Transport
from matcha.errors import InputError, ModelError
from matcha.plans import PlanLike
from matcha.training.clipping import allowance

__all__ = ["WorkerState", "make_worker_state"]


@dataclass(kw_only=True, eq=False)
class WorkerState:
    """One worker's model, its optimizers, its position in the plan, and its exchange.

    A checkpoint holds what of it later iterations depend on.
    """

    modules: nn.Module
    """The model, and what is exchanged beside it."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    options: GossipOptions
    """The options, with what the launcher and the optimizers decide filled in."""
    placement: Placement
    buckets: Sequence[Bucket]
    """Where the trainable parameters lie."""
    layout: str
    """A digest of what lies where."""
    frozen: Sequence[nn.Parameter]
    """Parameters that do not train."""
    cursor: PlanCursor
    exchange: Exchange
    """Mixes values with partners."""
    momentum: MomentumRules
    averaging: Averaging
    replanning: Replanning
    """Keeps the plan that is in force."""
    stopwatch: Stopwatch
    overlap: Overlap | None
    """Runs the exchange beside the gradient, where that was asked for."""
    asynchrony: Asynchrony | None
    """Holds meetings when both ends have time, where that was asked for."""
    push_sum: PushSumValues | None
    """x and ω, where messages go one way without coming round."""
    clipping: Clipping | None
    """Bounds what a meeting does, where that was asked for."""
    elastic: ElasticMeetings | None
    """Leaves out meetings with workers that are lost, where training goes on then."""
    stepped: set[int] = field(default_factory=set)
    """Which optimizers have stepped in the iteration under way."""
    has_met: bool = True
    """Whether a meeting of the last round took place; at first, of the round in a checkpoint."""

    @property
    def transport(self) -> Transport:
        """How messages to other workers travel."""
        return self.placement.transport

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.transport.rank

    @property
    def timeout(self) -> float:
        """Seconds after which a silent partner is an error."""
        return self.options.timeout

    @property
    def iteration(self) -> int:
        """The index of the next round: how many steps this worker has taken."""
        return self.cursor.iteration

    @property
    def plan(self) -> PlanLike:
        """The plan in use: as given, or in stages where it follows the network."""
        return self.replanning.plan

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run beside the gradient."""
        return self.overlap is not None or self.asynchrony is not None

    # -- an iteration -----------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Start what runs beside the gradient; again in the same iteration does nothing."""
        if self.asynchrony is not None:
            self.asynchrony.want(self.cursor)
        elif self.overlap is not None and self.cursor.met:
            self.overlap.start(self._exchange_apart)

    def finish_overlap(self) -> None:
        """Wait for what runs beside the gradient: parameters are about to change."""
        if self.overlap is not None:
            self.overlap.finish()

    def mix(self) -> bool:
        """Carry out this worker's part of the round; whether parameters have moved."""
        if self.asynchrony is not None:
            self.check_parameters()
            return self.asynchrony.merge()
        if not self.cursor.met and self.push_sum is None:
            return False
        self.check_parameters()
        if self.overlap is not None:
            self.overlap.merge()
            return True
        for bucket in self.buckets:
            bucket.pack()
        with self._exchanging():
            if self.cursor.met:  # written out here and below: each call more is a frame more
                now = self.cursor
                self.has_met = self.exchange.run(now.round, now.met, now.iteration) > 0
        for bucket in self.buckets:
            bucket.unpack()
        return True

    def _exchange_apart(self) -> None:
        """The exchange of the current round, on the overlap's thread."""
        with self._exchanging():
            now = self.cursor
            self.has_met = self.exchange.run(now.round, now.met, now.iteration) > 0

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        with self.stopwatch.exchanging(self.exchange, self.iteration):
            if self.push_sum is None:
                yield
            else:
                with self.push_sum:
                    yield

    def follow_network(self) -> None:
        """Change to the plan that is in force from this iteration on. Collective, where it may."""
        if self.replanning.look(self.iteration):
            self.cursor.follow(self.plan)

    def check_parameters(self) -> None:
        """Take back parameters that were given other values; refuse those that became others.

        Raises:
            ModelError: a parameter changed its kind, or began to train.
        """
        for bucket in self.buckets:
            name = bucket.take_back()
            if name is not None:
                raise ModelError(
                    f"parameter {name!r} has another device, dtype or shape than when Gossip took "
                    "it in (model.to(...)): change the model first, then construct Gossip."
                )
        for parameter in self.frozen:
            if parameter.requires_grad:
                raise ModelError(
                    "a parameter that was frozen when Gossip was constructed now trains, but is "
                    "not exchanged: call detach() and construct Gossip again."
                )

    # -- between iterations -----------------------------------------------------------------------

    def settle(self) -> None:
        """Let the exchange under way end: collective calls must not run beside it.

        With `asynchronous=True` a collective call itself: meetings end at both ends alike.
        """
        if self.asynchrony is not None:
            self.asynchrony.settle()
        elif self.overlap is not None:
            self.overlap.finish()

    def forget(self) -> None:
        """Drop the exchange under way: the values it started from are about to be replaced."""
        if self.asynchrony is not None:
            self.asynchrony.settle()
        elif self.overlap is not None:
            self.overlap.discard()

    def close(self) -> None:
        """End what runs beside the script, and give back connections."""
        if self.overlap is not None:
            self.overlap.discard()
            self.overlap.close()
        if self.asynchrony is not None:
            self.asynchrony.close()
        self.replanning.close()
        self.placement.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the plan, in plain values."""
        return {
            "iteration": self.iteration,
            "num_workers": self.transport.num_workers,
            "plan_digest": self.replanning.given.digest,
            "layout_digest": self.layout,
            "replanning": self.replanning.state(),
            "stepped": sorted(self.stepped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            InputError: it was taken under another plan, model or number of workers.
        """
        for key, value in self.state_dict().items():
            if key not in ("iteration", "replanning", "stepped") and state[key] != value:
                raise InputError(f"the saved state is of another {key}: {state[key]}, not {value}.")
        self.forget()
        self.follow(state)
        self.cursor.seek(int(state["iteration"]))

    def follow(self, state: Mapping[str, Any]) -> None:
        """Continue with the stages of a saved state's plan, and in the middle of its iteration."""
        self.replanning.load(state.get("replanning", {"asked_at": 0, "stages": None}))
        self.cursor.follow(self.plan)
        self.stepped = set(state.get("stepped", ()))
        self.momentum.forget_steps()

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what wire, momentum, push-sum and clipping remember from round to round."""
        parts: Iterable[tuple[str, Any]] = (
            ("wire", self.exchange),
            ("momentum", self.momentum),
            ("push-sum", self.push_sum),
            ("clip", self.clipping),
        )
        kept = [(name, part.state()) for name, part in parts if part is not None]
        return {f"{name}/{key}": tensor for name, state in kept for key, tensor in state.items()}


def make_worker_state(
    modules: nn.Module,
    optimizers: tuple[torch.optim.Optimizer, ...],
    plan: PlanLike,
    placement: Placement,
    options: GossipOptions,
    *,
    buckets: Sequence[Bucket],
    layout: str,
    averaging: Averaging,
    stopwatch: Stopwatch,
) -> WorkerState:
    """Set up what exchanges a model's parameters, which hold their first values by now.

    Args:
        modules: whose trainable parameters and buffers are exchanged.
        optimizers: what steps them.
        plan: who talks when.
        placement: this process's.
        options: how to exchange.
        buckets: where the parameters lie.
        layout: a digest of what lies where.
        averaging: of the modules.
        stopwatch: counts the time that exchanges take.
    """
    transport, timeout = placement.transport, options.timeout
    alone = transport.num_workers == 1
    bucket_bytes = int(options.bucket_cap_mb * 1e6)
    values = [bucket.data for bucket in buckets]
    momentum = MomentumRules(options.momentum, optimizers, plan, buckets)
    push_sum = push_sum_of(plan, values)
    overlap = Overlap(buckets) if options.overlap else None
    asynchrony = None
    if options.asynchronous and not alone:
        asynchrony = Asynchrony(buckets, transport, plan.topology.neighbors(transport.rank))
    apart = push_sum or overlap or asynchrony
    mixed = apart.mixed if apart else values
    exchange = make_exchange(
        plan.wire, transport, buckets, mixed, momentum.travelling, bucket_bytes, timeout
    )
    everything = [*mixed, *(tensor for _, tensor in momentum.travelling)]
    replan = 0 if alone else options.replan or 0
    replanning = Replanning(plan, replan, placement, everything, timeout)
    elastic: ElasticMeetings | None = None
    if isinstance(transport, LinkTransport) and options.on_loss == "continue":
        elastic = ElasticMeetings(exchange, transport, everything)
        exchange.hooks.append(elastic)
    if replan:
        exchange.hooks.append(LinkTimer(exchange, replanning.times))
    clipping: Clipping | None = None
    if options.clip is not None:
        clipping = Clipping(exchange, mixed, allowance(plan, options.clip))
        exchange.hooks.append(clipping)
    averaging.push_sum = push_sum
    return WorkerState(
        modules=modules,
        optimizers=optimizers,
        options=replace(options, replan=replan),
        placement=placement,
        buckets=buckets,
        layout=layout,
        frozen=[p for p in modules.parameters() if not p.requires_grad],
        cursor=PlanCursor(plan, transport.rank, 0, alone=alone),
        exchange=exchange,
        momentum=momentum,
        averaging=averaging,
        replanning=replanning,
        stopwatch=stopwatch,
        overlap=overlap,
        asynchrony=asynchrony,
        push_sum=push_sum,
        clipping=clipping,
        elastic=elastic,
    )
