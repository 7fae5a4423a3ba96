"""The strategies compared at equal communication: by formula, by simulation, and against vanilla.

    python benchmarks/strategies.py                 # all sections, about ten minutes
    python benchmarks/strategies.py --only errors   # one of them
    python benchmarks/strategies.py --only errors --graph er8   # some of its rows, the rest kept

Writes benchmarks/results/strategies.json and .txt. Consensus error is tr(X)/m in the steady state
under unit gradient noise, measured after mixing (docs/greedy.md). `python tools/figures.py` then
fills the page and draws its figure.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness
import numpy as np
from parts.one_peer import one_peer_exponential_error
from parts.supports import doubling_bound

import matcha
from matcha import Plan, Topology, families
from matcha.strategies import Greedy, Matcha

BUDGETS = (0.02, 0.1, 0.3, 0.5)
PAPER = ("er8", "geometric16-d5", "geometric16-d10", "geometric16-d13", "er16")
SLOWED = ("geometric16-d10", "er16", "torus:4x4", "geometric:64:0.2:1")
OTHERS = ("ring:16", "torus:4x4", "star:16", "barbell:16", "geometric:64:0.2:1")
# DESIGN.md section 5: greedy on the paper's graphs.
DESIGN = {
    0.1: dict(zip(PAPER, (2.49, 6.03, 1.13, 0.51, 1.37), strict=True)),
    0.3: dict(zip(PAPER, (0.55, 1.47, 0.18, 0.026, 0.23), strict=True)),
}
# Share of matcha's budget that greedy may need to reach vanilla's error: best alpha, paper's.
BARS = {
    "best": dict(zip(PAPER, (0.62, 0.45, 0.42, 0.32, 0.41), strict=True)),
    "paper": dict(zip(PAPER, (0.58, 0.43, 0.37, 0.22, 0.27), strict=True)),
}
SEEDS = 8
COLUMNS = 32


def topology_of(name: str) -> Topology:
    return families.paper(name) if name in PAPER else families.parse(name)


def chosen(names: Sequence[str], wanted: Sequence[str]) -> list[str]:
    return [name for name in names if not wanted or name in wanted]


def plans(name: str, budget: float) -> dict[str, Plan]:
    """The compared plans; the paper's graphs come with the authors' own matchings as well."""
    topology = topology_of(name)
    fair = Matcha(alpha="error")
    own = families.paper_matchings(name) if name in PAPER else None
    return {
        "matcha, paper's alpha": matcha.plan(topology, budget, "matcha", matchings=own),
        "matcha": matcha.plan(topology, budget, fair, matchings=own),
        "matcha, searched": matcha.plan(topology, budget, fair),
        "matcha, pairwise": matcha.plan(topology, budget, Matcha(mixing="pairwise"), matchings=own),
        "greedy": matcha.plan(topology, budget, "greedy"),
    }


# -- 1 and 3: the table, by formula and by simulation -------------------------------------------


def simulate(plan: Plan, seed: int) -> float:
    """Noisy consensus, run: the mean of (1/m) Σ ‖x_i − x̄‖² a column, after the beginning."""
    m = plan.num_workers
    burn = math.ceil(8 / max(1 - plan.rho, 1e-3)) + 50
    iterations = 4 * burn + 3000
    rng = np.random.default_rng(seed)
    known: dict[tuple[int, ...], Any] = {}
    x, total = np.zeros((m, COLUMNS)), 0.0
    for k, round_ in enumerate(plan.rounds(0, burn + iterations)):
        x += rng.standard_normal(x.shape)
        if round_:
            if round_.indices not in known:
                known[round_.indices] = round_.matrix(m)
            x = known[round_.indices] @ x
        if k >= burn:
            total += float(np.square(x - x.mean(axis=0)).sum())
    return total / (iterations * COLUMNS * m)


def reseeded(plan: Plan, seed: int) -> Plan:
    """The same plan with other coins; a cycle has none."""
    schedule = plan.schedule
    if hasattr(schedule, "seed"):
        schedule = dataclasses.replace(schedule, seed=seed)
    return dataclasses.replace(plan, schedule=schedule)


def simulated(plan: Plan) -> dict[str, float]:
    """Mean over seeds with its 95 % interval (Student's t)."""
    from scipy.stats import t

    values = [simulate(reseeded(plan, 1000 + s), s) for s in range(SEEDS)]
    half = float(t.ppf(0.975, SEEDS - 1) * np.std(values, ddof=1) / math.sqrt(SEEDS))
    return {"mean": float(np.mean(values)), "half_width": half}


def errors(graphs: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in chosen((*PAPER, *OTHERS), graphs):
        vanilla = matcha.plan(topology_of(name), 1.0, "vanilla").consensus_error
        for budget in BUDGETS:
            found = plans(name, budget)
            row: dict[str, Any] = {"graph": name, "budget": budget, "vanilla": vanilla}
            row["formula"] = {label: plan.consensus_error for label, plan in found.items()}
            row["simulation"] = {
                label: simulated(found[label]) for label in ("matcha", "matcha, pairwise", "greedy")
            }
            row["rho"] = {label: plan.rho for label, plan in found.items()}
            row["comm_time"] = {label: plan.expected_comm_time for label, plan in found.items()}
            row["weight"] = found["greedy"].alpha
            row["doubling_bound"] = doubling_bound(
                found["greedy"].num_workers, budget * found["greedy"].num_colors
            )
            row["design"] = DESIGN.get(budget, {}).get(name)
            rows.append(row)
            print(errors_line(row), flush=True)
    return rows


def errors_line(row: dict[str, Any]) -> str:
    f, s = row["formula"], row["simulation"]

    def interval(label: str) -> str:
        return f"{s[label]['mean']:.4g}±{s[label]['half_width']:.2g}"

    bar = "" if row["design"] is None else f"{row['design']:g}"
    return (
        f"{row['graph']:20s} {row['budget']:5.2f} {f['matcha']:9.4g} {interval('matcha'):>15s} "
        f"{f['matcha, searched']:9.4g} {f['matcha, pairwise']:9.4g} "
        f"{interval('matcha, pairwise'):>15s} "
        f"{f['greedy']:9.4g} {interval('greedy'):>17s} {bar:>6s} {row['doubling_bound']:9.4g} "
        f"{min(f['matcha'], f['matcha, searched']) / f['greedy']:6.2f}x"
    )


def errors_table(rows: list[dict[str, Any]]) -> str:
    agree = [
        abs(row["formula"][label] - s["mean"]) <= s["half_width"]
        for row in rows
        for label, s in row["simulation"].items()
    ]
    worst = max(
        abs(row["formula"][label] / s["mean"] - 1)
        for row in rows
        for label, s in row["simulation"].items()
    )
    head = (
        f"{'graph':20s} {'C_b':>5s} {'matcha':>9s} {'simulated':>15s} {'searched':>9s} "
        f"{'pairwise':>9s} {'simulated':>15s} {'greedy':>9s} {'simulated':>17s} {'DESIGN':>6s} "
        f"{'no less':>9s} {'gain':>7s}"
    )
    never = all(
        row["formula"]["greedy"]
        <= min(row["formula"]["matcha"], row["formula"]["matcha, searched"])
        for row in rows
    )
    bars = all(row["design"] is None or row["formula"]["greedy"] <= row["design"] for row in rows)
    return "\n".join(
        [
            "Steady-state consensus error at equal communication time (lower is better).",
            "matcha: authors' matchings and its best alpha; searched: ours; pairwise: matcha with",
            "pairwise mixing; no less: what no schedule can go below; ±: 95 % interval.",
            head,
            *map(errors_line, rows),
            f"greedy at most DESIGN.md's value: {bars}; never worse than matcha: {never}",
            f"formula inside the 95 % interval: {sum(agree)} of {len(agree)} "
            f"({100 * sum(agree) / len(agree):.0f} %); largest difference {100 * worst:.1f} %",
        ]
    )


# -- 2: the budget that reaches vanilla's error -------------------------------------------------


def least_budget(error: Callable[[float], float], goal: float, low: float, steps: int) -> float:
    """The smallest budget found at which the error is at most the goal, by bisection."""
    high = low
    while error(high) > goal:
        low, high = high, min(1.0, 1.3 * high)
        if low >= 1.0:
            return math.nan
    if high == low:
        return high
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if error(middle) <= goal else (middle, high)
    return high


def crossings(graphs: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in chosen(PAPER, graphs):
        topology, own = families.paper(name), families.paper_matchings(name)
        goal = matcha.plan(topology, 1.0, "vanilla").consensus_error

        def paper(budget: float, how: Any, topology: Topology = topology, own: Any = own) -> float:
            return matcha.plan(topology, budget, how, matchings=own).consensus_error or 0.0

        def greedy(budget: float, topology: Topology = topology) -> Plan:
            return matcha.plan(topology, budget, Greedy(effort="high"))

        row: dict[str, Any] = {
            "graph": name,
            "goal": goal,
            "matcha_best": least_budget(
                lambda b, f=paper: f(b, Matcha(alpha="error")), goal, 0.2, 9
            ),
            "matcha_paper": least_budget(lambda b, f=paper: f(b, "matcha"), goal, 0.2, 9),
            "greedy": least_budget(lambda b: greedy(b).consensus_error or 0.0, goal, 0.05, 6),
        }
        m, colors = topology.num_workers, len(own)
        row["no_less"] = least_budget(
            lambda b, m=m, c=colors: doubling_bound(m, b * c), goal, 0.01, 20
        )
        for kind in ("best", "paper"):
            row[f"share_{kind}"] = row["greedy"] / row[f"matcha_{kind}"]
            row[f"bar_{kind}"] = BARS[kind][name]
            row[f"possible_{kind}"] = row["no_less"] / row[f"matcha_{kind}"]
        rows.append(row)
        print(crossings_line(row), flush=True)
    return rows


def crossings_line(row: dict[str, Any]) -> str:
    return (
        f"{row['graph']:18s} {row['goal']:8.4g} {row['matcha_best']:8.3f} "
        f"{row['matcha_paper']:8.3f} {row['greedy']:8.3f} "
        f"{row['share_best']:10.3f} {row['bar_best']:5.2f} {row['possible_best']:9.3f} "
        f"{row['share_paper']:11.3f} {row['bar_paper']:5.2f} {row['possible_paper']:9.3f}"
    )


def crossings_table(rows: list[dict[str, Any]]) -> str:
    met = all(row[f"share_{k}"] <= row[f"bar_{k}"] for row in rows for k in ("best", "paper"))
    return "\n".join(
        [
            "Budget C_b that reaches vanilla's consensus error, and greedy's share of matcha's.",
            "possible: the share below which no schedule whatsoever can go (doubling bound).",
            f"{'graph':18s} {'vanilla':>8s} {'matcha':>8s} {'paper a':>8s} {'greedy':>8s} "
            f"{'share best':>10s} {'bar':>5s} {'possible':>9s} {'share paper':>11s} {'bar':>5s} "
            f"{'possible':>9s}",
            *map(crossings_line, rows),
            f"all bars met: {met}",
        ]
    )


# -- links that differ, and links chosen freely -------------------------------------------------


def slow_links(graphs: Sequence[str]) -> list[dict[str, Any]]:
    """Three workers behind links that are ten times slower; equal seconds per iteration."""
    rows = []
    for name in chosen(SLOWED, graphs):
        plain = topology_of(name)
        slow = set(np.random.default_rng(5).choice(plain.num_workers, 3, replace=False).tolist())
        topology = plain.with_link_times([1.0 if slow & {i, j} else 0.1 for i, j in plain.links])
        for budget in (0.1, 0.3):
            ours = matcha.plan(topology, budget, "greedy")
            paper = matcha.plan(topology, budget, Matcha(alpha="error"))
            # Greed that does not know the times, held to the same seconds by a smaller budget.
            blind_budget = budget
            for _ in range(12):
                blind = matcha.plan(plain, blind_budget, Greedy(effort="none"))
                length = len(blind.schedule.cycle)  # type: ignore[union-attr]
                seconds = sum(ours.timing.round_time(r.matchings) for r in blind.rounds(0, length))
                if seconds / length <= ours.expected_comm_time * 1.01:
                    break
                blind_budget *= min(0.97, ours.expected_comm_time * length / seconds)
            rows.append(
                {
                    "graph": name,
                    "budget": budget,
                    "seconds": {
                        "matcha": paper.expected_comm_time,
                        "greedy": ours.expected_comm_time,
                        "blind": seconds / length,
                    },
                    "error": {
                        "matcha": paper.consensus_error,
                        "greedy": ours.consensus_error,
                        "blind": blind.consensus_error,
                    },
                }
            )
            print(slow_line(rows[-1]), flush=True)
    return rows


def slow_line(row: dict[str, Any]) -> str:
    e, s = row["error"], row["seconds"]
    return (
        f"{row['graph']:20s} {row['budget']:5.2f} {s['matcha']:8.3f} {e['matcha']:9.4g} "
        f"{s['blind']:8.3f} {e['blind']:9.4g} {s['greedy']:8.3f} {e['greedy']:9.4g}"
    )


def slow_table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        [
            "Links of three workers ten times slower: seconds per iteration and consensus error.",
            "blind: greedy that does not know the times (effort none), at the same seconds.",
            f"{'graph':20s} {'C_b':>5s} {'seconds':>8s} {'matcha':>9s} {'seconds':>8s} "
            f"{'blind':>9s} {'seconds':>8s} {'greedy':>9s}",
            *map(slow_line, rows),
        ]
    )


def free_links(_: Sequence[str]) -> list[dict[str, Any]]:
    """Complete graphs: greedy against sequences made for them."""
    rows = []
    for m in (8, 12, 16, 27):
        for units in (0.5, 1.0, 2.0, 3.0):
            topology = families.complete(m)
            colors = m - 1 if m % 2 == 0 else m
            budget = units / colors
            greedy = matcha.plan(topology, budget, "greedy")
            finite = "hypercube" if m in (8, 16) else "base"
            rows.append(
                {
                    "workers": m,
                    "units": units,
                    "greedy": greedy.consensus_error,
                    "plain": matcha.plan(topology, budget, Greedy(effort="none")).consensus_error,
                    "one_peer": one_peer_exponential_error(m, units),
                    "finite_time": matcha.plan(topology, budget, finite).consensus_error,
                    "ceca": matcha.plan(topology, budget, "ceca").consensus_error,
                    "one_way": matcha.plan(topology, budget, Greedy(mixing="push")).consensus_error,
                    "no_less": doubling_bound(m, units),
                }
            )
            print(free_line(rows[-1]), flush=True)
    return rows


FREE = ("greedy", "plain", "one_way", "one_peer", "finite_time", "ceca", "no_less")


def free_line(row: dict[str, Any]) -> str:
    errors = {k: "–" if row.get(k) is None else f"{row[k]:.4g}" for k in FREE}
    return f"{row['workers']:7d} {row['units']:5.1f} " + " ".join(
        f"{error:>{11 if k == 'finite_time' else 9}s}" for k, error in errors.items()
    )


def free_table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(
        [
            "Complete graphs, equal units per iteration: consensus error.",
            "plain: greedy, effort none; one-way: greedy over one-way rounds; one-peer: directed",
            "exponential graph, one unit a hop; finite-time: hypercube (8, 16) or base; ceca: all",
            "its hops at once; no less: what no schedule can go below.",
            f"{'workers':>7s} {'units':>5s} {'greedy':>9s} {'plain':>9s} {'one-way':>9s} "
            f"{'one-peer':>9s} {'finite-time':>11s} {'ceca':>9s} {'no less':>9s}",
            *map(free_line, rows),
        ]
    )


# -- command line -------------------------------------------------------------------------------


Section = tuple[Callable[[Sequence[str]], list[dict[str, Any]]], Callable[[Any], str]]
SECTIONS: dict[str, Section] = {
    "errors": (errors, errors_table),
    "crossings": (crossings, crossings_table),
    "slow_links": (slow_links, slow_table),
    "free_links": (free_links, free_table),
}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The old rows, the new ones in the places of those that they are measured again."""
    fresh = {(row["graph"], row.get("budget")): row for row in new}
    kept = [fresh.pop((row["graph"], row.get("budget")), row) for row in old]
    return [*kept, *fresh.values()]


def describe(document: dict[str, Any]) -> str:
    """A table per section."""
    return "\n\n".join(SECTIONS[name][1](document[name]) for name in SECTIONS if name in document)


def main() -> None:
    parser = harness.parser(__doc__, output="strategies")
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--graph", action="append", default=[], help="only its rows")
    arguments = parser.parse_args()
    document: dict[str, Any] = harness.earlier(arguments.output) or {}
    for name in arguments.only or SECTIONS:
        begun = time.perf_counter()
        rows = SECTIONS[name][0](arguments.graph)
        if arguments.graph:
            rows = merged(document.get(name, []), rows)
        else:
            document.setdefault("seconds", {})[name] = round(time.perf_counter() - begun, 1)
        document[name] = rows
        harness.write(arguments.output, document)
    harness.finish(arguments.output, document, describe(document))


if __name__ == "__main__":
    main()
