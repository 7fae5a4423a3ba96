"""Planning: a topology, a budget and a strategy's name in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from matcha.errors import InputError, PlanError, unknown_name
from matcha.matchings import check_decomposition
from matcha.plans import Plan, check_budget
from matcha.rounds import Mixing
from matcha.strategies.request import (
    DECOMPOSITIONS,
    EFFORTS,
    MIXINGS,
    STRATEGIES,
    Decomposition,
    Effort,
    Request,
)
from matcha.theory import consensus_error
from matcha.timing import Timing, default_timing
from matcha.topology import Matching, Topology

_EXACT_ERROR_LIMIT = 256  # workers; the exact error takes 0.7 s there and 12 s at 512


def plan(
    topology: Topology,
    budget: float = 0.5,
    strategy: str = "matcha",
    seed: int = 0,
    *,
    mixing: Mixing | None = None,
    matchings: Iterable[Iterable[Sequence[int]]] | None = None,
    decomposition: Decomposition = "matchings",
    timing: Timing | None = None,
    effort: Effort = "default",
) -> Plan:
    """Plan the communication of decentralized SGD on a topology within a budget.

    Args:
        topology: The workers and their links.
        budget: C_b in (0, 1]: expected communication time an iteration as a fraction of vanilla's.
        strategy: `matcha` (the paper), `vanilla`, `periodic`, `single` or `greedy`.
        seed: Decides which rounds are drawn, and every search on the way.
        mixing: `laplacian` (the paper's I − αL) or `pairwise`; by default the strategy's own.
        matchings: Your own decomposition of the links, as lists of pairs of worker numbers.
        decomposition: What the links are split into: `matchings`, single `links`, or `cliques`.
        timing: The delay model; by default link seconds where the topology has them, else units.
        effort: How long to search for a good decomposition: `none`, `default` or `high`.

    Returns:
        The plan, with its contraction ρ, its expected communication time and its certificate.

    Raises:
        InputError: The budget, a name or the decomposition is not valid.

    >>> from matcha.topology import families
    >>> plan(families.ring(4), budget=1.0, strategy="vanilla").expected_comm_time
    2.0
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InputError(f"the budget is {budget!r}, but it is a number in (0, 1].")
    check_budget(float(budget))
    for kind, name, known in (
        ("strategy", strategy, STRATEGIES),
        ("mixing", mixing or "laplacian", MIXINGS),
        ("decomposition", decomposition, DECOMPOSITIONS),
        ("effort", effort, EFFORTS),
    ):
        if name not in known:
            raise unknown_name(kind, str(name), known)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"the seed is {seed!r}, but it is a whole number from 0 up.")
    request = Request(
        topology=topology,
        budget=float(budget),
        strategy=strategy,
        seed=seed,
        mixing=mixing,
        matchings=None if matchings is None else _own_matchings(topology, matchings),
        decomposition=decomposition,
        timing=timing or default_timing(topology),
        effort=effort,
    )
    build: Callable[[Request], Plan] = import_module(f"matcha.strategies.{strategy}").build
    return _with_consensus_error(build(request))


def _with_consensus_error(plan: Plan) -> Plan:
    """The plan with its steady-state consensus error, where the strategy did not find it."""
    if plan.consensus_error is not None:
        return plan
    return replace(plan, consensus_error=consensus_error(plan, max_workers=_EXACT_ERROR_LIMIT))


def _own_matchings(topology: Topology, given: Any) -> tuple[Matching, ...]:
    """The user's decomposition with sorted pairs, verified against the topology."""
    try:
        matchings = tuple(
            tuple(sorted((min(int(i), int(j)), max(int(i), int(j))) for i, j in matching))
            for matching in given
        )
    except (TypeError, ValueError):
        raise PlanError(
            "matchings are lists of pairs of worker numbers, [[(i, j), …], …]."
        ) from None
    check_decomposition(topology, matchings)
    return matchings
