"""What a live page costs: eight processes train with and without it, turn and turn about.

    python benchmarks/live.py --output benchmarks/results/live

Eight real processes train scikit-learn's digits over gloo on the paper's graph er8 and record every
hundred iterations. The page is served as `matcha train --serve` does it, by the launching process,
and open in Chromium on this machine, which draws it on the same cores. Within one training short
stretches follow one another in which the page is frozen, as a browser freezes one that nobody looks
at, and in which it runs; the workers say where they are only in these. Each of these is compared
with the stretches before and after it; the median counts, its error is a bootstrap's. Opening the
page is not measured: it takes Chromium about a second once.

Beside the lost pace stands the processor time of Chromium and of the server, of all that there is.
Once the workers take all cores, and once they compute for a fixed time in which the cores are free,
as with GPUs: that time is made up, by sleeping.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from matcha import Plan, families, plan
from matcha.distributed import Gossip, Recorder
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.report.live import LivePage, heartbeat
from matcha.zoo.data import digits

NUM_WORKERS = 8
BATCH = 16
RECORD_EVERY = 100
CASES = {"all cores busy": 0.0, "computing elsewhere, 20 ms": 0.02}
SETTLE = 0.4
"""Seconds after each change, before a stretch is measured."""
OPEN, FROZEN = "page in Chromium here", "page frozen"
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


# -- stretches -------------------------------------------------------------------------------------


class Page:
    """A tab that can be frozen, and what it and the server in this process have taken so far."""

    def __init__(self, browser: Any) -> None:
        self.tab = browser.new_page(viewport={"width": 1280, "height": 720})
        self._page = self.tab.context.new_cdp_session(self.tab)
        self._browser = browser.new_browser_cdp_session()

    def set_state(self, state: str) -> None:
        """Freeze the page, or let it go on, as browsers do with what nobody looks at."""
        self._page.send("Page.setWebLifecycleState", {"state": state})

    def processor_seconds(self) -> float:
        """Of the server, which is this process, and of all of the browser's processes."""
        processes = self._browser.send("SystemInfo.getProcessInfo")["processInfo"]
        return time.process_time() + sum(process["cpuTime"] for process in processes)


def stretch(kind: str, folder: Path, seconds: float, page: Page) -> dict[str, Any]:
    """Iterations per second of one stretch, and the share of the processors that the page took."""
    told = board(folder)
    told[NUM_WORKERS] = kind == OPEN
    page.set_state("active" if kind == OPEN else "frozen")
    time.sleep(SETTLE)
    # All workers' iterations: one alone may be a few ahead.
    begun, first = time.perf_counter(), int(told[:NUM_WORKERS].sum())
    taken = page.processor_seconds()
    time.sleep(seconds)
    share = page.processor_seconds() - taken
    took = time.perf_counter() - begun
    pace = (int(told[:NUM_WORKERS].sum()) - first) / NUM_WORKERS / took
    return {"kind": kind, "pace": pace, "share": share / took / (os.cpu_count() or 1)}


def measure(case: float, turns: int, seconds: float, page: Page) -> list[dict[str, Any]]:
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
            live = LivePage(folder / "run", "0")
            page.tab.goto(live.url)
            page.tab.wait_for_selector("#curves:visible")
            kinds = [*[FROZEN, OPEN] * turns, FROZEN]
            found = [stretch(kind, folder, seconds, page) for kind in kinds]
            page.set_state("active")
            drawn = page.tab.evaluate("document.documentElement.dataset.live")
            page.tab.goto("about:blank")
            live.finish(patience=0.0)
            told[NUM_WORKERS + 1] = told[:NUM_WORKERS].max() + 2 * RECORD_EVERY
            codes = workers.wait(timeout=200)
        if any(codes) or not int(drawn or 0):
            raise SystemExit(f"the workers ended with {codes}, the page was at {drawn}")
    return found


def row(case: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a page cost in one case: the share of the pace before and after that is lost with it."""
    lost = [
        1 - here["pace"] / statistics.fmean((before["pace"], after["pace"]))
        for before, here, after in zip(found, found[1:], found[2:], strict=False)
        if here["kind"] == OPEN
    ]
    again = np.random.default_rng(0).choice(lost, (4000, len(lost)))
    return {
        "case": case,
        "iterations_per_second": statistics.fmean(s["pace"] for s in found if s["kind"] == FROZEN),
        "cost": statistics.median(lost),
        "cost_error": float(np.median(again, axis=1).std()),
        "share": statistics.fmean(s["share"] for s in found if s["kind"] == OPEN),
    }


def describe(found: dict[str, Any]) -> str:
    columns = [
        harness.Column("workers", "case"),
        harness.Column("iterations/s", "iterations_per_second", ".1f"),
        harness.Column("pace lost", "cost", ".2%"),
        harness.Column("± standard error", "cost_error", ".2%"),
        harness.Column("processors taken", "share", ".2%"),
    ]
    return (
        f"{NUM_WORKERS} processes on paper:er8 and the live page in Chromium beside them, "
        f"{found['turns']} turns of {found['seconds']:g} s, {found['machine']}\n\n"
        f"{harness.table(columns, found['rows'])}"
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.8, help="of a stretch")
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
        page = Page(browser)
        found = {
            name: measure(seconds, options.turns, options.seconds, page)
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
        "rows": [row(name, stretches) for name, stretches in found.items()],
        "stretches": found,
    }
    harness.finish(options.output, document, describe(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
