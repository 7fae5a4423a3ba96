"""How fast m workers train on one device: the engine, a plain loop over models, one large batch.

    python benchmarks/simulation.py --device cuda --output results.json
    python benchmarks/simulation.py --device cpu

Images (or words) a second. *loop*: one model after another, `torch.optim.SGD`, autocast on CUDA;
it neither draws data nor mixes. *engine*: a whole iteration, data and mixing included, the best of
the execution variants tried. *whole*: one model on all workers' batch at once, no data, launched
kernel by kernel as users do; *whole, captured*: the same replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parts.agreement import agreement
from parts.simulation_cases import CPU_CASES, CUDA_CASES, OPTIMIZER, Case, task_of
from torch import nn
from torch.nn import functional

from matcha.rounds import Round
from matcha.simulation import Engine, Execution


def ring_round(num_workers: int) -> Round:
    """Every worker mixes with both neighbours on a ring: no iteration is silent."""
    even = tuple((i, i + 1) for i in range(0, num_workers, 2))
    odd = (*((i, i + 1) for i in range(1, num_workers - 1, 2)), (0, num_workers - 1))
    return Round(matchings=(even, odd), indices=(0, 1), mixing="laplacian", weight=0.3)


def seconds(step: Callable[[], None], device: str, repeats: int, warm: int = 3) -> float:
    """Median seconds of a step."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(warm):
        step()
    wait()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(repeats):
            step()
        wait()
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times)


def alternating(steps: list[Callable[[], None]], repeats: int) -> list[float]:
    """The fastest of several rounds in which each step has its turn: fair on a busy CPU."""
    best = [float("inf")] * len(steps)
    for _ in range(9):
        for k, step in enumerate(steps):
            step()
            started = time.perf_counter()
            for _ in range(repeats):
                step()
            best[k] = min(best[k], (time.perf_counter() - started) / repeats)
    return best


def engine_step(case: Case, execution: Execution) -> Callable[[], None]:
    """A whole iteration of the engine."""
    task = task_of(case)
    engine = Engine(task, OPTIMIZER, execution=execution)
    round = ring_round(case.num_workers)
    steps = task.steps_per_epoch
    engine.begin_epoch(0, [0.01] * steps, [round] * steps)
    position = 0

    def step() -> None:
        nonlocal position
        if position == steps:
            engine.position.fill_(-1)
            position = 0
        engine.step(position)
        position += 1

    return step


def engine_seconds(case: Case, execution: Execution, repeats: int, profile: bool = False) -> float:
    step = engine_step(case, execution)
    taken = seconds(step, execution.device, repeats)
    if profile:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            step()
            torch.cuda.synchronize()
        events = trace.key_averages()
        print(events.table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=70))
    return taken


def model_step(case: Case, module: nn.Module, batch_size: int, device: str) -> Callable[[], None]:
    """One model's training step as users write it."""
    cuda = device == "cuda"
    module = module.to(device).train()
    if cuda and case.name != "lstm":
        module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    if case.name == "lstm":
        words = torch.randint(0, 10_000, (35, batch_size), device=device)

        def loss_of() -> torch.Tensor:
            return functional.cross_entropy(module(words).flatten(0, 1), words.flatten())

    else:
        shape = (64,) if case.name in ("digits-linear", "digits-mlp") else (3, 32, 32)
        shape = (1, 8, 8) if case.name == "digits-cnn" else shape
        x = torch.randn(batch_size, *shape, device=device)
        x = x.to(memory_format=torch.channels_last) if cuda else x
        y = torch.randint(0, 10, (batch_size,), device=device)

        def loss_of() -> torch.Tensor:
            return functional.cross_entropy(module(x), y)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = loss_of()
        loss.backward()
        optimizer.step()

    return step


class PlainLSTM(nn.Module):
    """The language model as users write it, on PyTorch's own LSTM (cuDNN)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(10_000, 1500), nn.Dropout(0.65)
        self.lstm = nn.LSTM(1500, 1500, 2, dropout=0.65)
        self.decoder = nn.Linear(1500, 10_000)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the next word."""
        outputs, _ = self.lstm(self.drop(self.embedding(words)))
        return self.decoder(self.drop(outputs))


def fresh(case: Case) -> nn.Module:
    return PlainLSTM() if case.name == "lstm" else task_of(case).model()


def loop_step(case: Case, device: str) -> Callable[[], None]:
    """One model after another."""
    steps = [
        model_step(case, fresh(case), case.batch_size, device) for _ in range(case.num_workers)
    ]
    return lambda: [step() for step in steps] and None


def loop_seconds(case: Case, device: str, repeats: int) -> float:
    return seconds(loop_step(case, device), device, repeats)


def whole_seconds(case: Case, device: str, repeats: int, captured: bool) -> float:
    step = model_step(case, fresh(case), case.batch_size * case.num_workers, device)
    if captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    return seconds(step, device, repeats)


def guarded(label: str, measure: Callable[[], float]) -> float | None:
    """A measurement, or None with its traceback printed: one failure must not cost the table."""
    started = time.perf_counter()
    try:
        value = measure()
    except Exception:
        print(f"{label} failed:\n{traceback.format_exc()}", flush=True)
        value = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    shown = f"{value * 1e3:.2f} ms" if value is not None else "failed"
    print(f"  {label}: {shown} (took {time.perf_counter() - started:.1f} s)", flush=True)
    return value


def variants(
    case: Case, device: str, streams: list[int], with_compile: bool
) -> dict[str, Execution]:
    chosen = {
        f"{n} streams": Execution(device="cuda", precision="bfloat16", streams=n)
        for n in streams
        if n <= case.num_workers
    }
    if with_compile and case.compiled:
        n = min(8, case.num_workers)
        chosen[f"{n} streams, compiled"] = Execution(
            device="cuda", precision="bfloat16", streams=n, compile=True
        )
    return chosen


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    print(f"{case.name}, {case.num_workers} x {case.batch_size}", flush=True)
    device, repeats = args.device, args.repeats
    per_step = case.num_workers * case.batch_size * (35 if case.name == "lstm" else 1)
    loop = None
    if not args.engine_only and device == "cuda":
        loop = guarded("loop", lambda: loop_seconds(case, device, max(2, repeats // 8)))
    profile = case.name in (args.profile or ())
    engine: dict[str, float | None]
    if device == "cpu":
        both = [loop_step(case, "cpu"), engine_step(case, Execution())]
        loop, only = alternating(both, max(1, repeats // 4))
        engine = {"auto": only}
        print(f"  loop {loop * 1e3:.2f} ms, engine {only * 1e3:.2f} ms", flush=True)
    else:
        engine = {
            name: guarded(name, lambda e=execution: engine_seconds(case, e, repeats, profile))
            for name, execution in variants(case, device, args.streams, args.compile).items()
        }
    whole = captured = None
    if device == "cuda" and case.name != "lstm" and not args.engine_only:
        whole = guarded("whole", lambda: whole_seconds(case, device, repeats, False))
        captured = guarded("whole, captured", lambda: whole_seconds(case, device, repeats, True))
    known = {name: value for name, value in engine.items() if value is not None}
    best = min(known, key=known.__getitem__) if known else None

    def rate(value: float | None) -> float | None:
        return None if value is None else per_step / value

    best_seconds = None if best is None else known[best]
    return {
        "case": case.name,
        "num_workers": case.num_workers,
        "batch_size": case.batch_size,
        "parameters": sum(p.numel() for p in task_of(case).model().parameters()),
        "loop": rate(loop),
        "engine": {name: rate(value) for name, value in engine.items()},
        "best": best,
        "whole": rate(whole),
        "whole_captured": rate(captured),
        "times_loop": loop / best_seconds if loop and best_seconds else None,
        "bar_loop": case.over_loop,
        "share_of_whole": whole / best_seconds if whole and best_seconds else None,
        "bar_whole": case.over_whole,
    }


def table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None, digits: int = 0) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    lines = [
        "| model | parameters | workers × batch | loop | engine | variant | whole "
        "| whole, captured | engine / loop (bar) | engine / whole (bar) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        best = r["engine"][r["best"]] if r["best"] else None
        lines.append(
            f"| {r['case']} | {r['parameters'] / 1e6:.2f}M "
            f"| {r['num_workers']} × {r['batch_size']} "
            f"| {number(r['loop'])} | {number(best)} | {r['best']} | {number(r['whole'])} "
            f"| {number(r['whole_captured'])} "
            f"| {number(r['times_loop'], 2)} ({number(r['bar_loop'], 1)}) "
            f"| {number(r['share_of_whole'], 2)} ({number(r['bar_whole'], 2)}) |"
        )
    return "\n".join(lines)


def machine(device: str) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else platform.processor() or platform.machine()
    )
    cpu = Path("/proc/cpuinfo")
    if device == "cpu" and cpu.exists():
        models = [
            line.split(":")[1].strip()
            for line in cpu.read_text().splitlines()
            if "model name" in line
        ]
        name = models[0] if models else name
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 16])
    parser.add_argument("--engine-only", action="store_true", help="no baselines, no agreement")
    parser.add_argument("--no-agreement", action="store_true", help="times only")
    parser.add_argument("--profile", nargs="*", help="case names whose kernels to list")
    parser.add_argument("--compile", action="store_true", help="also try torch.compile'd blocks")
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--only", nargs="*", help="case names")
    parser.add_argument("--workers", type=int, help="only cases of so many workers")
    parser.add_argument(
        "--budget-seconds", type=float, default=1e9, help="start no case after this"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    document: dict[str, Any] = {"machine": machine(args.device), "agreement": [], "cases": []}

    def save() -> None:
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(document, indent=1) + "\n")

    print(json.dumps(document["machine"]), flush=True)
    if args.device == "cuda" and not (args.engine_only or args.no_agreement):
        document["agreement"] = agreement(Execution(device="cuda", streams=4))
        for result in document["agreement"]:
            print(result.pop("failed", json.dumps(result)), flush=True)
        save()
    for case in CUDA_CASES if args.device == "cuda" else CPU_CASES:
        if args.only and case.name not in args.only:
            continue
        if args.workers and case.num_workers != args.workers:
            continue
        if time.perf_counter() - started > args.budget_seconds:
            print(f"out of time before {case.name}", flush=True)
            break
        document["cases"].append(measure(case, args))
        save()
    print(table(document["cases"]), flush=True)


if __name__ == "__main__":
    main()
