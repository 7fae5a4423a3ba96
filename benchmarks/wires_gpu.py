"""Wires and momentum on one GPU: what they cost, and what they reach with how many bytes.

    # here: the plans, for a machine that cannot plan itself (a name, or runs as key=value,...)
    python benchmarks/wires_gpu.py plans cifar10-gn
    # there: first that kernels and capture are right and what they cost, then trainings
    python benchmarks/wires_gpu.py check --output $OUT      # needs no data: images of noise will do
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
import logging
import math
import statistics
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.wires_runs import LISTS, Run, parse

import wires
from matcha.plans import Plan
from matcha.simulation import Delays, Engine, Execution, Settings, Simulation, Task
from matcha.simulation.execution import Graphs
from matcha.simulation.mixing import WireMixing
from matcha.wires import Modulo, kernels, modulo, parse_wire
from matcha.wires.coding import Coder
from matcha.wires.wire import BLOCK, Segment
from matcha.zoo.data import partition
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
    """Kernels and captured wires against the definition, and what both cost, in one table each."""
    plan = Plan.load(args.plans / Run(bytes=0.02, wire="modulo:3").plan_file())
    logging.basicConfig(level=logging.INFO)  # why Triton does not work, if it does not
    print(f"kernels by {'Triton' if _has_triton(args.device) else 'torch alone'}", flush=True)
    exact = {}
    for wire in ("bfloat16", *_MODULO, "lowrank:2"):
        worst = max(_deviation(wire, mixing, plan, args.device) for mixing in _MIXINGS)
        exact[f"{wire}, all workers captured, float64"] = worst, 1e-9
    for wire in _MODULO:  # a root may be rounded another way there
        exact[f"{wire}, messages as torch's on a CPU"] = _message_deviation(wire, args.device), 1e-6
    for name, (worst, allowed) in exact.items():
        print(f"{name:50} {worst:.1e} {'ok' if worst < allowed else 'WRONG'}", flush=True)
    document: dict[str, Any] = {"rounds_budget": plan.budget, "deviations": exact}
    speeds = _speeds(args.device)
    document |= _iterations(plan, args)
    for name, content in (("wires_cuda", speeds), ("wires_speed", document)):
        (args.output / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{time.perf_counter() - _STARTED:.0f} s in all", flush=True)


_STARTED = time.perf_counter()
_MODULO = tuple(f"modulo:{bits}" for bits in wires.BITS)


def _has_triton(device: str) -> bool:
    return device.startswith("cuda") and kernels.on_gpu(torch.device(device)) is not None


def _message_deviation(name: str, device: str) -> float:
    """How far a GPU's messages, and what they mean, are from those of torch on the CPU.

    Values are whole numbers of a step, whose sums are exact in any order, and a block of NaN.
    """
    wire, random = Modulo(bits=int(name.removeprefix("modulo:"))), torch.Generator().manual_seed(0)
    lower = torch.randint(-99, 100, (1001, BLOCK), generator=random).float()
    ends = [lower, lower + 0.25 * torch.randint(-1, 2, lower.shape, generator=random)]
    for end in ends:
        end[7], end[9] = 2.0**20 * end[7], 2.0**-20 * end[9]
    ends[1][3, 5] = torch.nan
    scales = torch.full((len(lower),), wire.half / wire.clip_range)
    found = []
    for where in (device, "cpu"):
        coders = [Coder(wire, end.to(where)) for end in ends]
        for coder in coders:
            coder.kernels = modulo if where == "cpu" else coder.kernels
        common, sent = scales.to(where), []
        for k, coder in enumerate(coders):
            message = torch.empty(coder.message_bytes(len(lower)), dtype=torch.uint8, device=where)
            coded = coder.encode(ends[k].to(where), 0, common, message, lower=k == 0)
            sent.append((coded, message))
        moves = []
        for k, coder in enumerate(coders):
            move = torch.zeros(lower.shape, device=where)
            coder.move(move, sent[k][0], sent[1 - k][1], weight=1.0)
            moves.append(move.cpu())
        usual = [i for i in range(len(lower)) if i != 3]
        bodies = [message[: -4 * len(lower)].cpu() for _, message in sent]
        checks = [coded.checks[usual].cpu() for coded, _ in sent]
        residues = [coded.residues[usual].cpu() for coded, _ in sent]
        assert bool(torch.stack(moves)[:, 3].eq(0).all()), "NaN came through"
        found.append((moves, residues, checks))
        packed = torch.empty_like(bodies[0])
        for body, (coded, _) in zip(bodies, sent, strict=True):
            modulo.pack(coded.residues.cpu().reshape(-1), wire.bits, packed)
            assert packed.equal(body), "packing differs"
    (ours, our_residues, our_checks), (torchs, residues, checks) = found
    same = all(
        a.equal(b) for a, b in zip(our_residues + our_checks, residues + checks, strict=True)
    )
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, torchs, strict=True))
    largest = max(float(b.abs().max()) for b in torchs)
    return apart / largest if same else math.inf


def _speeds(device: str) -> dict[str, Any]:
    """GB/s of float32 for each modulo wire, by kernels and by torch, as `wires.py` has it."""
    blocks = 1 << (17 if device.startswith("cuda") else 11)
    found = {f"modulo:{bits}": wires.measure(bits, blocks, device) for bits in wires.BITS}
    document = {"benchmark": "wires", "device": device, "blocks": blocks, "wires": found}
    print(wires.describe(document), flush=True)
    return document


_TIMED = (
    ("float32", "local"),
    ("bfloat16", "local"),
    *((wire, "local") for wire in (*_MODULO, "lowrank:4")),
    ("float32", "local"),
    ("float32", "quasi-global"),
    ("modulo:4", "quasi-global"),
    ("modulo:3", "quasi-global"),
    ("float32", "local"),
)


def _iterations(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per iteration over wires and with momentum, over those with neither."""
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            _write_noise(Path(folder))
            args.data = Path(folder)
        task, engine = _engine(replace(Run(), epochs=2), args)
    seconds: dict[str, list[float]] = {}

    def time_one(name: str, wire: str, momentum: str) -> None:
        found = _time_epochs(task, engine, plan, wire, momentum)
        seconds.setdefault(name, []).extend(found)

    for wire, momentum in _TIMED:
        time_one(f"{wire} {momentum}", wire, momentum)
    with unittest.mock.patch.object(kernels, "on_gpu", return_value=None):
        time_one("modulo:3 quasi-global, torch alone", "modulo:3", "quasi-global")
        time_one("modulo:3 local, torch alone", "modulo:3", "local")
    base = statistics.median(seconds["float32 local"])
    for name, found in seconds.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        ratios = f"{middle / base:.3f} ({low / base:.3f} to {high / base:.3f})"
        print(f"{name:36} {middle * 1e3:6.2f} ms per iteration, {ratios} × float32's", flush=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {"seconds_per_iteration": medians, "epochs": seconds}


def _write_noise(folder: Path, images: int = 50_000) -> None:
    """Random images in CIFAR-100's layout: how long an iteration takes does not depend on them."""
    place = folder / "cifar-100-binary"
    place.mkdir()
    random = np.random.default_rng(0)
    for name, number in (("train", images), ("test", 1000)):
        rows = random.integers(0, 256, (number, 2 + 3072), dtype=np.uint8)
        rows[:, 0] %= 20
        rows[:, 1] %= 100
        rows.tofile(place / f"{name}.bin")


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


def _time_epochs(task: Task, engine: Engine, plan: Plan, wire: str, momentum: str) -> list[float]:
    """Seconds per iteration in each of five epochs, after one that captures and one to warm up."""
    settings = _settings(Run(wire=wire, momentum=momentum, epochs=8, rate=1e-3), engine)
    settings = replace(settings, evaluate_every=100)
    plan = replace(plan, wire=parse_wire(wire))
    epochs, found = iter(Simulation(task, plan, settings, engine=engine)), []
    for _ in range(7):
        started = time.perf_counter()
        next(epochs)
        found.append((time.perf_counter() - started) / task.steps_per_epoch)
    return found[2:]


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
