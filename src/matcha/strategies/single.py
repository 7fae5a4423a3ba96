"""One matching an iteration, drawn with probability p_j (section 3, "Extension")."""

from __future__ import annotations

from matcha.activation import optimal_probabilities
from matcha.mixing import single_contraction
from matcha.plans import Plan
from matcha.schedules import Choice
from matcha.strategies.parts import check_affordable, check_probabilities, coloring, finished
from matcha.strategies.strategy import Request
from matcha.topology import Matching


def build(request: Request, probabilities: tuple[float, ...] | None = None) -> Plan:
    """Plan at most one matching an iteration; which one is drawn, the best connected way.

    Both ends of a link then take their mean, so Laplacian mixing with weight ½ and pairwise
    mixing are the same thing.
    """
    matchings = coloring(request)
    full_time = request.timing.round_time(matchings)
    if probabilities is not None:
        check_probabilities(probabilities, matchings)
        return _given(request, matchings, probabilities, full_time)
    found = optimal_probabilities(
        matchings,
        request.topology.num_workers,
        1.0,
        costs=_shares(request, matchings),
        seed=request.seed,
        progress=request.progress_of("iterations of eq. 5"),
    )
    best = single_contraction(found.certificate.value)
    return finished(
        request,
        matchings=matchings,
        schedule=Choice(probabilities=found.probabilities, seed=request.seed),
        alpha=best.alpha,
        num_colors=len(matchings),
        figures={"rho": best.rho, "connectivity": found.certificate.value},
        certificate=found.certificate,
        full_time=full_time,
    )


def _given(
    request: Request, matchings: tuple[Matching, ...], p: tuple[float, ...], full_time: float
) -> Plan:
    """The same with probabilities that the user brought."""
    schedule = Choice(probabilities=p, seed=request.seed)
    cost = schedule.expected_time(request.timing, matchings)
    check_affordable(request, cost, request.budget * full_time, "the probabilities")
    return finished(
        request,
        matchings=matchings,
        schedule=schedule,
        alpha=0.5,
        num_colors=len(matchings),
        notes=("the probabilities are yours.",),
        full_time=full_time,
    )


def _shares(request: Request, matchings: tuple[Matching, ...]) -> tuple[float, ...]:
    """Costs for which Σ p_j · cost_j <= 1 keeps both Σ p_j <= 1 and the expected time in budget.

    Only one of the two binds unless some matchings cost more than the budget and others less; in
    between, the larger share of each matching is charged.
    """
    timing = request.timing
    limit = request.budget * timing.round_time(matchings)
    return tuple(max(1.0, timing.matching_time(matching) / limit) for matching in matchings)
