"""Sequences that reach exact consensus in finitely many rounds, on graphs with the links for it.

For m = b^d workers, d rounds of averaging in groups of b leave every worker with the mean: workers
whose numbers differ in one digit, written in base b, form a group. `hypercube` is b = 2, a matching
a round; `base` takes the smallest larger b whose links are there (Base-(k+1) graphs, k + 1 = b),
and for any other number of workers Base-2 with a weight a link.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from matcha.errors import InputError
from matcha.plans import Plan
from matcha.rounds import Shares
from matcha.schedules import Cycle
from matcha.strategies.pacing import timeline, unrolled
from matcha.strategies.parts import coloring, finished
from matcha.strategies.request import Request
from matcha.topology import Link, Matching, Topology

_MOST_TURNS = 64


def hypercube(request: Request) -> Plan:
    """Plan to average with the neighbour across one dimension of a hypercube after another.

    Raises:
        InputError: The number of workers is not a power of two, or links are missing.
    """
    m = request.topology.num_workers
    groups = tuple((matching,) for matching in hypercube_matchings(m))
    if not groups:
        raise InputError(f"a hypercube needs a power of 2 workers, not {m}.")
    missing = _missing(request.topology, groups)
    if missing is not None:
        raise InputError(
            f"a hypercube needs the link {missing}, which the topology does not have: number the "
            "workers so that neighbours differ in one bit, or use greedy, which works anywhere."
        )
    return _repeated(request, groups, base=2)


def base(request: Request) -> Plan:
    """Plan to average within groups of b, digit by digit, for the smallest b >= 3 with its links.

    All of a group average at once, by Laplacian mixing with weight 1/b. Where m is no power of such
    a base, or pairwise mixing is asked for, Base-2 for any number of workers.

    Raises:
        InputError: No base has all its links in the topology.
    """
    m = request.topology.num_workers
    bases = [b for b in range(3, m) if _digits(m, b)] if request.mixing == "laplacian" else []
    for b in bases:
        groups = base_matchings(m, b)
        if _missing(request.topology, groups) is None:
            return _repeated(request, groups, base=b)
    weighted = base_two_rounds(m)
    groups = tuple((tuple(sorted(links)),) for links in weighted)
    missing = _missing(request.topology, groups)
    if missing is None:
        shares = tuple(tuple(links[link] for link in sorted(links)) for links in weighted)
        note = f"exact consensus after {len(groups)} rounds of base 2, with a weight a link."
        pairs = replace(request, mixing="pairwise")
        return repeated(pairs, groups, alpha=0.5, note=note, weights=shares)
    tried = ", ".join(map(str, [2, *bases]))
    raise InputError(
        f"the topology lacks links of every sequence for {m} workers (bases {tried}; of base 2 the "
        f"link {missing}): add links, or use greedy, which works anywhere."
    )


def base_two_rounds(num_workers: int) -> tuple[dict[Link, float], ...]:
    """Matchings with a weight a link that leave any number of workers with the mean: Base-2.

    Written in binary, m is a sum of powers of two: blocks. Each block averages as a hypercube.
    Then every worker outside the largest block V meets one inside with weight |V|/m, which makes
    the mean of V, and of the rest, the mean of all; V averages again while the rest, block by
    block, do the same among themselves. About 2 log2(m) + 1 rounds.

    >>> [len(links) for links in base_two_rounds(3)]
    [1, 1, 1]
    """
    blocks, first = [], 0
    for bit in reversed(range(num_workers.bit_length())):
        if num_workers >> bit & 1:
            blocks.append(list(range(first, first + (1 << bit))))
            first += 1 << bit
    rounds = [*_together([_cube(block) for block in blocks]), *_merged(blocks)]
    return tuple(links for links in rounds if links)


def _cube(workers: list[int]) -> list[dict[Link, float]]:
    return [
        {(workers[i], workers[j]): 0.5 for i, j in matching}
        for matching in hypercube_matchings(len(workers))
    ]


def _merged(blocks: list[list[int]]) -> list[dict[Link, float]]:
    """Rounds after which all workers agree, where every block agrees within itself already."""
    if len(blocks) == 1:
        return []
    largest, rest = blocks[0], [worker for block in blocks[1:] for worker in block]
    weight = len(largest) / (len(largest) + len(rest))
    across = dict.fromkeys(zip(largest, rest, strict=False), weight)
    return [across, *_together([_cube(largest), _merged(blocks[1:])])]


def _together(parts: list[list[dict[Link, float]]]) -> list[dict[Link, float]]:
    """Rounds of disjoint workers side by side."""
    longest = max(len(part) for part in parts)
    return [
        {link: w for part in parts if n < len(part) for link, w in part[n].items()}
        for n in range(longest)
    ]


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


def base_matchings(num_workers: int, base: int) -> tuple[tuple[Matching, ...], ...]:
    """Rounds of a Base-(k+1) sequence: in round d, workers equal but for digit d form a group.

    A group of b is fully linked, which takes b − 1 matchings for even b and b for odd.

    Returns:
        For each digit, the matchings of its round.

    Raises:
        InputError: The number of workers is not a power of the base.

    >>> [len(round_) for round_ in base_matchings(9, 3)]
    [3, 3]
    """
    digits = _digits(num_workers, base)
    if not digits:
        raise InputError(
            f"a Base-{base} sequence needs a power of {base} workers, not {num_workers}."
        )
    rounds = []
    for d in range(digits):
        matchings = [
            tuple(
                sorted(
                    (start + a * base**d, start + b * base**d)
                    for start in range(num_workers)
                    if start // base**d % base == 0
                    for a, b in pairs
                )
            )
            for pairs in _round_robin(base)
        ]
        rounds.append(tuple(matchings))
    return tuple(rounds)


def _digits(num_workers: int, base: int) -> int:
    """How many digits the workers' numbers have; 0 where m is no power of the base."""
    digits = round(math.log(num_workers, base)) if base >= 2 and num_workers >= 2 else 0
    return digits if digits and base**digits == num_workers else 0


def _missing(topology: Topology, groups: tuple[tuple[Matching, ...], ...]) -> object:
    links = set(topology.links)
    needed = (link for round_ in groups for matching in round_ for link in matching)
    return next((link for link in needed if link not in links), None)


def _repeated(request: Request, groups: tuple[tuple[Matching, ...], ...], *, base: int) -> Plan:
    note = f"exact consensus after {len(groups)} rounds of base {base}."
    return repeated(request, groups, alpha=1 / base, note=note)


def repeated(
    request: Request,
    groups: tuple[tuple[Matching, ...], ...],
    *,
    alpha: float,
    note: str,
    weights: Shares | None = None,
) -> Plan:
    """The plan that goes through the rounds again and again as its time accrues."""
    timing, colors = request.timing, coloring(request)
    share = Fraction(repr(request.budget)).limit_denominator(10**6)
    rate = share * Fraction(timing.round_time(colors))
    costs = [Fraction(timing.round_time(round_)) for round_ in groups]
    # Repeated until the cycle's time is whole iterations, so that none of the budget is lost.
    repeats = min((sum(costs, start=Fraction(0)) / rate).denominator, _MOST_TURNS)
    firsts = list(accumulate((len(round_) for round_ in groups), initial=0))
    places = [tuple(range(firsts[d], firsts[d + 1])) for d in range(len(groups))] * repeats
    turns = timeline(costs * repeats, rate)
    if request.mixing == "laplacian":
        # A group's average is exact alone: one digit an iteration, however large the budget.
        turns = [(wait if n == some[0] else 1, [n]) for wait, some in turns for n in some]
    cycle = unrolled((wait, tuple(j for n in some for j in places[n])) for wait, some in turns)
    return finished(
        request,
        matchings=tuple(matching for round_ in groups for matching in round_),
        schedule=Cycle(cycle=cycle, num_matchings=firsts[-1], seed=request.seed),
        alpha=alpha,
        weights=weights,
        num_colors=len(colors),
        notes=(note,),
    )


def _round_robin(players: int) -> list[list[tuple[int, int]]]:
    """Everyone meets everyone: a colouring of the complete graph by the circle method."""
    size = players + players % 2
    days = []
    for day in range(size - 1):
        pairs = [(size - 1, day)]
        pairs += [((day + k) % (size - 1), (day - k) % (size - 1)) for k in range(1, size // 2)]
        kept = [(min(p), max(p)) for p in pairs if max(p) < players]
        days.append(sorted(kept))
    return [pairs for pairs in days if pairs]
