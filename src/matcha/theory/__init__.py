"""What theory promises of a plan: steady-state consensus error, contraction, Theorem 2's bound."""

from matcha.theory.bounds import (
    admissible_learning_rate,
    error_bound,
    gradient_bound,
    graph_bound,
)
from matcha.theory.steady_state import (
    averages_over_cycle,
    connectivity,
    consensus_error,
    contraction,
    drift_error,
    push_sum_weights,
)

__all__ = [
    "admissible_learning_rate",
    "averages_over_cycle",
    "connectivity",
    "consensus_error",
    "contraction",
    "drift_error",
    "error_bound",
    "gradient_bound",
    "graph_bound",
    "push_sum_weights",
]
