"""How quickly matcha starts, and how many rounds per second a plan gives.

Local workers are started by matcha's fork server, beside `torch.multiprocessing`'s forkserver,
which is told to import the same, and beside processes that import for themselves: seconds until
eight have taken a step of an optimizer, at first and again, as after a failure (the least of some).

Usage: python benchmarks/basics.py      (prints one table, writes benchmarks/results/basics.json)
       python benchmarks/basics.py --quick     (a hundredth of the rounds)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Column, finish, machine, parser, table

import matcha
from matcha.strategies import strategy_with

ROUNDS = 400_000
REPEATS = 5
WORKERS = 8


def import_seconds(repeats: int) -> float:
    code = "import time; t = time.perf_counter(); import matcha; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return statistics.median(times)


def rounds_per_second(plan: matcha.Plan, rounds: int) -> float:
    start = time.perf_counter()
    for _ in plan.rounds(0, rounds):
        pass
    return rounds / (time.perf_counter() - start)


def random_access_per_second(plan: matcha.Plan, rounds: int) -> float:
    start = time.perf_counter()
    for k in range(0, 1000 * rounds, 1000):
        plan.round(k)
    return rounds / (time.perf_counter() - start)


def work(diary: str) -> None:
    """What a worker does: a step, and when it was taken."""
    import torch

    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()
    with open(diary, "a") as file:
        file.write(f"{time.time()}\n")


def start_up(wave: Callable[[], list[Any]], diary: Path, waves: int) -> tuple[float, float]:
    """Seconds until all workers of a wave have worked: the first, and the least of the others."""
    seconds = []
    for _ in range(waves):
        diary.write_text("")
        began = time.time()
        for worker in wave():
            (worker.join if hasattr(worker, "join") else worker.wait)()
        times = [float(line) for line in diary.read_text().splitlines()]
        if len(times) < WORKERS:
            raise SystemExit(f"{WORKERS - len(times)} of {WORKERS} workers have failed")
        seconds.append(max(times) - began)
    return seconds[0], min(seconds[1:])


def ways_to_start(diary: Path) -> dict[str, Callable[[], list[Any]]]:
    """Waves of workers by each way to start them."""
    import torch.multiprocessing

    from matcha.distributed.launch.fork_server import _MODULES, ForkServer

    command = [sys.executable, __file__, "--work", str(diary)]
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES])
    servers: list[ForkServer] = []

    def ours() -> list[Any]:
        if not servers:
            servers.append(ForkServer(os.environ))
        return [servers[0].start(command, os.environ, None, "wb") for _ in range(WORKERS)]

    def theirs() -> list[Any]:
        processes = [context.Process(target=work, args=(str(diary),)) for _ in range(WORKERS)]
        for process in processes:
            process.start()
        return processes

    def plain() -> list[Any]:
        return [subprocess.Popen(command) for _ in range(WORKERS)]

    return {"matcha": ours, "torch.multiprocessing": theirs, "each by itself": plain}


COLUMNS = [Column("", "name"), Column("", lambda row: float(f"{row['value']:.4g}"), ",g")]


def describe(document: dict[str, Any]) -> str:
    """A line per figure."""
    rows = [{"name": n, "value": v} for n, v in document.items() if n != "machine"]
    return table(COLUMNS, rows).lstrip("\n")


def main() -> None:
    options = parser(__doc__, output="basics")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--work", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.work:
        work(args.work)
        return
    repeats, rounds = (1, ROUNDS // 100) if args.quick else (REPEATS, ROUNDS)
    document: dict[str, Any] = {"machine": machine()}
    document["import matcha, seconds"] = import_seconds(repeats)
    for name in ("matcha", "periodic", "single", "greedy"):
        plan = matcha.plan("paper:geometric16-d13", 0.3, strategy_with(name, effort="none"))
        in_order = rounds_per_second(plan, rounds)
        document[f"{name}: rounds per second in order"] = in_order
        at_random = random_access_per_second(plan, rounds // 40)
        document[f"{name}: rounds per second by random access"] = at_random
    with tempfile.TemporaryDirectory() as folder:
        diary = Path(folder, "diary")
        for name, wave in ways_to_start(diary).items():
            first, again = start_up(wave, diary, 2 if "itself" in name else 1 + repeats)
            document[f"{WORKERS} workers by {name}: seconds at first"] = first
            document[f"{WORKERS} workers by {name}: seconds again"] = again
    finish(args.output, document, describe(document))


if __name__ == "__main__":
    main()
