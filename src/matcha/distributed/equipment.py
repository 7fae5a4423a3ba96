"""Equipment: what carries out a worker's part of each round, put together as it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from matcha.distributed.elastic.replanning import Replanning
from matcha.distributed.exchange.background import Overlap, asynchrony_of
from matcha.distributed.exchange.buckets import Bucket
from matcha.distributed.exchange.clipping import Clipping
from matcha.distributed.exchange.elastic_meetings import ElasticMeetings
from matcha.distributed.exchange.exchange import make_exchange
from matcha.distributed.exchange.plan_cursor import PlanCursor
from matcha.distributed.exchange.push_sum import push_sum_of
from matcha.distributed.exchange.timers import LinkTimer
from matcha.distributed.launch.placement import Placement
from matcha.distributed.links.transport import LinkTransport
from matcha.distributed.momentum import MomentumRules
from matcha.distributed.options import GossipOptions
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
        meetings: leaves out meetings with workers that are lost, where training goes on then.
    """

    def __init__(
        self,
        plan: PlanLike,
        placement: Placement,
        buckets: Sequence[Bucket],
        optimizers: tuple[torch.optim.Optimizer, ...],
        team: LinkTransport | None,
        options: GossipOptions,
    ) -> None:
        values = [bucket.data for bucket in buckets]
        overlap, deadline = options.overlap, options.deadline
        self.overlap = Overlap(buckets) if overlap else None
        self.asynchrony = asynchrony_of(plan, placement, buckets, options.asynchronous)
        self.following = MomentumRules(options.momentum, optimizers, plan, buckets)
        self.push_sum = push_sum_of(plan, values)
        apart = self.push_sum or self.overlap or self.asynchrony
        mixed = apart.mixed if apart else values
        laid = buckets, mixed, self.following.travelling
        self.exchange = make_exchange(
            plan.wire, placement.transport, *laid, int(options.bucket_mb * 1e6), deadline
        )
        everything = [*mixed, *(tensor for _, tensor in self.following.travelling)]
        self.replanning = Replanning(plan, options.replan or 0, placement, everything, deadline)
        self.clipping: Clipping | None = None
        self.meetings: ElasticMeetings | None = None
        if team is not None:
            self.meetings = ElasticMeetings(self.exchange, team, everything)
            self.exchange.hooks.append(self.meetings)
        if options.replan:
            self.exchange.hooks.append(LinkTimer(self.exchange, self.replanning.times))
        if options.clip is not None:
            self.clipping = Clipping(self.exchange, mixed, allowance(plan, options.clip))
            self.exchange.hooks.append(self.clipping)
        self.has_met = True
        """Whether this worker met somebody in its last round, and not only should have; at first of
        the round in a checkpoint."""

    def run(self, now: PlanCursor) -> None:
        """This worker's part of the current round; on the overlap's thread where there is one."""
        with self.push_sum or nullcontext():
            if now.met:
                self.has_met = self.exchange.run(now.round, now.met, now.iteration) > 0
