"""A link becomes ten times slower in the middle of a run: a plan that follows, and others.

    sudo python benchmarks/network/replan.py

Eight hosts (network namespaces) on er8, every link a wire of its own, 40 Mbit/s each way; a model
of 0.4 megabytes, 20 ms of computing an iteration, greedy at budget 0.3. After fifty iterations one
link is shaped to a tenth. *follows* was told nothing and compares times every hundred iterations
(`Gossip(replan=100)`); the look that notices has the next stage made beside training, and all
change to it some seconds later. Its pace is counted after that, and the longest iteration about the
look, about the change and between them stands beside it. *knew* was planned from the start for
links as they are then, with the same communication time per iteration; *stays* is the plan that was
made first. All three run on the slowed network, over links of our own. Writes
benchmarks/results/replan.*
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from namespaces import Network

import matcha
from matcha import Plan, StagedPlan, Topology, families
from matcha.distributed import Gossip, LinkTransport, Peers
from matcha.distributed.transports.collectives import barrier
from matcha.strategies import next_stage

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import finish, parser

SIZE, MBPS, FACTOR, COMPUTE = 400_000, 40.0, 10, 0.02
SECONDS = 8e-6 * SIZE / MBPS
EVERY, SETTLE, COUNTED = 100, 5, 60
SLOW = (0, 1)
CASES = ("follows", "knew", "stays")


def topology() -> Topology:
    return families.paper("er8")


def plans() -> dict[str, Plan | StagedPlan]:
    """What each case starts with."""
    graph = topology()
    first = matcha.plan(graph, 0.3, "greedy")
    slowed = dict.fromkeys(graph.links, SECONDS) | {SLOW: FACTOR * SECONDS}
    return {"follows": first, "knew": next_stage(first, slowed, 1).levels[1], "stays": first}


def work(folder: Path, rank: int) -> None:
    """One host: every case in turn."""
    torch.set_num_threads(1)
    if rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    found: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        plan = matcha.load_plan(folder / f"{case}.json")
        addresses = tuple((f"10.77.0.{r + 1}", 29600 + number) for r in range(plan.num_workers))
        transport = LinkTransport(topology(), rank, Peers(addresses=addresses), timeout=60.0)
        model = torch.nn.Linear(SIZE // 4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        every = EVERY if case == "follows" else 0
        gossip = Gossip(model, optimizer, plan, transport=transport, replan=every)
        first = 2 * EVERY + SETTLE if every else SETTLE
        times = []
        for k in range(first + COUNTED + 1):
            if every and k == EVERY // 2 and rank == 0:
                (folder / "slow-now").touch()
            times.append(time.perf_counter())
            time.sleep(COMPUTE)
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        stages = [stage.start for stage in getattr(gossip.plan, "stages", ())]
        found[case] = {"seconds": times[-1] - times[first], "stages": stages}
        if every:
            lasted = [b - a for a, b in itertools.pairwise(times)]
            changed = stages[-1] if stages else 2 * every
            found[case]["look"] = max(lasted[every - 2 : every + 1])
            found[case]["meanwhile"] = max(lasted[every + 1 : changed - 2])
            found[case]["change"] = max(lasted[changed - 2 : changed + 1])
        barrier(transport, 100.0)  # no worker hangs up on others' last messages
        gossip.detach()
        transport.close()
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    output = parser(__doc__, output="replan").parse_args().output
    graph = topology()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case, plan in plans().items():
            plan.save(folder / f"{case}.json")
        with Network(
            graph.with_link_times([SECONDS] * len(graph.links)), message_bytes=SIZE
        ) as net:
            command = [sys.executable, __file__, "--work", name]
            started = [net.start(r, [*command, str(r)]) for r in range(graph.num_workers)]
            end = time.monotonic() + 120
            while not (folder / "slow-now").exists() and time.monotonic() < end:
                time.sleep(0.01)
            net.reshape(SLOW, MBPS / FACTOR)
            codes = [process.wait(300) for process in started]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        found = [json.loads((folder / f"found-{r}.json").read_text()) for r in range(8)]
    rows = {case: _over(case, found) for case in CASES}
    finish(output, rows, as_text(rows))


def _over(case: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A case as its slowest worker saw it."""
    seconds = max(worker[case]["seconds"] for worker in found)
    row = {"iterations_per_second": COUNTED / seconds, "stages": found[0][case]["stages"]}
    names = [name for name in ("look", "meanwhile", "change") if name in found[0][case]]
    return row | {f"{name}_seconds": max(w[case][name] for w in found) for name in names}


def as_text(rows: dict[str, Any]) -> str:
    """A line per plan, and the longest iterations."""
    knew = rows["knew"]["iterations_per_second"]
    lines = [
        f"er8, greedy at 0.3; link {SLOW[0]}–{SLOW[1]} takes ten times as long.",
        f"{'plan':10s} {'iterations/s':>12s} {'of knew':>8s}  stages begin at",
        *(
            f"{case:10s} {row['iterations_per_second']:12.2f} "
            f"{row['iterations_per_second'] / knew:8.0%}  {row['stages']}"
            for case, row in rows.items()
        ),
        "the longest iteration took {look_seconds:.2f} s about the look, {meanwhile_seconds:.2f} s "
        "while the stage was made, {change_seconds:.2f} s about the change".format(
            **rows["follows"]
        ),
        f"counted over {COUNTED} iterations after the change; load {os.getloadavg()[0]:.1f}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    work(Path(sys.argv[2]), int(sys.argv[3])) if sys.argv[1:2] == ["--work"] else main()
