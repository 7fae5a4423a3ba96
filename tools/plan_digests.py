"""Plans of many cases, to compare two versions of the planner bit for bit.

`plan_digests.py FILE` plans every case and writes what it found as JSON; `plan_digests.py A B`
compares two such files and ends with 1 where they differ. Run it once in each version's worktree.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matcha
from matcha import families, theory
from matcha.errors import MatchaError
from matcha.strategies import (
    STRATEGIES,
    Effort,
    Greedy,
    make_strategy,
    strategy_named,
    strategy_with,
)
from matcha.timing import LinkSeconds, RandomLinks, Scaled, Underlay
from matcha.topology import Topology

_ROUNDS = 300
_RENAMED = {"wires": "channels", "share": "size_ratio", "halves": "num_phases"}
_FIGURES = ("rho", "algebraic_connectivity", "consensus_error", "expected_comm_time")
_OTHERS = ("rho_kind", "smallest_self_weight", "needs_push_sum", "omega", "alpha", "digest")


def graphs() -> dict[str, Topology]:
    """Topologies small and large, with and without link times, one-way too."""
    er8 = families.paper("er8")
    times = [0.01 * (1 + e % 7) for e in range(len(er8.links))]
    circle = [(i, (i + k) % 8) for i in range(8) for k in (1, 3)]
    return {
        "er8": er8,
        "er8-times": er8.with_link_times(times, [0.25 * t for t in times]),
        "geometric16-d10": families.paper("geometric16-d10"),
        "ring:9": families.ring(9),
        "hypercube:3": families.hypercube(3),
        "complete:6": families.complete(6),
        "complete:8": families.complete(8),
        "star:6": families.star(6),
        "torus:4x4": families.torus(4, 4),
        "circle:8": Topology.from_links(circle, directed=True),
        "one-way:er8": families.one_way(er8, 0.3, seed=1),
        "named": Topology.from_links([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]),
        "erdos-renyi:48": families.erdos_renyi(48, 0.15, seed=3),
    }


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every case by name, and how its plan is made."""
    for graph, topology in graphs().items():
        small = topology.num_workers < 20
        effort: Effort = "default" if small else "none"
        for strategy in STRATEGIES:
            for budget in (0.1, 0.5):
                for seed in (0, 1) if small else (0,):
                    chosen = strategy_with(strategy, effort=effort)
                    make = partial(matcha.plan, topology, budget, chosen, seed)
                    yield f"{graph} {strategy} {budget} {seed}", make
    yield from _options()


def _options() -> Iterator[tuple[str, Callable[[], Any]]]:
    g = graphs()
    er8, timed = g["er8"], g["er8-times"]
    calm: dict[str, Any] = {"effort": "none"}

    def case(name: str, topology: Topology, *args: Any, **options: Any) -> Any:
        return name, partial(_plan, topology, *args, **{**calm, **options})

    for mixing in ("laplacian", "pairwise", "push"):
        for strategy in ("matcha", "single", "periodic", "greedy", "vanilla", "one-peer"):
            yield case(f"{strategy} {mixing}", er8, 0.3, strategy, mixing=mixing)
    for wire in ("bfloat16", "modulo:8", "modulo:3", "lowrank:2"):
        for graph in (er8, timed):
            for strategy in ("matcha", "greedy", "all-reduce"):
                yield case(f"{wire} {strategy} {graph.link_times}", graph, 0.1, strategy, wire=wire)
    for kind in ("links", "cliques"):
        yield case(f"decomposition {kind}", er8, 0.3, "matcha", decomposition=kind)
    rows = tuple(tuple(0.1 + 0.01 * ((e * r) % 5) for e in range(len(er8.links))) for r in (1, 2))
    racks = timed.with_link_times([0.1] * len(timed.links))
    uplinks = Underlay.racks(racks, [range(4), range(4, 8)], uplink=0.2)
    for strategy in ("matcha", "greedy", "periodic"):
        yield case(f"scaled {strategy}", er8, 0.3, strategy, timing=Scaled(lambda n: n**0.5, 8))
        yield case(f"random {strategy}", er8, 0.3, strategy, timing=RandomLinks(er8, rows))
        yield case(f"racks {strategy}", racks, 0.3, strategy, timing=uplinks)
        yield case(f"seconds {strategy}", timed, 0.3, strategy, timing=LinkSeconds(timed))
        yield case(f"alpha {strategy}", er8, 0.3, strategy, alpha=0.2)
    for strategy in ("matcha", "vanilla", "periodic"):
        yield case(f"metropolis {strategy}", er8, 0.3, strategy, weights="metropolis")
    yield case("certain", er8, 1.0, "matcha", probabilities=[1.0] * 6)
    rounds: Any = [[[(0, 1), (2, 3)], [(1, 2)]], [], [[(0, 3)]]]
    for mixing in ("laplacian", "pairwise", "push"):
        yield case(f"own {mixing}", families.ring(4), 1.0, rounds=rounds, mixing=mixing)
    yield case(
        "unlike pushes", families.path(3), 1.0, rounds=[[[(0, 1)]], [[(1, 2)]]], mixing="push"
    )
    for m in (210, 300):
        for strategy in ("vanilla", "periodic", "matcha", "single", "greedy"):
            large = families.geometric(m, 0.15, seed=2)
            yield case(f"geometric:{m} {strategy}", large, 0.1, strategy)
        yield case(f"ring:{m} greedy", families.ring(m), 0.3, "greedy")
    yield from _reduced(er8)
    for graph in (er8, timed):
        budgets = {0: 0.5, 40: 0.1, 90: 0.5}
        make = partial(matcha.staged_plan, graph, budgets, Greedy(effort="none"))
        yield f"staged {graph.link_times is None}", make


def _plan(topology: Topology, budget: float, name: str = "rounds", **options: Any) -> Any:
    """A plan as 0.2 was asked for it: what a strategy takes goes to the strategy."""
    rest = {key: options.pop(key) for key in ("timing", "wire") if key in options}
    known = strategy_named(name)
    if "effort" not in known.options():
        options.pop("effort")
    if "mixing" not in known.options() and options.get("mixing") == known.mixings[0]:
        options.pop("mixing")
    return matcha.plan(topology, budget, make_strategy(name, **options), **rest)


def _reduced(topology: Topology) -> Iterator[tuple[str, Callable[[], Any]]]:
    def without(strategy: str, *workers: int) -> Any:
        made = matcha.plan(topology, 0.3, strategy_with(strategy, effort="none"))
        for worker in workers:
            made = made.without([worker])
        return made

    def without_links(strategy: str) -> Any:
        made = matcha.plan(topology, 0.3, strategy_with(strategy, effort="none"))
        return made.without_links([topology.links[0], topology.links[4]])

    for strategy in ("matcha", "greedy", "periodic", "single", "all-reduce", "ceca", "one-peer"):
        yield f"{strategy} without 3", partial(without, strategy, 3)
        yield f"{strategy} without 3 5", partial(without, strategy, 5, 3)
        yield f"{strategy} without links", partial(without_links, strategy)


def found(make: Callable[[], Any]) -> Any:
    """What a case's plan is and says; of one that is refused, that it is."""
    try:
        plan = make()
    except MatchaError as error:
        return type(error).__name__
    talk = [
        [r.matchings, r.indices, r.weight, r.weights, r.mixing] for r in plan.rounds(0, _ROUNDS)
    ]
    some = [plan.round(k) for k in (0, 7, 10**9)]
    row: dict[str, Any] = {
        "rounds": hashlib.sha256(repr(talk).encode()).hexdigest(),
        "some": hashlib.sha256(repr([[r.matchings, r.weight] for r in some]).encode()).hexdigest(),
        "notes": list(plan.notes),
        "digest": plan.digest,
        "json": plan.to_json(),
    }
    for level in plan.levels:
        row |= {name: repr(getattr(level, name)) for name in (*_FIGURES, *_OTHERS)}
        known = getattr(level, "process", level)  # 0.2 had no process
        small = level.num_workers <= 16
        row["derived"] = [
            repr(theory.drift_error(known)) if small else None,
            repr(theory.error_bound(known)),
        ]
    return row


def compare(one: Path, other: Path) -> int:
    """Print the cases in which two files differ; how many there are."""
    a, b = (
        {k: _timeless(row) for k, row in json.loads(p.read_text()).items()} for p in (one, other)
    )
    differ = 0
    for name in sorted(a.keys() | b.keys()):
        mine, theirs = a.get(name), b.get(name)
        if mine == theirs:
            continue
        differ += 1
        if not isinstance(mine, dict) or not isinstance(theirs, dict):
            print(f"{name}: {str(mine)[:80]} | {str(theirs)[:80]}")
            continue
        for key in mine:
            if mine[key] != theirs.get(key):
                print(f"{name}: {key}: {str(mine[key])[:90]} | {str(theirs.get(key))[:90]}")
    refused = sum(isinstance(row, str) for row in a.values())
    print(f"{len(a)} cases ({refused} refused), {differ} differ")
    return differ


def _timeless(row: Any) -> Any:
    """A row without the seconds that a search took, and with today's names."""
    if isinstance(row, dict):
        for level in row["json"].get("levels", [row["json"]]):
            if level["certificate"] is not None:
                level["certificate"]["seconds"] = 0.0
            for old, new in _RENAMED.items():
                if old in level["timing"]:
                    level["timing"][new] = level["timing"].pop(old)
    return row


def main() -> int:
    """Write one file, or compare two."""
    if len(sys.argv) == 3:
        return int(compare(Path(sys.argv[1]), Path(sys.argv[2])) > 0)
    rows = {name: found(make) for name, make in cases()}
    Path(sys.argv[1]).write_text(json.dumps(rows, sort_keys=True))
    print(f"{len(rows)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
