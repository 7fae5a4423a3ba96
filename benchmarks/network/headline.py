"""Seconds to the same loss on a real, shaped network: ours beside what people train with today.

    sudo python benchmarks/network/headline.py --output benchmarks/results/headline

Eight processes on eight hosts (network namespaces) of the paper's graph er8, models of 1 and 10 MB,
real gradients on scikit-learn's digits, real messages over TCP. Two measurements a method:

- *ms an iteration*, with every host's card shaped. The hosts share this machine's few cores, so
  computing is padded by sleeping to the same fixed time for all: the only thing that is made up.
- *iterations to the target*, by the average model's loss on all training data, every few
  iterations, on the same processes with the cards unshaped and no padding: what is exchanged does
  not depend on how long it takes, and evaluating is not on any clock. The target counts as reached
  when two evaluations in a row are below it.

Seconds are their product. The ceiling is DDP's iterations with free communication. All methods
take the same learning rate, tuned for none of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from namespaces import Network
from peers import PEERS, RATE, Method, attach, available
from torch import nn

from matcha import families
from matcha import plan as make_plan
from matcha.distributed import TorchTransport
from matcha.distributed.collectives import barrier
from matcha.errors import MatchaError
from matcha.tasks.data import digits

NUM_WORKERS = 8
BATCH = 16
COMPUTE_SECONDS = 0.04
MBPS = 200.0
ITERATIONS = 300
EVERY = 5
TARGET = 0.1
WARMUP = 12
SIZES = {"1 MB": (512, 400), "10 MB": (1200, 2000)}
"""The hidden layers of the models."""
OURS: list[tuple[str, float, bool, str | None]] = [
    ("vanilla", 1.0, False, None),
    ("periodic", 0.1, False, None),
    ("matcha", 0.5, False, None),
    ("matcha", 0.1, False, None),
    ("greedy", 0.1, False, None),
    ("greedy", 0.1, False, "bfloat16"),
    ("greedy", 0.1, True, "bfloat16"),
    ("greedy", 0.02, False, None),
    ("greedy", 0.02, False, "bfloat16"),
    ("greedy", 0.02, True, "bfloat16"),
]
"""Strategy, budget, whether the exchange overlaps the gradient, and the wire's type."""


def make_model(size: str) -> nn.Module:
    """A network whose message has about that size."""
    first, second = SIZES[size]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(),
            nn.Linear(second, 10),
        )  # fmt: skip


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

    def run(self, case: dict[str, Any], size: str, number: int, pad: float) -> None:
        """Train a case, timed (`pad` > 0) or evaluated, and leave what was found in a file."""
        model = make_model(size)
        method = attach(case, model, self.transport)
        random = torch.Generator().manual_seed(self.rank)
        barrier(self.transport, 120)
        found = []
        begun = time.perf_counter()
        for k in range(1, case["timed" if pad else "iterations"] + 1):
            self._iterate(method, random, pad)
            if pad and k == WARMUP:
                begun = time.perf_counter()
            if not pad and k % EVERY == 0:
                method.settle()
                found.append(self._share_of_loss(model, size))
        method.settle()
        if pad:
            found = [(time.perf_counter() - begun) / (case["timed"] - WARMUP)]
        method.close()
        barrier(self.transport, 120)
        kind = "timed" if pad else "evaluated"
        (self.folder / f"{number}-{kind}-{self.rank}.json").write_text(json.dumps(found))

    def _iterate(self, method: Method, random: torch.Generator, pad: float) -> None:
        begun = time.perf_counter()
        batch = torch.randint(len(self.labels), (BATCH,), generator=random)
        loss = nn.functional.cross_entropy(method.forward(self.images[batch]), self.labels[batch])
        if pad:
            time.sleep(max(0.0, pad - 2 * (time.perf_counter() - begun)))
        method.step(loss)

    def _share_of_loss(self, model: nn.Module, size: str) -> float:
        """This worker's part of the average model's loss; models meet in a file, not on a wire."""
        own = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        shape = (NUM_WORKERS, own.size)
        mode = "r+" if (self.folder / f"{size}.bin").exists() else "w+"
        if self.rank == 0 and mode == "w+":
            np.memmap(self.folder / f"{size}.bin", np.float32, "w+", shape=shape)
        barrier(self.transport, 120)
        slots = np.memmap(self.folder / f"{size}.bin", np.float32, "r+", shape=shape)
        slots[self.rank] = own
        slots.flush()
        barrier(self.transport, 120)
        average = make_model(size)
        nn.utils.vector_to_parameters(torch.from_numpy(slots.mean(0)), average.parameters())
        barrier(self.transport, 120)
        with torch.no_grad():
            return nn.functional.cross_entropy(average(self.images), self.labels).item()


def work(folder: Path) -> None:
    task = json.loads((folder / "task.json").read_text())
    worker = Worker(folder)
    for number, case in enumerate(task["cases"]):
        worker.run(case, task["size"], number, task["pad"])
    worker.transport.close()
    dist.destroy_process_group()


# -- the whole -------------------------------------------------------------------------------------


def cases(folder: Path, size: str, quick: bool) -> list[dict[str, Any]]:
    """Every method, with how many iterations it is timed: whole periods, and not for minutes."""
    heavy = size == "10 MB"
    peers = [
        {"name": name, "plan": None, "timed": WARMUP + _timed(name, heavy)} for name in available()
    ]
    ours = []
    for strategy, budget, overlap, wire in OURS:
        path = folder / f"plan-{strategy}-{budget}.json"
        own = families.paper_matchings("er8") if strategy in ("matcha", "vanilla") else None
        make_plan(families.paper("er8"), budget, strategy, seed=0, matchings=own).save(path)
        name = strategy if strategy == "vanilla" else f"{strategy} {budget:g}"
        name += f", {wire}" if wire else ""
        name += ", overlap" if overlap else ""
        count = 10 if heavy and budget > 0.2 else 100
        ours.append(
            {"name": name, "plan": str(path), "overlap": overlap, "wire": wire,
             "timed": WARMUP + count}
        )  # fmt: skip
    chosen = [*peers, *ours]
    for case in chosen:
        case["iterations"] = 30 if quick else ITERATIONS
        case["timed"] = WARMUP + 10 if quick else case["timed"]
    return chosen


def _timed(peer: str, heavy: bool) -> int:
    if peer.startswith("PostLocalSGD"):
        return 100
    return 20 if heavy else 40


def run_network(
    folder: Path, chosen: list[dict[str, Any]], size: str, mbps: float | None
) -> list[list[Any]]:
    """Run all cases on the hosts, shaped and timed or unshaped and evaluated."""
    pad = 0.0 if mbps is None else COMPUTE_SECONDS
    (folder / "task.json").write_text(json.dumps({"cases": chosen, "size": size, "pad": pad}))
    with Network(families.paper("er8"), mbps=mbps) as network:
        codes = network.run([sys.executable, __file__, "--worker", str(folder)], timeout=3000)
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")
    kind = "timed" if pad else "evaluated"
    return [
        [
            json.loads((folder / f"{number}-{kind}-{rank}.json").read_text())
            for rank in range(NUM_WORKERS)
        ]
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


def measure(size: str, mbps: float, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        chosen = cases(folder, size, quick)
        evaluated = run_network(folder, chosen, size, None)
        timed = run_network(folder, chosen, size, mbps)
    rows = []
    for case, losses, seconds in zip(chosen, evaluated, timed, strict=True):
        curve = np.mean(losses, axis=0).tolist()
        iterations, each = held(curve), max(value for (value,) in seconds)
        rows.append(
            {
                "method": case["name"],
                "is_peer": case["name"] in PEERS,
                "iteration_ms": 1e3 * each,
                "iterations": iterations,
                "seconds": None if iterations is None else iterations * each,
                "final_loss": curve[-1],
            }
        )
    return {"size": size, "bytes": _message_bytes(size), "rows": _with_ratios(rows)}


def _message_bytes(size: str) -> int:
    return 4 * sum(p.numel() for p in make_model(size).parameters())


def _with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Times sooner than DDP and than the best peer, and how close to the ceiling."""
    by_name = {row["method"]: row for row in rows}
    ddp = by_name["DDP"]
    peers = [
        r["seconds"] for r in rows if r["is_peer"] and r["seconds"] and r["method"] != "silent"
    ]
    ceiling = None if ddp["iterations"] is None else ddp["iterations"] * COMPUTE_SECONDS
    bases = {"over_ddp": ddp["seconds"], "over_best_peer": min(peers, default=None)}
    bases["over_vanilla"] = by_name["vanilla"]["seconds"]
    for row in rows:
        for name, base in bases.items():
            row[name] = base / row["seconds"] if base and row["seconds"] else None
        row["of_ceiling"] = row["seconds"] / ceiling if ceiling and row["seconds"] else None
    return rows


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hosts']} processes on {result['topology']}, cards at {result['mbps']:g} Mbit/s, "
        f"computing padded to {result['compute_ms']:g} ms; seconds until the average model's "
        f"training loss is {result['target_loss']:g}"
    ]
    for size in result["sizes"]:
        lines += [
            "",
            f"messages of {size['bytes'] / 1e6:.2f} MB",
            f"{'method':<30}{'ms/iter.':>9}{'iterations':>11}{'seconds':>9}{'x DDP':>7}"
            f"{'x best peer':>12}{'x vanilla':>10}{'of ceiling':>11}",
        ]
        for row in size["rows"]:
            cells = (
                f"{row['iteration_ms']:>9.0f}{_cell(row['iterations'], 11, '.0f')}"
                f"{_cell(row['seconds'], 9, '.1f')}{_cell(row['over_ddp'], 7, '.2f')}"
                f"{_cell(row['over_best_peer'], 12, '.2f')}{_cell(row['over_vanilla'], 10, '.2f')}"
                f"{_cell(row['of_ceiling'], 11, '.2f')}"
            )
            lines.append(f"{row['method']:<30}{cells}")
    return "\n".join(lines)


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.txt")
    parser.add_argument("--mbps", type=float, default=MBPS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="a few iterations of each, to try it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    try:
        sizes = [measure(size, options.mbps, options.quick) for size in options.sizes]
    except MatchaError as error:
        print(f"headline: {error}", file=sys.stderr)
        return 2
    result = {
        "benchmark": "headline",
        "hosts": NUM_WORKERS,
        "topology": "paper:er8",
        "mbps": options.mbps,
        "compute_ms": 1e3 * COMPUTE_SECONDS,
        "target_loss": TARGET,
        "learning_rate": RATE,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "sizes": sizes,
    }
    text = table(result)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
