"""The error–runtime trade-off: what disagreement remains, for how much communication.

    python benchmarks/tradeoff.py

Plans two of the paper's graphs with every strategy over budgets and writes, for each point, the
communication an iteration, ρ and the steady-state consensus error. Nothing is timed: the numbers
are exact and the same on every machine.
"""

from __future__ import annotations

from typing import Any

from harness import Column, finish, parser, table

import matcha
from matcha.strategies import comparable

GRAPHS = ("er8", "geometric16-d10")
STRATEGIES = ("vanilla", "periodic", "matcha", "greedy")
BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def points_of(graph: str, strategy: str) -> list[dict[str, object]]:
    """One strategy over all budgets; α minimises the error, so that no strategy is held back."""
    points = []
    for budget in (1.0,) if strategy == "vanilla" else BUDGETS:
        plan = matcha.plan(matcha.families.paper(graph), budget, comparable(strategy))
        points.append(
            {
                "graph": graph,
                "strategy": strategy,
                "budget": budget,
                "comm_units": round(plan.expected_comm_time, 6),
                "rho": round(plan.rho, 6),
                "consensus_error": round(float(plan.consensus_error or 0.0), 6),
            }
        )
    return points


COLUMNS = [
    Column("graph", "graph"),
    Column("strategy", "strategy"),
    Column("C_b", "budget", "g"),
    Column("units", "comm_units", ".3f"),
    Column("rho", "rho", ".4f"),
    Column("error", "consensus_error", ".4f"),
]


def describe(document: dict[str, Any]) -> str:
    """A line per plan."""
    return table(COLUMNS, document["points"])


def main() -> None:
    """Measure, print one table, write the result."""
    output = parser(__doc__, output="tradeoff").parse_args().output
    points = [p for graph in GRAPHS for name in STRATEGIES for p in points_of(graph, name)]
    document = {
        "command": "python benchmarks/tradeoff.py",
        "version": matcha.__version__,
        "num_colors": {
            g: matcha.plan(matcha.families.paper(g), strategy="matcha").num_colors for g in GRAPHS
        },
        "points": points,
    }
    finish(output, document, describe(document))


if __name__ == "__main__":
    main()
