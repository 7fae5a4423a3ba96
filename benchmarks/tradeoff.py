"""The error–runtime trade-off: what disagreement remains, for how much communication.

    python benchmarks/tradeoff.py

Plans two of the paper's graphs with every strategy over budgets and writes, for each point, the
communication an iteration, ρ and the steady-state consensus error. Nothing is timed: the numbers
are exact and the same on every machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from parts import outcome

import matcha

GRAPHS = ("er8", "geometric16-d10")
STRATEGIES = ("vanilla", "periodic", "matcha", "greedy")
BUDGETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
RESULT = outcome.RESULTS / "tradeoff.json"


def points_of(graph: str, strategy: str) -> list[dict[str, object]]:
    """One strategy over all budgets; α minimises the error, so that no strategy is held back."""
    points = []
    for budget in (1.0,) if strategy == "vanilla" else BUDGETS:
        plan = matcha.plan(matcha.families.paper(graph), budget, strategy)
        if plan.mixing == "laplacian":
            plan = plan.with_error_optimal_alpha()
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


def main() -> None:
    """Measure, print one table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULT)
    output: Path = parser.parse_args().output
    points: list[dict[str, object]] = []
    for graph in GRAPHS:
        for strategy in STRATEGIES:
            points += points_of(graph, strategy)
    print(f"{'graph':<18}{'strategy':<10}{'C_b':>6}{'units':>9}{'rho':>9}{'error':>10}")
    for p in points:
        print(
            f"{p['graph']:<18}{p['strategy']:<10}{p['budget']:>6}{p['comm_units']:>9.3f}"
            f"{p['rho']:>9.4f}{p['consensus_error']:>10.4f}"
        )
    document = {
        "command": "python benchmarks/tradeoff.py",
        "version": matcha.__version__,
        "num_colors": {
            g: matcha.plan(matcha.families.paper(g), strategy="matcha").num_colors for g in GRAPHS
        },
        "points": points,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
