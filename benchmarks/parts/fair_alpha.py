"""The mixing weight that is best for the consensus error, so that no strategy is held back."""

from __future__ import annotations

import math
from dataclasses import replace

from scipy.optimize import minimize_scalar

from matcha import Plan, theory


def with_error_optimal_alpha(plan: Plan) -> Plan:
    """The plan with the α that minimises its steady-state consensus error.

    ρ is a worst case over directions; the error is an average over them, and its best α is
    usually smaller. Weights per link were found together and stay as they are.
    """
    process = plan.process
    if process.weights is not None:
        return plan

    def error(alpha: float) -> float:
        changed = replace(process, alpha=float(alpha))
        value = theory.consensus_error(changed, max_workers=process.num_workers)
        return value if value is not None and math.isfinite(value) else 1e300

    # The error blows up at both ends of the range of α and had one minimum wherever we looked.
    high = min(1.6 * process.alpha, 1.0) if process.mixing == "laplacian" else 0.95
    found = minimize_scalar(
        error, bounds=(0.2 * process.alpha, high), method="bounded", options={"xatol": 1e-5}
    )
    better = error(found.x) <= error(process.alpha)
    return plan.with_process(alpha=float(found.x)) if better else plan
