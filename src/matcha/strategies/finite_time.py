"""Sequences that reach exact consensus in finitely many rounds, on graphs with the links for it.

*Hypercube.* For m = 2^d workers, d matchings leave every worker with the mean: in matching t each
meets the worker whose number differs in bit t.

*Base b*, b = k + 1, for any number of workers: about 2 log_b(m) rounds in which no worker has more
than k partners. A number of workers whose factors are at most b takes one round per factor:
workers that differ in one digit form a group, which averages (the k-peer hyper-hypercube). Any
other number is a sum of such blocks a·b^p, as its digits in base b say: first each block agrees
within itself; then every worker of the smaller blocks meets one worker of each of the largest
block's a parts, with weights that bring every part's mean to the mean of all; then each part
agrees within itself, while the smaller blocks do the same among themselves.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count, zip_longest
from typing import TypeAlias

from matcha._io.tables import count_noun
from matcha.errors import InputError
from matcha.matchings import round_robin
from matcha.plans import Plan
from matcha.rounds import Mixing, Shares
from matcha.schedules import Cycle
from matcha.strategies.strategy import (
    LONGEST_CYCLE,
    Request,
    Strategy,
    assemble_plan,
    simple,
    timeline,
    unroll,
)
from matcha.topology import Link, Matching, Topology

Exchanges: TypeAlias = list[dict[Link, float]]
"""A round: the weight of each link, a matching at a time."""

LARGEST_BASE = 6
_MOST_TURNS = 64


@dataclass(frozen=True, kw_only=True)
class Hypercube(Strategy):
    """One dimension of a hypercube after another, for a power of two workers."""

    name = "hypercube"
    about = "one dimension of a hypercube after another: exact consensus every log2(m) rounds"
    mixings = ("pairwise",)

    def build(self, request: Request) -> Plan:
        m = request.topology.num_workers
        groups = tuple((matching,) for matching in hypercube_matchings(m))
        if not groups:
            raise InputError(f"a hypercube needs a power of 2 workers, not {m}.")
        advice = "number the workers so that neighbours differ in one bit, or "
        check_has_links(request.topology, groups, "hypercube", advice)
        note = f"exact consensus after {count_noun(len(groups), 'round')} of base 2."
        return repeat_rounds(request, groups, alpha=0.5, note=note)


@dataclass(frozen=True, kw_only=True)
class Base(Strategy):
    """Groups of at most b that average, for any number of workers.

    Args:
        mixing: `laplacian` (the default), or `pairwise`, which leaves base 2 only.
    """

    name = "base"
    about = "groups of at most b: exact consensus in about 2 log_b(m) rounds, for any m"
    mixings = ("laplacian", "pairwise")
    mixing: Mixing | None = None

    def build(self, request: Request) -> Plan:
        """Plan the sequence, of those whose links are there, that takes least time to agree.

        Base 2 is one matching per round and mixes pairwise. In larger bases all of a group average
        at once, by Laplacian mixing; they are left out where pairwise mixing is asked for.
        """
        m, tried = request.topology.num_workers, [2]
        if request.mixing == "laplacian":
            tried += [b for b in range(3, m + 1) if b <= LARGEST_BASE or (b < m and is_power(m, b))]
        sequences = {b: base_rounds(m, b) for b in tried}
        groups = {
            b: tuple(tuple(map(tuple, round_)) for round_ in rounds)
            for b, rounds in sequences.items()
        }
        lacking = [missing_link(request.topology, groups[b]) for b in tried]
        able = [b for b, missing in zip(tried, lacking, strict=True) if missing is None]
        if not able:
            raise InputError(
                f"the topology lacks links of every sequence for {m} workers (bases "
                f"{', '.join(map(str, tried))}; of base 2 the link {lacking[0]}): add links, or "
                "use greedy, which works anywhere."
            )
        b = min(able, key=lambda b: sum(map(request.timing.round_time, groups[b])))
        weights = tuple(tuple(links.values()) for round_ in sequences[b] for links in round_)
        alike = {w for shares in weights for w in shares} == {1 / b}
        note = f"exact consensus after {count_noun(len(groups[b]), 'round')} of base {b}"
        return repeat_rounds(
            replace(request, mixing="pairwise") if b == 2 else request,
            groups[b],
            alpha=1 / b,
            note=f"{note}." if alike else f"{note}, with a weight a link.",
            weights=None if alike else weights,
        )


@dataclass(frozen=True, kw_only=True)
class OnePeer(Strategy):
    """Each worker sends 1, 2, 4, … places on: the one-peer exponential graph."""

    name = "one-peer"
    about = "each worker sends 1, 2, 4, … places on: the one-peer exponential graph"
    mixings = ("push",)

    def build(self, request: Request) -> Plan:
        m = request.topology.num_workers
        rounds = tuple((messages(m, hop),) for hop in exponential_hops(m))
        exact = "; exact consensus after all of them" if m & (m - 1) == 0 else ""
        note = f"hops of {count_noun(len(rounds), 'round')}{exact}."
        return repeat_rounds(request, rounds, alpha=0.5, note=note)


@dataclass(frozen=True, kw_only=True)
class Ceca(Strategy):
    """Sums that hop: the exact mean of any number of workers."""

    name = "ceca"
    about = "sums that hop: the exact mean of any m by ⌈log2 m⌉ messages at once"
    mixings = ("windows",)

    def build(self, request: Request) -> Plan:
        m = request.topology.num_workers
        hops = tuple(messages(m, hop) for hop in ceca_hops(m))
        sums = f"{count_noun(len(hops), 'hop')} at once, of sums over ever more workers"
        note = f"exact consensus by {sums}."
        return repeat_rounds(request, (hops,), alpha=1 / m, note=note)


def hypercube_matchings(num_workers: int) -> tuple[Matching, ...]:
    """Workers whose numbers differ in bit b, for each b; empty unless m is a power of two."""
    if num_workers < 2 or num_workers & (num_workers - 1):
        return ()
    bits = [1 << b for b in range(num_workers.bit_length() - 1)]
    return tuple(tuple((i, i ^ bit) for i in range(num_workers) if i < i ^ bit) for bit in bits)


def pairwise_average(num_workers: int) -> tuple[tuple[Matching, ...], Shares | None]:
    """Matchings which, one after another, leave all workers with the mean; and their weights.

    Those of a hypercube, or of base 2 for any other number of workers.
    """
    cube = hypercube_matchings(num_workers)
    if cube:
        return cube, None
    matchings = [matching for round_ in base_rounds(num_workers, 2) for matching in round_]
    return tuple(map(tuple, matchings)), tuple(tuple(m.values()) for m in matchings)


def messages(num_workers: int, hop: int) -> tuple[Link, ...]:
    """Each worker's message (sender, receiver) at a hop."""
    return tuple((i, (i + hop) % num_workers) for i in range(num_workers))


def exponential_hops(num_workers: int) -> tuple[int, ...]:
    """1, 2, 4, … below m: the one-peer exponential graph."""
    return tuple(2**t for t in range(max(1, math.ceil(math.log2(num_workers)))))


def ceca_hops(num_workers: int) -> tuple[int, ...]:
    """How many places on each worker sends, message by message.

    >>> ceca_hops(8), ceca_hops(12), ceca_hops(27)
    ((1, 2, 4), (1, 1, 3, 6), (1, 2, 3, 7, 13))
    """
    hops: list[int] = []
    for bit in f"{num_workers - 1:b}":
        hops.append(sum(hops) + int(bit))
    return tuple(hops)


def missing_link(topology: Topology, groups: tuple[tuple[Matching, ...], ...]) -> Link | None:
    """A link that rounds need and the topology lacks; None where it has all of them."""
    arrows = set(topology.arrows)
    needed = (link for round_ in groups for matching in round_ for link in matching)
    return next((link for link in needed if link not in arrows), None)


def check_has_links(
    topology: Topology, groups: tuple[tuple[Matching, ...], ...], what: str, advice: str = ""
) -> None:
    """Refuse rounds that need a link which the topology lacks; the advice ends in "or "."""
    missing = missing_link(topology, groups)
    if missing is not None:
        raise InputError(
            f"{what} needs the link from worker {missing[0]} to {missing[1]}, which the topology "
            f"does not have: {advice}use greedy, which works anywhere."
        )


def repeat_rounds(
    request: Request,
    groups: tuple[tuple[Matching, ...], ...],
    *,
    alpha: float,
    note: str,
    weights: Shares | None = None,
) -> Plan:
    """The plan that goes through the rounds again and again as its time accrues."""
    check_has_links(request.topology, groups, request.strategy)
    share = simple(Fraction(repr(request.budget)), 10**6)
    rate = share * Fraction(request.full_time)
    costs = [Fraction(request.timing.round_time(round_)) for round_ in groups]
    # Repeated until the cycle's time is whole iterations, so that none of the budget is lost.
    once = sum(costs, start=Fraction(0)) / rate
    repeats = min(once.denominator, _MOST_TURNS, max(1, int(LONGEST_CYCLE / once)))
    place = count()
    places = [tuple(next(place) for _ in round_) for round_ in groups] * repeats
    turns = timeline(costs * repeats, rate)
    if request.mixing in ("laplacian", "windows"):
        # A group's average is exact alone: one digit per iteration, however large the budget.
        turns = [(wait if n == some[0] else 1, [n]) for wait, some in turns for n in some]
    cycle = unroll((wait, tuple(j for n in some for j in places[n])) for wait, some in turns)
    matchings = tuple(matching for round_ in groups for matching in round_)
    return assemble_plan(
        request,
        matchings=matchings,
        schedule=Cycle(cycle=cycle, num_matchings=len(matchings), seed=request.seed),
        alpha=alpha,
        weights=weights,
        notes=(note,),
    )


# -- base b ---------------------------------------------------------------------------------------


def base_rounds(num_workers: int, base: int) -> tuple[Exchanges, ...]:
    """Rounds after which all workers hold the mean, at most base − 1 partners per worker in each.

    Where m = s·t, s with factors of at most the base, t groups that agree within themselves may
    agree with each other in one round per factor: the shorter of the two ways.

    >>> [len(base_rounds(m, 3)) for m in (3, 9, 5, 10, 25)]
    [1, 2, 3, 4, 6]
    """
    if num_workers < 2 or base < 2:
        raise InputError(f"{num_workers} workers in base {base}: both are at least 2.")
    ways = [_sums(list(range(num_workers)), base)]
    smooth = math.prod(_factors(num_workers, base))
    if 1 < smooth < num_workers:
        size = num_workers // smooth
        groups = [list(range(g * size, (g + 1) * size)) for g in range(smooth)]
        columns = [list(range(k, num_workers, size)) for k in range(size)]
        within = _run_together([_sums(group, base) for group in groups])
        ways.append([*within, *_run_together([_cube(column, base) for column in columns])])
    rounds = min(ways, key=lambda way: (sum(map(len, way)), len(way)))
    return tuple([dict(sorted(links.items())) for links in round_] for round_ in rounds)


def is_power(number: int, base: int) -> bool:
    """Whether a number is base^d, d >= 1."""
    return bool(number == base ** round(math.log(number, base)))


def _factors(number: int, base: int) -> list[int]:
    """Factors of at most the base, largest first; what has none is left out."""
    found = []
    while factor := next((f for f in range(min(base, number), 1, -1) if number % f == 0), 0):
        found.append(factor)
        number //= factor
    return found


def _cube(workers: Sequence[int], base: int) -> list[Exchanges]:
    """One round per factor: workers that differ in that digit alone average."""
    rounds, stride = [], 1
    for size in _factors(len(workers), base):
        firsts = [n for n in range(len(workers)) if n // stride % size == 0]
        groups = [[workers[n + a * stride] for a in range(size)] for n in firsts]
        rounds.append(_join_rounds([_average(group) for group in groups]))
        stride *= size
    return rounds


def _average(group: Sequence[int]) -> Exchanges:
    return [
        {_link(group[a], group[b]): 1 / len(group) for a, b in day}
        for day in round_robin(len(group))
    ]


def _sums(workers: Sequence[int], base: int) -> list[Exchanges]:
    """The way of sums of blocks a·b^p, each as large as what is left allows."""
    blocks, first = [], 0
    for digit, power in _digits(len(workers), base):
        blocks.append((workers[first : first + digit * base**power], base**power))
        first += digit * base**power
    agreed = _run_together([_cube(block, base) for block, _ in blocks])
    return [*agreed, *_merge(blocks, base)]


def _merge(blocks: Sequence[tuple[Sequence[int], int]], base: int) -> list[Exchanges]:
    """Rounds after which all agree, where every block agrees within itself already."""
    if len(blocks) == 1:
        return []
    (largest, size), rest = blocks[0], [w for block, _ in blocks[1:] for w in block]
    parts = [largest[n : n + size] for n in range(0, len(largest), size)]
    # A part's mean moves by weight·|rest|/size of the difference: to the mean of all.
    weight = size / (len(largest) + len(rest))
    across = [{_link(a, b): weight for a, b in zip(part, rest, strict=False)} for part in parts]
    then = _run_together([*(_cube(part, base) for part in parts), _merge(blocks[1:], base)])
    return [across, *then]


def _digits(number: int, base: int) -> list[tuple[int, int]]:
    """The digits that are not 0, with their powers, highest first."""
    powers = range(number.bit_length() - 1, -1, -1)
    digits = [(number // base**power % base, power) for power in powers]
    return [(digit, power) for digit, power in digits if digit]


def _run_together(ways: Sequence[list[Exchanges]]) -> list[Exchanges]:
    """Rounds of disjoint workers side by side."""
    return [_join_rounds(parts) for parts in zip_longest(*ways, fillvalue=[]) if any(parts)]


def _join_rounds(parts: Iterable[Exchanges]) -> Exchanges:
    """One round of several of disjoint workers: their first matchings together, and so on."""
    days: Iterable[Iterable[dict[Link, float]]] = zip_longest(*parts, fillvalue={})
    return [dict(link for links in day for link in links.items()) for day in days]


def _link(a: int, b: int) -> Link:
    return (a, b) if a < b else (b, a)
