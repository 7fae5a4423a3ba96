"""Two racks with one uplink each: predicted and measured times, and what knowing the wires gains.

    sudo python benchmarks/network/racks.py

Ten hosts (network namespaces), five a rack, everyone linked with everyone; messages between racks
queue on uplinks half as fast as a host's card. First one exchange within a rack and one between
racks are timed alone, as `matcha probe` would; predictions are made from these two numbers. Then
each plan's rounds are exchanged over TCP for some turns of its cycle, nothing computed in between,
with a barrier after each round whose own time is taken off. Writes benchmarks/results/racks.*
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import Network

import matcha
from matcha import Plan, Round, Topology, families
from matcha.distributed import TorchTransport
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import meetings
from matcha.timing import Underlay

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import finish, parser

RACKS = [range(5), range(5, 10)]
MESSAGE = 1_000_000
MBPS, UPLINK = 40.0, 20.0
SECONDS = 8e-6 * MESSAGE / MBPS
UPLINK_SECONDS = 8e-6 * MESSAGE / UPLINK
PROBED = ((0, 1), (0, 5))
BUSY = 24
"""Rounds with exchanges to measure of each plan."""


def topology() -> Topology:
    complete = families.complete(10)
    return complete.with_link_times([SECONDS] * len(complete.links))


def plans() -> dict[str, Plan]:
    """One that knows the wires, and one that does not, with the same consensus error or less."""
    graph = topology()
    timing = Underlay.racks(graph, RACKS, uplink=UPLINK_SECONDS)
    full = timing.round_time(matcha.plan(graph, 1.0, "vanilla").matchings)
    knows = matcha.plan(graph, 0.8 / full, "greedy", timing=timing)
    low, high = 0.01, 1.0
    for _ in range(9):
        middle = (low * high) ** 0.5
        other = matcha.plan(graph, middle, "greedy")
        enough = (other.consensus_error or 0.0) <= (knows.consensus_error or 0.0)
        low, high = (low, middle) if enough else (middle, high)
    return {"knows the wires": knows, "does not": matcha.plan(graph, high, "greedy")}


def alone(exchange: Exchange, rank: int, pair: tuple[int, int]) -> float:
    """Seconds of one exchange while no other pair talks: the median of some."""
    round_ = Round(matchings=((pair,),), indices=(0,), mixing="pairwise", weight=0.5)
    seconds = []
    for k in range(5):
        dist.barrier()
        begun = time.perf_counter()
        if rank in pair:
            exchange.run(round_, meetings(round_, rank), iteration=k)
        seconds.append(time.perf_counter() - begun)
    return sorted(seconds)[2]


def work(folder: Path) -> None:
    """One host: every plan in turn; host 0 writes what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = TorchTransport()
    values = [torch.zeros(MESSAGE // 4)]
    exchange = Exchange(transport, [FloatCodec(values, bucket_bytes=4 * MESSAGE)], timeout=120)
    found: dict[str, Any] = {"alone": [alone(exchange, transport.rank, pair) for pair in PROBED]}
    for path in sorted(folder.glob("plan-*.json")):
        plan = Plan.load(path)
        period = [r for r in plan.rounds(0, len(plan.schedule.period or ())) if r]
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(20):
            dist.barrier()
        barrier = (time.perf_counter() - begun) / 20
        begun = time.perf_counter()
        for k in range(BUSY):
            round_ = period[k % len(period)]
            met = meetings(round_, transport.rank)
            if met:
                exchange.run(round_, met, iteration=k)
            dist.barrier()
        seconds = time.perf_counter() - begun - BUSY * barrier
        found[path.stem] = {"seconds": seconds / BUSY, "barrier": barrier}
    if transport.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    output = parser(__doc__, output="racks").parse_args().output
    made = plans()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, plan in enumerate(made.values()):
            plan.save(folder / f"plan-{number}.json")
        racks = [list(rack) for rack in RACKS]
        with Network(topology(), mbps=MBPS, racks=racks, uplink_mbps=UPLINK) as network:
            codes = network.run([sys.executable, __file__, "--work", name])
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        found = json.loads((folder / "found.json").read_text())
    inside, across = found["alone"]
    graph = topology().with_link_times([inside] * len(topology().links))
    timing = Underlay.racks(graph, RACKS, uplink=across)
    rows = []
    for number, (label, plan) in enumerate(made.items()):
        period = list(plan.rounds(0, len(plan.schedule.period or ())))
        busy = [round_ for round_ in period if round_]
        played = [busy[k % len(busy)] for k in range(BUSY)]
        predicted = sum(timing.round_time(r.matchings) for r in played) / BUSY
        measured = found[f"plan-{number}"]["seconds"]
        share = sum(timing.round_time(r.matchings) for r in busy) / len(period)
        rows.append(
            {
                "plan": label,
                "error": plan.consensus_error,
                "predicted_round": predicted,
                "measured_round": measured,
                "inside": inside,
                "across": across,
                "barrier": found[f"plan-{number}"]["barrier"],
                "predicted_iteration": share,
                "measured_iteration": share * measured / predicted,
            }
        )
    finish(output, rows, as_text(rows))


def as_text(rows: list[dict[str, Any]]) -> str:
    """A line per plan, as predicted and as measured."""
    gain = rows[1]["measured_iteration"] / rows[0]["measured_iteration"]
    lines = [
        "Two racks of five, cards of 40 Mbit/s, uplinks of 20; messages of one megabyte.",
        f"Alone, an exchange takes {rows[0]['inside']:.3f} s in a rack and "
        f"{rows[0]['across']:.3f} s across.",
        f"{'greedy that':16s} {'error':>8s} {'s a round':>10s} {'measured':>9s} {'off':>7s} "
        f"{'s an iteration':>14s} {'measured':>9s}",
        *(
            f"{row['plan']:16s} {row['error']:8.4f} {row['predicted_round']:10.3f} "
            f"{row['measured_round']:9.3f} "
            f"{100 * (row['measured_round'] / row['predicted_round'] - 1):6.1f}% "
            f"{row['predicted_iteration']:14.3f} {row['measured_iteration']:9.3f}"
            for row in rows
        ),
        f"at the same consensus error, knowing the wires takes {gain:.2f} times less time; "
        f"load {os.getloadavg()[0]:.1f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    work(Path(sys.argv[2])) if sys.argv[1:2] == ["--work"] else main()
