"""What a live page costs: eight processes train with and without it, turn and turn about.

    python benchmarks/live.py --output benchmarks/results/live

Eight real processes train scikit-learn's digits over gloo on the paper's graph er8 and record every
hundred iterations. Within one training stretches follow one another: nothing is served; the page is
served as `matcha train --serve` does it, by the launching process, and a reader asks what an open
page asks, as often; the same with the page open in Chromium on this machine, which draws it on the
same cores. Each stretch with a page is compared with the stretches without one before and after it.
Once the workers take all cores, and once they compute for a fixed time in which the cores are free,
as with GPUs: that time is made up, by sleeping.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from matcha import Plan, families, plan
from matcha.distributed import Gossip, Recorder
from matcha.distributed.launch.local_workers import LocalWorkers
from matcha.report.live import LivePage, heartbeat
from matcha.zoo.data import digits

NUM_WORKERS = 8
BATCH = 16
RECORD_EVERY = 100
CASES = {"all cores busy": 0.0, "computing elsewhere, 20 ms": 0.02}
SETTLE = 0.8
"""Seconds after each change, before a stretch is measured: a page loads in them."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def board(folder: Path) -> np.memmap:
    """Each worker's iteration; then whether worker 0 tells where it is, and where all stop."""
    return np.memmap(folder / "board", np.int64, "r+", shape=NUM_WORKERS + 2)


# -- one worker ------------------------------------------------------------------------------------


def work(folder: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, told = dist.get_rank(), board(folder)
    torch.manual_seed(rank)
    data = digits()
    images = torch.from_numpy(data.train_images).float().flatten(1)[rank::NUM_WORKERS] / 255
    labels = torch.from_numpy(data.train_labels)[rank::NUM_WORKERS]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    with ExitStack() as stack:
        gossip = stack.enter_context(Gossip(model, optimizer, Plan.load(folder / "plan.json")))
        log = stack.enter_context(Recorder(gossip, folder / "run", view=None, report=False))
        beating = stack.enter_context(ExitStack())
        is_beating = False
        while gossip.iteration < told[NUM_WORKERS + 1]:
            chosen = torch.randint(len(images), (BATCH,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            if seconds:
                time.sleep(seconds)
            optimizer.step()
            told[rank] = gossip.iteration
            if rank == 0 and bool(told[NUM_WORKERS]) != is_beating:
                is_beating = not is_beating
                beating.close()
                if is_beating:
                    beating.enter_context(heartbeat(folder / "run", gossip.state.whereabouts))
            if gossip.iteration % RECORD_EVERY == 0:
                log(loss=loss)
    dist.destroy_process_group()


# -- readers ---------------------------------------------------------------------------------------


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Ask what an open page asks: where the run is, and its curves when there is a new record."""
    over = threading.Event()

    def ask() -> None:
        urllib.request.urlopen(url).read()
        version, since = None, 0
        while not over.wait(0.5):
            answer = urllib.request.urlopen(f"{url}now?reader=benchmark&since={since}").read()
            now = json.loads(answer)
            since = now.get("iteration", 0)
            if now["version"] != version:
                version = now["version"]
                urllib.request.urlopen(f"{url}data").read()

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    over.set()
    thread.join()


def stretch(kind: str, folder: Path, seconds: float, tab: Any) -> float:
    """Iterations per second of one stretch."""
    told = board(folder)
    with ExitStack() as stack:
        told[NUM_WORKERS] = kind != "no page"
        if kind != "no page":
            live = LivePage(folder / "run", "0")
            stack.callback(live.finish, patience=0.0)
            if kind == "page asked for":
                stack.enter_context(asking(live.url))
            else:
                tab.goto(live.url)
                stack.callback(tab.goto, "about:blank")
        time.sleep(SETTLE)
        # All workers' iterations: one alone may be a few ahead.
        begun, first = time.perf_counter(), int(told[:NUM_WORKERS].sum())
        tab.wait_for_timeout(1e3 * seconds)
        return (int(told[:NUM_WORKERS].sum()) - first) / NUM_WORKERS / (time.perf_counter() - begun)


def measure(case: float, turns: int, seconds: float, tab: Any) -> list[tuple[str, float]]:
    """The stretches of one training, in their order."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        folder = Path(place)
        plan(families.paper("er8"), 0.3, "greedy", wire="modulo:3").save(folder / "plan.json")
        (folder / "board").write_bytes(bytes(8 * (NUM_WORKERS + 2)))
        told = board(folder)
        told[NUM_WORKERS + 1] = 1 << 40
        command = [sys.executable, __file__, "--worker", place, "--compute", str(case)]
        with LocalWorkers(command, NUM_WORKERS, environment={"OMP_NUM_THREADS": "1"}) as workers:
            while told[:NUM_WORKERS].min() < RECORD_EVERY:
                time.sleep(0.1)
            kinds = ["no page", "page asked for", "no page", "page in Chromium here"] * turns
            found = [(kind, stretch(kind, folder, seconds, tab)) for kind in [*kinds, "no page"]]
            told[NUM_WORKERS + 1] = told[:NUM_WORKERS].max() + 2 * RECORD_EVERY
            codes = workers.wait(timeout=200)
        if any(codes):
            raise SystemExit(f"the workers ended with {codes}")
    return found


def costs(found: list[tuple[str, float]], kind: str) -> list[float]:
    """Of each stretch of a kind: the share of the pace around it that is lost."""
    return [
        1 - pace / statistics.fmean((found[k - 1][1], found[k + 1][1]))
        for k, (name, pace) in enumerate(found)
        if name == kind
    ]


def rows(case: str, found: list[tuple[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for kind in dict.fromkeys(name for name, _ in found):
        lost = costs(found, kind) if kind != "no page" else None
        rows.append(
            {
                "case": case,
                "kind": kind,
                "iterations_per_second": statistics.fmean(p for n, p in found if n == kind),
                "cost": None if lost is None else statistics.fmean(lost),
                "cost_error": None
                if lost is None
                else statistics.stdev(lost) / math.sqrt(len(lost)),
            }
        )
    return rows


def describe(found: dict[str, Any]) -> str:
    columns = [
        harness.Column("workers", "case"),
        harness.Column("page", "kind"),
        harness.Column("iterations/s", "iterations_per_second", ".1f"),
        harness.Column("cost", "cost", ".2%"),
        harness.Column("± standard error", "cost_error", ".2%"),
    ]
    return (
        f"{NUM_WORKERS} processes on paper:er8, {found['turns']} turns of {found['seconds']:g} s, "
        f"{found['machine']}\n\n{harness.table(columns, found['rows'])}"
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a stretch")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compute", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.compute)
        return 0
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        tab = browser.new_page()
        found = {
            name: measure(seconds, options.turns, options.seconds, tab)
            for name, seconds in CASES.items()
        }
        browser.close()
    document = {
        "benchmark": "live",
        "turns": options.turns,
        "seconds": options.seconds,
        "machine": harness.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "rows": [row for name, stretches in found.items() for row in rows(name, stretches)],
        "stretches": found,
    }
    harness.finish(options.output, document, describe(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
