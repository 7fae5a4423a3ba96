"""RelaySum: sums relayed along a spanning tree, by which workers average exactly, if late."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from matcha.matchings import decompose
from matcha.plans import Plan
from matcha.schedules import Cycle
from matcha.strategies.pacing import unroll
from matcha.strategies.parts import assemble_plan
from matcha.strategies.strategy import Request, Strategy
from matcha.topology import Link, Topology

_ROOTS = 64  # from which trees are grown


@dataclass(frozen=True, kw_only=True)
class RelaySum(Strategy):
    """RelaySum over a spanning tree (Vogels et al., 2021); with a step before each round, RelaySGD.

    A worker sends each neighbor in the tree the sum of its own model and of what its other
    neighbors sent a round ago. Every model arrives everywhere, with the same weight, as many rounds
    late as there are workers between: what differs between workers' data biases no average.
    """

    name = "relaysum"
    about = "sums relayed along a spanning tree (RelaySGD)"
    mixings = ("relay",)
    takes_wire = False

    def build(self, request: Request) -> Plan:
        """Plan a round over the tree every H iterations, for the smallest H that is affordable."""
        links = spanning_tree(request.topology)
        m = request.topology.num_workers
        matchings = decompose(Topology.from_links(links, m), seed=request.seed)
        once = request.timing.round_time(matchings)
        ratio = Fraction(once) / (Fraction(request.budget) * Fraction(request.full_time))
        period = max(1, math.ceil(ratio - Fraction(1, 10**9)))
        cycle = unroll([(period, tuple(range(len(matchings))))])
        every = f"every {period} iterations" if period > 1 else "at every iteration"
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed),
            alpha=1 / m,
            notes=(f"sums are relayed along a tree {every}.",),
        )


def spanning_tree(topology: Topology) -> tuple[Link, ...]:
    """A tree of the topology with few links per worker, and few between any two workers.

    A worker sends over its links one after another, so few links make quick rounds; what others
    sent is late by the links between. Trees are grown breadth first from every worker, with three
    links per worker where that reaches all, and the lowest of them is taken.

    >>> from matcha.topology import families
    >>> spanning_tree(families.ring(4)), len(spanning_tree(families.complete(16)))
    (((0, 1), (0, 3), (1, 2)), 15)
    """
    m = topology.num_workers
    roots = range(0, m, max(1, m // _ROOTS))
    for most in range(3, m + 3):
        trees = [tree for root in roots if len(tree := _grow(topology, root, most)) == m - 1]
        if trees:
            break
    return tuple(sorted((min(a), max(a)) for a in min(trees, key=_depth)))


def _grow(topology: Topology, root: int, most: int) -> list[Link]:
    """Links (parent, child), breadth first, with at most so many per worker."""
    links: list[Link] = []
    free, queue, reached = {root: most}, [root], {root}
    for parent in queue:
        for child in topology.neighbors(parent):
            if child not in reached and free[parent]:
                links.append((parent, child))
                reached.add(child)
                queue.append(child)
                free[parent] -= 1
                free[child] = most - 1
    return links


def _depth(links: list[Link]) -> int:
    """How many links the farthest worker is from the root."""
    depth: dict[int, int] = {}
    for parent, child in links:
        depth[child] = depth.get(parent, 0) + 1
    return max(depth.values(), default=0)
