"""What strategies share: the decomposition, the time of a full exchange, the notes on a plan."""

from __future__ import annotations

from dataclasses import replace

from matcha.errors import InputError
from matcha.matchings import decompose
from matcha.mixing import periodic_contraction
from matcha.plans import Plan
from matcha.rounds import Mixing
from matcha.strategies.request import Request
from matcha.topology import Matching

_COMPARED_UP_TO = 2000


def coloring(request: Request) -> tuple[Matching, ...]:
    """The matchings of a full exchange, whose time the budget is a fraction of."""
    if request.matchings is not None:
        return request.matchings
    return decompose(request.topology, seed=request.seed)


def only_laplacian(request: Request) -> Mixing:
    """The mixing of strategies in which all links talk at once.

    Raises:
        InputError: Pairwise mixing was asked for.
    """
    if request.mixing == "pairwise":
        raise InputError(
            f"the {request.strategy} strategy mixes by the Laplacian: "
            "pairwise mixing goes with matcha, single and greedy."
        )
    return "laplacian"


def annotated(plan: Plan, *, full_time: float | None = None) -> Plan:
    """The plan with what its user should know added to its notes.

    Args:
        plan: A finished plan.
        full_time: What a full exchange costs, for strategies that compete with periodic ones.
    """
    notes = list(plan.notes)
    own = plan.smallest_self_weight
    if own < -1e-12:
        notes.append(
            f"a worker may give its own model the weight {own:.3f}, below zero: such mixing "
            "extrapolates and can diverge at large learning rates."
        )
    if full_time is not None and plan.num_workers <= _COMPARED_UP_TO:
        spent = min(1.0, plan.expected_comm_time / full_time)
        other = periodic_contraction(plan.topology, spent).rho
        if other < plan.rho - 1e-9:
            notes.append(
                "periodic communication contracts faster here in the same time: "
                f"rho {other:.4f} instead of {plan.rho:.4f}."
            )
    return replace(plan, notes=tuple(notes))
