"""Training with a thousand strangers at the door, against the same without, in one run.

    python benchmarks/strangers.py --output benchmarks/results/strangers

Two workers train over a link with TLS. Windows in which a thousand connections that say nothing
are opened at one worker's port, at which others may also join, and windows in which strangers with
keys of another authority ask there to be taken in, twenty per second, take turns with windows in
which no strangers connect. Compared are the iterations per second of neighboring windows; the
strangers live in a third process, on the same cores.
"""

from __future__ import annotations

import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn

from matcha import families, plan
from matcha._io.keys import Keys, new_keys
from matcha.distributed import Gossip, read_peers
from matcha.distributed.launch.launcher import LocalWorkers, local_links
from matcha.distributed.launch.placement import default_transport
from matcha.distributed.links.joining import Joining
from matcha.errors import ExchangeError

TOPOLOGY = families.path(2)
GUARDED = 1  # worker 0 dials: the door is worker 1's
TOLD = "was told of the team"
PER_SECOND = 20  # strangers that ask to be taken in
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


@contextmanager
def askers(address: tuple[str, int], keys: Keys, said: list[str]) -> Iterator[None]:
    """Strangers that ask to be taken in, one after another; `said` gets what they are told."""
    over = threading.Event()

    def ask() -> None:
        due = time.monotonic()
        while not over.wait(max(0.0, due - time.monotonic())):
            due += 1 / PER_SECOND
            try:
                Joining(f"{address[0]}:{address[1]}", keys=keys).close()
            except ExchangeError as error:
                said.append(str(error))
            else:
                said.append(TOLD)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(folder: Path, windows: int, seconds: float, strangers: int) -> dict[str, Any]:
    keys = folder / "keys"
    new_keys(keys, 2, days=2)
    new_keys(folder / "foreign", 3, days=2)
    foreign, said = Keys(directory=folder / "foreign", rank=2), list[str]()
    environment = local_links(2, folder, keys)
    address = read_peers(folder / "peers").addresses[GUARDED]
    assert address is not None
    command = [sys.executable, __file__, "--worker", str(folder)]
    spans: dict[str, list[tuple[float, float]]] = {"calm": [], "siege": [], "askers": []}
    with LocalWorkers(command, 2, environment=environment, logs=folder / "logs") as workers:
        _wait_for_start(folder, workers)
        for _ in range(windows):
            spans["calm"].append(_window(seconds))
            with siege(address, strangers):
                spans["siege"].append(_window(seconds))
            with askers(address, foreign, said):
                spans["askers"].append(_window(seconds))
    ticks = [float(line) for line in (folder / "ticks-1").read_text().splitlines()[:-1]]
    rates = {
        name: [sum(a <= tick < b for tick in ticks) / (b - a) for a, b in found]
        for name, found in spans.items()
    }
    if TOLD in said:
        raise SystemExit(f"a stranger {TOLD}")
    ratios = {
        name: [s / c for c, s in zip(rates["calm"], rates[name], strict=True)]
        for name in ("siege", "askers")
    }
    log = (folder / "logs" / "worker-1.log").read_text()
    return {
        "rates": rates,
        "ratios": ratios,
        "ratio": {name: statistics.median(found) for name, found in ratios.items()},
        "asked": len(said),
        "told": sorted(set(said)),
        "refusals_logged": log.count("refused a client"),
    }


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
    calm, besieged, asked = (
        statistics.median(found["rates"][name]) for name in ("calm", "siege", "askers")
    )
    return (
        f"{found['strangers']} idle strangers at a worker's port, or {PER_SECOND} per second that "
        f"ask to join; {len(found['rates']['calm'])} windows of {found['seconds']:g} s each way\n\n"
        f"iterations per second, no strangers   {calm:8.1f}\n"
        f"iterations per second, idle strangers {besieged:8.1f}\n"
        f"ratio, median of neighbors           {found['ratio']['siege']:8.3f}\n"
        f"iterations per second, asked to join  {asked:8.1f}\n"
        f"ratio, median of neighbors           {found['ratio']['askers']:8.3f}\n"
        f"strangers that asked, all refused     {found['asked']:6d}\n"
    )


if __name__ == "__main__":
    main()
