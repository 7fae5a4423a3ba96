"""What theory promises of a plan: steady-state consensus error, contraction, Theorem 2's bound."""

from matcha.theory.bounds import (
    admissible_learning_rate,
    doubling_bound,
    error_bound,
    gradient_bound,
    graph_bound,
)
from matcha.theory.parts import Parts
from matcha.theory.periods import push_sum_weights
from matcha.theory.steady_state import (
    MAX_WORKERS,
    connectivity,
    consensus_error,
    contraction,
    drift_error,
    error_optimal_alpha,
    schedule_error,
    spans_a_cycle,
    with_error_optimal_alpha,
)

__all__ = [
    "MAX_WORKERS",
    "Parts",
    "admissible_learning_rate",
    "connectivity",
    "consensus_error",
    "contraction",
    "doubling_bound",
    "drift_error",
    "error_bound",
    "error_optimal_alpha",
    "gradient_bound",
    "graph_bound",
    "push_sum_weights",
    "schedule_error",
    "spans_a_cycle",
    "with_error_optimal_alpha",
]
