"""A worker that is a group of processes with FSDP2 inside: memory and bytes per process.

    python benchmarks/groups.py --output benchmarks/results/groups

Two workers of two processes each train a transformer of GPT-2's size on the CPU over gloo: with
`fully_shard` alone (two groups that never meet), with Gossip between the groups, and with Gossip
that overlaps. Each kind is started again, so that a process's memory is its own. In the table, a
process: its shard of the parameters; what it has resident before there is a model, after a step,
and at most; the tensors that Gossip holds of that; and what it sent at a meeting. The last column
is the kernel's own count: what crossed the loopback device in a round of all workers without a
step, over the sum of all shards; nothing else may use that device meanwhile.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import matcha
from matcha.distributed import Gossip
from matcha.distributed.launch.launcher import LocalWorkers

NODES, PROCESSES = 2, 2
KINDS = ("FSDP2 alone", "Gossip", "Gossip, overlap")
STEPS = 3
LAYERS, WIDTH, WORDS, CONTEXT = 12, 768, 32_000, 32
# What is freed goes back to the system at once, so that resident memory is memory in use.
TIDY = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


class Transformer(nn.Module):
    """GPT-2's layers and width, and a vocabulary of 32,000: 110 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """How badly the next byte is foretold, on average."""
        x = self.words(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def megabytes(field: str) -> float:
    """A figure of this process's memory, as Linux counts it."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1e3 * 1.024


def loopback_bytes() -> int:
    """How much was ever sent over the loopback device."""
    line = next(t for t in Path("/proc/net/dev").read_text().splitlines() if "lo:" in t)
    return int(line.split()[9])


def round_bytes(gossip: Gossip) -> int:
    """What crosses the loopback device in one round of all workers, without a step."""
    gossip.state.settle()
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    gossip.step()
    gossip.state.settle()
    dist.barrier()
    return loopback_bytes() - before


def train(kind: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (NODES, PROCESSES), mesh_dim_names=("node", "gpu"))
    idle = megabytes("VmRSS")
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["gpu"])
    fully_shard(model, mesh=mesh["gpu"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gossip = None
    if kind != KINDS[0]:
        plan = matcha.plan(
            matcha.families.path(NODES), 1.0, "matcha"
        )  # the two meet at every iteration
        gossip = Gossip(model, optimizer, plan, mesh=mesh["node"], overlap=kind == KINDS[2])
    data = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        started = time.perf_counter()
        tokens = torch.randint(256, (2, CONTEXT + 1), generator=data)
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    if gossip is not None:
        gossip.state.settle()
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    shard = sum(p.nbytes for p in locals_)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "shard_bytes": shard,
        "idle_mb": idle,
        "after_mb": megabytes("VmRSS"),
        "peak_mb": megabytes("VmHWM"),
        "step_seconds": min(seconds),
    }
    if gossip is not None:
        meetings = STEPS + (kind == KINDS[2])  # overlap has started the next one
        copies = [bucket.data for bucket in gossip.state.buckets]
        copies += gossip.state.overlap.mixed if gossip.state.overlap else []
        held = sum(copy.nbytes for copy in copies) + gossip.state.exchange.spare_bytes
        result["gossip_mb"] = held / 1e6
        result["sent_bytes"] = gossip.state.exchange.bytes_sent / meetings
        result["loopback_bytes"] = round_bytes(gossip)
        result["distance"] = gossip.consensus_distance()
        gossip.detach()
    return result


def work(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(kind)
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", kind, folder]
        with LocalWorkers(command, NODES * PROCESSES, environment=TIDY) as workers:
            if any(workers.wait(timeout=200)):
                raise SystemExit(f"the workers of {kind} failed")
        files = sorted(Path(folder).iterdir())
        return {"kind": kind, "processes": [json.loads(file.read_text()) for file in files]}


def describe(document: dict[str, Any]) -> str:
    """A line per process."""
    rows = document["rows"]
    lines = [
        f"{rows[0]['processes'][0]['parameters'] / 1e6:.1f} million parameters (float32, AdamW), "
        f"{NODES} workers of {PROCESSES} processes; MB per process",
        f"{'':<18}{'shard':>8}{'idle':>8}{'after':>8}{'peak':>8}{'Gossip':>8}{'sent':>8}{'sent/shard':>12}"
        f"{'s/step':>8}{'kernel/shards':>15}",
    ]
    for row in rows:
        for process in row["processes"]:
            line = f"{row['kind']:<18}{process['shard_bytes'] / 1e6:>8.1f}"
            line += "".join(f"{process[f'{k}_mb']:>8.0f}" for k in ("idle", "after", "peak"))
            if "sent_bytes" in process:
                shards = sum(p["shard_bytes"] for p in row["processes"])
                line += f"{process['gossip_mb']:>8.0f}{process['sent_bytes'] / 1e6:>8.1f}"
                line += f"{process['sent_bytes'] / process['shard_bytes']:>12.4f}"
                line += f"{process['step_seconds']:>8.2f}"
                line += f"{process['loopback_bytes'] / shards:>15.4f}"
            else:
                line += f"{'-':>8}{'-':>8}{'-':>12}{process['step_seconds']:>8.2f}{'-':>15}"
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"))
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    rows = [measure(kind) for kind in KINDS]
    document = {
        "benchmark": "groups",
        "torch": torch.__version__,
        "machine": harness.machine(),
        "rows": rows,
    }
    harness.finish(options.output, document, describe(document))


if __name__ == "__main__":
    main()
