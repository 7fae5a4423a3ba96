"""How long greedy planning takes as networks grow, and what the sketch costs.

    python benchmarks/greedy_scale.py           # about ten minutes
    python benchmarks/greedy_scale.py --quick   # up to 1,024 workers

Each size is planned in a process of its own (wall and processor seconds, peak memory). Writes
benchmarks/results/greedy_scale.json and .txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BUDGET = 0.1
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 10_000)
BOTH = ("geometric:96:0.17:1", "torus:10x10", "geometric:256:0.1:1", "erdos-renyi:128:0.06:1")


def radius(num_workers: int) -> float:
    """About eight links a worker, and enough to be connected."""
    return math.sqrt(max(8.0, 1.25 * math.log(num_workers)) / (math.pi * num_workers))


def plan_one(num_workers: int) -> None:
    """Plan in this process and print what it took as JSON."""
    import matcha
    from matcha import families

    topology = families.geometric(num_workers, round(radius(num_workers), 4), seed=1)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = matcha.plan(topology, BUDGET, "greedy")
    row = {
        "workers": num_workers,
        "links": len(topology.links),
        "colors": plan.num_colors,
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "consensus_error": plan.consensus_error,
        "rho": plan.rho,
        "weight": plan.alpha,
        "matchings": len(plan.matchings),
        "sketched": "sketch" in plan.notes[0],
    }
    print(json.dumps(row))


def both(name: str) -> dict[str, Any]:
    """A graph that both searches can do: what the sketch costs."""
    import matcha
    from matcha import families, search, sketch

    topology = families.parse(name)
    exact = matcha.plan(topology, BUDGET, "greedy")
    network = search.Network(
        num_workers=topology.num_workers,
        links=topology.link_array,
        times=(Fraction(1),) * len(topology.links),
        rate=Fraction(repr(BUDGET)) * exact.num_colors,
    )
    found = sketch.sketched_cycle(network).best
    return {
        "graph": name,
        "exact": exact.consensus_error,
        "sketched": found.scored().error,
        "estimated": found.error,
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['workers']:7d} {row['links']:7d} {row['wall_seconds']:9.1f} "
        f"{row['cpu_seconds']:9.1f} {row['peak_mb']:9.0f} {row['consensus_error']:9.4g} "
        f"{row['rho']:8.5f} {row['weight']:6.3f} {'sketch' if row['sketched'] else 'exact':>7s}"
    )


def both_line(row: dict[str, Any]) -> str:
    return (
        f"{row['graph']:24s} {row['exact']:9.4g} {row['sketched']:9.4g} {row['estimated']:9.4g} "
        f"{100 * (row['sketched'] / row['exact'] - 1):7.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        plan_one(arguments.one)
        return
    rows = []
    for size in SIZES:
        if arguments.quick and size > 1024:
            break
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(size)],
            check=True,
            capture_output=True,
            text=True,
        )
        rows.append(json.loads(done.stdout))
        print(line(rows[-1]), flush=True)
    pairs = []
    for name in BOTH:
        pairs.append(both(name))
        print(both_line(pairs[-1]), flush=True)
    table = "\n".join(
        [
            f"Greedy plans of random geometric graphs at C_b {BUDGET:g} "
            f"(load average at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores).",
            f"{'workers':>7s} {'links':>7s} {'wall s':>9s} {'cpu s':>9s} {'peak MB':>9s} "
            f"{'error':>9s} {'rho':>8s} {'weight':>6s} {'search':>7s}",
            *map(line, rows),
            "",
            "What the sketch costs where both searches can run: consensus error.",
            f"{'graph':24s} {'exact':>9s} {'sketched':>9s} {'estimate':>9s} {'cost':>9s}",
            *map(both_line, pairs),
        ]
    )
    print(table)
    RESULTS.mkdir(exist_ok=True)
    document = {"budget": BUDGET, "sizes": rows, "both": pairs}
    (RESULTS / "greedy_scale.json").write_text(json.dumps(document, indent=1) + "\n")
    (RESULTS / "greedy_scale.txt").write_text(table + "\n")


if __name__ == "__main__":
    main()
