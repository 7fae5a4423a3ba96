"""Worker state: everything that one worker trains with, and what each iteration does to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from matcha.distributed.elastic.replanning import Replanning
from matcha.distributed.exchange.averaging import Averaging, PushSumValues
from matcha.distributed.exchange.background import Asynchrony, Overlap
from matcha.distributed.exchange.buckets import describe_layout, fill_buckets, layout_digest
from matcha.distributed.exchange.codecs import RelayedSums
from matcha.distributed.exchange.exchange import Stopwatch, alignment, make_exchange
from matcha.distributed.exchange.hooks import Clipping, ElasticMeetings, LinkTimer
from matcha.distributed.exchange.meeting import RUNNING, PlanCursor
from matcha.distributed.exchange.momentum import MomentumRules
from matcha.distributed.launch.placement import Placement, own_facts
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.options import Setup, check_setup
from matcha.distributed.transports.waiting import START, Pace
from matcha.errors import InputError, ModelError
from matcha.plans import PlanLike
from matcha.records import Span
from matcha.training.clipping import allowance

_PATIENCE = 30.0  # seconds: a partner's script may do something of its own for as long


class WorkerState:
    """One worker's model, its optimizers, its position in the plan, and its exchange.

    Constructing it is a collective call: the workers check that they agree, and all start from
    worker 0's values. A checkpoint holds the part of it that later iterations depend on.
    """

    def __init__(
        self,
        setup: Setup,
        modules: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        placement: Placement,
        on_span: Callable[[Span], None] | None,
    ) -> None:
        plan, options, transport = setup.plan, setup.options, placement.transport
        alone = transport.num_workers == 1
        replan = 0 if alone else options.replan or 0
        timeout, bucket_bytes = options.timeout or START, int(options.bucket_cap_mb * 1e6)
        self.setup, self.placement = setup, placement
        self.transport, self.rank = transport, transport.rank
        self.modules, self.optimizers = modules, optimizers
        self.options = replace(options, momentum=setup.momentum, replan=replan)
        self._frozen = [p for p in modules.parameters() if not p.requires_grad]
        self.stepped: set[int] = set()  # optimizers, in the iteration under way
        weights = None if alone else plan.worker_weights
        if weights is not None and not optimizers:
            raise InputError(
                "worker_weights multiply gradients before each step, and only an optimizer tells "
                "when: give Gossip the optimizer, or plan without worker_weights."
            )
        self.weight = 1.0 if weights is None else weights[self.rank]
        self.has_met = True  # a worker in the last round
        # Who is there and where, for a worker that takes this one's state.
        self.describe_team: Callable[[], dict[str, Any] | None] = lambda: None
        self.adopt_team: Callable[[Mapping[str, Any]], None] = lambda _: None
        self.stopwatch = Stopwatch(transport.rank, on_span)
        self.cursor = PlanCursor(plan, transport.rank, 0, alone=alone)
        self.buckets = fill_buckets(
            modules,
            bucket_bytes=bucket_bytes,
            buffers=options.buffers == "average",
            sharded=setup.has_mesh,
            alignment=alignment(plan.wire),
        )
        self.layout = layout_digest(self.buckets)
        self.pace = Pace(0)
        self.averaging = Averaging(placement, modules, self.buckets, lambda: self.timeout)
        self.team = None  # the links, where training goes on without lost workers
        if options.on_loss == "continue" and isinstance(transport, LinkTransport):
            self.team = transport
        transport.expect_model(sum(v.nbytes for v in (*modules.parameters(), *modules.buffers())))
        if self.team is None or not self.team.needs_state:
            facts = own_facts(plan, options.describe())
            placement.agree(facts, self.layout, describe_layout(self.buckets), timeout)
            self.averaging.start_equal()

        # From here on the parameters hold their first values.
        values = [bucket.data for bucket in self.buckets]
        self.momentum = MomentumRules(setup.momentum, optimizers, plan, self.buckets)
        needs_push_sum = any(level.needs_push_sum for level in plan.levels)
        self.push_sum = PushSumValues(values) if needs_push_sum else None
        self.averaging.push_sum = self.push_sum
        self.overlap = Overlap(self.buckets) if options.overlap else None
        self.asynchrony: Asynchrony | None = None
        if options.asynchronous and not alone:
            neighbors = plan.topology.neighbors(transport.rank)
            self.asynchrony = Asynchrony(self.buckets, transport, neighbors)
        apart = self.push_sum or self.overlap or self.asynchrony
        mixed, travelling = apart.mixed if apart else values, self.momentum.travelling
        self.exchange = make_exchange(
            plan.wire, transport, self.buckets, mixed, travelling, bucket_bytes, timeout
        )
        if any(level.mixing == "relay" for level in plan.levels) and not alone:
            volatile = [k for k, bucket in enumerate(self.buckets) if bucket.volatile]
            self.exchange.relay = RelayedSums(transport, values, self.cursor.partners(), volatile)
        everything = [*mixed, *(tensor for _, tensor in travelling)]
        self.replanning = Replanning(plan, replan, placement, everything, lambda: self.timeout)
        self.elastic: ElasticMeetings | None = None
        if self.team is not None:
            self.elastic = ElasticMeetings(self.exchange, self.team, everything)
            self.exchange.hooks.append(self.elastic)
        if replan:
            self.exchange.hooks.append(LinkTimer(self.exchange, self.replanning.times))
        self.clipping: Clipping | None = None
        if options.clip is not None:
            self.clipping = Clipping(self.exchange, mixed, allowance(plan, options.clip))
            self.exchange.hooks.append(self.clipping)
            self.exchange.takes_all = True  # a message that is not finite moves nothing

    @property
    def timeout(self) -> float:
        """Seconds to wait for all workers: as asked for, or as slow iterations ask for."""
        return self.options.timeout or self.pace.durations.deadline(START)

    def note_pace(self) -> None:
        """Learn from an iteration that ends here how long partners may take for theirs.

        Where training goes on without a lost worker, one that hangs is left out sooner.
        """
        self.pace.note(self.iteration, time.perf_counter())
        if self.options.timeout is None and self.exchange.finished_at == RUNNING:
            floor = START if self.team is None else _PATIENCE
            self.exchange.timeout = self.pace.durations.deadline(floor)

    @property
    def iteration(self) -> int:
        """The index of the next round: how many steps this worker has taken."""
        return self.cursor.iteration

    @property
    def plan(self) -> PlanLike:
        """The plan in use: as given, or in stages where it follows the network."""
        return self.replanning.plan

    @property
    def has_changed(self) -> bool:
        """Whether workers have joined the team, or left it for good, since it started."""
        return self.team is not None and self.team.team.stage > 0

    def whereabouts(self) -> dict[str, Any]:
        """Where this worker is, and who is there, in plain values."""
        return {"iteration": self.iteration, "members": list(self.transport.members)}

    def check_call(self, call: str) -> None:
        """Refuse a call that does not go with the options, or inside `averaged()`."""
        check_setup(replace(self.setup, call=call))
        self.leave_average(f"{call}()")

    def leave_average(self, call: str) -> None:
        """Refuse what concerns this worker's own values where the model holds the average."""
        if self.averaging.is_open:
            raise InputError(
                f"{call} inside averaged() would take the average for this worker's own values: "
                "leave the with statement first. (To keep the average: averaged_state_dict().)"
            )

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
        now = self.cursor
        with self._exchanging():
            if now.met:  # written out here and below: each call more is a frame more
                self.has_met = self.exchange.run(now.round, now.met, now.iteration) > 0
        for bucket in self.buckets:
            bucket.unpack()
        return True

    def _exchange_apart(self) -> None:
        """The exchange of the current round, on the overlap's thread."""
        now = self.cursor
        with self._exchanging():
            self.has_met = self.exchange.run(now.round, now.met, now.iteration) > 0

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        with (
            self.stopwatch.exchanging(self.exchange, self.iteration),
            self.push_sum or nullcontext(),
        ):
            yield

    def follow_network(self) -> None:
        """Change to the plan that is in force from this iteration on. Collective, where it may."""
        if self.replanning.look(self.iteration):
            self.cursor.follow(self.plan)

    def check_parameters(self) -> None:
        """Take back parameters that were given other values; refuse those that became others."""
        for bucket in self.buckets:
            name = bucket.take_back()
            if name is not None:
                raise ModelError(
                    f"parameter {name!r} has another device, dtype or shape than when Gossip took "
                    "it in (model.to(...)): change the model first, then construct Gossip."
                )
        if any(parameter.requires_grad for parameter in self._frozen):
            raise ModelError(
                "a parameter that was frozen when Gossip was constructed now trains, but is not "
                "exchanged: call detach() and construct Gossip again."
            )

    # -- between iterations -----------------------------------------------------------------------

    def settle(self) -> None:
        """Let the exchange under way end: collective calls must not run beside it.

        With `asynchronous=True` a collective call itself: meetings end at both ends alike.
        """
        if self.asynchrony is not None:
            self.asynchrony.settle()
        self.finish_overlap()

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
            "team": self.describe_team(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, from_neighbor: bool = False) -> None:
        """Continue where `state_dict` was taken; a neighbour's also says who is in the team now."""
        if from_neighbor:
            self.adopt_team(state)
        for key, value in self.state_dict().items():
            if key not in ("iteration", "replanning", "stepped", "team") and state[key] != value:
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
        parts: dict[str, Any] = {
            "wire": self.exchange,
            "relay": self.exchange.relay,
            "momentum": self.momentum,
            "push-sum": self.push_sum,
            "clip": self.clipping,
        }
        kept = {name: part.state() for name, part in parts.items() if part is not None}
        return {f"{name}/{key}": t for name, state in kept.items() for key, t in state.items()}
