"""Base-(k+1): exact consensus in about 2 log_b(m) rounds for any number of workers, b = k + 1.

In a round no worker has more than k partners. A number of workers whose factors are at most b takes
one round per factor: workers that differ in one digit form a group, which averages (the k-peer
hyper-hypercube). Any other number is a sum of such blocks a·b^p, as its digits in base b say:
first each block agrees within itself; then every worker of the smaller blocks meets one worker of
each of the largest block's a parts, with weights that bring every part's mean to the mean of all;
then each part agrees within itself, while the smaller blocks do the same among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from matcha.errors import InputError
from matcha.matchings.decompositions import round_robin
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.strategies.finite_time import missing_link, repeat_rounds
from matcha.strategies.strategy import Request, Strategy
from matcha.topology import Link, Matching

Exchanges: TypeAlias = list[dict[Link, float]]
"""A round: the weight of each link, a matching at a time."""

LARGEST_BASE = 6


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
        m = request.topology.num_workers
        larger = range(3, min(LARGEST_BASE, m) + 1) if request.mixing == "laplacian" else range(0)
        powers = [b for b in range(LARGEST_BASE + 1, m) if is_power(m, b)] if larger else []
        tried, found = [2, *larger, *powers], []
        lacking: object = None
        for b in tried:
            rounds = base_rounds(m, b)
            missing = missing_link(request.topology, _links(rounds))
            if missing is None:
                time = sum(request.timing.round_time(round_) for round_ in _links(rounds))
                found.append((time, b, rounds))
            lacking = lacking or missing
        if not found:
            raise InputError(
                f"the topology lacks links of every sequence for {m} workers (bases "
                f"{', '.join(map(str, tried))}; of base 2 the link {lacking}): add links, or use "
                "greedy, which works anywhere."
            )
        _, b, rounds = min(found, key=lambda known: known[:2])
        return _plan(request, b, rounds)


def _plan(request: Request, b: int, rounds: Sequence[Exchanges]) -> Plan:
    weights = tuple(tuple(links.values()) for round_ in rounds for links in round_)
    alike = {w for shares in weights for w in shares} == {1 / b}
    note = f"exact consensus after {len(rounds)} rounds of base {b}"
    return repeat_rounds(
        replace(request, mixing="pairwise") if b == 2 else request,
        _links(rounds),
        alpha=1 / b,
        note=f"{note}." if alike else f"{note}, with a weight a link.",
        weights=None if alike else weights,
    )


def _links(rounds: Sequence[Exchanges]) -> tuple[tuple[Matching, ...], ...]:
    return tuple(tuple(tuple(links) for links in round_) for round_ in rounds)


# -- the sequences ------------------------------------------------------------------------------


def base_rounds(num_workers: int, base: int) -> tuple[Exchanges, ...]:
    """Rounds after which all workers hold the mean, at most base − 1 partners per worker in each.

    Where m = s·t, s with factors of at most the base, t groups that agree within themselves may
    agree with each other in one round per factor: the shorter of the two ways.

    >>> [len(base_rounds(m, 3)) for m in (3, 9, 5, 10, 25)]
    [1, 2, 3, 4, 6]
    >>> [len(round_) for round_ in base_rounds(9, 3)]  # groups of three take three matchings
    [3, 3]
    """
    if num_workers < 2 or base < 2:
        raise InputError(f"{num_workers} workers in base {base}: both are at least 2.")
    ways = [_sums(list(range(num_workers)), base)]
    smooth = 1
    for factor in _factors(num_workers, base, partial=True):
        smooth *= factor
    if 1 < smooth < num_workers:
        size = num_workers // smooth
        groups = [list(range(g * size, (g + 1) * size)) for g in range(smooth)]
        columns = [list(range(k, num_workers, size)) for k in range(size)]
        within = _together([_sums(group, base) for group in groups])
        ways.append([*within, *_together([_cube(column, base) for column in columns])])
    rounds = min(ways, key=lambda way: (sum(map(len, way)), len(way)))
    return tuple([dict(sorted(links.items())) for links in round_] for round_ in rounds)


def is_power(number: int, base: int) -> bool:
    """Whether a number is base^d, d >= 1.

    >>> is_power(27, 3), is_power(12, 3)
    (True, False)
    """
    while number % base == 0:
        number //= base
    return number == 1


def _factors(number: int, base: int, *, partial: bool = False) -> list[int]:
    """Factors of at most the base, largest first; what has none is left out, if it may be."""
    found = []
    while number > 1:
        factor = next((f for f in range(min(base, number), 1, -1) if number % f == 0), None)
        if factor is None:
            assert partial
            break
        found.append(factor)
        number //= factor
    return found


def _cube(workers: Sequence[int], base: int) -> list[Exchanges]:
    """One round a factor: those who differ in one digit alone average."""
    rounds, stride = [], 1
    for size in _factors(len(workers), base):
        firsts = [n for n in range(len(workers)) if n // stride % size == 0]
        groups = [[workers[n + a * stride] for a in range(size)] for n in firsts]
        rounds.append(_side_by_side([_average(group) for group in groups]))
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
    agreed = _together([_cube(block, base) for block, _ in blocks])
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
    then = _together([*(_cube(part, base) for part in parts), _merge(blocks[1:], base)])
    return [across, *then]


def _digits(number: int, base: int) -> list[tuple[int, int]]:
    """The digits that are not 0, with their powers, highest first."""
    found, power = [], 0
    while number:
        number, digit = divmod(number, base)
        if digit:
            found.append((digit, power))
        power += 1
    return found[::-1]


def _together(ways: Sequence[list[Exchanges]]) -> list[Exchanges]:
    """Rounds of disjoint workers side by side."""
    longest = max(len(way) for way in ways)
    rounds = (_side_by_side([way[n] for way in ways if n < len(way)]) for n in range(longest))
    return [round_ for round_ in rounds if round_]


def _side_by_side(parts: Iterable[Exchanges]) -> Exchanges:
    joined: Exchanges = []
    for part in parts:
        for n, links in enumerate(part):
            if n == len(joined):
                joined.append({})
            joined[n] |= links
    return [links for links in joined if links]


def _link(a: int, b: int) -> Link:
    return (a, b) if a < b else (b, a)
