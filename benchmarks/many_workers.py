"""Sixty-four processes on links of their own beside gloo: sockets, start-up and memory.

    python benchmarks/many_workers.py --output benchmarks/results/many_workers

Each process imports what a training script imports, makes a small model, an optimizer and Gossip,
takes one step, and says how many sockets it holds, how long it took from the launch of all until
then, what processor time that was, and its memory: resident, and its share of what processes share
(PSS). gloo connects all pairs whatever the topology, so it is run once a number of workers; on a
complete graph links of our own connect all pairs, too. Processes are forked from one that has
imported torch, as `matcha train` does; "alone" are those that start as on a machine of their own,
each with its imports. `--only ring` (or another case) runs one; the others' figures in OUTPUT.json
are kept.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

from matcha import Plan, Topology, families, plan
from matcha.distributed.launch.launcher import LocalWorkers, local_links

CASES = ("ring", "erdos-renyi", "gloo", "complete:32", "gloo:32", "ring-alone", "gloo-alone")
PATIENCE = 900.0


def topology_of(case: str, workers: int) -> Topology:
    if case == "erdos-renyi":
        return families.erdos_renyi(workers, 0.1, seed=1)
    if case == "complete":
        return families.complete(workers)
    return families.ring(workers)


def work(folder: Path) -> None:
    """One of many."""
    import torch

    from matcha.distributed import Gossip
    from matcha.distributed.launch.placement import default_transport

    torch.set_num_threads(1)
    imported = time.process_time()
    chosen = Plan.load(folder / "plan.json")
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = time.process_time()
    transport = default_transport(chosen.topology)
    gossip = Gossip(model, optimizer, chosen, transport=transport, timeout=PATIENCE)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    facts = {
        "up": time.monotonic(),
        "cpu": time.process_time(),
        "cpu_imports": imported,
        "cpu_optimizer": made - imported,
        "sockets": _sockets(),
        "rss": _kilobytes("/proc/self/status", "VmRSS") / 1024,
    }
    (folder / f"up-{gossip.rank}").touch()
    _wait_for(folder, "up-*", chosen.num_workers)  # PSS means something while all are there
    facts["pss"] = _kilobytes("/proc/self/smaps_rollup", "Pss") / 1024
    (folder / f"facts-{gossip.rank}.json").write_text(json.dumps(facts))
    _wait_for(folder, "facts-*", chosen.num_workers)
    os._exit(0)  # nothing that is measured comes after this


def _sockets() -> int:
    """TCP connections between workers that this process holds."""
    links = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    own = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _rows(name)]
    established = "01"
    return sum(row[3] == established and row[9] in own for row in rows)


def _rows(name: str) -> list[str]:
    path = Path(f"/proc/self/net/{name}")
    return path.read_text().splitlines()[1:] if path.exists() else []


def _kilobytes(path: str, name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(path).read_text(), re.MULTILINE)
    return float(found[1]) if found else float("nan")


def _wait_for(folder: Path, pattern: str, number: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob(pattern))) < number:
        if time.monotonic() > end:
            raise SystemExit("not all workers came")
        time.sleep(0.5)


def measure(case: str, workers: int) -> dict[str, Any]:
    case, _, number = case.partition(":")
    workers = int(number or workers)
    topology = topology_of(case, workers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plan(topology, 1.0, "vanilla").save(folder / "plan.json")
        environment = {"OMP_NUM_THREADS": "1"}
        if "gloo" not in case:
            environment |= local_links(workers, folder)
        command = [sys.executable, __file__, "--worker", scratch]
        start = time.monotonic()
        with LocalWorkers(
            command,
            workers,
            environment=environment,
            logs=folder / "logs",
            forked="alone" not in case,
        ) as ws:
            codes = ws.wait(timeout=PATIENCE + 60)
        if any(codes):
            raise SystemExit("\n".join([str(codes), *ws.last_words(codes.index(max(codes)))]))
        facts = [json.loads((folder / f"facts-{r}.json").read_text()) for r in range(workers)]
    middle = {name: statistics.median(f[name] for f in facts) for name in facts[0]}
    return {
        "workers": workers,
        "links": [topology.degrees[r] for r in range(workers)],
        "sockets": [f["sockets"] for f in facts],
        "seconds_until_all_are_up": max(f["up"] for f in facts) - start,
        **{name: middle[name] for name in ("cpu", "cpu_imports", "cpu_optimizer", "rss", "pss")},
    }


def describe(document: dict[str, Any]) -> str:
    """A line per case."""
    cases = document["cases"]
    lines = ["case          links    sockets   all up     CPU s per process (imports, optimizer)"
             "   RSS     PSS"]  # fmt: skip
    for name, case in cases.items():
        links = "–" if "gloo" in name else f"{min(case['links'])}–{max(case['links'])}"
        sockets = f"{min(case['sockets'])}–{max(case['sockets'])}"
        cpu = f"{case['cpu']:.2f} ({case['cpu_imports']:.2f}, {case['cpu_optimizer']:.2f})"
        lines.append(
            f"{name:<12}{links:>7}{sockets:>11}{case['seconds_until_all_are_up']:>7.1f} s"
            f"{cpu:>34}{case['rss']:>13.0f} MB{case['pss']:>5.0f} MB"
        )
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--workers", type=int, default=64, help="of cases that name no number")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    cases = (harness.earlier(options.output) or {"cases": {}})["cases"]
    cases |= {case: measure(case, options.workers) for case in options.only}
    cases = {name: cases[name] for name in CASES if name in cases}
    result = {"benchmark": "many_workers", "machine": harness.machine(), "cases": cases}
    harness.finish(options.output, result, describe(result))


if __name__ == "__main__":
    main()
