"""Sequences that reach exact consensus in finitely many rounds, where links are free to choose.

Baselines for `greedy`: on a complete graph of m = b^d workers, d rounds of averaging in groups of
b (Base-(k+1) graphs with k + 1 = b; a hypercube for b = 2) leave every worker with the mean. The
one-peer exponential graph does the same for powers of two with one message out and one message
in a round, each to a different peer.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from matcha.errors import InputError
from matcha.plans import Plan, check_budget
from matcha.schedules import Cycle
from matcha.strategies.greedy.candidates import timeline, unrolled
from matcha.theory import consensus_error, contraction, cycles
from matcha.theory.cycles import Array
from matcha.timing import Units
from matcha.topology import Matching
from matcha.topology.families import complete


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
    digits = round(math.log(num_workers, base)) if base >= 2 and num_workers >= 2 else 0
    if digits < 1 or base**digits != num_workers:
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


def finite_time_plan(num_workers: int, budget: float, *, base: int = 2, seed: int = 0) -> Plan:
    """A plan on the complete graph that cycles through a finite-time sequence within a budget.

    Base 2 exchanges one matching at a time with weight ½; larger bases average whole groups at
    once by Laplacian mixing with weight 1/b.

    >>> finite_time_plan(8, 1 / 7).expected_comm_time
    1.0
    """
    check_budget(budget)
    topology = complete(num_workers)
    groups = base_matchings(num_workers, base)
    num_colors = num_workers - 1 if num_workers % 2 == 0 else num_workers
    rate = Fraction(repr(float(budget))).limit_denominator(10**6) * num_colors
    costs = [Fraction(len(round_)) for round_ in groups]
    turn = sum(costs, start=Fraction(0)) / rate
    repeats = min(turn.denominator, 64)
    matchings = tuple(matching for round_ in groups for matching in round_)
    first = np.cumsum([0, *(len(round_) for round_ in groups)]).tolist()
    indices = [tuple(range(first[d], first[d + 1])) for d in range(len(groups))] * repeats
    cycle = unrolled(
        (wait, tuple(j for n in numbers for j in indices[n]))
        for wait, numbers in timeline(costs * repeats, rate)
    )
    spent = sum(len(active) for active in cycle) / len(cycle)
    uses = [sum(j in active for active in cycle) / len(cycle) for j in range(len(matchings))]
    plan = Plan(
        topology=topology,
        strategy="finite-time",
        budget=budget,
        seed=seed,
        mixing="pairwise" if base == 2 else "laplacian",
        matchings=matchings,
        probabilities=tuple(uses),
        alpha=1 / base,
        schedule=Cycle(cycle=cycle),
        timing=Units(),
        num_colors=num_colors,
        rho=0.0,
        algebraic_connectivity=float(num_workers * sum(uses) / len(topology.links)),
        expected_comm_time=spent,
        notes=(f"exact consensus after {len(groups)} rounds of base {base}.",),
    )
    from dataclasses import replace

    return replace(plan, rho=contraction(plan), consensus_error=consensus_error(plan))


def one_peer_exponential(num_workers: int) -> tuple[Array, ...]:
    """The mixing matrices of the one-peer exponential graph: hop 2^t in round t, ½ (I + shift).

    Every worker sends to one peer and receives from another: directed, so not a matching, but as
    long as one where links carry both directions at once.

    >>> [float(W[0].max()) for W in one_peer_exponential(4)]
    [0.5, 0.5]
    """
    hops = max(1, math.ceil(math.log2(num_workers)))
    eye = np.eye(num_workers)
    return tuple((eye + np.roll(eye, 2**t % num_workers, axis=1)) / 2 for t in range(hops))


def one_peer_exponential_error(num_workers: int, rounds_per_iteration: float) -> float:
    """The steady-state consensus error of the one-peer exponential graph at a pace.

    >>> one_peer_exponential_error(8, 1.0)
    0.5
    """
    matrices = one_peer_exponential(num_workers)
    rate = Fraction(rounds_per_iteration).limit_denominator(1000)
    turn = Fraction(len(matrices)) / rate
    count = len(matrices) * min(turn.denominator, 256)
    numbers = unrolled((wait, tuple(some)) for wait, some in timeline([Fraction(1)] * count, rate))
    noise = cycles.centering(num_workers)

    def advance(X: Array) -> tuple[Array, float]:
        total = 0.0
        for active in numbers:
            X = X + noise
            for n in active:
                W = matrices[n % len(matrices)]
                X = W @ X @ W.T
            total += float(np.trace(X))
        return X, total

    product = noise
    for n in range(count):
        product = matrices[n % len(matrices)] @ product
    fixed = cycles.lyapunov(product, advance(np.zeros_like(noise))[0])
    assert fixed is not None  # hop 1 alone connects everyone
    return advance(fixed)[1] / (len(numbers) * num_workers)


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
