"""One of eight workers four times slower: in step, and with meetings when both have time.

    python benchmarks/stragglers.py --output benchmarks/results/stragglers

Eight real processes train scikit-learn's digits over gloo on the paper's graph er8. They share this
machine's few cores, so computing is padded by sleeping to a fixed time, four times as long on one
worker: the only thing that is made up. Every worker notes its parameters after each of its steps;
the average model on the clock is worked out afterwards, off the clock. The target counts as reached
when two evaluations in a row are below it. Beside it stands what the simulator predicts from the
two times alone, for the same task, the same batches and the same plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from matcha import Plan, families, plan
from matcha.distributed import Gossip, TorchTransport
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.distributed.transports.collectives import barrier
from matcha.simulation import (
    SGD,
    AsynchronousSimulation,
    Constant,
    Delays,
    Settings,
    Simulation,
)
from matcha.zoo.data import digits
from matcha.zoo.tensors import TensorTask

NUM_WORKERS = 8
BATCH = 16
RATE, MOMENTUM = 0.03, 0.9
COMPUTE_SECONDS = 0.04
MEETING_SECONDS = 0.003
"""Of a meeting on this machine's loopback, for the simulator."""
SLOW = 7
TIMES_SLOWER = 4.0
TARGET = 0.2
EVERY = 0.1
"""Seconds between evaluations."""
CASES = {
    "even, in step": (1.0, False),
    "even, asynchronous": (1.0, True),
    "slow, in step": (TIMES_SLOWER, False),
    "slow, asynchronous": (TIMES_SLOWER, True),
}


def make_task(seed: int) -> TensorTask:
    data = digits()
    images = torch.from_numpy(data.train_images).float().flatten(1) / 255
    labels = torch.from_numpy(data.train_labels)
    return TensorTask(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        images, labels, num_workers=NUM_WORKERS, batch_size=BATCH, seed=seed, name="digits",
    )  # fmt: skip


# -- one worker ------------------------------------------------------------------------------------


def work(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchTransport("gloo")
    chosen = Plan.load(folder / "plan.json")
    for name, seed, slower, asynchronous, seconds in json.loads((folder / "runs.json").read_text()):
        pace = COMPUTE_SECONDS * (slower if transport.rank == SLOW else 1.0)
        limit = None if asynchronous else round(seconds / (COMPUTE_SECONDS * slower))
        found = train(transport, chosen, seed, asynchronous, pace, limit, seconds)
        np.savez(folder / f"{name}-{seed}-{transport.rank}.npz", **found)
    transport.close()
    dist.destroy_process_group()


def train(
    transport: TorchTransport,
    chosen: Plan,
    seed: int,
    asynchronous: bool,
    pace: float,
    limit: int | None,
    seconds: float,
) -> dict[str, Any]:
    """Train until the time is over, or for so many iterations; when was what where."""
    task = make_task(seed)
    task.to(torch.device("cpu"), torch.float32)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    gossip = Gossip(
        model, optimizer, chosen, transport=transport, asynchronous=asynchronous, timeout=120
    )
    steps, rank, k = task.steps_per_epoch, transport.rank, 0
    times, values = [0.0], [_flat(model)]
    barrier(transport, 120)
    begun = time.monotonic()
    tables: dict[str, torch.Tensor] = {}
    while k < limit if limit is not None else time.monotonic() - begun < seconds:
        started = time.monotonic()
        if k % steps == 0:
            tables = {n: torch.from_numpy(t) for n, t in task.tables(k // steps).items()}
        inputs, targets = task.batch({name: table[k % steps] for name, table in tables.items()})
        loss, _ = task.loss(model, inputs[rank], targets[rank], ())
        optimizer.zero_grad()
        loss.backward()
        time.sleep(max(0.0, pace - (time.monotonic() - started)))
        optimizer.step()
        k += 1
        times.append(time.monotonic() - begun)
        values.append(_flat(model))
    gossip.detach()
    barrier(transport, 120)
    return {"times": times, "values": np.stack(values), "sent": gossip.state.exchange.bytes_sent}


def _flat(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


# -- the whole -------------------------------------------------------------------------------------


def run(folder: Path, runs: list[tuple[str, int, float, bool, float]]) -> None:
    (folder / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, __file__, "--worker", str(folder)]
    with LocalWorkers(command, NUM_WORKERS, environment={"OMP_NUM_THREADS": "1"}) as workers:
        codes = workers.wait(timeout=600)
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")


def measured(folder: Path, name: str, seed: int) -> dict[str, Any]:
    """A run's figures: each worker's iterations per second, and when the target was reached."""
    workers = [np.load(folder / f"{name}-{seed}-{rank}.npz") for rank in range(NUM_WORKERS)]
    rates = [(len(w["times"]) - 1) / float(w["times"][-1]) for w in workers]
    values = [w["values"] for w in workers]
    end = min(float(w["times"][-1]) for w in workers)
    grid = np.arange(0.0, end, EVERY)
    places = [np.searchsorted(w["times"], grid, side="right") - 1 for w in workers]
    task = make_task(seed)
    task.to(torch.device("cpu"), torch.float32)
    model, losses = task.model(), []
    for moment in range(len(grid)):
        mean = np.mean([v[p[moment]] for v, p in zip(values, places, strict=True)], axis=0)
        nn.utils.vector_to_parameters(torch.from_numpy(mean), model.parameters())
        with torch.no_grad():
            losses.append(task.evaluate(model).loss)  # without a test split: on all training data
    return {"rates": rates, "to_target": reached(grid.tolist(), losses), "final": losses[-1]}


def reached(times: list[float], losses: list[float]) -> float | None:
    """When the loss fell to the target for two evaluations, interpolated."""
    for place in range(1, len(losses) - 1):
        if losses[place] <= TARGET and losses[place + 1] <= TARGET:
            before, after = losses[place - 1], losses[place]
            share = (before - TARGET) / (before - after) if before > TARGET else 1.0
            return times[place - 1] + share * (times[place] - times[place - 1])
    return None


def predicted(chosen: Plan, seed: int, slower: float, asynchronous: bool) -> float | None:
    """When the simulator reaches the target."""
    speeds = tuple(1 / slower if worker == SLOW else 1.0 for worker in range(NUM_WORKERS))
    settings = Settings(
        epochs=25,
        schedule=Constant(base=RATE),
        optimizer=SGD(momentum=MOMENTUM),
        delays=Delays(compute_time=COMPUTE_SECONDS, link_time=MEETING_SECONDS, speeds=speeds),
    )
    if asynchronous:
        records = list(
            AsynchronousSimulation(make_task(seed), chosen, replace(settings, asynchronous=True))
        )
    else:
        records = list(Simulation(make_task(seed), chosen, settings))
    found = [(r.time, r.test_loss) for r in records if r.test_loss is not None]
    return reached([0.0, *(t for t, _ in found)], [float("inf"), *(loss for _, loss in found)])


def result(folder: Path, chosen: Plan, seeds: list[int]) -> dict[str, Any]:
    rows = []
    for name, (slower, asynchronous) in CASES.items():
        runs = [measured(folder, name, seed) for seed in seeds]
        others = [r for run in runs for w, r in enumerate(run["rates"]) if w != SLOW]
        expected = [predicted(chosen, seed, slower, asynchronous) for seed in seeds]
        rows.append(
            {
                "case": name,
                "others_iterations_per_second": statistics.fmean(others),
                "slowest_of_the_others": min(others),
                "worker_iterations_per_second": statistics.fmean(r["rates"][SLOW] for r in runs),
                "seconds_to_target": [r["to_target"] for r in runs],
                "predicted_seconds": expected,
                "final_loss": [r["final"] for r in runs],
            }
        )
    return {"rows": rows, "shares": shares(rows)}


def shares(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """What must hold: iterations kept, and time to the target against without a straggler."""
    by = {row["case"]: row for row in rows}
    found: dict[str, float | None] = {}
    for how in ("in step", "asynchronous"):
        slow, even = by[f"slow, {how}"], by[f"even, {how}"]
        key = "others_iterations_per_second"
        found[f"iterations kept, {how}"] = slow[key] / even[key]
        for kind in ("seconds_to_target", "predicted_seconds"):
            found[f"{kind} over even, {how}"] = _ratio(slow[kind], even[kind])
    found["seconds_to_target over even in step, asynchronous"] = _ratio(
        by["slow, asynchronous"]["seconds_to_target"], by["even, in step"]["seconds_to_target"]
    )
    return found


def _ratio(ours: list[float | None], theirs: list[float | None]) -> float | None:
    if None in ours or None in theirs:
        return None
    return statistics.fmean(ours) / statistics.fmean(theirs)  # type: ignore[type-var]


def describe(found: dict[str, Any]) -> str:
    lines = [
        f"{NUM_WORKERS} processes on paper:er8, {found['plan']}; computing padded to "
        f"{1e3 * COMPUTE_SECONDS:g} ms, x{TIMES_SLOWER:g} on worker {SLOW}; seeds "
        f"{', '.join(map(str, found['seeds']))}; target: average model's training loss {TARGET:g}",
        "",
        f"{'case':<20}{'others it./s':>13}{'worker 7 it./s':>15}{'s to target':>14}"
        f"{'predicted':>14}",
    ]
    lines += [
        f"{row['case']:<20}{row['others_iterations_per_second']:>13.2f}"
        f"{row['worker_iterations_per_second']:>15.2f}{_cell(row['seconds_to_target']):>14}"
        f"{_cell(row['predicted_seconds']):>14}"
        for row in found["rows"]
    ]
    lines.append("")
    lines += [f"{name}: {'-' if v is None else f'{v:.3f}'}" for name, v in found["shares"].items()]
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)}"
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.2f}{spread}"


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=9.0, help="of a run without a straggler")
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--only-predicted", action="store_true", help="no processes")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return 0
    chosen = plan(families.paper("er8"), options.budget, "greedy", seed=0)
    if options.only_predicted:
        for name, (slower, asynchronous) in CASES.items():
            print(name, [predicted(chosen, s, slower, asynchronous) for s in options.seeds])
        return 0
    runs = [
        # In step all workers are up to four times slower, and asynchronously hardly any is.
        (name, seed, slower, asynchronous, options.seconds * (1 if asynchronous else share))
        for seed in options.seeds
        for name, (slower, asynchronous) in CASES.items()
        for share in (1 + 0.6 * (slower - 1),)
    ]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        chosen.save(Path(place) / "plan.json")
        run(Path(place), runs)
        found = {
            "benchmark": "stragglers",
            "plan": f"greedy {options.budget:g}",
            "seeds": options.seeds,
            "compute_ms": 1e3 * COMPUTE_SECONDS,
            "target_loss": TARGET,
            "learning_rate": RATE,
            "momentum": MOMENTUM,
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            **result(Path(place), chosen, options.seeds),
        }
    harness.finish(options.output, found, describe(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
