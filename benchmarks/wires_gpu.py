"""Wires and momentum on one GPU: what they cost, and what they reach with how many bytes.

    # here: the plans, for a machine that cannot plan itself (a name, or runs as key=value,...)
    python benchmarks/wires_gpu.py plans cifar10-gn
    # there: first that capture is right and what it costs, then trainings
    python benchmarks/wires_gpu.py check --data /tmp/data --output $OUT
    python benchmarks/wires_gpu.py train cifar10-gn --data /tmp/data \
        --output $OUT --seconds 540
    python benchmarks/wires_gpu.py train bytes=0.02,wire=modulo:3,seeds=0-2 ...
    python benchmarks/wires_gpu.py collect OUT/wires.jsonl ... --output benchmarks/results
    python benchmarks/wires_gpu.py table benchmarks/results/wires_h200.json

A run is `task=,model=,topology=,partition=,concentration=,bytes=,wire=,momentum=,strategy=,seed=,
epochs=,rate=,rounds=,images=` with defaults; `seeds=0-2` is three runs. `bytes` is a share of
vanilla's with whole float32 models. Each result is a line of OUTPUT/wires.jsonl as soon as it is
known; a later call leaves out what the files in --state hold already, and a run that would not end
in time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.wires_runs import LISTS, Run, parse

from matcha.plans import Plan
from matcha.simulation import Delays, Engine, Execution, Settings, Simulation, Task
from matcha.simulation.execution import Graphs
from matcha.simulation.mixing import WireMixing
from matcha.wires import parse_wire
from matcha.wires.wire import BLOCK, Segment
from matcha.zoo.partitions import partition
from matcha.zoo.recipes import Choices, recipe

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.wires.definition import Definition

# -- here -----------------------------------------------------------------------------------------


def make_plans(runs: Sequence[Run], folder: Path) -> None:
    """Write the plan of every run."""
    import matcha

    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        path = folder / run.plan_file()
        if not path.exists():
            topology = matcha.families.paper(run.topology.removeprefix("paper:"))
            plan = matcha.plan(topology, run.budget(), run.strategy)
            plan.save(path)
            print(f"{path.name}: {plan.expected_comm_time:.4g} units per iteration", flush=True)


# -- there: is capture right, and what does it cost? ----------------------------------------------


def check(args: argparse.Namespace) -> None:
    """Captured wires against the definition, captured training against uncaptured, and speed."""
    plan = Plan.load(args.plans / Run(bytes=0.02, wire="modulo:3").plan_file())
    for wire in ("bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2"):
        worst = max(_deviation(wire, mixing, plan, args.device) for mixing in _MIXINGS)
        verdict = "ok" if worst < 1e-9 else "WRONG"
        print(f"{wire:10} captured against the definition: {worst:.1e} {verdict}", flush=True)
    run = replace(Run(), epochs=2)
    task, engine = _engine(run, args)
    base = _time_iterations(task, engine, plan, "float32", "local")
    print(f"float32, local: {base * 1e3:.2f} ms per iteration", flush=True)
    found = {"float32 local": base}
    for wire, momentum in (
        ("float32", "quasi-global"),
        ("float32", "outer"),
        ("float32", "tracking"),
        ("bfloat16", "local"),
        ("modulo:8", "local"),
        ("modulo:3", "local"),
        ("modulo:3", "quasi-global"),
        ("lowrank:4", "local"),
    ):
        seconds = _time_iterations(task, engine, plan, wire, momentum)
        found[f"{wire} {momentum}"] = seconds
        print(f"{wire}, {momentum}: {seconds / base:.3f} × the iteration without", flush=True)
    document = {"rounds_budget": plan.budget, "seconds_per_iteration": found}
    (args.output / "wires_speed.json").write_text(json.dumps(document, indent=1) + "\n")


_MIXINGS = ("pairwise", "laplacian")
_TRIED = ((64, 30, 3, 3), (300,), (1,), (40, 100), (7, 3))


def _deviation(wire: str, mixing: str, plan: Plan, device: str) -> float:
    """The largest difference, in float64, of 12 captured rounds from the definition's."""
    lengths = [math.prod(shape) for shape in _TRIED]
    ends = np.cumsum([-(-n // BLOCK) * BLOCK for n in lengths])
    segments = [
        Segment(offset=int(end) - -(-n // BLOCK) * BLOCK, shape=shape)
        for end, n, shape in zip(ends, lengths, _TRIED, strict=True)
    ]
    places = np.concatenate([np.arange(s.offset, s.offset + s.size) for s in segments])
    random = np.random.default_rng(0)
    x = np.repeat(random.normal(size=(1, sum(lengths))), plan.num_workers, 0)
    rows = torch.zeros(plan.num_workers, int(ends[-1]), dtype=torch.float64, device=device)
    rows[:, places] = torch.from_numpy(x).to(device)
    rounds = [replace(round, mixing=mixing, weight=0.4) for round in plan.rounds(0, 200) if round]
    rounds = rounds[:12]
    definition = Definition(parse_wire(wire), _TRIED, x)
    graphs = Graphs(torch.device(device), capture=True)
    whole = WireMixing(parse_wire(wire), segments, [rows], plan.topology.links, graphs)
    whole.fill(rounds)
    if graphs.missing(whole.parts()):
        kept = rows.clone(), {name: tensor.clone() for name, tensor in whole.state.items()}
        graphs.capture(whole.parts(), lambda: None)
        rows.copy_(kept[0])
        for name, tensor in whole.state.items():
            tensor.copy_(kept[1][name])
    for k, round in enumerate(rounds):
        drift = 0.01 * random.normal(size=x.shape) * (100.0 if k == 5 else 1.0)
        x = definition.mix(round, x + drift)
        rows[:, places] += torch.from_numpy(drift).to(device)
        whole.mix(k)
    return float(np.abs(rows[:, places].cpu().numpy() - x).max())


def _time_iterations(task: Task, engine: Engine, plan: Plan, wire: str, momentum: str) -> float:
    settings = _settings(Run(wire=wire, momentum=momentum, epochs=8), engine)
    settings = replace(settings, evaluate_every=100)
    plan = replace(plan, wire=parse_wire(wire))
    simulation = Simulation(task, plan, settings, engine=engine)
    epochs = iter(simulation)
    for _ in range(2):
        next(epochs)
    started = time.perf_counter()
    for _ in range(3):
        next(epochs)
    return (time.perf_counter() - started) / (3 * task.steps_per_epoch)


# -- there: trainings -----------------------------------------------------------------------------


def _engine(run: Run, args: argparse.Namespace) -> tuple[Task, Engine]:
    how = recipe(run.task)
    place = "geometric16" if "16" in run.topology else "er8"
    task = how.task(
        Choices(
            num_workers=16 if place == "geometric16" else 8,
            data=args.data,
            model=run.model,
            partition=run.partition,  # type: ignore[arg-type]
            concentration=run.concentration,
            num_train=run.images or None,
            num_test=args.num_test,
        )
    )
    on_gpu = args.device.startswith("cuda")
    execution = Execution(
        device=args.device,
        precision="bfloat16" if on_gpu else "float32",
        streams=args.streams,
    )
    return task, Engine(task, how.optimizer, execution=execution)


def _settings(run: Run, engine: Engine) -> Settings:
    how = recipe(run.task)
    return Settings(
        epochs=run.epochs,
        schedule=how.schedule(run.epochs, run.rate),
        optimizer=engine.optimizer,
        momentum=run.momentum,
        evaluate_every=max(1, run.epochs // 4),
        delays=Delays(compute_time=0.05),
        execution=engine.execution,
    )


def _reseed(task: Task, run: Run) -> None:
    """Another seed's weights, order and parts, on an engine that is there."""
    task.seed = run.seed  # type: ignore[misc]
    parts = getattr(task, "parts", None)
    if parts is not None:
        labels = task._data.train_labels  # type: ignore[attr-defined]
        task.parts = partition(  # type: ignore[attr-defined]
            labels,
            task.num_workers,
            run.partition,  # type: ignore[arg-type]
            seed=run.seed,
            concentration=run.concentration,
        )


def train(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Run what is not done yet, group by group, as far as the time goes."""
    deadline = time.perf_counter() + args.seconds
    done = {json.dumps(line["run"], sort_keys=True) for line in _lines(args.state, args.output)}
    engine: Engine | None = None
    group: tuple[object, ...] = ()
    epoch_seconds: dict[tuple[object, ...], float] = {}
    for run in runs:
        if json.dumps(asdict(run), sort_keys=True) in done:
            continue
        each = epoch_seconds.get((*run.group, run.wire, run.momentum)) or epoch_seconds.get(
            run.group, 0.0
        )
        if time.perf_counter() + 1.05 * each * run.epochs + 3 > deadline:
            print(f"no time for {run.key()}", flush=True)
            continue
        if run.group != group or engine is None:
            engine = None  # its memory goes first
            group = run.group
            task, engine = _engine(run, args)
        _reseed(task, run)
        started = time.perf_counter()
        try:
            line = _train(run, task, engine, args)
        except Exception as error:
            print(f"{run.key()} failed: {type(error).__name__}: {error}", flush=True)
            continue
        seconds = (time.perf_counter() - started) / run.epochs
        epoch_seconds[run.group] = epoch_seconds[(*run.group, run.wire, run.momentum)] = seconds
        for folder in (args.output, args.state):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "wires.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    if torch.cuda.is_available():
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def _train(run: Run, task: Task, engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    plan = Plan.load(args.plans / run.plan_file())
    started = time.perf_counter()
    plan = replace(plan, wire=parse_wire(run.wire))
    simulation = Simulation(task, plan, _settings(run, engine), engine=engine)
    records = list(simulation)
    last = records[-1]
    print(
        f"{run.key()}: train {last.train_loss} test {last.test_loss} {last.test_accuracy} "
        f"consensus {last.consensus_distance} {last.megabytes_sent} MB per worker "
        f"{simulation.momentum} {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return {
        "run": asdict(run),
        "momentum": asdict(simulation.momentum),
        "device": torch.cuda.get_device_name() if engine.on_cuda else "cpu",
        "seconds": time.perf_counter() - started,
        "plan": {"budget": plan.budget, "digest": plan.digest},
        "products": torch.get_float32_matmul_precision(),
        "apart": _apart(engine),
        "records": [
            {k: v for k, v in asdict(record).items() if v is not None} for record in records
        ],
    }


def _apart(engine: Engine, number: int = 8) -> list[dict[str, float]]:
    """The blocks whose workers differ most: by how much, of how long values and gradients."""
    x, gradients = (
        rows.view(len(rows), -1, BLOCK)
        for rows in (engine.workers.parameters, engine.workers.updates)
    )
    squares = (x - x.mean(0)).square().sum(-1).mean(0)
    found = squares.topk(min(number, len(squares)))
    return [
        {
            "block": int(block),
            "share": float(square / squares.sum()),
            "distance": float(square),
            "values": float(x[:, block].square().sum(-1).mean()),
            "gradients": float(gradients[:, block].square().sum(-1).mean()),
        }
        for square, block in zip(*found, strict=True)
    ]


def _lines(*folders: Path) -> Iterator[dict[str, Any]]:
    for folder in folders:
        path = folder if folder.is_file() else folder / "wires.jsonl"
        if path.suffix == ".json":
            yield from json.loads(path.read_text())["runs"]
        elif path.exists():
            yield from map(json.loads, path.read_text().splitlines())


def table(lines: Iterable[dict[str, Any]]) -> str:
    """One row for runs that differ by their seed only."""
    rows: dict[Run, dict[int, dict[str, Any]]] = {}
    for line in lines:
        run = Run(**line["run"])
        rows.setdefault(run.row, {})[run.seed] = line["records"][-1]
    out = [
        "| task | bytes | wire | momentum | strategy | epochs | seeds | test accuracy or loss "
        "| training loss | consensus | MB sent |",
        "| --- " * 11 + "|",
    ]
    for run, found in rows.items():
        last = list(found.values())
        name = "test_accuracy" if last[0].get("test_accuracy") is not None else "test_loss"
        scores = [r[name] * (100 if "accuracy" in name else 1) for r in last if r.get(name)]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        mean = f"{statistics.fmean(scores):.2f}{spread}" if scores else "diverged"
        loss, consensus = (
            statistics.fmean([r[key] for r in last if r.get(key) is not None] or [math.nan])
            for key in ("train_loss", "consensus_distance")
        )
        out.append(
            f"| {_task(run)} | {run.bytes:g} | {run.wire} "
            f"| {run.momentum} | {run.strategy} | {run.epochs} | {len(found)} | {mean} "
            f"| {loss:.3f} | {consensus:.3g} | {last[0].get('megabytes_sent', 0):.0f} |"
        )
    return "\n".join(out)


def _task(run: Run) -> str:
    images = f", {run.images:,} images" if run.images else ""
    return f"{run.task} {run.model} {run.partition}{images}"


_KEPT = (
    "epoch",
    "train_loss",
    "test_loss",
    "test_accuracy",
    "consensus_distance",
    "predicted_consensus",
    "megabytes_sent",
)


def collect(files: Sequence[Path], folder: Path) -> None:
    """Write the runs of several files as one result, with what tables and charts use.

    Of a run that is in several files, the last counts. A line may have a note, which tables show:
    how it differs from others of the same words.
    """
    runs = {}
    for line in _lines(*files):
        records = [{k: r[k] for k in _KEPT if r.get(k) is not None} for r in line["records"]]
        kept = [r for r in records if {"test_loss", "predicted_consensus"} & r.keys()]
        runs[Run(**line["run"]).key()] = {
            k: line[k] for k in ("run", "momentum", "device", "seconds", "note") if k in line
        } | {"records": kept or records[-1:]}
    document = {"benchmark": "wires_gpu", "runs": list(runs.values())}
    (folder / "wires_h200.json").write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["plans", "check", "train", "table", "collect"])
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(LISTS)}, or key=value,...")
    parser.add_argument("--plans", type=Path, default=Path(__file__).parent / "plans")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, default=Path("."))
    parser.add_argument("--state", type=Path, default=Path("/tmp/matcha-wires"))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--num-test", type=int)
    args = parser.parse_args()
    if args.action == "table":
        print(table(_lines(*map(Path, args.runs))))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    if args.action == "collect":
        collect([Path(name) for name in args.runs], args.output)
    elif args.action == "plans":
        make_plans(list(parse(args.runs)), args.plans)
    elif args.action == "check":
        check(args)
    else:
        train(list(parse(args.runs)), args)
        print(table(_lines(args.state)))


if __name__ == "__main__":
    main()
