"""How quickly matcha starts, and how many rounds per second a plan gives.

Usage: python benchmarks/basics.py      (prints one table, writes benchmarks/results/basics.json)
       python benchmarks/basics.py --quick     (a hundredth of the rounds)
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from harness import Column, finish, machine, parser, table

import matcha
from matcha.strategies import strategy_with

ROUNDS = 400_000
REPEATS = 5


def import_seconds(repeats: int) -> float:
    code = "import time; t = time.perf_counter(); import matcha; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return statistics.median(times)


def rounds_per_second(plan: matcha.Plan, rounds: int) -> float:
    start = time.perf_counter()
    for _ in plan.rounds(0, rounds):
        pass
    return rounds / (time.perf_counter() - start)


def random_access_per_second(plan: matcha.Plan, rounds: int) -> float:
    start = time.perf_counter()
    for k in range(0, 1000 * rounds, 1000):
        plan.round(k)
    return rounds / (time.perf_counter() - start)


COLUMNS = [Column("", "name"), Column("", lambda row: float(f"{row['value']:.4g}"), ",g")]


def describe(document: dict[str, Any]) -> str:
    """A line per figure."""
    rows = [{"name": n, "value": v} for n, v in document.items() if n != "machine"]
    return table(COLUMNS, rows).lstrip("\n")


def main() -> None:
    options = parser(__doc__, output="basics")
    options.add_argument("--quick", action="store_true")
    args = options.parse_args()
    repeats, rounds = (1, ROUNDS // 100) if args.quick else (REPEATS, ROUNDS)
    document: dict[str, Any] = {"machine": machine()}
    document["import matcha, seconds"] = import_seconds(repeats)
    for name in ("matcha", "periodic", "single", "greedy"):
        plan = matcha.plan("paper:geometric16-d13", 0.3, strategy_with(name, effort="none"))
        in_order = rounds_per_second(plan, rounds)
        document[f"{name}: rounds per second in order"] = in_order
        at_random = random_access_per_second(plan, rounds // 40)
        document[f"{name}: rounds per second by random access"] = at_random
    finish(args.output, document, describe(document))


if __name__ == "__main__":
    main()
