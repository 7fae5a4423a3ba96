"""Seconds and bytes to the same loss: real packages as real processes on shaped links, one clock.

    sudo python benchmarks/arena/run.py                       # every row, at 200 and at 10 Mbit/s
    sudo python benchmarks/arena/run.py --mbps 10 --only DiLoCo "greedy 0.002"

Eight processes on eight hosts (network namespaces) train a model of 10 MB on scikit-learn's digits.
Every few iterations each leaves its parameters in memory, with the seconds that it has trained and
the bytes that its kernel has counted on its card; that is off the clock. Afterwards the average
model's loss is computed from them. Computing is padded by sleeping to the same time for all, since
the hosts share this machine's cores. A row ends when it has had its iterations or its time.

What trains is a row of a file in `rows/`: a name, and how to make a `peers.Method` for a model. A
file of your own there adds rows. Those whose package is not installed are left out, and named.

The ceiling is free communication: DDP's iterations at the pace of workers that are silent.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "network")]

import harness  # noqa: E402
from headline import BATCH, COMPUTE_SECONDS, EVERY, NUM_WORKERS, make_model  # noqa: E402
from headline import TARGET as TARGET_LOSS  # noqa: E402
from namespaces import Network  # noqa: E402
from peers import Method  # noqa: E402

from matcha import families  # noqa: E402
from matcha.zoo.data import digits  # noqa: E402

Row = Callable[[nn.Module], Method]
ITERATIONS = 150
SPEEDS = (200.0, 10.0)  # Mbit/s
TIME_LIMIT = 75.0  # seconds of training
START_LIMIT = 90.0  # seconds until training begins


def known_rows(*, quiet: bool = False) -> dict[str, Row]:
    """What the files in `rows/` offer here; a package that is missing is told, unless `quiet`."""
    found: dict[str, Row] = {}
    for file in sorted((HERE / "rows").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"rows_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if not quiet:
                print(f"arena: left out {file.name}: {error}", file=sys.stderr)
            continue
        found |= module.ROWS
    return found


# -- one worker ------------------------------------------------------------------------------------


def card_bytes() -> int:
    """What the kernel has counted on this host's card, sent."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def work(folder: Path, name: str) -> None:
    """Train by one row on one host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data, random = digits(), torch.Generator().manual_seed(rank)
    images = torch.from_numpy(data.train_images).float().flatten(1)[rank::NUM_WORKERS] / 255
    labels = torch.from_numpy(data.train_labels)[rank::NUM_WORKERS]
    model = make_model("10 MB")
    method = known_rows(quiet=True)[name](model)
    dist.barrier()
    (folder / f"started-{rank}").touch()
    off_clock, bytes_before, began = 0.0, card_bytes(), time.perf_counter()
    for k in range(1, ITERATIONS + 1):
        started = time.perf_counter()
        batch = torch.randint(len(labels), (BATCH,), generator=random)
        loss = nn.functional.cross_entropy(method.forward(images[batch]), labels[batch])
        time.sleep(max(0.0, COMPUTE_SECONDS - 2 * (time.perf_counter() - started)))
        method.step(loss)
        if k % EVERY == 0:
            paused = time.perf_counter()
            found = [paused - began - off_clock, card_bytes() - bytes_before]
            parameters = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
            np.save(folder / f"{k}-{rank}.tmp.npy", parameters)
            (folder / f"{k}-{rank}.json").write_text(json.dumps(found))
            (folder / f"{k}-{rank}.tmp.npy").rename(folder / f"{k}-{rank}.npy")
            off_clock += time.perf_counter() - paused
    (folder / f"ended-{rank}").touch()
    time.sleep(3600)  # the others may need it still; all are ended together


# -- the whole -------------------------------------------------------------------------------------


def play(name: str, mbps: float, folder: Path) -> None:
    """Run one row on the shaped network until it ends or its time is over."""
    with Network(families.paper("er8"), mbps=mbps) as network:
        command = [sys.executable, __file__, "--worker", str(folder), name]
        processes = [network.start(rank, command) for rank in range(NUM_WORKERS)]
        limit = time.monotonic() + START_LIMIT
        begun = False
        while time.monotonic() < limit:
            if not begun and len(list(folder.glob("started-*"))) == NUM_WORKERS:
                # What is off the clock and on this one: 10 MB a worker, every five iterations.
                begun, limit = True, time.monotonic() + 1.3 * TIME_LIMIT
            if len(list(folder.glob("ended-*"))) == NUM_WORKERS:
                return
            if any(process.poll() is not None for process in processes):
                print(f"arena: {name}: a worker ended by itself", file=sys.stderr)
                return
            time.sleep(0.1)


def evaluate(folder: Path) -> list[dict[str, float]]:
    """The average model's loss on all training data at each time that all workers have left."""
    data, model = digits(), copy.deepcopy(make_model("10 MB"))
    images = torch.from_numpy(data.train_images).float().flatten(1) / 255
    labels, curve = torch.from_numpy(data.train_labels), []
    for k in range(EVERY, ITERATIONS + 1, EVERY):
        files = [folder / f"{k}-{rank}.npy" for rank in range(NUM_WORKERS)]
        if not all(file.exists() for file in files):
            break
        mean = np.mean([np.load(file) for file in files], axis=0)
        nn.utils.vector_to_parameters(torch.from_numpy(mean), model.parameters())
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(images), labels).item()
        left = [json.loads(file.with_suffix(".json").read_text()) for file in files]
        seconds, sent = max(one[0] for one in left), sum(one[1] for one in left) / NUM_WORKERS
        curve.append({"iteration": k, "loss": loss, "seconds": seconds, "megabytes": sent / 1e6})
    return [point for point in curve if point["seconds"] <= TIME_LIMIT]


def reached(curve: list[dict[str, float]]) -> dict[str, float] | None:
    """The first point at the target that holds it at the next one too, interpolated."""
    for place in range(len(curve) - 1):
        here = curve[place]
        if here["loss"] <= TARGET_LOSS and curve[place + 1]["loss"] <= TARGET_LOSS:
            before = curve[place - 1] if place else here
            gap = before["loss"] - here["loss"]
            share = (before["loss"] - TARGET_LOSS) / gap if gap > 0 else 1.0
            return {key: before[key] + share * (here[key] - before[key]) for key in here}
    return None


def table_rows(curves: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row per method, with what it took to the target and how that compares."""
    rows = []
    for name, curve in curves.items():
        last = curve[-1] if curve else {"iteration": 0, "loss": float("nan"), "seconds": 0.0}
        pace = 1e3 * last["seconds"] / last["iteration"] if curve else None
        end = reached(curve)
        never = {"iteration": None, "seconds": None, "megabytes": None}
        row = {"method": name, "iteration_ms": pace, "last_loss": last["loss"]}
        rows.append(row | (end or never))
    seconds = ceiling(rows)[0]
    for row in rows:
        row["of_ceiling"] = row["seconds"] / seconds if seconds and row["seconds"] else None
    return rows


def ceiling(rows: list[dict[str, Any]]) -> tuple[float | None, str]:
    """Seconds of free communication, and in words where they come from."""
    by = {row["method"]: row for row in rows}
    if "DDP" not in by or "silent" not in by or by["silent"]["iteration_ms"] is None:
        return None, "ceiling: needs the rows DDP and silent."
    measured, pace = by["DDP"]["iteration"], by["silent"]["iteration_ms"]
    needed = measured or DDP_ITERATIONS
    source = "measured here" if measured else "the headline's: here DDP did not get there"
    seconds = needed * pace / 1e3
    return seconds, (
        f"ceiling: {seconds:.2f} s, DDP's {needed:.0f} iterations ({source}) at silence's "
        f"{pace:.0f} ms."
    )


DDP_ITERATIONS = 80.0
"""To the target, of the headline: where DDP does not get there in its time."""

COLUMNS = [
    harness.Column("method", "method"),
    harness.Column("ms/iter.", "iteration_ms", ".0f"),
    harness.Column("iterations", "iteration", ".0f"),
    harness.Column("seconds", "seconds", ".1f"),
    harness.Column("MB sent", "megabytes", ".1f"),
    harness.Column("of ceiling", "of_ceiling", ".2f"),
    harness.Column("last loss", "last_loss", ".3f"),
]


def describe(document: dict[str, Any]) -> str:
    """A table for each speed."""
    lines = [
        f"{NUM_WORKERS} processes, a model of 10 MB, computing padded to {1e3 * COMPUTE_SECONDS:g}"
        f" ms; until the average model's training loss is {TARGET_LOSS:g}, {TIME_LIMIT:g} s or "
        f"{ITERATIONS} iterations at most.",
        "MB sent: by one worker, as its kernel counts; last loss: where the row ended.",
    ]
    for mbps, curves in document["curves"].items():
        rows = table_rows(curves)
        lines += ["", f"cards at {mbps} Mbit/s; {ceiling(rows)[1]}", harness.table(COLUMNS, rows)]
    return "\n".join(lines)


def main() -> int:
    parser = harness.parser(__doc__, output="arena")
    parser.add_argument("--mbps", type=float, nargs="+", default=list(SPEEDS))
    parser.add_argument("--only", nargs="+", default=[""], help="parts of rows' names")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(Path(args.worker[0]), args.worker[1])
        return 0
    document = harness.earlier(args.output) or {"benchmark": "arena", "curves": {}}
    document |= {"torch": torch.__version__, "machine": harness.machine()}
    for mbps in args.mbps:
        curves = document["curves"].setdefault(f"{mbps:g}", {})
        for name in known_rows(quiet=mbps != args.mbps[0]):
            if name in curves or not any(only in name for only in args.only):
                continue  # it is measured already
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                play(name, mbps, Path(folder))
                curves[name] = evaluate(Path(folder))
            harness.write(args.output, document, describe(document))
    print(describe(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
