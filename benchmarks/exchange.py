"""The exchange against the fastest thing that could carry the same bytes.

    sudo python benchmarks/exchange.py --output benchmarks/results/exchange
    python benchmarks/exchange.py --silent --output benchmarks/results/silent_step

Four questions, one table:
- on a link shaped to 200 Mbit/s, how does a one-matching exchange compare with raw duplex sockets;
- on loopback, how does it compare with a bare torch.distributed.batch_isend_irecv;
- what does a round without a partner cost, and how much memory is held beyond the model;
- what does a training step cost under a plan that sends nothing, beside no Gossip and beside DDP.

Both contenders of a comparison alternate in the same run. "exchange" is everything that Gossip does
in a round, iteration header and mixing included; "messages" is the same without the arithmetic.
"+average" adds to the reference the averaging that any user of the bare call has to write.
Without root the shaped part is left out, and said so.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from matcha import Plan, Round, families
from matcha.distributed import Gossip, Message, TorchTransport, Transport
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import Meeting
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.distributed.transports.collectives import barrier
from matcha.errors import MatchaError
from matcha.rounds import RoundProcess
from matcha.schedules import Cycle
from matcha.timing import Units

SIZES_MB = (4, 100)
SHAPED_MBPS = 200
BUCKET_MB = 25
PAIR = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)


# -- contenders ------------------------------------------------------------------------------------


class RawSockets:
    """Two threads and one TCP connection: full duplex, nothing else."""

    def __init__(self, rank: int) -> None:
        address = (os.environ["MASTER_ADDR"], 29477)
        if rank == 0:
            with socket.create_server(address) as server:
                self.socket, _ = server.accept()
        else:
            self.socket = _connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        """Send one tensor and receive another at the same time."""
        sender = threading.Thread(target=self.socket.sendall, args=(_bytes(outgoing),))
        sender.start()
        view, got = _bytes(incoming), 0
        while got < len(view):
            got += self.socket.recv_into(view[got:])
        sender.join()


def _connect(address: tuple[str, int]) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(address)
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"no server listens at {address}")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")


def bare(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, incoming, peer), dist.P2POp(dist.isend, outgoing, peer)]
    )
    for work in works:
        work.wait()


def bare_and_average(x: torch.Tensor, incoming: torch.Tensor, peer: int) -> None:
    bare(x, incoming, peer)
    x.add_(incoming).mul_(0.5)


def messages(transport: Transport, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    message = Message(peer=1 - transport.rank, tag=5, incoming=incoming, outgoing=outgoing)
    transport.post([message]).wait(120)


# -- measuring -------------------------------------------------------------------------------------


def alternate(
    transport: Transport, contenders: dict[str, Callable[[], None]], repetitions: int
) -> dict[str, float]:
    """Median seconds of each, taken in turns; both workers start together each time."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 1):
        for name, run in contenders.items():
            barrier(transport, 120)
            started = time.perf_counter()
            run()
            if repetition:  # the first only warms up
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(transport: Transport, megabytes: int, shaped: bool) -> dict[str, Any]:
    count = megabytes * 1_000_000 // 4
    x, incoming = torch.ones(count), torch.zeros(count)
    buckets = list(torch.split(x, BUCKET_MB * 1_000_000 // 4))
    exchange = Exchange(
        transport, [FloatCodec(buckets, bucket_bytes=BUCKET_MB * 1_000_000)], timeout=120
    )
    met = [Meeting(0, 1 - transport.rank, 0.5)]
    contenders: dict[str, Callable[[], None]] = {}
    if shaped:
        raw = RawSockets(transport.rank)
        contenders["raw sockets"] = lambda: raw.exchange(x, incoming)
    else:
        contenders["batch_isend_irecv"] = lambda: bare(x, incoming, 1 - transport.rank)
        contenders["and average"] = lambda: bare_and_average(x, incoming, 1 - transport.rank)
    contenders["messages"] = lambda: messages(transport, x, incoming)
    contenders["exchange"] = lambda: exchange.run(PAIR, met, 0)
    repetitions = (3 if megabytes >= 100 else 9) if shaped else (15 if megabytes >= 100 else 201)
    seconds = alternate(transport, contenders, repetitions)
    reference = next(iter(seconds.values()))
    return {
        "link": f"{SHAPED_MBPS} Mbit/s" if shaped else "loopback",
        "megabytes": megabytes,
        "reference": next(iter(seconds)),
        "milliseconds": {name: 1e3 * value for name, value in seconds.items()},
        "messages_ratio": seconds["messages"] / reference,
        "exchange_ratio": seconds["exchange"] / reference,
        "spare_megabytes": exchange.spare_bytes / 1e6,
    }


def always(mixing: str, *round: int) -> Plan:
    """The plan that gives two workers the same round at every iteration: 0 is their only link."""
    return Plan(
        process=RoundProcess(
            topology=families.path(2),
            matchings=(((0, 1),),),
            schedule=Cycle(cycle=(round,), num_matchings=1),
            mixing=mixing,  # type: ignore[arg-type]
            alpha=0.5,
        ),
        strategy="greedy" if mixing == "pairwise" else "vanilla",
        budget=1.0,
        timing=Units(),
        num_colors=1,
    )


def empty_round(transport: Transport) -> dict[str, Any]:
    """What Gossip does around a step whose round has no partner for this worker."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = Gossip(model, optimizer, always("pairwise"), transport=transport)

    def run(times: int = 20_000) -> float:
        started = time.perf_counter()
        for _ in range(times):
            gossip.step()  # both hooks, and no step between them
        return (time.perf_counter() - started) / times

    run(1000)
    seconds = statistics.median(run() for _ in range(7))
    gossip.detach()
    return {"microseconds": 1e6 * seconds}


MODELS = {
    "100 tensors, 0.4 M": [64] * 49 + [62, 1],
    "6 tensors, 0.4 M": [512, 512, 10],
}


def perceptron(sizes: list[int]) -> nn.Module:
    """Linear layers of these widths; two tensors per layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = 256
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers)


def silent_step(transport: Transport, name: str, sizes: list[int]) -> dict[str, Any]:
    """A step of training with nothing around it, in DDP, and under a plan without meetings.

    "again" is "nothing" a second time: their difference is what the machine's own noise makes.
    `optimizer.step()` alone shows microseconds, which a whole step hides.
    """
    inputs = torch.randn(64, 256)

    def contender(kind: str) -> Callable[[], float]:
        model = perceptron(sizes)
        run: nn.Module = nn.parallel.DistributedDataParallel(model) if kind == "DDP" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        if kind in ("silent", "silent, quasi-global"):
            momentum = "quasi-global" if kind != "silent" else "local"
            plan = always("pairwise")
            gossip = Gossip(model, optimizer, plan, transport=transport, momentum=momentum)
            gossips.append(gossip)

        def step() -> float:
            optimizer.zero_grad()
            run(inputs).square().mean().backward()
            started = time.perf_counter()
            optimizer.step()
            return time.perf_counter() - started

        return step

    gossips: list[Gossip] = []
    kinds = ("nothing", "again", "DDP", "silent", "silent, quasi-global")
    contenders = {kind: contender(kind) for kind in kinds}
    whole: dict[str, list[float]] = {kind: [] for kind in kinds}
    inner: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repetition in range(320):
        for kind, step in contenders.items():  # in turns, so that noise falls on all alike
            started = time.perf_counter()
            seconds = step()
            if repetition >= 20:
                whole[kind].append(time.perf_counter() - started)
                inner[kind].append(seconds)
    for gossip in gossips:
        gossip.detach()
    return {
        "model": name,
        "milliseconds": {kind: 1e3 * statistics.median(whole[kind]) for kind in kinds},
        "optimizer_microseconds": {kind: 1e6 * statistics.median(inner[kind]) for kind in kinds},
    }


def memory(transport: Transport, overlap: bool) -> dict[str, Any]:
    """Memory held beyond a 100 MB model after rounds with several partners, as buckets."""
    model = nn.ParameterList(torch.zeros(1_250_000) for _ in range(20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    largest = 0
    for mixing in ("pairwise", "laplacian"):
        twice = always(mixing, 0, 0)
        with Gossip(model, optimizer, twice, transport=transport, overlap=overlap) as gossip:
            for _ in range(2):
                optimizer.step()
            gossip.state.settle()
            copies = (
                sum(t.nbytes for t in gossip.state.overlap.mixed) if gossip.state.overlap else 0
            )
            largest = max(largest, gossip.state.exchange.spare_bytes + copies)
    return {
        "rule": "footnote" if overlap else "eq2",
        "model_megabytes": 100.0,
        "beyond_megabytes": largest / 1e6,
        "allowed_megabytes": 2 * BUCKET_MB + (100.0 if overlap else 0.0),
    }


def work(kind: str, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchTransport()
    dist.barrier()
    result: dict[str, Any] = {}
    if kind != "silent":
        result["comparisons"] = [compare(transport, mb, kind == "shaped") for mb in SIZES_MB]
    if kind in ("silent", "loopback"):
        result["silent_step"] = [silent_step(transport, *model) for model in MODELS.items()]
    if kind == "loopback":
        result["empty_round"] = empty_round(transport)
        result["memory"] = [memory(transport, overlap) for overlap in (False, True)]
    if transport.rank == 0:
        output.write_text(json.dumps(result))
    transport.close()
    dist.destroy_process_group()


# -- the whole -------------------------------------------------------------------------------------


def measure_silent(folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", "silent", str(folder / "silent.json")]
    with LocalWorkers(command, 2) as workers:
        if any(workers.wait(timeout=300)):
            raise SystemExit("the workers failed")
    result: dict[str, Any] = json.loads((folder / "silent.json").read_text())
    return result


def measure(folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker"]
    with LocalWorkers([*command, "loopback", str(folder / "loopback.json")], 2) as workers:
        if any(workers.wait(timeout=300)):
            raise SystemExit("the loopback workers failed")
    result: dict[str, Any] = json.loads((folder / "loopback.json").read_text())
    sys.path.insert(0, str(Path(__file__).parent / "network"))
    from namespaces import Network

    try:
        with Network(families.path(2), mbps=SHAPED_MBPS) as network:
            if any(network.run([*command, "shaped", str(folder / "shaped.json")], timeout=300)):
                raise SystemExit("the workers on the shaped link failed")
        shaped = json.loads((folder / "shaped.json").read_text())
        result["comparisons"] = shaped["comparisons"] + result["comparisons"]
    except MatchaError as error:
        result["not_measured"] = str(error)
    return result


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"


def silent_table(result: dict[str, Any]) -> str:
    kinds = list(result["silent_step"][0]["milliseconds"])
    lines = ["a step of" + " " * 21 + "".join(f"{kind:>22}" for kind in kinds)]
    for row in result["silent_step"]:
        for key, unit in (("milliseconds", "whole, ms"), ("optimizer_microseconds", "step(), µs")):
            values = "".join(f"{row[key][kind]:>22.2f}" for kind in kinds)
            lines.append(f"{row['model']:<19}{unit:>11}{values}")
    lines.append("medians of 300 steps, each kind in turn; nothing and again are the same thing")
    return "\n".join(lines)


def describe(result: dict[str, Any]) -> str:
    lines = [
        "link        size     reference            ms  +average  messages  exchange   "
        "messages/ref  exchange/ref"
    ]
    for row in result["comparisons"]:
        ms = row["milliseconds"]
        lines.append(
            f"{row['link']:<11}{row['megabytes']:>4} MB   {row['reference']:<17}"
            f"{ms[row['reference']]:>7.1f}{_shown(ms.get('and average')):>10}"
            f"{ms['messages']:>10.1f}{ms['exchange']:>10.1f}"
            f"{row['messages_ratio']:>15.2f}{row['exchange_ratio']:>14.2f}"
        )
    lines.append(f"\na round without a partner: {result['empty_round']['microseconds']:.1f} µs")
    lines += [
        f"memory beyond a {row['model_megabytes']:.0f} MB model, {row['rule']}: "
        f"{row['beyond_megabytes']:.0f} MB (allowed {row['allowed_megabytes']:.0f})"
        for row in result["memory"]
    ]
    if "silent_step" in result:
        lines += ["", silent_table(result)]
    if "not_measured" in result:
        lines.append(f"the shaped link was not measured: {result['not_measured']}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FILE"))
    parser.add_argument("--silent", action="store_true", help="only the silent step: a minute")
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], Path(options.worker[1]))
        return
    if options.silent:
        with tempfile.TemporaryDirectory() as folder:
            result = measure_silent(Path(folder))
        harness.finish(options.output, result, silent_table(result))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder))
    result |= {
        "benchmark": "exchange",
        "torch": torch.__version__,
        "machine": harness.machine(),
        "bucket_megabytes": BUCKET_MB,
    }
    harness.finish(options.output, result, describe(result))


if __name__ == "__main__":
    main()
