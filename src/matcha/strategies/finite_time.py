"""Sequences that reach exact consensus in finitely many rounds, on graphs with the links for it.

*Hypercube.* For m = 2^d workers, d matchings leave every worker with the mean: in matching t each
meets the worker whose number differs in bit t. `base` does the same for other numbers of workers.

*One-peer exponential.* Each worker sends to the one 1, 2, 4, … places further on, in turn. One
message out and one in per round, each with another peer: as long as a matching where links carry
both ways at once. For a power of two, log2(m) rounds leave every worker with the mean.

*CECA.* The exact mean of any number of workers after ⌈log2 m⌉ messages each, and no fewer can do.
Each worker holds two sums: over the n workers before it, and the same with itself. A message from
the worker n + 1 places back with its own sum makes n grow to 2n + 1; one from n places back with
the sum before it makes n grow to 2n. The bits of m − 1, highest first, say which comes when; after
the last, n + 1 = m and each holds the sum of all (Ding et al., 2023: the two-port variant).

The two sums live within one round, so that a worker holds one model between iterations, as with any
other plan: messages are saved up and all sent in the iteration in which the last of them is due.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.rounds import Shares
from matcha.schedules import Cycle
from matcha.strategies.pacing import LONGEST_CYCLE, simple, timeline, unroll
from matcha.strategies.parts import assemble_plan
from matcha.strategies.strategy import Request, Strategy
from matcha.topology import Link, Matching, Topology

_MOST_TURNS = 64


@dataclass(frozen=True, kw_only=True)
class Hypercube(Strategy):
    """One dimension of a hypercube after another, for a power of two workers."""

    name = "hypercube"
    about = "one dimension of a hypercube after another: exact consensus every log2(m) rounds"
    mixings = ("pairwise",)

    def build(self, request: Request) -> Plan:
        """Plan to average with the neighbour across one dimension of a hypercube after another."""
        m = request.topology.num_workers
        groups = tuple((matching,) for matching in hypercube_matchings(m))
        if not groups:
            raise InputError(f"a hypercube needs a power of 2 workers, not {m}.")
        missing = missing_link(request.topology, groups)
        if missing is not None:
            raise InputError(
                f"a hypercube needs the link {missing}, which the topology does not have: number "
                "the workers so that neighbours differ in one bit, or use greedy, which works "
                "anywhere."
            )
        note = f"exact consensus after {len(groups)} rounds of base 2."
        return repeat_rounds(request, groups, alpha=0.5, note=note)


@dataclass(frozen=True, kw_only=True)
class OnePeer(Strategy):
    """Each worker sends 1, 2, 4, … places on: the one-peer exponential graph."""

    name = "one-peer"
    about = "each worker sends 1, 2, 4, … places on: the one-peer exponential graph"
    mixings = ("push",)

    def build(self, request: Request) -> Plan:
        """Plan to hop 1, 2, 4, … places, again and again."""
        m = request.topology.num_workers
        rounds = tuple((messages(m, hop),) for hop in exponential_hops(m))
        exact = "; exact consensus after all of them" if m & (m - 1) == 0 else ""
        note = f"hops of {len(rounds)} rounds{exact}."
        return repeat_rounds(request, rounds, alpha=0.5, note=note)


@dataclass(frozen=True, kw_only=True)
class Ceca(Strategy):
    """Sums that hop: the exact mean of any number of workers."""

    name = "ceca"
    about = "sums that hop: the exact mean of any m by ⌈log2 m⌉ messages at once"
    mixings = ("windows",)

    def build(self, request: Request) -> Plan:
        """Plan an exact mean by hops, as often as the budget allows."""
        m = request.topology.num_workers
        hops = tuple(messages(m, hop) for hop in ceca_hops(m))
        note = f"exact consensus by {len(hops)} hops at once, of sums over ever more workers."
        return repeat_rounds(request, (hops,), alpha=1 / m, note=note)


def hypercube_matchings(num_workers: int) -> tuple[Matching, ...]:
    """Workers whose numbers differ in bit b, for each b; empty unless m is a power of two.

    >>> hypercube_matchings(4)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    if num_workers < 2 or num_workers & (num_workers - 1):
        return ()
    return tuple(
        tuple((i, i ^ 1 << b) for i in range(num_workers) if i < i ^ 1 << b)
        for b in range(num_workers.bit_length() - 1)
    )


def messages(num_workers: int, hop: int) -> tuple[Link, ...]:
    """Each worker's message (sender, receiver) at a hop."""
    return tuple((i, (i + hop) % num_workers) for i in range(num_workers))


def exponential_hops(num_workers: int) -> tuple[int, ...]:
    """1, 2, 4, … below m: the one-peer exponential graph.

    >>> exponential_hops(12)
    (1, 2, 4, 8)
    """
    return tuple(2**t for t in range(max(1, math.ceil(math.log2(num_workers)))))


def ceca_hops(num_workers: int) -> tuple[int, ...]:
    """How many places on each worker sends, message by message.

    >>> ceca_hops(8), ceca_hops(12), ceca_hops(27)
    ((1, 2, 4), (1, 1, 3, 6), (1, 2, 3, 7, 13))
    """
    hops, count = [], 0
    for bit in f"{num_workers - 1:b}":
        hop = count + int(bit)
        hops.append(hop)
        count += hop
    return tuple(hops)


def missing_link(topology: Topology, groups: tuple[tuple[Matching, ...], ...]) -> Link | None:
    """A link that rounds need and the topology lacks; None where it has all of them."""
    arrows = set(topology.arrows)
    needed = (link for round_ in groups for matching in round_ for link in matching)
    return next((link for link in needed if link not in arrows), None)


def repeat_rounds(
    request: Request,
    groups: tuple[tuple[Matching, ...], ...],
    *,
    alpha: float,
    note: str,
    weights: Shares | None = None,
) -> Plan:
    """The plan that goes through the rounds again and again as its time accrues."""
    missing = missing_link(request.topology, groups)
    if missing is not None:
        raise InputError(
            f"{request.strategy} needs the link from worker {missing[0]} to {missing[1]}, which "
            "the topology does not have: use greedy, which works anywhere."
        )
    share = simple(Fraction(repr(request.budget)), 10**6)
    rate = share * Fraction(request.full_time)
    costs = [Fraction(request.timing.round_time(round_)) for round_ in groups]
    # Repeated until the cycle's time is whole iterations, so that none of the budget is lost.
    once = sum(costs, start=Fraction(0)) / rate
    repeats = min(once.denominator, _MOST_TURNS, max(1, int(LONGEST_CYCLE / once)))
    firsts = list(accumulate((len(round_) for round_ in groups), initial=0))
    places = [tuple(range(firsts[d], firsts[d + 1])) for d in range(len(groups))] * repeats
    turns = timeline(costs * repeats, rate)
    if request.mixing in ("laplacian", "windows"):
        # A group's average is exact alone: one digit per iteration, however large the budget.
        turns = [(wait if n == some[0] else 1, [n]) for wait, some in turns for n in some]
    cycle = unroll((wait, tuple(j for n in some for j in places[n])) for wait, some in turns)
    return assemble_plan(
        request,
        matchings=tuple(matching for round_ in groups for matching in round_),
        schedule=Cycle(cycle=cycle, num_matchings=firsts[-1], seed=request.seed),
        alpha=alpha,
        weights=weights,
        notes=(note,),
    )
