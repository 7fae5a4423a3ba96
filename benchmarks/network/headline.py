"""Seconds to the same loss on a real, shaped network: ours beside what people train with today.

    sudo python benchmarks/network/headline.py --output benchmarks/results/headline

About 20 minutes on a quiet machine of two cores. What OUTPUT.json already holds of the same
settings is not measured again, so it can be run in pieces (`--sizes`, `--parts`, `--only`).

Eight processes on eight hosts (network namespaces) of the paper's graph er8, models of 1 and 10 MB,
real gradients on scikit-learn's digits, real messages over TCP. Three measurements a method:

- *ms per iteration*, with every host's card shaped. The hosts share this machine's few cores, so
  computing is padded by sleeping to the same fixed time for all: the only thing that is made up.
- *iterations to the target*, by the average model's loss on all training data, every few
  iterations, on the same processes with the cards unshaped and no padding: what is exchanged does
  not depend on how long it takes, and evaluating is not on any clock. The target counts as reached
  when two evaluations in a row are below it.

- *ms per iteration with a core per host*: real hosts do not encode on one another's cores, and
  these do: whatever computes on all of them takes hosts / cores times as long as it would. So once
  more with time dilated by that number (Gupta et al., "To infinity and beyond: time-warped network
  emulation", NSDI 2006): cards that many times slower, computing padded to that many times
  longer, and what the clock says divided by it. Every host then has as much of a core, a dilated
  second, as one core has a real second.

Seconds are the product of iterations and either of the others. The ceiling is DDP's iterations at
the pace of workers that are silent.
All methods take the same learning rate, tuned for none of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import Network
from peers import PEERS, RATE, Method, attach, available
from torch import nn

from matcha import families
from matcha import plan as make_plan
from matcha.distributed import TorchTransport
from matcha.distributed.transports.collectives import barrier
from matcha.errors import MatchaError
from matcha.zoo.data import digits

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness

NUM_WORKERS = 8
BATCH = 16
COMPUTE_SECONDS = 0.04
MBPS = 200.0
EVERY = 5
TARGET = 0.1
WARMUP = 12
SIZES = {"1 MB": (512, 400), "10 MB": (1200, 2000)}
"""The hidden layers of the models."""
MOST_ITERATIONS = 300
DILATION = max(1.0, NUM_WORKERS / (os.cpu_count() or 1))
PARTS = ("iterations", "seconds", "core_each")
CLOCKS = {
    "seconds": "hosts share this machine's cores",
    "core_each": "a core per host, by dilated time",
}
OURS: list[tuple[str, float, str, bool]] = [
    ("vanilla", 1.0, "float32", False),
    ("periodic", 0.1, "float32", False),
    ("matcha", 0.5, "float32", False),
    ("matcha", 0.1, "float32", False),
    ("greedy", 0.1, "float32", False),
    ("greedy", 0.1, "bfloat16", False),
    ("greedy", 0.1, "bfloat16", True),
    ("greedy", 0.02, "float32", False),
    ("greedy", 0.02, "float32", True),
    ("greedy", 0.02, "bfloat16", False),
    ("greedy", 0.02, "bfloat16", True),
    ("greedy", 0.01, "float32", True),
    ("greedy", 0.005, "float32", True),
    ("greedy", 0.002, "float32", True),
    ("greedy", 0.02, "modulo:4", True),
    ("greedy", 0.02, "modulo:3", True),
    ("greedy", 0.005, "modulo:8", True),
    ("greedy", 0.005, "modulo:4", False),
    ("greedy", 0.005, "modulo:4", True),
    ("greedy", 0.005, "modulo:3", True),
    ("greedy", 0.002, "modulo:4", True),
    ("greedy", 0.002, "modulo:3", True),
]
"""Strategy, budget, wire and overlap."""


def make_model(size: str) -> nn.Module:
    """A network whose message has about that size."""
    first, second = SIZES[size]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(),
            nn.Linear(second, 10),
        )  # fmt: skip


def dilation(part: str) -> float:
    """How many times slower everything but the processor is in a measurement."""
    return DILATION if part == "core_each" else 1.0


# -- one worker ------------------------------------------------------------------------------------


class Worker:
    """Runs every case in turn on one host."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.folder = folder
        self.rank = dist.get_rank()
        self.transport = TorchTransport("gloo")
        data = digits()
        images = torch.from_numpy(data.train_images).float().flatten(1) / 255
        self.images = images[self.rank :: NUM_WORKERS]
        self.labels = torch.from_numpy(data.train_labels)[self.rank :: NUM_WORKERS]

    def run(self, case: dict[str, Any], size: str, number: int, part: str) -> None:
        """Measure one part of a case, and leave what was found in a file."""
        model = make_model(size)
        method = attach(case, model, self.transport)
        self.random = torch.Generator().manual_seed(self.rank)
        barrier(self.transport, 120)
        if part == "iterations":
            found: Any = self._losses(method, model, case)
        else:
            found = self._time(method, case, dilation(part))
        method.close()
        barrier(self.transport, 120)
        (self.folder / f"{number}-{self.rank}.json").write_text(json.dumps(found))

    def _time(self, method: Method, case: dict[str, Any], dilation: float) -> float:
        begun = time.perf_counter()
        for k in range(1, case["timed"] + 1):
            self._iterate(method, COMPUTE_SECONDS * dilation)
            if k == WARMUP:
                begun = time.perf_counter()
        method.settle()
        return (time.perf_counter() - begun) / (case["timed"] - WARMUP) / dilation

    def _losses(self, method: Method, model: nn.Module, case: dict[str, Any]) -> list[float]:
        """The average model's loss, until it has held the target."""
        losses: list[float] = []
        for k in range(1, case["most_iterations"] + 1):
            self._iterate(method, 0.0)
            if k % EVERY == 0:
                method.settle()
                losses.append(self._loss_of_average(model))
                if held(losses) is not None:
                    break
        return losses

    def _iterate(self, method: Method, pad: float) -> None:
        begun = time.perf_counter()
        batch = torch.randint(len(self.labels), (BATCH,), generator=self.random)
        loss = nn.functional.cross_entropy(method.forward(self.images[batch]), self.labels[batch])
        if pad:
            time.sleep(max(0.0, pad - 2 * (time.perf_counter() - begun)))
        method.step(loss)

    def _loss_of_average(self, model: nn.Module) -> float:
        """The average model's loss on all training data; each worker computes it on its own part.

        By an all-reduce of its own group: nothing of it is on a clock, nor on a plan's link.
        """
        mean = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        dist.all_reduce(mean)
        average = copy.deepcopy(model)
        nn.utils.vector_to_parameters(mean / NUM_WORKERS, average.parameters())
        with torch.no_grad():
            loss = nn.functional.cross_entropy(average(self.images), self.labels, reduction="sum")
        total = torch.tensor([loss.item(), float(len(self.labels))])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def work(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    worker = Worker(folder)
    for number, case in enumerate(task["cases"]):
        worker.run(case, task["size"], number, task["part"])
    worker.transport.close()
    dist.destroy_process_group()


# -- the whole -------------------------------------------------------------------------------------


def cases(folder: Path, size: str) -> list[dict[str, Any]]:
    """Every method, with how many iterations it is timed: whole periods, and not for minutes."""
    heavy = size == "10 MB"
    peers = [
        {"name": name, "plan": None, "timed": WARMUP + _timed(name, heavy)} for name in available()
    ]
    ours = [_own_case(folder, heavy, *options) for options in OURS]
    return [{**case, "most_iterations": MOST_ITERATIONS} for case in [*peers, *ours]]


def _timed(peer: str, heavy: bool) -> int:
    if peer.startswith("PostLocalSGD"):
        return 100
    return 20 if heavy else 40


def _own_case(
    folder: Path, heavy: bool, strategy: str, budget: float, wire: str, overlap: bool
) -> dict[str, Any]:
    path = folder / f"plan-{strategy}-{budget}-{wire}.json"
    if not path.exists():
        own = families.paper_matchings("er8") if strategy in ("matcha", "vanilla") else None
        er8 = families.paper("er8")
        make_plan(er8, budget, strategy, seed=0, matchings=own, wire=wire).save(path)
    name = strategy if strategy == "vanilla" else f"{strategy} {budget:g}"
    name += f", {wire}" if wire != "float32" else ""
    name += ", overlap" if overlap else ""
    count = 10 if heavy and budget > 0.2 else 100
    return {"name": name, "plan": str(path), "overlap": overlap, "timed": WARMUP + count}


def run_network(
    folder: Path, chosen: list[dict[str, Any]], size: str, part: str, mbps: float
) -> list[list[Any]]:
    """Run all cases on the hosts, shaped and timed or unshaped and evaluated."""
    (folder / "task.json").write_text(json.dumps({"cases": chosen, "size": size, "part": part}))
    shaped = None if part == "iterations" else mbps / dilation(part)
    with Network(families.paper("er8"), mbps=shaped) as network:
        codes = network.run([sys.executable, __file__, "--worker", str(folder)], timeout=3000)
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")
    return [
        [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
        for number in range(len(chosen))
    ]


def held(losses: list[float]) -> float | None:
    """The iteration at which the loss fell to the target for two evaluations, interpolated."""
    for place in range(len(losses) - 1):
        if losses[place] <= TARGET and losses[place + 1] <= TARGET:
            if place == 0:
                return float(EVERY)
            before, after = losses[place - 1], losses[place]
            return EVERY * (place + (before - TARGET) / (before - after))
    return None


def measure(found: dict[str, dict[str, Any]], size: str, options: argparse.Namespace) -> None:
    """Add to what was found of a size what is asked for and not there yet."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        listed = cases(folder, size)
        chosen = [case for case in listed if any(only in case["name"] for only in options.only)]
        for part in options.parts:
            missing = [c for c in chosen if part not in found.get(c["name"], {})]
            if not missing:
                continue
            answers = run_network(folder, missing, size, part, options.mbps)
            for case, answer in zip(missing, answers, strict=True):
                entry = found.setdefault(case["name"], {})
                # The slowest worker's time; the average model is the same for all.
                entry[part] = answer[0] if part == "iterations" else max(answer)


def rows(found: dict[str, dict[str, Any]], clock: str) -> list[dict[str, Any]]:
    """A row a method, in the order of the lists above, by one of the clocks."""
    order = [*PEERS, "vanilla", *(name for name in found if name not in {*PEERS, "vanilla"})]
    wanted = {"iterations", clock}
    return [_row(name, found[name], clock) for name in order if wanted <= set(found.get(name, ()))]


def _row(name: str, entry: dict[str, Any], clock: str) -> dict[str, Any]:
    iterations = held(entry["iterations"])
    return {
        "method": name,
        "is_peer": name in PEERS,
        "iteration_ms": 1e3 * entry[clock],
        "iterations": iterations,
        "seconds": None if iterations is None else iterations * entry[clock],
        "final_loss": entry["iterations"][-1],
    }


def verdict(rows: list[dict[str, Any]]) -> str:
    """How much a coded wire gains on whole values, and how much any could."""
    reached = [r for r in rows if r["seconds"] and r.get("of_ceiling")]
    ours = [r for r in reached if r["method"].startswith("greedy")]
    coded = [r for r in ours if "modulo" in r["method"]]
    whole = [r for r in ours if r not in coded and "bfloat16" not in r["method"]]
    if not coded or not whole:
        return ""
    best, plain = (min(these, key=lambda r: r["seconds"]) for these in (coded, whole))
    free = plain["seconds"] / plain["of_ceiling"]
    return (
        f"Greedy with whole float32 values takes {plain['seconds']:.1f} s at its best budget "
        f"({plain['method']}), over a coded wire {best['seconds']:.1f} s ({best['method']}): "
        f"{plain['seconds'] / best['seconds']:.2f} times as fast, and {best['of_ceiling']:.2f} of "
        f"the ceiling of free communication. That ceiling, {free:.1f} s, is "
        f"{plain['of_ceiling']:.2f} times as fast as whole values: a wire can gain more only "
        "where it needs fewer iterations than DDP."
    )


def _by(found: dict[str, dict[str, Any]], clock: str) -> dict[str, Any]:
    of_clock = _with_ratios(rows(found, clock))
    return {"rows": of_clock, "verdict": verdict(of_clock)}


def _message_bytes(size: str) -> int:
    return 4 * sum(p.numel() for p in make_model(size).parameters())


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times sooner than DDP and than the best peer, and how close to the ceiling."""
    by_name = {row["method"]: row for row in rows}
    if "DDP" not in by_name:
        return []
    ddp = by_name["DDP"]
    peers = [
        r["seconds"] for r in rows if r["is_peer"] and r["seconds"] and r["method"] != "silent"
    ]
    free = by_name["silent"]["iteration_ms"] / 1e3 if "silent" in by_name else COMPUTE_SECONDS
    ceiling = None if ddp["iterations"] is None else ddp["iterations"] * free
    bases = {"over_ddp": ddp["seconds"], "over_best_peer": min(peers, default=None)}
    bases["over_vanilla"] = by_name["vanilla"]["seconds"] if "vanilla" in by_name else None
    for row in rows:
        for name, base in bases.items():
            row[name] = base / row["seconds"] if base and row["seconds"] else None
        row["of_ceiling"] = row["seconds"] / ceiling if ceiling and row["seconds"] else None
    return rows


def describe(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hosts']} processes on {result['topology']}, cards at {result['mbps']:g} Mbit/s, "
        f"computing padded to {result['compute_ms']:g} ms; seconds until the average model's "
        f"training loss is {result['target_loss']:g}"
    ]
    for size in result["sizes"]:
        for clock, by_clock in (("seconds", size), ("core_each", size["core_each"])):
            if by_clock["rows"]:
                head = f"messages of {size['bytes'] / 1e6:.2f} MB; {CLOCKS[clock]}"
                lines += ["", head, *_lines(by_clock["rows"]), by_clock["verdict"]]
    return "\n".join(lines)


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'method':<30}{'ms/iter.':>9}{'iterations':>11}{'seconds':>9}{'x DDP':>7}"
        f"{'x best peer':>12}{'x vanilla':>10}{'of ceiling':>11}"
    ]
    for row in rows:
        cells = (
            f"{row['iteration_ms']:>9.0f}{_cell(row['iterations'], 11, '.0f')}"
            f"{_cell(row['seconds'], 9, '.1f')}{_cell(row['over_ddp'], 7, '.2f')}"
            f"{_cell(row['over_best_peer'], 12, '.2f')}{_cell(row['over_vanilla'], 10, '.2f')}"
            f"{_cell(row['of_ceiling'], 11, '.2f')}"
        )
        lines.append(f"{row['method']:<30}{cells}")
    return lines


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def main() -> int:
    options = _options()
    if options.worker:
        work(options.worker)
        return 0
    settings = {
        "hosts": NUM_WORKERS, "topology": "paper:er8", "mbps": options.mbps,
        "compute_ms": 1e3 * COMPUTE_SECONDS, "target_loss": TARGET, "learning_rate": RATE,
        "cores": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip
    found = _earlier(options.output, settings)
    for size in options.sizes:
        try:
            measure(found.setdefault(size, {}), size, options)
        except MatchaError as error:
            print(f"headline: {error}", file=sys.stderr)
            return 2
    _write(settings, found, options.output)
    return 0


def _options() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--mbps", type=float, default=MBPS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of methods' names")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _earlier(output: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    earlier = harness.earlier(output) or {}
    same = all(earlier.get(key) == value for key, value in settings.items())
    return earlier.get("found", {}) if same else {}


def _write(settings: dict[str, Any], found: dict[str, Any], output: Path | None) -> None:
    sizes = [
        {
            "size": size, "bytes": _message_bytes(size), **_by(of_size, "seconds"),
            "core_each": _by(of_size, "core_each"),
        }
        for size, of_size in found.items()
    ]  # fmt: skip
    result = {"benchmark": "headline", **settings, "sizes": sizes, "found": found}
    harness.finish(output, result, describe(result))


if __name__ == "__main__":
    sys.exit(main())
