"""MATCHA: each matching is active by a coin of its own, weighted toward critical links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from matcha._numerics.spectra import laplacian
from matcha.activation import Activation, optimal_probabilities
from matcha.errors import InputError
from matcha.matchings import Groups, cliques, single_links
from matcha.mixing import (
    laplacian_extremes,
    moments,
    optimal_contraction,
    single_contraction,
    vanilla_contraction,
)
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.schedules import Bernoulli, Choice
from matcha.strategies.parts import assemble_plan, check_affordable, check_probabilities
from matcha.strategies.recoloring import improve
from matcha.strategies.strategy import Alpha, Decomposition, Effort, Request, Strategy, Weights
from matcha.theory.pairwise import optimal_activation
from matcha.topology import Matching

_OWN = ("the probabilities are yours.",)


@dataclass(frozen=True, kw_only=True)
class Matcha(Strategy):
    """Each matching by a coin of its own: the paper's method.

    Args:
        mixing: `laplacian` (the paper's I − αL, the default) or `pairwise`.
        decomposition: What the links are split into: `matchings`, single `links`, `cliques`.
        effort: How long to search for a good decomposition: `none`, `default` or `high`.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Vanilla`.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "matcha"
    about = "each matching by a coin of its own (the paper)"
    mixings = ("laplacian", "pairwise")
    compared = True
    mixing: Mixing | None = None
    decomposition: Decomposition = "matchings"
    effort: Effort = "default"
    probabilities: Iterable[float] | None = None
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        """Decompose, optimise probabilities (eq. 5), then the weight (eq. 9)."""
        m, colors, timing = request.topology.num_workers, request.colors, request.timing
        matchings, groups = self._subgraphs(request)
        costs = timing.costs(matchings)
        compared = (colors, matchings) if len(matchings) == len(colors) else (colors,)
        limit = min(timing.allowance(some, request.budget) for some in compared)
        certificate = None
        if self.probabilities is None:
            found = optimal_probabilities(
                matchings,
                m,
                limit,
                costs=costs,
                groups=groups,
                seed=request.seed,
                progress=request.progress,
            )
            if request.mixing == "pairwise":
                if groups:
                    raise InputError(
                        "pairwise mixing needs a coin for each matching: cliques share coins."
                    )
                return _pairwise(request, matchings, found, costs, limit)
            p, certificate = found.probabilities, found.certificate
        else:
            p = check_probabilities(self.probabilities, matchings)
        schedule = Bernoulli(probabilities=p, seed=request.seed, groups=groups)
        if certificate is None:
            cost = sum(q * c for q, c in zip(p, costs, strict=True))
            check_affordable(request, cost, limit, "the probabilities")
        best = None
        if request.mixing == "laplacian":
            # When every link is always active, exactly those of vanilla.
            best = (
                vanilla_contraction(request.topology)
                if min(p) == 1.0
                else optimal_contraction(moments(matchings, p, m, groups))
            )
        return assemble_plan(
            request,
            matchings=matchings,
            schedule=schedule,
            alpha=0.5 if best is None else best.alpha,
            figures={"rho": best.rho, "algebraic_connectivity": certificate.value}
            if best is not None and certificate is not None
            else {},
            certificate=certificate,
            notes=_OWN if certificate is None else (),
            beside_periodic=True,
        )

    def _subgraphs(self, request: Request) -> tuple[tuple[Matching, ...], Groups]:
        """Split the links as the user asked: what coins activate, and which of it shares a coin."""
        if request.matchings is not None:
            return request.matchings, ()
        if self.decomposition == "links":
            return single_links(request.topology), ()
        if self.decomposition == "cliques":
            return cliques(request.topology)
        return improve(request, self.effort), ()


def _pairwise(
    request: Request,
    matchings: tuple[Matching, ...],
    found: Activation,
    costs: Sequence[float],
    limit: float,
) -> Plan:
    """Each matching sees the result of the one before; ρ itself is minimised, from eq. 5's p."""
    topology = request.topology
    m = topology.num_workers
    best = optimal_activation(matchings, found.probabilities, m, limit, costs=costs)
    p = best.probabilities
    matchings = tuple(matchings[j] for j in best.order)
    links = np.array([link for matching in matchings for link in matching])
    weights = np.repeat(p, [len(matching) for matching in matchings])
    connectivity = laplacian_extremes(laplacian(links, m, weights), topology)[0]
    return assemble_plan(
        request,
        matchings=matchings,
        schedule=Bernoulli(probabilities=p, seed=request.seed),
        alpha=0.5,
        figures={"rho": best.rho, "algebraic_connectivity": connectivity},
        certificate=found.certificate,
        notes=(
            f"probabilities and order minimise rho itself: {best.rho:.4f}, against "
            f"{best.start_rho:.4f} for those that maximise the connectivity; the certificate "
            "is of the latter.",
        ),
        beside_periodic=True,
    )


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """At most one matching per iteration, drawn (section 3, "Extension").

    Both ends of a link then take their mean, so laplacian mixing with weight ½ and pairwise mixing
    are the same.

    Args:
        mixing: `laplacian` or `pairwise`.
        probabilities: Your own, one per matching; by default the best.
        alpha: As for `Vanilla`.
        weights: As for `Vanilla`, with laplacian mixing.
    """

    name = "single"
    about = "at most one matching per iteration, drawn"
    mixings = ("laplacian", "pairwise")
    mixing: Mixing | None = None
    probabilities: Iterable[float] | None = None
    alpha: Alpha | None = None
    weights: Weights | None = None

    def build(self, request: Request) -> Plan:
        colors, timing, seed = request.colors, request.timing, request.seed
        limit = request.budget * request.full_time
        if self.probabilities is not None:
            p = check_probabilities(self.probabilities, colors)
            schedule = Choice(probabilities=p, seed=seed)
            cost = schedule.expected_time(timing, colors)
            check_affordable(request, cost, limit, "the probabilities")
            return assemble_plan(
                request, schedule=schedule, alpha=0.5, notes=_OWN, beside_periodic=True
            )
        # With these costs Σ p_j · cost_j <= 1 keeps both Σ p_j <= 1 and the expected time in
        # budget. Only one of the two binds unless some matchings cost more than the budget and
        # others less; in between, the larger share of each matching is charged.
        costs = [max(1.0, timing.matching_time(matching) / limit) for matching in colors]
        m, progress = request.topology.num_workers, request.progress
        found = optimal_probabilities(colors, m, 1.0, costs=costs, seed=seed, progress=progress)
        best = single_contraction(found.certificate.value)
        return assemble_plan(
            request,
            schedule=Choice(probabilities=found.probabilities, seed=seed),
            alpha=best.alpha,
            figures={"rho": best.rho, "algebraic_connectivity": found.certificate.value},
            certificate=found.certificate,
            beside_periodic=True,
        )
