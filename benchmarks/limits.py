"""How close schedules come to what no schedule can beat, and what one-way rounds add.

    python benchmarks/limits.py                  # half an hour; four minutes on a quiet machine
    python benchmarks/limits.py --only bound     # one of its sections
    python benchmarks/limits.py --only bound --graph er8    # some of its rows again, the rest kept

bound: units of communication an iteration with which greedy keeps vanilla's consensus error, over
those below which no schedule can (the doubling bound, and the graph's own). directed: complete
graphs at one unit per iteration, one-way rounds beside matchings. digits: the average model's test
accuracy on scikit-learn's digits where three links in ten carry one way, beside the same graph with
all links both ways, at equal time. Writes benchmarks/results/limits.*
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
from parts.one_peer import two_model_ceca_error
from parts.supports import doubling_bound, searched_lengths, sharpen

import matcha
from matcha import Topology, families, theory
from matcha.matchings import decompose
from matcha.strategies import Greedy, strategy_with

PAPER = ("er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16")
OTHERS = (
    "ring:16",
    "torus:4x4",
    "star:16",
    "barbell:16",
    "path:12",
    "hypercube:4",
    "erdos-renyi:16:0.3:1",
    "geometric:12:0.5:1",
    "erdos-renyi:12:0.4:1",
)
# Units per iteration that 0.1's greedy needed (strategies.json): budget times matchings.
BEFORE = dict(zip(PAPER, (1.32, 0.84, 1.17, 2.0, 1.53), strict=True))
SIZES = (12, 20, 27, 48)
SEEDS = 5
SEARCH = 60.0
"""Seconds for the sharpest bound of a graph."""


def topology_of(name: str) -> Topology:
    return families.paper(name) if name in PAPER else families.parse(name)


def least(error: Callable[[float], float], goal: float, low: float, steps: int) -> float:
    """The least pace at which an error that falls with it is at most the goal."""
    high = low
    while error(high) > goal:
        low, high = high, 1.3 * high
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if error(middle) <= goal else (middle, high)
    return high


def bound(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the graphs named, or of all; with --keep, bounds again and schedules as they are.

    An effort above the default is tried beside what is known: the better of both stays.
    """
    known = (harness.earlier(options.output) or {}).get("bound", [])
    rows = {row["graph"]: row for row in known}
    for name in options.graph or (*PAPER, *OTHERS):
        old = rows.get(name, {})
        row = bounds_of(name) | {"before": BEFORE.get(name)}
        if not options.keep:
            row |= units_of(name, row["goal"], row["quick"], options.effort)
            if options.effort == "high" and "push" in old:
                row |= {how: min(row[how], old[how]) for how in ("pairwise", "push")}
        rows[name] = old | row
        print(bound_line(rows[name]), flush=True)
    return [rows[name] for name in (*PAPER, *OTHERS) if name in rows]


def bounds_of(name: str) -> dict[str, Any]:
    """Units per iteration below which no schedule keeps vanilla's consensus error."""
    topology = topology_of(name)
    goal = matcha.plan(topology, 1.0, "vanilla").consensus_error or 0.0
    m, graph = topology.num_workers, partial(theory.graph_bound, topology)
    searched = searched_lengths(topology, seconds=SEARCH)
    return {
        "graph": name,
        "goal": goal,
        "doubling": least(lambda c: doubling_bound(m, c), goal, 0.01, 20),
        "quick": least(graph, goal, 0.01, 20),
        "bound": least(partial(graph, sharpen=partial(sharpen, searched=searched)), goal, 0.01, 20),
        "one_way_bound": least(partial(graph, one_way=True), goal, 0.01, 20),
    }


def units_of(name: str, goal: float, low: float, effort: Any) -> dict[str, Any]:
    """Units per iteration with which greedy keeps it, by matchings and by one-way rounds."""
    topology, begun = topology_of(name), time.process_time()
    colors = len(decompose(topology))
    found: dict[str, Any] = {}
    for mixing in ("pairwise", "push"):

        def error(pace: float, how: Any = mixing) -> float:
            share = min(1.0, pace / colors)
            made = matcha.plan(topology, share, Greedy(mixing=how, effort=effort))
            return made.consensus_error or 0.0

        units = least(error, goal, 1.02 * low, 4)
        found[mixing] = min(units, found.get("pairwise", math.inf))
    return found | {"seconds": time.process_time() - begun}


def bound_line(row: dict[str, Any]) -> str:
    before = "–" if row["before"] is None else f"{row['before'] / row['doubling']:.2f}"
    return (
        f"{row['graph']:22s} {row['goal']:8.4g} {row['doubling']:9.3f} {row['quick']:9.3f} "
        f"{row['bound']:9.3f} {row['pairwise']:9.3f} {row['push']:9.3f} {before:>9s} "
        f"{row['pairwise'] / row['quick']:9.2f} {row['pairwise'] / row['bound']:9.2f} "
        f"{row['push'] / row['one_way_bound']:9.2f} {row['seconds']:8.1f}"
    )


def bound_table(rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if "quick" in row]
    close = sum(row["pairwise"] <= 1.25 * row["bound"] for row in rows)
    return "\n".join(
        [
            "Units per iteration that keep vanilla's consensus error, and below which no schedule",
            "of matchings can: by doubling, by the graph, and by search (a minute); greedy over",
            "matchings and over one-way rounds; ratios: 0.1's to doubling, matchings to graph and",
            "to search, one-way to the graph's bound on one-way rounds.",
            f"{'graph':22s} {'goal':>8s} {'doubling':>9s} {'graph':>9s} {'search':>9s} "
            f"{'matchings':>9s} {'one-way':>9s} {'0.1':>9s} {'/graph':>9s} {'/search':>9s} "
            f"{'one-way/':>9s} {'cpu s':>8s}",
            *map(bound_line, rows),
            f"matchings within 1.25 of what search says: {close} of {len(rows)}",
        ]
    )


def directed(_: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for m in SIZES:
        topology = families.complete(m)
        budget = 1 / len(decompose(topology))
        begun = time.process_time()
        asked = {
            "greedy": ("greedy", "pairwise"),
            "greedy, push": ("greedy", "push"),
            "one-peer": ("one-peer", None),
            "base 2": ("base", "pairwise"),
            "base": ("base", None),
            "ceca": ("ceca", None),
        }
        row: dict[str, Any] = {"workers": m, "no_less": doubling_bound(m, 1.0)}
        row["error"] = {
            label: matcha.plan(topology, budget, strategy_with(name, mixing=mixing)).consensus_error  # type: ignore[arg-type]
            for label, (name, mixing) in asked.items()
        }
        row["error"]["ceca, 2 models"] = two_model_ceca_error(m)
        row["seconds"] = time.process_time() - begun
        rows.append(row)
        print(directed_line(row), flush=True)
    return rows


def directed_line(row: dict[str, Any]) -> str:
    errors = " ".join(f"{value:14.5g}" for value in row["error"].values())
    return f"{row['workers']:7d} {errors} {row['no_less']:9.5g} {row['seconds']:8.1f}"


def directed_table(rows: list[dict[str, Any]]) -> str:
    best = all(
        row["error"]["greedy, push"] <= 1.02 * min(row["error"].values())
        and row["error"]["greedy, push"] <= row["error"]["one-peer"]
        for row in rows
    )
    return "\n".join(
        [
            "Complete graphs, one unit per iteration: consensus error.",
            "ceca, 2 models: gradients between its hops, for which a worker keeps two models.",
            f"{'workers':>7s} {' '.join(f'{label:>14s}' for label in rows[0]['error'])} "
            f"{'no less':>9s} {'cpu s':>8s}",
            *map(directed_line, rows),
            f"greedy over one-way rounds at most one-peer's and 1.02 of the best: {best}",
        ]
    )


def digits(_: argparse.Namespace) -> list[dict[str, Any]]:
    from matcha.simulation import Settings, Simulation
    from matcha.zoo.recipes import Choices, recipe

    rows = []
    for name in ("er8", "er16"):
        both = families.paper(name)
        row: dict[str, Any] = {"graph": name, "accuracy": {"both ways": [], "one way": []}}
        for seed in range(SEEDS):
            graphs = {"both ways": both, "one way": families.one_way(both, 0.3, seed)}
            for label, graph in graphs.items():
                plan = matcha.plan(graph, 1 / len(decompose(graph)), Greedy(effort="none"))
                row.setdefault("error", {})[label] = plan.consensus_error
                task = recipe("digits").task(Choices(num_workers=both.num_workers, seed=seed))
                *_, last = Simulation(task, plan, Settings(epochs=12, evaluate_every=12))
                row["accuracy"][label].append(last.test_accuracy)
        rows.append(row)
        print(digits_line(row), flush=True)
    return rows


def digits_line(row: dict[str, Any]) -> str:
    import numpy as np

    means = [100 * float(np.mean(row["accuracy"][label])) for label in ("both ways", "one way")]
    spread = [100 * float(np.std(row["accuracy"][label])) for label in ("both ways", "one way")]
    return (
        f"{row['graph']:18s} {len(row['accuracy']['one way']):5d} "
        f"{means[0]:9.2f} ± {spread[0]:4.2f} {means[1]:9.2f} ± {spread[1]:4.2f} "
        f"{means[1] - means[0]:+10.2f} {row['error']['both ways']:9.4f} "
        f"{row['error']['one way']:9.4f}"
    )


def digits_table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        [
            "Digits, one unit of communication per iteration: test accuracy in %.",
            f"{'graph':18s} {'seeds':>5s} {'both ways':>16s} {'30 % one way':>16s} "
            f"{'difference':>10s} {'error':>9s} {'one way':>9s}",
            *map(digits_line, rows),
        ]
    )


Section = tuple[Callable[[argparse.Namespace], list[dict[str, Any]]], Callable[[Any], str]]
SECTIONS: dict[str, Section] = {
    "bound": (bound, bound_table),
    "directed": (directed, directed_table),
    "digits": (digits, digits_table),
}


def describe(document: dict[str, Any]) -> str:
    """A table per section."""
    return "\n\n".join(SECTIONS[name][1](document[name]) for name in SECTIONS if name in document)


def main() -> None:
    parser = harness.parser(__doc__, output="limits")
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--graph", action="append", default=[], help="only its row of the bounds")
    parser.add_argument("--keep", action="store_true", help="bounds again, schedules as they are")
    parser.add_argument("--effort", default="default", help="of greedy's search")
    arguments = parser.parse_args()
    document: dict[str, Any] = harness.earlier(arguments.output) or {}
    for name in arguments.only or SECTIONS:
        document[name] = SECTIONS[name][0](arguments)
        harness.write(arguments.output, document)
    harness.finish(arguments.output, document, describe(document))


if __name__ == "__main__":
    main()
