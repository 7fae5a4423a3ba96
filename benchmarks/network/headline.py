"""Time to the same training loss on a real, shaped network, strategy by strategy.

    sudo python benchmarks/network/headline.py --output benchmarks/results/headline

Eight processes on eight hosts (network namespaces) of the paper's graph er8; every host's card is
shaped so that vanilla's exchange takes about five times its computing. Each process computes real
gradients of a real model on scikit-learn's digits and exchanges real messages over TCP. The hosts
share this machine's few cores, so computing is padded by sleeping to the same fixed time for all;
the padding is the only thing that is made up, and it is stated in the table.

The training loss is the mean over workers of their batches' losses, over the last 20 iterations; a
worker's clock runs from its first iteration. All strategies take the same learning rate, tuned for
none of them.
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from matcha import Plan, families
from matcha import plan as make_plan
from matcha.distributed import Gossip, TorchTransport
from matcha.distributed.collectives import barrier
from matcha.errors import MatchaError
from matcha.tasks.data import digits

NUM_WORKERS = 8
BATCH = 16
RATE, MOMENTUM = 0.05, 0.9
COMPUTE_SECONDS = 0.04
MBPS = 200.0
ITERATIONS = 220
WINDOW = 20
TARGET = 0.15
STRATEGIES: list[tuple[str, float]] = [
    ("ddp", 1.0),
    ("vanilla", 1.0),
    ("periodic", 0.5),
    ("periodic", 0.1),
    ("matcha", 0.5),
    ("matcha", 0.1),
    ("matcha", 0.02),
    ("greedy", 0.5),
    ("greedy", 0.1),
    ("greedy", 0.02),
]
OVERLAP_BUDGETS = (0.02, 0.1, 0.2, 0.3, 0.5, 1.0)
OVERLAP_ITERATIONS = 40


def make_model() -> nn.Module:
    """243,402 parameters: a message is just under one megabyte."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 400), nn.ReLU(), nn.Linear(400, 10)
        )


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

    def run(self, name: str, plan: Plan | None, iterations: int, overlap: bool = False) -> None:
        """Train and write (seconds, loss) of each iteration; no plan means DDP."""
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        trained: nn.Module = model
        gossip = None
        if plan is None:
            trained = DistributedDataParallel(model)
        else:
            gossip = Gossip(
                model, optimizer, plan, transport=self.transport, overlap=overlap, deadline=120
            )
        random = torch.Generator().manual_seed(self.rank)
        barrier(self.transport, 120)
        log = []
        started = time.perf_counter()
        for _ in range(iterations):
            begun = time.perf_counter()
            batch = torch.randint(len(self.labels), (BATCH,), generator=random)
            loss = nn.functional.cross_entropy(trained(self.images[batch]), self.labels[batch])
            time.sleep(max(0.0, COMPUTE_SECONDS - 2 * (time.perf_counter() - begun)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append((time.perf_counter() - started, loss.item()))
        if gossip is not None:
            gossip.detach()
        barrier(self.transport, 120)
        (self.folder / f"{name}-{self.rank}.json").write_text(json.dumps(log))


def work(folder: Path) -> None:
    worker = Worker(folder)
    for case in json.loads((folder / "cases.json").read_text()):
        plan = None if case["plan"] is None else Plan.load(case["plan"])
        worker.run(case["name"], plan, case["iterations"], case["overlap"])
    worker.transport.close()
    dist.destroy_process_group()


# -- the whole -------------------------------------------------------------------------------------


def cases(folder: Path, quick: bool) -> list[dict[str, Any]]:
    topology = families.paper("er8")
    plans: dict[tuple[str, float], str] = {}

    def plan_file(strategy: str, budget: float) -> str | None:
        if strategy == "ddp":
            return None
        if (strategy, budget) not in plans:
            path = folder / f"plan-{strategy}-{budget}.json"
            own = families.paper_matchings("er8") if strategy in ("matcha", "vanilla") else None
            make_plan(topology, budget, strategy, seed=0, matchings=own).save(path)
            plans[strategy, budget] = str(path)
        return plans[strategy, budget]

    chosen = [
        {
            "name": f"{strategy}-{budget}",
            "strategy": strategy,
            "budget": budget,
            "plan": plan_file(strategy, budget),
            "iterations": 30 if quick else ITERATIONS,
            "overlap": False,
        }
        for strategy, budget in STRATEGIES
    ]
    chosen += [
        {
            "name": f"overlap-{overlap}-{budget}",
            "strategy": "greedy",
            "budget": budget,
            "plan": plan_file("greedy", budget),
            "iterations": 10 if quick else OVERLAP_ITERATIONS,
            "overlap": overlap,
        }
        for budget in OVERLAP_BUDGETS
        for overlap in (False, True)
    ]
    return chosen


def evaluate(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    logs = np.array(
        [
            json.loads((folder / f"{case['name']}-{rank}.json").read_text())
            for rank in range(NUM_WORKERS)
        ]
    )  # worker, iteration, (seconds, loss)
    clock = logs[:, :, 0].max(0)
    loss = logs[:, :, 1].mean(0)
    window = min(WINDOW, len(loss))
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    reached = np.flatnonzero(smooth <= TARGET)
    row = {key: case[key] for key in ("strategy", "budget", "overlap")}
    row["iteration_ms"] = 1e3 * float(clock[-1]) / len(loss)
    row["final_loss"] = float(smooth[-1])
    row["iterations_to_target"] = int(reached[0] + window) if len(reached) else None
    row["seconds_to_target"] = float(clock[reached[0] + window - 1]) if len(reached) else None
    return row


def measure(mbps: float, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = cases(folder, quick)
        (folder / "cases.json").write_text(json.dumps(chosen))
        with Network(families.paper("er8"), mbps=mbps) as network:
            codes = network.run([sys.executable, __file__, "--worker", name], timeout=3000)
        if any(codes):
            raise SystemExit(f"the workers ended with {codes}")
        rows = [evaluate(folder, case) for case in chosen]
    vanilla = next(row["seconds_to_target"] for row in rows if row["strategy"] == "vanilla")
    for row in rows:
        row["speed_up_over_vanilla"] = (
            vanilla / row["seconds_to_target"] if vanilla and row["seconds_to_target"] else None
        )
    bulk = len(STRATEGIES)
    return {
        "benchmark": "headline",
        "hosts": NUM_WORKERS,
        "topology": "paper:er8",
        "mbps": mbps,
        "message_bytes": 4 * sum(p.numel() for p in make_model().parameters()),
        "compute_ms": 1e3 * COMPUTE_SECONDS,
        "target_loss": TARGET,
        "learning_rate": RATE,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rows": rows[:bulk],
        "overlap": rows[bulk:],
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['hosts']} processes on {result['topology']}, cards at {result['mbps']:g} Mbit/s, "
        f"messages of {result['message_bytes'] / 1e6:.2f} MB, computing padded to "
        f"{result['compute_ms']:g} ms",
        f"training loss {result['target_loss']:g}:",
        "",
        "strategy   budget   ms/iteration   iterations   seconds to target   speed-up over vanilla",
    ]
    for row in result["rows"]:
        seconds, speed = row["seconds_to_target"], row["speed_up_over_vanilla"]
        end = "not reached" if seconds is None else f"{seconds:.1f}"
        lines.append(
            f"{row['strategy']:<11}{row['budget']:>6g}{row['iteration_ms']:>15.0f}"
            f"{row['iterations_to_target'] or '-':>13}{end:>20}"
            f"{'-' if speed is None else f'{speed:.2f}':>24}"
        )
    lines += [
        "",
        "greedy, milliseconds an iteration: the exchange after the gradient, or beside it:",
        "budget   x <- W(x - eta g)   x <- Wx - eta g",
    ]
    for budget in OVERLAP_BUDGETS:
        plain, hidden = (
            next(
                row["iteration_ms"]
                for row in result["overlap"]
                if row["budget"] == budget and row["overlap"] is overlap
            )
            for overlap in (False, True)
        )
        lines.append(f"{budget:>6g}{plain:>19.0f}{hidden:>18.0f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.txt")
    parser.add_argument("--mbps", type=float, default=MBPS)
    parser.add_argument("--quick", action="store_true", help="a few iterations of each, to try it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    try:
        result = measure(options.mbps, options.quick)
    except MatchaError as error:
        print(f"headline: {error}", file=sys.stderr)
        return 2
    text = table(result)
    print(text)
    if options.output:
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
