"""How long greedy planning takes as networks grow, and what the sketch costs.

    python benchmarks/greedy_scale.py           # about ten minutes on a quiet machine
    python benchmarks/greedy_scale.py --sizes 1024 10000 --graphs   # only these


Each size is planned in a process of its own (wall and processor seconds, peak memory). Updates
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
from typing import Any

from parts.outcome import RESULTS, write

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
        "load": os.getloadavg()[0],
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
    from matcha import families
    from matcha.strategies.greedy import candidates, sketch

    topology = families.parse(name)
    exact = matcha.plan(topology, BUDGET, "greedy")
    network = candidates.Network(
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


def line(row: dict[str, Any], before: dict[int, dict[str, Any]]) -> str:
    old = before.get(row["workers"])
    was = f"{old['cpu_seconds']:9.1f} {old['consensus_error']:9.4g}" if old else f"{'–':>9s}" * 2
    return (
        f"{row['workers']:7d} {row['links']:7d} {row['wall_seconds']:9.1f} "
        f"{row['cpu_seconds']:9.1f} {row['load']:5.1f} {row['peak_mb']:8.0f} "
        f"{row['consensus_error']:9.4g} "
        f"{row['rho']:8.5f} {row['weight']:6.3f} {'sketch' if row['sketched'] else 'exact':>7s} "
        f"{was}"
    )


def before(document: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What 0.1 took, kept beside: its double precision, three scouts and thirteen full sorts."""
    return {row["workers"]: row for row in document.get("before", [])}


def both_line(row: dict[str, Any]) -> str:
    return (
        f"{row['graph']:24s} {row['exact']:9.4g} {row['sketched']:9.4g} {row['estimated']:9.4g} "
        f"{100 * (row['sketched'] / row['exact'] - 1):7.1f} %"
    )


def report(document: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"Greedy plans of random geometric graphs at C_b {BUDGET:g}, {os.cpu_count()} cores;",
            "load: the machine's load average meanwhile, without which wall is about cpu.",
            f"{'workers':>7s} {'links':>7s} {'wall s':>9s} {'cpu s':>9s} {'load':>5s} "
            f"{'peak MB':>8s} {'error':>9s} {'rho':>8s} {'weight':>6s} {'search':>7s} "
            f"{'0.1 cpu s':>9s} {'its error':>9s}",
            *(line(row, before(document)) for row in document["sizes"]),
            "",
            "What the sketch costs where both searches can run: consensus error.",
            f"{'graph':24s} {'exact':>9s} {'sketched':>9s} {'estimate':>9s} {'cost':>9s}",
            *map(both_line, document["both"]),
        ]
    )


def save(document: dict[str, Any]) -> None:
    document["sizes"].sort(key=lambda row: row["workers"])
    write(RESULTS / "greedy_scale", document, report(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--graphs", nargs="*", default=BOTH, help="what both searches plan")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        plan_one(arguments.one)
        return
    path = RESULTS / "greedy_scale.json"
    document = {"budget": BUDGET, "sizes": [], "both": []}
    if path.exists():
        document = json.loads(path.read_text())
    for size in arguments.sizes:
        command = [sys.executable, __file__, "--one", str(size)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout)
        document["sizes"] = [r for r in document["sizes"] if r["workers"] != size] + [row]
        print(line(row, before(document)), flush=True)
        save(document)
    for name in arguments.graphs:
        pair = both(name)
        document["both"] = [r for r in document["both"] if r["graph"] != name] + [pair]
        print(both_line(pair), flush=True)
        save(document)


if __name__ == "__main__":
    main()
