"""The planner against a general solver: probabilities (eq. 5) and mixing weight (eq. 9).

    python benchmarks/planner.py            # about three minutes; writes benchmarks/results/
    python benchmarks/planner.py --quick    # a smoke test: 64 and 256 workers, nothing written

Erdős–Rényi and random geometric graphs of average degree 8 at C_b = 0.5. At that density graphs
of thousands of workers have stray components; each is joined to the largest one by a link (to a
random worker, or to the nearest). Every row is measured in a process of its own, with one BLAS
thread for all. Times are wall-clock seconds of the call: ours for `optimal_probabilities`
and `optimal_contraction` (up to 256 workers the median of five), the solvers' for `Problem.solve`
of cvxpy (its compilation is milliseconds here). CPU seconds are recorded as well: they are what
to compare when the machine was shared. The solvers get both problems in a form that suits them:
the vector of ones lifted out of the way in eq. 5, the Laplacian scaled to norm 1 in eq. 9
(unscaled, CLARABEL fails on the geometric graph).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

BUDGET = 0.5
DEGREE = 8
SIZES = (64, 256, 1024, 4096, 16384)
SOLVERS = ("CLARABEL", "SCS")
BARS = {1024: (1e-4, 10.0, None), 4096: (1e-3, 20.0, 600.0), 16384: (1e-2, None, None)}
"""Largest gap, seconds and MB for each size."""
SPEED_UP = 50.0


# -- graphs -------------------------------------------------------------------------------------


def erdos_renyi(num_workers: int, seed: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, num_workers, (rng.poisson(DEGREE * num_workers / 2), 2))
    ends = np.sort(ends[ends[:, 0] != ends[:, 1]], axis=1)
    links = np.unique(ends, axis=0)
    return joined(links, num_workers, lambda inside, _: (inside[0], 0), rng)


def geometric(num_workers: int, seed: int) -> list[tuple[int, int]]:
    from scipy.spatial import cKDTree

    rng = np.random.default_rng(seed)
    points = rng.random((num_workers, 2))
    radius = (DEGREE / (np.pi * num_workers)) ** 0.5
    links = cKDTree(points).query_pairs(radius, output_type="ndarray")

    def nearest(inside: Any, outside: Any) -> tuple[int, int]:
        distances, places = cKDTree(points[outside]).query(points[inside])
        return inside[distances.argmin()], places[distances.argmin()]

    return joined(links, num_workers, nearest, rng)


def joined(links: Any, num_workers: int, choose: Any, rng: Any) -> list[tuple[int, int]]:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = coo_array((np.ones(len(links)), links.T), shape=(num_workers, num_workers))
    number, part = connected_components(graph, directed=False)
    largest = np.bincount(part).argmax()
    found = [(int(min(i, j)), int(max(i, j))) for i, j in links]
    for stray in set(range(number)) - {int(largest)}:
        outside = rng.permutation(np.flatnonzero(part == largest))
        i, place = choose(np.flatnonzero(part == stray), outside)
        j = outside[place]
        found.append((int(min(i, j)), int(max(i, j))))
    return sorted(found)


FAMILIES = {"erdos-renyi": erdos_renyi, "geometric": geometric}


# -- one row, in a process of its own -----------------------------------------------------------


def ours(family: str, num_workers: int) -> dict[str, Any]:
    from matcha import Topology
    from matcha.activation import optimal_probabilities
    from matcha.matchings import decompose
    from matcha.mixing import moments, optimal_contraction

    topology = Topology.from_links(FAMILIES[family](num_workers, seed=1), num_workers)
    warm = Topology.from_links(FAMILIES[family](32, seed=2), 32)  # pay for the imports first
    optimal_contraction(moments(decompose(warm), [0.5] * len(decompose(warm)), 32))
    optimal_probabilities(decompose(warm), 32, 1.0)

    runs = []
    for _ in range(5 if num_workers <= 256 else 1):
        began, cpu_began = time.perf_counter(), time.process_time()
        matchings = decompose(topology)
        colored, cpu_colored = time.perf_counter(), time.process_time()
        activation = optimal_probabilities(matchings, num_workers, BUDGET * len(matchings))
        solved = time.perf_counter()
        best = optimal_contraction(moments(matchings, activation.probabilities, num_workers))
        done, cpu_done = time.perf_counter(), time.process_time()
        runs.append(
            {
                "decomposition_s": colored - began,
                "eq5_s": solved - colored,
                "eq9_s": done - solved,
                "total_s": done - colored,
                "cpu_s": cpu_done - cpu_colored,
                "whole_cpu_s": cpu_done - cpu_began,
            }
        )
    return {
        **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
        "links": len(topology.links),
        "matchings": len(matchings),
        "lambda2": activation.certificate.value,
        "gap": activation.certificate.gap,
        "iterations": activation.certificate.iterations,
        "rho": best.rho,
        "alpha": best.alpha,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def general(solver: str, family: str, num_workers: int) -> dict[str, Any]:
    """The same two problems by cvxpy; eq. 9 with our probabilities, so that both solve the same."""
    import warnings

    import cvxpy as cp

    from matcha import Topology
    from matcha._numerics.spectra import laplacian
    from matcha.activation import optimal_probabilities
    from matcha.matchings import decompose

    warnings.simplefilter("ignore")  # SCS says that it is inaccurate; the table shows it
    m = num_workers
    topology = Topology.from_links(FAMILIES[family](m, seed=1), m)
    matchings = decompose(topology)
    Ls = [laplacian(matching, m).toarray() for matching in matchings]
    eye, ones = np.eye(m), np.ones((m, m))

    p, t = cp.Variable(len(Ls)), cp.Variable()
    mean = sum(p[j] * L for j, L in enumerate(Ls))
    bounds = [p >= 0, p <= 1, cp.sum(p) <= BUDGET * len(Ls)]
    eq5 = cp.Problem(cp.Maximize(t), [mean + ones >> t * eye, *bounds])
    began, cpu = time.perf_counter(), -time.process_time()
    eq5.solve(solver=solver)
    eq5_s = time.perf_counter() - began
    cpu += time.process_time()

    q = optimal_probabilities(matchings, m, BUDGET * len(matchings)).probabilities
    L_mean = sum(x * L for x, L in zip(q, Ls, strict=True))
    L_noise = sum(x * (1 - x) * L for x, L in zip(q, Ls, strict=True))
    scale = np.linalg.norm(L_mean, 2)
    first, second = L_mean / scale, (L_mean @ L_mean + 2 * L_noise) / scale**2
    rho, alpha, beta = cp.Variable(), cp.Variable(), cp.Variable()
    contracted = eye - 2 * alpha * first + beta * second - ones / m << rho * eye
    eq9 = cp.Problem(cp.Minimize(rho), [cp.square(alpha) <= beta, contracted])
    began, cpu = time.perf_counter(), cpu - time.process_time()
    eq9.solve(solver=solver)
    eq9_s = time.perf_counter() - began
    cpu += time.process_time()
    return {
        "links": len(topology.links),
        "matchings": len(matchings),
        "eq5_s": eq5_s,
        "eq9_s": eq9_s,
        "total_s": eq5_s + eq9_s,
        "cpu_s": cpu,
        "lambda2": float(t.value),
        "rho": float(rho.value),
        "alpha": float(alpha.value) / float(scale),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


# -- the table ----------------------------------------------------------------------------------


def measured(who: str, family: str, num_workers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", who, family, str(num_workers)]
    source = str(Path(__file__).parent.parent / "src")
    paths = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return {"who": who, "family": family, "workers": num_workers, **json.loads(done.stdout)}


def line(row: dict[str, Any]) -> str:
    gap = f"{row['gap']:.1e}" if "gap" in row else "–"
    colored = f"{row['decomposition_s']:.3f}" if "decomposition_s" in row else "–"
    return (
        f"{row['family']:<12} {row['workers']:>7,} {row['links']:>7,} {row['matchings']:>4} "
        f"{row['who']:<9} {colored:>8} {row['eq5_s']:>8.3f} {row['eq9_s']:>8.3f} "
        f"{row['lambda2']:>11.7f} {gap:>8} {row['rho']:>10.7f} {row['peak_mb']:>7.0f}"
    )


HEADER = (
    f"{'graph':<12} {'workers':>7} {'links':>7} {'M':>4} {'by':<9} {'colour s':>8} "
    f"{'eq.5 s':>8} {'eq.9 s':>8} {'lambda2':>11} {'gap':>8} {'rho':>10} {'peak MB':>7}"
)


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Whether each bar is met, in words; the last line says how time grows."""
    said = []
    found = {(row["who"], row["family"], row["workers"]): row for row in rows}
    for family in FAMILIES:
        for solver in SOLVERS:
            theirs, own = found[(solver, family, 64)], found[("matcha", family, 64)]
            ratio = theirs["total_s"] / own["total_s"]
            bar = f" (bar {SPEED_UP:g}: {met(ratio >= SPEED_UP)})" if solver == "CLARABEL" else ""
            off = abs(own["lambda2"] / theirs["lambda2"] - 1)
            said.append(
                f"64 workers, {family}: {ratio:.0f} times faster than {solver}{bar}, "
                f"{theirs['cpu_s'] / own['cpu_s']:.0f} times in CPU seconds; "
                f"lambda2 agrees to {off:.0e}, rho to {abs(own['rho'] - theirs['rho']):.0e}"
            )
    for (who, family, workers), row in found.items():
        if who != "matcha" or workers not in BARS:
            continue
        gap, seconds, megabytes = BARS[workers]
        parts = [f"gap {row['gap']:.1e} (bar {gap:g}: {met(row['gap'] <= gap)})"]
        total = row["decomposition_s"] + row["total_s"]
        bar = "" if seconds is None else f" (bar {seconds:g}: {met(total < seconds)})"
        parts.append(
            f"{total:.2f} s with the decomposition{bar}, {row['whole_cpu_s']:.2f} s of them CPU"
        )
        bar = (
            "" if megabytes is None else f" (bar {megabytes:g}: {met(row['peak_mb'] < megabytes)})"
        )
        parts.append(f"{row['peak_mb']:.0f} MB{bar}")
        said.append(f"{workers:,} workers, {family}: " + ", ".join(parts))
    growth = []
    for family in FAMILIES:
        own = [row for row in rows if row["who"] == "matcha" and row["family"] == family]
        sizes = [row["workers"] for row in own]
        times = [row["whole_cpu_s"] for row in own]
        power = np.polyfit(np.log(sizes), np.log(times), 1)[0]
        growth.append(f"workers^{power:.2f} on {family}")
    span = f"{min(sizes):,} to {max(sizes):,}"
    said.append(f"growth from {span} workers, whole plan: CPU time ~ " + ", ".join(growth))
    return said


def met(condition: bool) -> str:
    return "met" if condition else "MISSED"


def describe(document: dict[str, Any]) -> str:
    """A line per size and solver, and whether the bars are met."""
    lines = [f"machine: {document['machine']}", "", HEADER, *map(line, document["rows"])]
    return "\n".join([*lines, "", *verdicts(document["rows"])])


def main() -> None:
    parser = harness.parser(__doc__, output="planner")
    parser.add_argument("--quick", action="store_true", help="64 and 256 workers, nothing written")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        who, family, workers = options.row
        size = int(workers)
        print(json.dumps(ours(family, size) if who == "matcha" else general(who, family, size)))
        return
    rows = [
        measured(who, family, workers)
        for family in FAMILIES
        for workers in (SIZES[:2] if options.quick else SIZES)
        for who in ("matcha", *(SOLVERS if workers == 64 else ()))
    ]
    where = f"{harness.machine()}, Python {platform.python_version()}"
    document = {"machine": where, "budget": BUDGET, "rows": rows, "verdicts": verdicts(rows)}
    harness.finish(None if options.quick else options.output, document, describe(document))


if __name__ == "__main__":
    main()
