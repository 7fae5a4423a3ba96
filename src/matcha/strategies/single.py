"""One matching an iteration, drawn with probability p_j (section 3, "Extension")."""

from __future__ import annotations

from matcha.activation import optimal_probabilities
from matcha.mixing import single_contraction
from matcha.plans import Plan
from matcha.schedules import Choice
from matcha.strategies.parts import annotated, coloring
from matcha.strategies.request import Request
from matcha.topology import Matching


def build(request: Request) -> Plan:
    """Plan at most one matching an iteration; which one is drawn, the best connected way.

    Both ends of a link then take their mean, so Laplacian mixing with weight ½ and pairwise
    mixing are the same thing.
    """
    topology, matchings = request.topology, coloring(request)
    found = optimal_probabilities(
        matchings, topology.num_workers, 1.0, costs=_shares(request, matchings), seed=request.seed
    )
    p = found.probabilities
    best = single_contraction(found.certificate.value)
    return annotated(
        Plan(
            topology=topology,
            strategy="single",
            budget=request.budget,
            seed=request.seed,
            mixing=request.mixing or "laplacian",
            matchings=matchings,
            probabilities=p,
            alpha=best.alpha,
            schedule=Choice(probabilities=p, seed=request.seed),
            timing=request.timing,
            num_colors=len(matchings),
            rho=best.rho,
            algebraic_connectivity=found.certificate.value,
            expected_comm_time=sum(
                q * request.timing.matching_time(matching)
                for q, matching in zip(p, matchings, strict=True)
            ),
            certificate=found.certificate,
        ),
        full_time=request.timing.round_time(matchings),
    )


def _shares(request: Request, matchings: tuple[Matching, ...]) -> tuple[float, ...]:
    """Costs for which Σ p_j · cost_j <= 1 keeps both Σ p_j <= 1 and the expected time in budget.

    Only one of the two binds unless some matchings cost more than the budget and others less; in
    between, the larger share of each matching is charged.
    """
    timing = request.timing
    limit = request.budget * timing.round_time(matchings)
    return tuple(max(1.0, timing.matching_time(matching) / limit) for matching in matchings)
