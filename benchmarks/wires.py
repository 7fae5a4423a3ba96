"""What each wire costs and leaves: bytes per value, share of a difference left, speed per core.

Then what a network makes of it: how far apart workers are that drift by noise, over what they are
with whole values, measured and as a plan predicts it; and where they drift a way of their own
each, as heterogeneous data make them.

    python benchmarks/wires.py                  # two tables; writes benchmarks/results/wires.json
    python benchmarks/wires.py --device cuda

In the first table two workers drift apart by random steps and meet, 40 times. Speeds count
gigabytes of float32 (simulated: of all workers that meet at once) and, on a CPU, the seconds of
this thread alone, so that a busy machine does not count. Compiled kernels are measured, on a GPU
Triton's, and torch's version in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import harness
import torch

import matcha
from matcha.plans import Plan
from matcha.simulation.execution import Graphs
from matcha.simulation.mixing import WireMixing
from matcha.wires import Modulo, library, modulo, parse_wire
from matcha.wires.batched import ModuloMeetings
from matcha.wires.coding import Coder
from matcha.wires.wire import BLOCK, Segment

BITS = (8, 4, 3, 2)


def clock(device: str) -> float:
    """Seconds that count."""
    if device == "cpu":
        return time.thread_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(bits: int, blocks: int, device: str) -> dict[str, float]:
    """One wire between two workers, by kernels, and torch's speed beside it."""
    found = meetings(bits, blocks, device, compiled=True)
    torchs = meetings(bits, blocks, device, compiled=False)
    for entry, compiled in ((found, True), (torchs, False)):
        entry["simulated_gb_s"] = simulated(bits, blocks, device, compiled=compiled)
    return found | {f"torch_{key}": torchs[key] for key in torchs if key.endswith("_gb_s")}


def simulated(bits: int, blocks: int, device: str, *, compiled: bool) -> float:
    """GB/s of eight workers' values in a simulator's matching, in which all of them meet."""
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(1, blocks * BLOCK, generator=random, device=device).repeat(8, 1)
    meetings = ModuloMeetings(Modulo(bits=bits), [Segment(offset=0, shape=(x.shape[1],))], x)
    if not compiled:
        meetings._fused = None
    partner = torch.arange(8, device=device) ^ 1
    move = torch.tensor([0.3, -0.3] * 4, device=device)
    seconds = []
    for _ in range(12):
        x += 1e-3 * torch.randn(x.shape, generator=random, device=device)
        meetings.begin()
        began = clock(device)
        meetings.meet(x, x, partner, move)
        seconds.append(clock(device) - began)
        meetings.end()
    return x.numel() * 4 / 1e9 / sorted(seconds)[len(seconds) // 4]


def meetings(bits: int, blocks: int, device: str, *, compiled: bool) -> dict[str, float]:
    """Forty meetings of two workers."""
    wire, random = Modulo(bits=bits), torch.Generator(device).manual_seed(0)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(blocks, BLOCK, generator=random, device=device)

    start = noise(0.05)
    ends = [start + noise(0.001) for _ in range(2)]
    coders = [Coder(wire, end) for end in ends]
    for coder in coders:
        if compiled and coder.kernels is modulo:
            where = f"at {library.path()}" if device == "cpu" else "for GPUs: Triton does not work"
            raise SystemExit(f"no compiled kernels {where}: install the package again")
        if not compiled:
            coder.kernels = modulo
    encoding, decoding, left = [], [], []
    for k in range(40):
        for coder in coders:
            coder.begin()
        common = [coders[0].common(coders[1].told()), coders[1].common(coders[0].told())]
        size = coders[0].message_bytes(blocks)
        messages = [torch.empty(size, dtype=torch.uint8, device=device) for _ in ends]
        before = float((ends[0] - ends[1]).square().sum())
        coded = []
        for e in range(2):
            began = clock(device)
            coded.append(coders[e].encode(ends[e], 0, common[e], messages[e], lower=e == 0))
            encoding.append(clock(device) - began)
        for e in range(2):
            began = clock(device)
            weight = 0.5 if e == 0 else -0.5
            coders[e].move(ends[e], coded[e], messages[1 - e], weight=weight)
            decoding.append(clock(device) - began)
            coders[e].end()
        if k >= 20:
            left.append(float((ends[0] - ends[1]).square().sum()) / before)
        ends = [end.add_(noise(0.001)) for end in ends]
    gigabytes = blocks * BLOCK * 4 / 1e9
    return {
        "bytes_per_value": wire.block_bytes() / BLOCK,
        "times_smaller": 1 / wire.size_ratio(),
        "share_left": sum(left) / len(left),
        "encode_gb_s": gigabytes / sorted(encoding)[len(encoding) // 4],
        "decode_gb_s": gigabytes / sorted(decoding)[len(decoding) // 4],
    }


NETWORKS = [("er8", 0.2), ("er8", 0.5), ("geometric16-d10", 0.2)]


def apart(plan: Plan, wire: str, *, unlike: bool = False) -> float:
    """The mean squared distance from the average after steps of length one, in a steady state."""
    workers, random = plan.num_workers, torch.Generator().manual_seed(0)
    x = torch.randn(1, 20 * BLOCK, generator=random).mul(1e3).repeat(workers, 1)
    segments = [Segment(offset=0, shape=(x.shape[1],))]
    graphs = Graphs(torch.device("cpu"), capture=False)
    mixing = WireMixing(parse_wire(wire), segments, [x], plan.topology.links, graphs)
    own = torch.randn(x.shape, generator=random)
    own -= own.mean(0)
    found = []
    for k, round in enumerate(plan.rounds(0, 300)):
        x += own if unlike else torch.randn(x.shape, generator=random)
        if round:
            mixing.fill([round])
            mixing.mix(0)
        if k >= 150:
            found.append(float((x - x.mean(0)).square().mean()))
    return fmean(found)


def in_networks() -> dict[str, dict[str, dict[str, float]]]:
    """By network and wire: error over whole values', as predicted, and with heterogeneous data."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, budget in NETWORKS:
        whole = matcha.plan(matcha.families.paper(name), budget, "greedy")
        base = {unlike: apart(whole, "float32", unlike=unlike) for unlike in (False, True)}
        rows = found[f"{name}, {budget:g}"] = {}
        for wire in (f"modulo:{bits}" for bits in BITS):
            rows[wire] = {
                "measured": apart(whole, wire) / base[False],
                "predicted": 1 / (1 - parse_wire(wire).residual),
                "unlike": apart(whole, wire, unlike=True) / base[True],
            }
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, help="2,048 on a CPU; on a GPU 131,072, 134 MB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # A GPU takes as long for a few megabytes as for none.
    blocks = args.blocks or (2048 if args.device == "cpu" else 1 << 17)
    found = {f"modulo:{b}": measure(b, blocks, args.device) for b in BITS}
    document: dict[str, Any] = {
        "benchmark": "wires",
        "device": args.device,
        "blocks": blocks,
        "wires": found,
    }
    if args.device == "cpu":
        document["networks"] = in_networks()
    harness.finish(args.output or harness.RESULTS / "wires", document, describe(document))


def describe(document: dict[str, Any]) -> str:
    """What each wire costs and leaves, and what networks make of it."""
    found = [{"wire": wire, **row} for wire, row in document["wires"].items()]
    text = harness.table([harness.Column("wire", "wire"), *_columns(found)], found)
    networks = [
        {"network": network, "wire": wire, **row}
        for network, rows in document.get("networks", {}).items()
        for wire, row in rows.items()
    ]
    if not networks:
        return text
    named = [harness.Column(key, key) for key in ("network", "wire")]
    return f"{text}\n\n{harness.table([*named, *_columns(networks)], networks)}"


def _columns(rows: Sequence[dict[str, Any]]) -> list[harness.Column]:
    keys = [key for key, value in rows[0].items() if not isinstance(value, str)]
    return [harness.Column(key.replace("_", " "), key, ".3g") for key in keys]


if __name__ == "__main__":
    main()
