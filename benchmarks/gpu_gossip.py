"""Four processes share one GPU over gloo with pinned staging buffers, against the same run on CPU.

    python benchmarks/gpu_gossip.py --output gpu_gossip.json

Needs torch and numpy only. Prints one table and writes it as JSON. Where four GPUs or more exist,
the same cases also run over NCCL, one GPU a worker; elsewhere it says why not, and only makes
NCCL's transport for one worker. Also checks what `torch.save`, distributed checkpoints and (where
it is installed) safetensors write of a model on the GPU that Gossip has taken in: the same tensors
in as many bytes as of the model by itself.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from matcha import Plan, families
from matcha.distributed import Gossip, TorchTransport, Transport
from matcha.distributed.launch.launcher import LocalWorkers
from matcha.rounds import RoundProcess
from matcha.schedules import Cycle, EvenlySpaced
from matcha.testing import MemoryNetwork
from matcha.timing import Units
from matcha.wires import parse_wire

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


def make_plan(mixing: str, wire: str) -> Plan:
    """Both matchings of a ring of four: all links every time, or one after another in a cycle."""
    matchings = (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    schedule = (
        EvenlySpaced(frequency=1.0, num_matchings=2)
        if mixing == "laplacian"
        else Cycle(cycle=((0,), (1, 0), (), (1,)), num_matchings=2)
    )
    return Plan(
        process=RoundProcess(
            topology=families.ring(NUM_WORKERS),
            matchings=matchings,
            schedule=schedule,
            mixing=mixing,
            alpha=0.25 if mixing == "laplacian" else 0.5,
        ),
        strategy="vanilla" if mixing == "laplacian" else "greedy",
        budget=1.0,
        timing=Units(),
        num_colors=2,
        wire=parse_wire(wire),
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
    with Gossip(
        model,
        optimizer,
        make_plan(case["mixing"], case["wire"] or "float32", "matcha"),
        transport=transport,
        overlap=case["overlap"],
        bucket_cap_mb=8,
        timeout=60,
    ) as gossip:
        started = time.perf_counter()
        for _ in range(ITERATIONS):
            batch = torch.randn(32, 256, generator=data).to(device, dtype)
            optimizer.zero_grad()
            (model(batch).float() - 1).square().mean().backward()
            optimizer.step()
        gossip.state.settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        spares = [block for some in gossip.state.exchange.spare.blocks.values() for block in some]
        pinned = bool(spares) and all(s.is_pinned() for s in spares if s.device.type == "cpu")
        result = {
            "iteration_ms": 1e3 * elapsed / ITERATIONS,
            "exchange_ms": 1e3 * gossip.state.stopwatch.exchange_seconds / ITERATIONS,
            "pinned": pinned,
        }
    flat = torch.cat([p.detach().float().cpu().flatten() for p in model.parameters()])
    return {**result, "parameters": flat}


def work(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    backend = "nccl" if kind.startswith("nccl") else "gloo"
    torch.distributed.init_process_group(backend)
    rank = torch.distributed.get_rank()
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device("cuda", rank if kind == "nccl" else 0)
        torch.cuda.set_device(device)
    transport = TorchTransport(backend)  # over NCCL all meet in it once
    for number, case in enumerate(CASES if kind != "nccl alone" else []):
        torch.save(train(transport, case, device), Path(folder) / f"{kind}-{number}-{rank}.pt")
    transport.close()
    torch.distributed.destroy_process_group()


def launch(kind: str, folder: str) -> None:
    command = [sys.executable, __file__, "--worker", kind, folder]
    with LocalWorkers(command, 1 if kind == "nccl alone" else NUM_WORKERS) as workers:
        codes = workers.wait(timeout=240)
    if any(codes):
        raise SystemExit(f"the {kind} workers ended with {codes}")


# -- what others save ------------------------------------------------------------------------------


def saving(folder: Path) -> dict[str, float]:
    """Bytes written of a model in buckets over those of its twin, by what writes them.

    Every file is read back and must hold the twin's values.
    """
    plain = make_model(torch.float32).cuda()
    taken = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(taken.parameters(), lr=0.1)
    sizes: dict[str, list[int]] = {}
    with Gossip(taken, optimizer, make_plan("laplacian", strategy="matcha"), transport=run_alone()):
        for model in (taken, plain):
            for name, (write, read) in writers().items():
                path = folder / f"{name}-{len(sizes.get(name, []))}"
                state = {key: value.clone() for key, value in plain.state_dict().items()}
                write(model, path)
                found = read(path, copy.deepcopy(plain))
                assert found.keys() == state.keys(), name
                assert all(torch.equal(found[key].cuda(), state[key]) for key in state), name
                files = [path] if path.is_file() else list(path.iterdir())
                sizes.setdefault(name, []).append(sum(file.stat().st_size for file in files))
    return {name: mine / alone for name, (mine, alone) in sizes.items()}


def run_alone() -> Transport:
    return MemoryNetwork(1).transport(0)


def writers() -> dict[str, tuple[Callable[..., object], Callable[..., dict[str, torch.Tensor]]]]:
    """How a model is written to a path, and its tensors read back into another model."""

    def read_dcp(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
        state = {"model": {key: torch.zeros_like(v) for key, v in model.state_dict().items()}}
        dcp.load(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
        return state["model"]

    def write_dcp(model: nn.Module, path: Path) -> None:
        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]

    found: dict[str, tuple[Callable[..., object], Callable[..., Any]]] = {
        "torch.save": (
            lambda model, path: torch.save(model.state_dict(), path),
            lambda path, model: torch.load(path, weights_only=True),
        ),
        "distributed checkpoint": (write_dcp, read_dcp),
    }
    if importlib.util.find_spec("safetensors"):
        import safetensors.torch as safe

        def read_safe(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
            safe.load_model(model, str(path), device="cuda")
            return model.state_dict()

        found["safetensors"] = (lambda model, path: safe.save_model(model, str(path)), read_safe)
    return found


def compare(kind: str, folder: str) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(CASES):
        runs = {
            k: [
                torch.load(Path(folder) / f"{k}-{number}-{rank}.pt", weights_only=True)
                for rank in range(NUM_WORKERS)
            ]
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


def describe(document: dict[str, Any]) -> str:
    """The result as text: a line per case."""
    header = f"{'over':<5}{'mixing':<11}{'overlap':<9}{'dtype':<10}{'wire':<10}"
    header += f"{'difference':>11}{'tolerance':>11}{'ms/iter':>9}{'exchange':>9}  equal pinned"
    lines = [
        f"four processes share one {document['device']} over gloo, against the CPU run",
        "",
        header,
    ]
    for row in document["rows"]:
        line = f"{row['over']:<5}{row['mixing']:<11}{row['overlap']!s:<9}{row['dtype']:<10}"
        line += f"{row['wire'] or '-':<10}{row['relative_difference']:>11.1e}"
        line += f"{row['tolerance']:>11.0e}{row['iteration_ms']:>9.1f}{row['exchange_ms']:>9.1f}"
        lines.append(f"{line}  {row['equal']!s:<5} {row['pinned']!s}")
    if document["nccl"] != "ran":
        lines.append(document["nccl"])
    said = ", ".join(f"{n} {ratio:.4f}" for n, ratio in document["saved_bytes_over_plain"].items())
    lines.append(f"bytes that others save of a model on the GPU, over the model by itself: {said}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
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
            skipped = f"NCCL needs a GPU per worker: {NUM_WORKERS} workers, {gpus} GPU(s) here."
            launch("nccl alone", folder)
            skipped += " Its transport was made and closed by one worker."
        sizes = saving(Path(folder))
    document = {
        "benchmark": "gpu_gossip",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "num_workers": NUM_WORKERS,
        "iterations": ITERATIONS,
        "nccl": skipped or "ran",
        "saved_bytes_over_plain": sizes,
        "rows": rows,
    }
    harness.finish(options.output, document, describe(document))
    if any(ratio > 1.01 for ratio in sizes.values()):
        raise SystemExit("a file holds more than the model")
    if not all(row["equal"] for row in rows):
        raise SystemExit("the GPU run differs from the CPU run by more than rounding")


if __name__ == "__main__":
    main()
