"""Training with a thousand strangers at the door, against the same without, in one run.

    python benchmarks/strangers.py --output benchmarks/results/strangers

Two workers train over a link with TLS. Windows in which a thousand connections that say nothing
are opened at one worker's port, at which others may also join, take turns with windows in which
no strangers connect. Compared are the iterations per second of neighboring windows; the strangers
live in a third process, on the same cores.
"""

from __future__ import annotations

import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn

from matcha import families, plan
from matcha._io.keys import new_keys
from matcha.distributed import Gossip, read_peers
from matcha.distributed.launch.environment import default_transport
from matcha.distributed.launch.launcher import local_links
from matcha.distributed.launch.local_workers import LocalWorkers

TOPOLOGY = families.path(2)
GUARDED = 1  # worker 0 dials: the door is worker 1's
PAUSE = 0.3  # seconds at a window's beginning that do not count


def work(folder: Path) -> None:
    """One of the two workers: trains until it is stopped, and writes when each iteration ended."""
    torch.set_num_threads(1)
    transport = default_transport(TOPOLOGY)
    torch.manual_seed(transport.rank)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = plan(TOPOLOGY, 1.0, "vanilla")
    Gossip(model, optimizer, chosen, transport=transport, timeout=60, on_loss="continue")
    inputs, targets = torch.randn(64, 512), torch.randint(10, (64,))
    with (folder / f"ticks-{transport.rank}").open("w", buffering=1, encoding="utf-8") as ticks:
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            ticks.write(f"{time.monotonic()}\n")


@contextmanager
def siege(address: tuple[str, int], strangers: int) -> Iterator[None]:
    """So many connections that say nothing."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as stack:
        for _ in range(strangers):
            stack.enter_context(socket.create_connection(address, timeout=30))
        yield


def measure(folder: Path, windows: int, seconds: float, strangers: int) -> dict[str, Any]:
    keys = folder / "keys"
    new_keys(keys, 2, days=2)
    environment = local_links(2, folder, keys)
    address = read_peers(folder / "peers").addresses[GUARDED]
    assert address is not None
    command = [sys.executable, __file__, "--worker", str(folder)]
    spans: dict[str, list[tuple[float, float]]] = {"calm": [], "siege": []}
    with LocalWorkers(command, 2, environment=environment, logs=folder / "logs") as workers:
        _wait_for_start(folder, workers)
        for _ in range(windows):
            spans["calm"].append(_window(seconds))
            with siege(address, strangers):
                spans["siege"].append(_window(seconds))
    ticks = [float(line) for line in (folder / "ticks-1").read_text().splitlines()[:-1]]
    rates = {
        name: [sum(a <= tick < b for tick in ticks) / (b - a) for a, b in found]
        for name, found in spans.items()
    }
    ratios = [s / c for c, s in zip(rates["calm"], rates["siege"], strict=True)]
    log = (folder / "logs" / "worker-1.log").read_text()
    return {"rates": rates, "ratio": statistics.median(ratios), "ratios": ratios,
            "refusals_logged": log.count("refused a client")}  # fmt: skip


def _window(seconds: float) -> tuple[float, float]:
    start = time.monotonic() + PAUSE
    time.sleep(PAUSE + seconds)
    return start, time.monotonic()


def _wait_for_start(folder: Path, workers: LocalWorkers) -> None:
    end = time.monotonic() + 200
    while not all((folder / f"ticks-{r}").exists() for r in range(2)):
        if time.monotonic() > end or any(workers.poll()):
            raise SystemExit("the workers did not start")
        time.sleep(0.1)
    time.sleep(1.0)  # the first iterations are slower


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--windows", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a window")
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), options.windows, options.seconds, options.strangers)
    result = {"benchmark": "strangers", "strangers": options.strangers, "seconds": options.seconds,
              "machine": harness.machine(), **found}  # fmt: skip
    harness.finish(options.output, result, describe(result))


def describe(found: dict[str, Any]) -> str:
    """The rates with and without strangers."""
    calm, besieged = (statistics.median(found["rates"][name]) for name in ("calm", "siege"))
    return (
        f"{found['strangers']} idle strangers at a worker's port, {len(found['rates']['calm'])} "
        f"windows of {found['seconds']:g} s each way\n\n"
        f"iterations per second, no strangers   {calm:8.1f}\n"
        f"iterations per second, with strangers {besieged:8.1f}\n"
        f"ratio, median of neighbors           {found['ratio']:8.3f}\n"
    )


if __name__ == "__main__":
    main()
