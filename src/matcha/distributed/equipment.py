"""Equipment: what carries out a worker's part of each round, put together as it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from matcha.distributed.elastic.replanning import Replanning
from matcha.distributed.exchange.asynchrony import asynchrony_of
from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.clipped import Clipped
from matcha.distributed.exchange.link_times import Timed
from matcha.distributed.exchange.meetings import Meetings
from matcha.distributed.exchange.overlap import Overlap
from matcha.distributed.exchange.push_sum import push_sum_of
from matcha.distributed.exchange.turns import Runner
from matcha.distributed.exchange.wiring import Exchanger, make_exchange
from matcha.distributed.hooks.momentum import MomentumRules
from matcha.distributed.itinerary import Itinerary
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.options import GossipOptions
from matcha.distributed.seats import Seat
from matcha.plans import PlanLike
from matcha.training.clipping import allowance

__all__ = ["Equipment"]


class Equipment:
    """A worker's exchange, and what is around it.

    Attributes:
        exchange: mixes values with partners.
        overlap: lets it run beside the gradient, where that was asked for.
        asynchrony: lets meetings happen when both ends have time, where that was asked for.
        push_sum: where messages go one way without coming round.
        following: what momentum does around meetings.
        clipping: bounds what a meeting does, where that was asked for.
        replanning: what a plan that follows the network needs.
        meetings: holds meetings with whoever is there, in a team that goes on when some are lost.
    """

    def __init__(
        self,
        plan: PlanLike,
        seat: Seat,
        buckets: Sequence[Bucket],
        optimizers: tuple[torch.optim.Optimizer, ...],
        team: LinkTransport | None,
        options: GossipOptions,
    ) -> None:
        values = [bucket.data for bucket in buckets]
        overlap, deadline = options.overlap, options.deadline
        self.overlap = Overlap(buckets) if overlap else None
        self.asynchrony = asynchrony_of(plan, seat, buckets, options.asynchronous)
        self.following = MomentumRules(options.momentum, optimizers, plan, buckets)
        self.push_sum = push_sum_of(plan, values)
        apart = self.push_sum or self.overlap or self.asynchrony
        mixed = apart.mixed if apart else values
        laid = buckets, mixed, self.following.travelling
        self.exchange: Exchanger = make_exchange(
            plan.wire, seat.transport, *laid, int(options.bucket_mb * 1e6), deadline
        )
        everything = [*mixed, *(tensor for _, tensor in self.following.travelling)]
        self.replanning = Replanning(plan, options.replan or 0, seat, everything, deadline)
        runner: Runner = self.exchange
        self.clipping: Clipped | None = None
        if options.clip is not None:
            longest = allowance(plan, options.clip)
            self.clipping = runner = Clipped(runner, seat.transport, mixed, longest)
        if options.replan:
            runner = Timed(runner, everything, self.replanning.times)
        self.meetings: Meetings | None = None
        if team is not None:
            self.meetings = Meetings(runner, team, everything, self.exchange.forget)
        self._runner: Runner | Meetings = self.meetings or runner
        self.has_met = False
        """Whether this worker met somebody in its last round, and not only should have."""

    def run(self, now: Itinerary) -> None:
        """This worker's part of the current round; on the overlap's thread where there is one."""
        # An average of all is no meeting of two.
        runner = self.exchange if now.round.mixing == "average" else self._runner
        with self.push_sum or nullcontext():
            if now.met:
                self._hold(runner, now)

    def _hold(self, runner: Runner | Meetings, now: Itinerary) -> None:
        held = self.meetings.held if self.meetings is not None else 0
        if self.clipping is not None:
            self.clipping.open()
        runner.run(now.round, now.met, now.iteration)
        self.has_met = runner is not self.meetings or runner.held > held
        if self.clipping is not None:
            self.clipping.close(met=self.has_met)
