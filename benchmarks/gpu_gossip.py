"""Four processes share one GPU over gloo with pinned staging buffers, against the same run on CPU.

    python benchmarks/gpu_gossip.py --output gpu_gossip.json

Needs torch and numpy only. Prints one table and writes it as JSON. Where two or more GPUs exist the
same cases also run over NCCL, one GPU a worker; elsewhere it says why not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from matcha import Plan, families
from matcha.distributed import Gossip, TorchTransport, Transport
from matcha.distributed.local_workers import LocalWorkers
from matcha.schedules import Cycle, Periodic
from matcha.timing import Units

NUM_WORKERS = 4
ITERATIONS = 30
CASES = [
    {"mixing": mixing, "overlap": overlap, "dtype": "float32", "wire": None}
    for mixing, overlap in product(("laplacian", "pairwise"), (False, True))
]
CASES += [
    {"mixing": "laplacian", "overlap": False, "dtype": "float32", "wire": "bfloat16"},
    {"mixing": "pairwise", "overlap": True, "dtype": "bfloat16", "wire": None},
]
# Relative to the largest parameter: rounding of 30 steps, and of bfloat16's 8 bits.
TOLERANCE = {"float32": 2e-5, "wire": 2e-2, "bfloat16": 1e-1}


def make_plan(mixing: str) -> Plan:
    """Both matchings of a ring of four: all links every time, or one after another in a cycle."""
    matchings = (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    schedule = (
        Periodic(frequency=1.0, num_matchings=2)
        if mixing == "laplacian"
        else Cycle(cycle=((0,), (1, 0), (), (1,)), num_matchings=2)
    )
    return Plan(
        topology=families.ring(NUM_WORKERS),
        strategy="vanilla" if mixing == "laplacian" else "greedy",
        budget=1.0,
        mixing=mixing,
        matchings=matchings,
        alpha=0.25 if mixing == "laplacian" else 0.5,
        schedule=schedule,
        timing=Units(),
        num_colors=2,
    )


def make_model(dtype: torch.dtype) -> nn.Module:
    """Five million parameters, 21 MB in float32, from a fixed seed.

    Smooth: at the kink of a ReLU the last bit of a sum decides whether a unit learns, and one such
    unit is a difference of 4e-5, on one device as on two.
    """
    model = nn.Sequential(
        nn.Linear(256, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 64)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.to(dtype)


def train(transport: Transport, case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    dtype = getattr(torch, case["dtype"])
    model = make_model(dtype).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(100 + transport.rank)
    wire = getattr(torch, case["wire"]) if case["wire"] else None
    with Gossip(
        model,
        optimizer,
        make_plan(case["mixing"]),
        transport=transport,
        overlap=case["overlap"],
        wire_dtype=wire,
        bucket_mb=8,
        deadline=60,
    ) as gossip:
        started = time.perf_counter()
        for _ in range(ITERATIONS):
            batch = torch.randn(32, 256, generator=data).to(device, dtype)
            optimizer.zero_grad()
            (model(batch).float() - 1).square().mean().backward()
            optimizer.step()
        gossip.settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        spares = gossip.exchange._spares.values()
        pinned = bool(spares) and all(s.is_pinned() for s in spares if s.device.type == "cpu")
        result = {
            "iteration_ms": 1e3 * elapsed / ITERATIONS,
            "exchange_ms": 1e3 * gossip.exchange_seconds / ITERATIONS,
            "pinned": pinned,
        }
    flat = torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])
    return {**result, "parameters": flat}


def work(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = "nccl" if kind == "nccl" else "gloo"
    torch.distributed.init_process_group(backend)
    rank = torch.distributed.get_rank()
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device("cuda", rank if kind == "nccl" else 0)
        torch.cuda.set_device(device)
    transport = TorchTransport(backend)
    for number, case in enumerate(CASES):
        torch.save(train(transport, case, device), Path(folder) / f"{kind}-{number}-{rank}.pt")
    transport.close()
    torch.distributed.destroy_process_group()


def launch(kind: str, folder: str) -> None:
    command = [sys.executable, __file__, "--worker", kind, folder]
    with LocalWorkers(command, NUM_WORKERS) as workers:
        codes = workers.wait(timeout=240)
    if any(codes):
        raise SystemExit(f"the {kind} workers ended with {codes}")


def compare(kind: str, folder: str) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(CASES):
        runs = {
            k: [torch.load(Path(folder) / f"{k}-{number}-{rank}.pt") for rank in range(NUM_WORKERS)]
            for k in ("cpu", kind)
        }
        largest = max(
            float((a["parameters"] - b["parameters"]).abs().max() / b["parameters"].abs().max())
            for a, b in zip(runs[kind], runs["cpu"], strict=True)
        )
        allowed = TOLERANCE["wire" if case["wire"] else case["dtype"]]
        rows.append(
            {
                **case,
                "over": kind,
                "relative_difference": largest,
                "tolerance": allowed,
                "equal": largest <= allowed,
                "iteration_ms": max(run["iteration_ms"] for run in runs[kind]),
                "exchange_ms": max(run["exchange_ms"] for run in runs[kind]),
                "cpu_iteration_ms": max(run["iteration_ms"] for run in runs["cpu"]),
                "pinned": all(run["pinned"] for run in runs[kind]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "FOLDER"))
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and PyTorch sees none here.")
    gpus = torch.cuda.device_count()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        launch("cpu", folder)
        launch("gpu", folder)
        rows += compare("gpu", folder)
        skipped = None
        if gpus >= NUM_WORKERS:
            launch("nccl", folder)
            rows += compare("nccl", folder)
        else:
            skipped = f"NCCL needs a GPU a worker: {NUM_WORKERS} workers, {gpus} GPU(s) here."
    document = {
        "benchmark": "gpu_gossip",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "num_workers": NUM_WORKERS,
        "iterations": ITERATIONS,
        "nccl": skipped or "ran",
        "rows": rows,
    }
    header = f"{'over':<5}{'mixing':<11}{'rule':<10}{'dtype':<10}{'wire':<10}"
    header += f"{'difference':>11}{'tolerance':>11}{'ms/iter':>9}{'exchange':>9}"
    print(header + "  equal pinned")
    for row in rows:
        rule = "footnote" if row["overlap"] else "eq2"
        print(
            f"{row['over']:<5}{row['mixing']:<11}{rule:<10}{row['dtype']:<10}"
            f"{row['wire'] or '-':<10}{row['relative_difference']:>11.1e}{row['tolerance']:>11.0e}"
            f"{row['iteration_ms']:>9.1f}{row['exchange_ms']:>9.1f}  "
            f"{row['equal']!s:<5} {row['pinned']!s}"
        )
    if skipped:
        print(skipped)
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    if not all(row["equal"] for row in rows):
        raise SystemExit("the GPU run differs from the CPU run by more than rounding")


if __name__ == "__main__":
    main()
