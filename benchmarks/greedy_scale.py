"""How long greedy planning takes as networks grow, and what the sketch costs.

    python benchmarks/greedy_scale.py           # about ten minutes on a quiet machine
    python benchmarks/greedy_scale.py --sizes 1024 10000 --graphs --families   # only these

Each network is planned in a process of its own (wall and processor seconds, peak memory). Updates
benchmarks/results/greedy_scale.json and .txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import time
from fractions import Fraction
from typing import Any

from harness import Column, earlier, parser, script, table, write

BUDGET = 0.1
SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 10_000)
BOTH = ("geometric:96:0.17:1", "torus:10x10", "geometric:256:0.1:1", "erdos-renyi:128:0.06:1")
FAMILIES = (
    "geometric:1024:0.0519:1",
    "erdos-renyi:1024:0.0078",
    "torus:32x32",
    "hypercube:10",
    "path:1024",
    "complete:64",
    "complete:127",
    "complete:128",
    "torus:100x100",
    "path:100000",
)


def radius(num_workers: int) -> float:
    """About eight links per worker, and enough to be connected."""
    return math.sqrt(max(8.0, 1.25 * math.log(num_workers)) / (math.pi * num_workers))


def plan_one(name: str) -> None:
    """Plan in this process and print what it took as JSON."""
    import matcha
    from matcha import families

    topology = families.parse(name)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = matcha.plan(topology, BUDGET, "greedy")
    row = {
        "graph": name,
        "workers": topology.num_workers,
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
    network = candidates.SearchNetwork(
        num_workers=topology.num_workers,
        links=topology.link_array,
        times=(Fraction(1),) * len(topology.links),
        rate=Fraction(repr(BUDGET)) * exact.num_colors,
    )
    found = sketch.sketched_cycle(network)[0]
    return {
        "graph": name,
        "exact": exact.consensus_error,
        "sketched": found.with_error().error,
        "estimated": found.error,
    }


SIZE_COLUMNS = [
    Column("workers", "workers", "d"),
    Column("links", "links", "d"),
    Column("wall s", "wall_seconds", ".1f"),
    Column("cpu s", "cpu_seconds", ".1f"),
    Column("load", "load", ".1f"),
    Column("peak MB", "peak_mb", ".0f"),
    Column("error", "consensus_error", ".4g"),
    Column("rho", "rho", ".5f"),
    Column("weight", "weight", ".3f"),
    Column("search", lambda row: "sketch" if row["sketched"] else "exact"),
    Column("0.1 cpu s", lambda row: row["before"].get("cpu_seconds"), ".1f"),
    Column("its error", lambda row: row["before"].get("consensus_error"), ".4g"),
]
FAMILY_COLUMNS = [Column("graph", "graph"), *SIZE_COLUMNS[:-2]]
BOTH_COLUMNS = [
    Column("graph", "graph"),
    Column("exact", "exact", ".4g"),
    Column("sketched", "sketched", ".4g"),
    Column("estimate", "estimated", ".4g"),
    Column("cost", lambda row: row["sketched"] / row["exact"] - 1, ".1%"),
]


def describe(document: dict[str, Any]) -> str:
    """Both tables; beside today's what 0.1 took, with double precision and thirteen full sorts."""
    before = {row["workers"]: row for row in document.get("before", [])}
    sizes = [row | {"before": before.get(row["workers"], {})} for row in document["sizes"]]
    families = document.get("families", [])
    others = ["Other families.", table(FAMILY_COLUMNS, families), ""] if families else []
    return "\n".join(
        [
            f"Greedy plans of random geometric graphs at C_b {BUDGET:g}; load: the machine's load",
            "average meanwhile, without which wall is about cpu.",
            table(SIZE_COLUMNS, sizes),
            "",
            *others,
            "What the sketch costs where both searches can run: consensus error.",
            table(BOTH_COLUMNS, document["both"]),
        ]
    )


def main() -> None:
    options = parser(__doc__, output="greedy_scale")
    options.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    options.add_argument("--graphs", nargs="*", default=BOTH, help="what both searches plan")
    options.add_argument("--families", nargs="*", default=FAMILIES, help="further networks")
    options.add_argument("--one", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.one:
        plan_one(args.one)
        return
    document = earlier(args.output) or {"budget": BUDGET, "sizes": [], "both": []}
    document.setdefault("families", [])
    geometric = [f"geometric:{size}:{round(radius(size), 4)}:1" for size in args.sizes]
    for part, names in (("sizes", geometric), ("families", args.families)):
        for name in names:
            done = subprocess.run(script("--one", name), check=True, capture_output=True, text=True)
            row = json.loads(done.stdout)
            same = "workers" if part == "sizes" else "graph"
            rows = [*(old for old in document[part] if old[same] != row[same]), row]
            document[part] = sorted(rows, key=lambda r: (r["workers"], r.get("graph", "")))
            write(args.output, document, describe(document))
    for name in args.graphs:
        rows = [row for row in document["both"] if row["graph"] != name]
        document["both"] = [*rows, both(name)]
        write(args.output, document, describe(document))
    print(describe(document))


if __name__ == "__main__":
    main()
