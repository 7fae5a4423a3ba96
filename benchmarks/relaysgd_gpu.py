"""RelaySGD's Table 2 on one GPU: VGG-11, CIFAR-10, 16 workers, 200 epochs, data that differ.

    # here: the plans that are not in benchmarks/plans yet, for a machine that cannot plan itself
    python benchmarks/relaysgd_gpu.py plans screen main more proxy
    # there: trainings, again and again
    python benchmarks/relaysgd_gpu.py train screen main more --data /tmp/data \
        --output $OUT --state /tmp/state --seconds 540
    python benchmarks/relaysgd_gpu.py table benchmarks/results/relaysgd_h200.jsonl
    # without a GPU, in an hour: the screening by a small network on small images
    python benchmarks/relaysgd_gpu.py train proxy --data DIR --device cpu --small \
        --images 8192 --batch-size 8 --seconds 4000 --state /tmp/proxy

`screen` tries rules and rates for a few epochs, of which `main` takes the best where it says so.
A run is `concentration=,topology=,strategy=,bytes=,wire=,momentum=,rate=,clip=,seed=,epochs=` with
defaults, or the name of a list; `local-10` and `sparseloco-2` average every so many iterations.
`bytes` is a share of theirs: two whole models per worker and iteration, as on a ring. Each result
is a line of OUTPUT/relaysgd.jsonl as soon as it is known; what --state or benchmarks/results holds
is not run again, and a run that --seconds cut short goes on in --state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from matcha.plans import Plan
from matcha.records import Record
from matcha.simulation import Delays, Engine, Execution, Settings, Simulation
from matcha.training.momentum import parse_momentum
from matcha.training.optimizers import SGD
from matcha.wires import parse_wire
from matcha.zoo.data import Images, cifar10, partition
from matcha.zoo.images import ImageTask
from matcha.zoo.models import build
from matcha.zoo.models.vision import VGG11, initialize
from matcha.zoo.recipes import recipe

WORKERS = 16
TASK = "cifar10-vgg11"
THEIRS = 2.0
"""Whole models that their workers send per iteration."""
_HERE = Path(__file__).parent
_COMMITTED = _HERE / "results" / "relaysgd_h200.jsonl"
_WARMUP = 5.0
"""Epochs, however many follow: short runs are to begin as long ones do."""
_SAVING = 12.0
"""Seconds set aside for a checkpoint."""
"""Workers one by one over streams, all at once, and that compiled."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    concentration: float = 0.1
    topology: str = "complete"
    strategy: str = "hypercube"
    bytes: float = 1.0
    wire: str = "bfloat16"
    momentum: str = "local"
    rate: float = 0.1
    clip: float = 0.0
    seed: int = 0
    epochs: int = 200

    @property
    def meetings(self) -> float:
        """Meetings of a worker per iteration that the bytes buy."""
        named = "local" if self.momentum == SCREENED else self.momentum
        wire, momentum = parse_wire(self.wire), parse_momentum(named)
        shapes = [tuple(p.shape) for p in build("vgg11", 10).parameters()]
        messages = momentum.messages if momentum else 1
        return THEIRS * self.bytes / (wire.size_ratio(shapes) * messages)

    @property
    def period(self) -> int | None:
        """Iterations between averages, where the strategy's name ends in them."""
        number = self.strategy.rpartition("-")[2]
        return int(number) if number.isdecimal() else None

    def plan_file(self) -> str:
        """The name of its plan's file."""
        often = self.wire.partition("@")[0].replace(":", "") if self.period else self.meetings
        part = often if isinstance(often, str) else f"{often:.4g}"
        return f"{self.topology}_{self.strategy}_{part}.json"

    def key(self) -> str:
        """All that says what is run."""
        return ",".join(f"{k}={v}" for k, v in asdict(self).items())


def _both(**values: Any) -> list[Run]:
    return [Run(concentration=alpha, **values) for alpha in (0.1, 0.01)]


_SMALL: dict[str, Any] = {"bytes": 0.02, "wire": "modulo:3"}
_RING: dict[str, Any] = {"topology": "ring", "strategy": "vanilla", "wire": "float32"}
_RELAY: dict[str, Any] = {"strategy": "relaysum", "wire": "float32"}
_PUBLISHED = "quasi-global:follow=1,warmup=0"


def _sparse(period: int, kept: int, memory: float = 0.95, **values: Any) -> Run:
    """Averages of the largest movements; `memory`: what is left of the rest an average later."""
    strategy, wire = f"sparseloco-{period}", f"topk:{kept}" + ("@1" if memory == 1 else "")
    return Run(bytes=0.02, strategy=strategy, wire=wire, **({"concentration": 0.01} | values))


_EXACT = "exact-diffusion"
# All four matchings in each iteration: rank 8 is 1/85 of the bytes.
_LOW_RANK = Run(concentration=0.01, bytes=0.0117158, wire="lowrank:8", rate=0.05)
SCREENED = "screened"
"""A momentum that stands for the best of the list `screen`: its rule, rate, strategy and wire."""
# Theirs at the rates that their code names as the best: RelaySGD over a binary tree, and the ring.
_RELAYED = [Run(**_RELAY, rate=0.3), Run(**_RELAY, concentration=0.01, rate=0.15)]
_THEIRS = [
    Run(**_RING, momentum=_PUBLISHED, rate=0.025),
    Run(**_RING, rate=0.05),
    Run(**_RING, concentration=0.01, momentum=_PUBLISHED, rate=0.05),
    Run(**_RING, concentration=0.01, rate=0.0125),
]
_WHOLE, _FEW = _both(), _both(**_SMALL, momentum=SCREENED)

LISTS: dict[str, list[Run]] = {
    # Which rule and rate at a fiftieth of the bytes: a few epochs each, by training loss.
    "screen": [
        replace(run, epochs=12)
        for run in (
            _sparse(2, 40, rate=0.05),
            _sparse(2, 40, memory=1, rate=0.05),
            _sparse(1, 16, rate=0.05),
            _sparse(2, 40, rate=0.1),
            _sparse(4, 96, rate=0.05),
            _LOW_RANK,
            _sparse(1, 16, rate=0.1),
            Run(**_SMALL, concentration=0.01, rate=0.025),
        )
    ],
    # In the order of what is asked: ours at a fiftieth of the bytes and at theirs, one seed, then
    # what their table has, then seeds.
    "main": [
        *_FEW[::-1],
        *_WHOLE[::-1],
        *_THEIRS,
        *(replace(run, seed=1) for run in _FEW[::-1]),
        *(replace(run, seed=1) for run in _WHOLE[::-1]),
        *(replace(run, seed=2) for run in _FEW[::-1]),
        *(replace(run, seed=2) for run in _WHOLE[::-1]),
        *_RELAYED,
        *_both(**_RING, momentum="auto", rate=0.05),
        *(replace(run, seed=seed) for seed in (1, 2) for run in _RELAYED),
    ],
    # The screening in small, for a CPU: --small --device cpu.
    "proxy": [
        replace(run, epochs=6, seed=seed)
        for seed in (0, 1, 2)
        for run in (
            Run(concentration=0.01, rate=0.05),
            *(_sparse(2, 40, memory=memory, rate=0.05) for memory in (0.95, 1)),
            *(_sparse(1, 16, memory=memory, rate=0.05) for memory in (0.95, 1)),
            *(_sparse(4, 96, memory=1, rate=rate) for rate in (0.05, 0.1)),
            # Rank 2 of 64, at the rounds of rank 8 of 512: a fiftieth of this network's bytes.
            replace(_LOW_RANK, bytes=0.0030797, wire="lowrank:2"),
            *(
                Run(**_SMALL, concentration=0.01, rate=0.05, momentum=momentum, clip=clip)
                for momentum, clip in (
                    *(("local", 0.0), ("outer", 0.0), ("quasi-global", 0.0), (_EXACT, 0.0)),
                    *(("local", 1.0), ("quasi-global", 1.0)),
                )
            ),
            *(
                Run(**_SMALL, concentration=0.01, rate=0.02, momentum=momentum)
                for momentum in ("local", "quasi-global", _EXACT)
            ),
            Run(**_SMALL, concentration=0.01, rate=0.05, strategy="local-10"),
        )
    ],
    "more": [
        *_both(**_SMALL, momentum="auto", rate=0.025),
        *_both(**(_RELAY | {"bytes": 0.02}), rate=0.05),
        *_both(topology="geometric16-d10", strategy="greedy"),
        *_both(topology="geometric16-d10", strategy="greedy", **_SMALL, rate=0.025),
        *(replace(run, seed=seed) for seed in (1, 2) for run in _THEIRS),
    ],
}


def screened(run: Run, lines: Sequence[dict[str, Any]]) -> Run:
    """The run, by the rule, wire and rate that had the least training loss in `screen`."""
    if run.momentum != SCREENED:
        return run
    tried = {one.key() for one in LISTS["screen"]}
    found = [line for line in lines if Run(**line["run"]).key() in tried]
    losses = {
        Run(**line["run"]): line["records"][-1].get("train_loss") or float("inf") for line in found
    }
    best = min(losses, key=losses.__getitem__) if losses else LISTS["screen"][0]
    return replace(best, concentration=run.concentration, seed=run.seed, epochs=run.epochs)


def parse(words: Sequence[str]) -> Iterator[Run]:
    """Runs by the name of a list, or as key=value,... with `+` for a comma within a value."""
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Run)}
    for word in words:
        if word in LISTS:
            yield from LISTS[word]
        else:
            pairs = (part.split("=", 1) for part in word.split(","))
            yield Run(**{k: kinds[k](v.replace("+", ",")) for k, v in pairs})


def make_plans(runs: Sequence[Run], folder: Path) -> None:
    """Write the plan of every run."""
    import matcha
    from matcha.strategies import Local, SparseLoCo, Vanilla

    folder.mkdir(parents=True, exist_ok=True)
    families: dict[str, Any] = {"complete": matcha.families.complete, "ring": matcha.families.ring}
    for run in runs:
        path = folder / run.plan_file()
        if path.exists():
            continue
        if run.topology in families:
            topology = families[run.topology](WORKERS)
        else:
            topology = matcha.families.paper(run.topology)
        if run.period is not None:
            kinds = {"local": Local, "sparseloco": SparseLoCo}
            kind = kinds[run.strategy.rpartition("-")[0]](period=run.period)
            if isinstance(kind, SparseLoCo):
                kind = replace(kind, wire=parse_wire(run.wire).name)
            plan = matcha.plan(topology, 1.0, kind, wire=parse_wire(run.wire).name)
        elif run.strategy == "vanilla":  # their weights: 1 / (1 + degree)
            plan = matcha.plan(topology, 1.0, Vanilla(alpha=1 / 3))
        elif run.strategy == "relaysum":  # a round every so many iterations
            plan = matcha.plan(topology, 1.0, "relaysum")
            each = 2 * (WORKERS - 1) / WORKERS
            period, full = max(1, round(each / run.meetings)), max(topology.degrees)
            share = len(plan.matchings) / full / period
            plan = matcha.plan(topology, float(f"{share * 1.0001:.6g}"), "relaysum")
        else:
            budget = run.meetings / max(topology.degrees)
            for _ in range(3):  # not all matchings have all workers
                plan = matcha.plan(topology, float(f"{min(1.0, budget):.6g}"), run.strategy)
                budget *= run.meetings / _meetings(plan)
        plan.save(path)
        print(f"{path.name}: rho {plan.rho:.4g}, {_meetings(plan):.4g} meetings per iteration")


def _meetings(plan: Plan, number: int = 2000) -> float:
    return sum(2 * len(r.links) for r in plan.rounds(0, number)) / number / plan.num_workers


# -- there ----------------------------------------------------------------------------------------


class Small(VGG11):
    """Three convolutions without normalization for 8 × 8 pixels: the same in small, for a CPU."""

    pooled = (0, 1, 2)

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, dropout=0.1, width=8)
        widths = (3, 32, 64, 64)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(into, out, 3, padding=1) for into, out in pairwise(widths)
        )
        initialize(self)


def _smaller(data: Images, number: int) -> Images:
    """Every 4 × 4 pixels as their mean, of some training and test images."""

    def reduce(images: Any) -> Any:
        return images.reshape(-1, 8, 4, 8, 4, 3).mean((2, 4)).astype(np.uint8)

    return Images(
        train_images=reduce(data.train_images[:number]),
        train_labels=data.train_labels[:number],
        test_images=reduce(data.test_images[: number // 2]),
        test_labels=data.test_labels[: number // 2],
        num_classes=data.num_classes,
    )


def _task(data: Images, run: Run, args: argparse.Namespace) -> ImageTask:
    classes = data.num_classes
    return ImageTask(
        TASK,
        data,
        _parts(data.train_labels, run),
        lambda: Small(classes) if args.small else VGG11(classes, width=args.width),
        batch_size=args.batch_size,
        seed=run.seed,
        augment=True,
        padding=1 if args.small else 4,
    )


def _parts(labels: Any, run: Run) -> Any:
    kind, alpha = "dirichlet-even", run.concentration
    return partition(labels, WORKERS, kind, seed=run.seed, concentration=alpha)  # type: ignore[arg-type]


def _random_images(number: int) -> Images:
    random = np.random.default_rng(0)
    pixels = random.integers(256, size=(number, 32, 32, 3), dtype=np.uint8)
    labels = random.integers(10, size=number)
    return Images(
        train_images=pixels,
        train_labels=labels,
        test_images=pixels[:100],
        test_labels=labels[:100],
        num_classes=10,
    )


def _engine(task: ImageTask, args: argparse.Namespace, clip: float = 0.0) -> Engine:
    """An engine; `clip` bounds the length of each worker's gradient, 0 leaves it."""
    on_gpu = args.device.startswith("cuda")
    execution = Execution(
        device=args.device,
        precision=args.precision or ("bfloat16" if on_gpu else "float32"),
        batching="loop",
        streams=args.streams,
    )
    optimizer = recipe(TASK).optimizer
    assert isinstance(optimizer, SGD)
    return Engine(task, replace(optimizer, clip_norm=clip or None), execution=execution)


def _device(args: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device


def train(runs: Sequence[Run], args: argparse.Namespace) -> None:
    """Run what is not done yet, in order, as far as the time goes."""
    deadline = time.perf_counter() + args.seconds
    args.state.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    lines = [*_lines(_COMMITTED), *_lines(args.state)]
    data = cifar10(args.data) if args.data else _random_images(args.images)
    if args.small:
        torch.set_num_threads(1)
        data = _smaller(data, args.images)
    task = _task(data, runs[0], args)
    engines: dict[float, Engine] = {}  # all runs of a clip share what was compiled and captured
    for asked in runs:
        run = screened(asked, lines)
        if any(Run(**line["run"]) == run for line in lines):
            continue
        if time.perf_counter() + 2 * _SAVING > deadline:
            print(f"no time for {run.key()}", flush=True)
            continue
        task.seed, task.parts = run.seed, _parts(data.train_labels, run)
        task.__dict__.pop("_fixed", None)
        try:
            if run.clip not in engines:
                engines[run.clip] = _engine(task, args, run.clip)
            line = _train(run, engines[run.clip], args, deadline)
        except Exception as error:
            print(f"{run.key()} failed: {type(error).__name__}: {error}", flush=True)
            continue
        if line is None:
            break
        lines.append(line)
        for folder in (args.output, args.state):
            with (folder / "relaysgd.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    if args.device.startswith("cuda"):
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


def _train(
    run: Run, engine: Engine, args: argparse.Namespace, deadline: float
) -> dict[str, Any] | None:
    """Train, going on where an earlier call stopped; None where this one must stop."""
    plan = replace(Plan.load(args.plans / run.plan_file()), wire=parse_wire(run.wire))
    schedule: Any = recipe(TASK).schedule(run.epochs, run.rate)
    settings = Settings(
        epochs=run.epochs,
        schedule=replace(schedule, warmup=min(_WARMUP, run.epochs / 2)),
        optimizer=engine.optimizer,
        momentum=run.momentum,
        evaluate_every=max(1, run.epochs // 10),
        delays=Delays(compute_time=0.05),
        execution=engine.execution,
    )
    simulation = Simulation(engine.task, plan, settings, engine=engine)
    checkpoint, kept = args.state / "cut.pt", args.state / "cut.json"
    records: list[dict[str, Any]] = []
    seconds = 0.0
    if kept.exists() and Run(**json.loads(kept.read_text())["run"]) == run:
        simulation.load(checkpoint)
        earlier = json.loads(kept.read_text())
        records, seconds = earlier["records"], earlier["seconds"]
        print(f"goes on after epoch {simulation.progress.epoch}: {run.key()}", flush=True)
    started = time.perf_counter()
    for record in simulation:
        records.append(_compact(record))
        if time.perf_counter() + _SAVING > deadline and not simulation.is_over:
            simulation.save(checkpoint)
            seconds += time.perf_counter() - started
            document = {"run": asdict(run), "records": records, "seconds": seconds}
            kept.write_text(json.dumps(document))
            (args.output / "cut.json").write_text(json.dumps(document))
            print(f"stops after epoch {simulation.progress.epoch}: {run.key()}", flush=True)
            return None
    seconds += time.perf_counter() - started
    last, own = records[-1], _own_accuracies(engine)
    print(
        f"{run.key()}: test {last.get('test_accuracy')} (workers {statistics.fmean(own):.4f}), "
        f"train {last.get('train_loss')}, own {last['worker_loss']}, "
        f"consensus {last['consensus_distance']:.4g}, {last['megabytes_sent'] / 1e6:.4g} TB, "
        f"{seconds:.1f} s",
        flush=True,
    )
    return {
        "run": asdict(run),
        "momentum": asdict(simulation.momentum),
        "device": _device(args),
        "batching": engine.batching,
        "compiled": engine.execution.compile,
        "seconds": seconds,
        "worker_accuracies": own,
        "records": records,
    }


def _compact(record: Record) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if v is not None}


def _own_accuracies(engine: Engine) -> list[float]:
    """Each worker's own model on the test set, which is what their table is of."""
    found = []
    for i in range(engine.task.num_workers):
        module = engine.workers.average()
        named = dict(module.named_parameters())
        with torch.no_grad(), engine.execution.autocast():
            for name, view in engine.workers.layout.views(engine.workers.parameters[i]):
                named[name].copy_(view)
            found.append(engine.task.evaluate(module).accuracy or 0.0)
    return found


# -- afterwards -----------------------------------------------------------------------------------


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    path = folder if folder.is_file() else folder / "relaysgd.jsonl"
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def table(path: Path) -> str:
    """A row for runs that differ in their seed only."""
    rows: dict[Run, list[dict[str, Any]]] = {}
    for line in _lines(path):
        rows.setdefault(replace(Run(**line["run"]), seed=0), []).append(line)
    out = [
        "| concentration | bytes | topology | strategy | wire | momentum | rate | epochs | seeds "
        "| average model | workers | TB per worker |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    for run, lines in rows.items():
        last = [line["records"][-1] for line in lines]
        scores = [100 * r["test_accuracy"] for r in last if r.get("test_accuracy") is not None]
        own = [100 * statistics.fmean(line["worker_accuracies"]) for line in lines]
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        mean = f"{statistics.fmean(scores):.1f}{spread}" if scores else "diverged"
        out.append(
            f"| {run.concentration:g} | {run.bytes:g} | {run.topology} | {run.strategy} "
            f"| `{run.wire}` | {run.momentum} | {run.rate:g} | {run.epochs} | {len(lines)} "
            f"| {mean} | {statistics.fmean(own):.1f} | {last[0]['megabytes_sent'] / 1e6:.3g} |"
        )
    return "\n".join(out)


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=["plans", "train", "table"])
    parser.add_argument("what", nargs="*", default=["main"])
    parser.add_argument("--plans", type=Path, default=_HERE / "plans")
    parser.add_argument("--data", type=Path, help="default: random images, to try the script")
    parser.add_argument("--output", type=Path, default=Path("."))
    parser.add_argument("--state", type=Path, default=Path("/tmp/relaysgd"))
    parser.add_argument("--seconds", type=float, default=540, help="of training in this call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--images", type=int, default=8192, help="random ones")
    parser.add_argument("--batch-size", type=int, default=recipe(TASK).batch_size)
    parser.add_argument("--small", action="store_true", help="a small network and small images")
    parser.add_argument("--width", type=int, default=64, help="less: to try it without a GPU")
    args = parser.parse_args()
    if args.action == "table":
        print(table(Path(args.what[0])))
    elif args.action == "plans":
        make_plans(list(parse(args.what)), args.plans)
    else:
        train(list(parse(args.what)), args)


if __name__ == "__main__":
    main()
