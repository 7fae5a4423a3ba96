"""MATCHA: each matching is active by a coin of its own, weighted toward critical links."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.activation import Activation, optimal_probabilities
from matcha.errors import InputError
from matcha.matchings import Groups, cliques, single_links
from matcha.mixing import (
    Contraction,
    laplacian_extremes,
    moments,
    optimal_contraction,
    single_contraction,
    vanilla_contraction,
)
from matcha.plans import Plan
from matcha.schedules import Bernoulli, Choice
from matcha.strategies.parts import assemble_plan, check_affordable, check_probabilities, coloring
from matcha.strategies.recoloring import improve
from matcha.strategies.strategy import Decomposition, Effort, Request
from matcha.theory.pairwise import optimal_activation
from matcha.topology import Matching


@dataclass(frozen=True, slots=True, kw_only=True)
class Subgraphs:
    """What the coins activate, and how much of it the budget allows."""

    matchings: tuple[Matching, ...]
    groups: Groups
    """Matchings that share a coin; empty where each has its own."""
    costs: tuple[float, ...]
    limit: float
    """Σ p_j · cost_j may not exceed this."""
    num_colors: int
    """M, the matchings of a full exchange."""
    full_time: float


def build(
    request: Request,
    *,
    decomposition: Decomposition = "matchings",
    effort: Effort = "default",
    probabilities: tuple[float, ...] | None = None,
) -> Plan:
    """Plan by the paper: decompose, optimise probabilities (eq. 5), then the weight (eq. 9)."""
    parts = subgraphs(request, decomposition, effort)
    if probabilities is not None:
        check_probabilities(probabilities, parts.matchings)
        return _plan_with(request, parts, probabilities)
    found = optimal_probabilities(
        parts.matchings,
        request.topology.num_workers,
        parts.limit,
        costs=parts.costs,
        groups=parts.groups,
        seed=request.seed,
        progress=request.progress,
    )
    if request.mixing == "pairwise":
        return _pairwise(request, parts, found)
    p = found.probabilities
    best = contraction(request, parts, p)
    return assemble_plan(
        request,
        matchings=parts.matchings,
        schedule=Bernoulli(probabilities=p, seed=request.seed, groups=parts.groups),
        alpha=best.alpha,
        num_colors=parts.num_colors,
        figures={"rho": best.rho, "connectivity": found.certificate.value},
        certificate=found.certificate,
        full_time=parts.full_time,
    )


def _plan_with(request: Request, parts: Subgraphs, p: tuple[float, ...]) -> Plan:
    """Probabilities that the user brought: only the weight is left to find."""
    schedule = Bernoulli(probabilities=p, seed=request.seed, groups=parts.groups)
    cost = sum(q * c for q, c in zip(p, parts.costs, strict=True))
    check_affordable(request, cost, parts.limit, "the probabilities")
    by_laplacian = request.mixing == "laplacian"
    return assemble_plan(
        request,
        matchings=parts.matchings,
        schedule=schedule,
        alpha=contraction(request, parts, p).alpha if by_laplacian else 0.5,
        num_colors=parts.num_colors,
        notes=("the probabilities are yours.",),
        full_time=parts.full_time,
    )


def _pairwise(request: Request, parts: Subgraphs, found: Activation) -> Plan:
    """Each matching sees the result of the one before; ρ itself is minimised, from eq. 5's p.

    Raises:
        InputError: Matchings share coins, or there are too many workers.
    """
    if parts.groups:
        raise InputError("pairwise mixing needs a coin for each matching: cliques share coins.")
    topology = request.topology
    best = optimal_activation(
        parts.matchings,
        found.probabilities,
        topology.num_workers,
        parts.limit,
        costs=parts.costs,
    )
    p = best.probabilities
    matchings = tuple(parts.matchings[j] for j in best.order)
    links = np.array([link for matching in matchings for link in matching])
    weights = np.concatenate(
        [np.full(len(matching), q) for matching, q in zip(matchings, p, strict=True)]
    )
    expected = laplacian(links, topology.num_workers, weights)
    return assemble_plan(
        request,
        matchings=matchings,
        schedule=Bernoulli(probabilities=p, seed=request.seed),
        alpha=0.5,
        num_colors=parts.num_colors,
        figures={"rho": best.rho, "connectivity": laplacian_extremes(expected, topology)[0]},
        certificate=found.certificate,
        notes=(
            f"probabilities and order minimise rho itself: {best.rho:.4f}, against "
            f"{best.start_rho:.4f} for those that maximise the connectivity; the certificate "
            "is of the latter.",
        ),
        full_time=parts.full_time,
    )


def subgraphs(request: Request, decomposition: Decomposition, effort: Effort) -> Subgraphs:
    """Split the links as the user asked; the budget is a fraction of a full exchange's time."""
    colors = coloring(request)
    matchings = colors
    groups: Groups = ()
    if request.matchings is None:
        if decomposition == "links":
            matchings = single_links(request.topology)
        elif decomposition == "cliques":
            matchings, groups = cliques(request.topology)
        else:
            matchings = improve(
                request.topology,
                colors,
                request.timing,
                request.budget,
                effort=effort,
                seed=request.seed,
                progress=request.progress,
            )
    return Subgraphs(
        matchings=matchings,
        groups=groups,
        costs=request.timing.costs(matchings),
        limit=min(
            request.timing.allowance(some, request.budget)
            for some in ((colors, matchings) if len(matchings) == len(colors) else (colors,))
        ),
        num_colors=len(colors),
        full_time=request.timing.round_time(colors),
    )


def contraction(request: Request, parts: Subgraphs, p: tuple[float, ...]) -> Contraction:
    """α and ρ; when every link is always active, exactly those of vanilla."""
    if min(p) == 1.0:
        return vanilla_contraction(request.topology)
    m = request.topology.num_workers
    return optimal_contraction(moments(parts.matchings, p, m, parts.groups))


# -- one matching at a time (section 3, "Extension") ---------------------------------------------


def single(request: Request, probabilities: tuple[float, ...] | None = None) -> Plan:
    """Plan at most one matching per iteration; which one is drawn, the best connected way.

    Both ends of a link then take their mean, so Laplacian mixing with weight ½ and pairwise
    mixing are the same thing.
    """
    matchings = coloring(request)
    full_time = request.timing.round_time(matchings)
    if probabilities is not None:
        check_probabilities(probabilities, matchings)
        return _single_with(request, matchings, probabilities, full_time)
    found = optimal_probabilities(
        matchings,
        request.topology.num_workers,
        1.0,
        costs=_shares(request, matchings),
        seed=request.seed,
        progress=request.progress,
    )
    best = single_contraction(found.certificate.value)
    return assemble_plan(
        request,
        matchings=matchings,
        schedule=Choice(probabilities=found.probabilities, seed=request.seed),
        alpha=best.alpha,
        num_colors=len(matchings),
        figures={"rho": best.rho, "connectivity": found.certificate.value},
        certificate=found.certificate,
        full_time=full_time,
    )


def _single_with(
    request: Request, matchings: tuple[Matching, ...], p: tuple[float, ...], full_time: float
) -> Plan:
    """The same with probabilities that the user brought."""
    schedule = Choice(probabilities=p, seed=request.seed)
    cost = schedule.expected_time(request.timing, matchings)
    check_affordable(request, cost, request.budget * full_time, "the probabilities")
    return assemble_plan(
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
