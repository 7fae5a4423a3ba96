"""How quickly matcha starts, and how many rounds a second a plan gives.

Usage: python benchmarks/basics.py      (prints one table, writes benchmarks/results/basics.json)
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matcha

RESULTS = Path(__file__).parent / "results" / "basics.json"
ROUNDS = 400_000
REPEATS = 5


def import_seconds() -> float:
    code = "import time; t = time.perf_counter(); import matcha; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(REPEATS)
    ]
    return statistics.median(times)


def rounds_a_second(plan: matcha.Plan) -> float:
    start = time.perf_counter()
    for _ in plan.rounds(0, ROUNDS):
        pass
    return ROUNDS / (time.perf_counter() - start)


def random_access_a_second(plan: matcha.Plan) -> float:
    start = time.perf_counter()
    for k in range(0, 10_000_000, 1000):
        plan.round(k)
    return 10_000 / (time.perf_counter() - start)


def main() -> None:
    rows = [("import matcha, seconds", import_seconds())]
    for strategy in ("matcha", "periodic", "single", "greedy"):
        plan = matcha.plan(matcha.families.paper("geometric16-d13"), 0.3, strategy, effort="none")
        rows.append((f"{strategy}: rounds a second in order", rounds_a_second(plan)))
        rows.append((f"{strategy}: rounds a second by random access", random_access_a_second(plan)))
    for name, value in rows:
        print(f"{name:<48}{value:>14,.3f}" if value < 10 else f"{name:<48}{value:>14,.0f}")
    RESULTS.write_text(
        json.dumps({"machine": platform.processor() or platform.machine(), **dict(rows)}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    main()
