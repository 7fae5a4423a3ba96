"""How quickly matcha starts, and how many rounds a second a plan gives.

Usage: python benchmarks/basics.py      (prints one table, writes benchmarks/results/basics.json)
       python benchmarks/basics.py --quick     (a hundredth of the rounds)
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

from parts import outcome

import matcha
from matcha.strategies import strategy_with

RESULTS = outcome.RESULTS / "basics.json"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    repeats, rounds = (1, ROUNDS // 100) if quick else (REPEATS, ROUNDS)
    rows = [("import matcha, seconds", import_seconds(repeats))]
    for strategy in ("matcha", "periodic", "single", "greedy"):
        plan = matcha.plan(
            matcha.families.paper("geometric16-d13"), 0.3, strategy_with(strategy, effort="none")
        )
        rows.append((f"{strategy}: rounds a second in order", rounds_per_second(plan, rounds)))
        rows.append(
            (
                f"{strategy}: rounds a second by random access",
                random_access_per_second(plan, rounds // 40),
            )
        )
    for name, value in rows:
        print(f"{name:<48}{value:>14,.3f}" if value < 10 else f"{name:<48}{value:>14,.0f}")
    RESULTS.write_text(
        json.dumps({"machine": platform.processor() or platform.machine(), **dict(rows)}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
