"""Language models: loss against bytes, for what the field compares and for plans of ours.

    python benchmarks/language.py --data FOLDER --device cuda

Eight workers train one transformer on a folder of text (`tools/fetch_text.py` gets RFCs) with
AdamW. Every method gets the same learning rates, and the best one is shown. Bytes are what a worker
sends, as a share of a float32 ring all-reduce at every iteration. Results are appended to
`benchmarks/results/language.jsonl`, one line per run; runs that stand there are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import matcha
from matcha.plans import Plan
from matcha.simulation import Engine, Execution, Settings, Simulation
from matcha.topology import families
from matcha.training.optimizers import adamw
from matcha.training.rates import Cosine
from matcha.wires import parse_wire
from matcha.zoo.recipes import Choices, recipe

M = 8
RESULTS = Path(__file__).parent / "results" / "language.jsonl"


def exact(period: int) -> Plan:
    """An exact average every so many iterations."""
    return matcha.plan(families.complete(M), 0.25 / period, strategy="local")


def pairs(period: int, wire: str = "modulo:3") -> Plan:
    """One dimension of the hypercube after another, one every so many iterations."""
    budget = parse_wire(wire).size_ratio() / (3 * period)
    return matcha.plan(families.hypercube(3), budget, strategy="hypercube", wire=wire)


def random_pairs(period: int, wire: str = "float32") -> Plan:
    """A random perfect matching every so many iterations."""
    random = np.random.default_rng(0)
    rounds: list[list[list[tuple[int, int]]]] = []
    for _ in range(61):
        order = random.permutation(M).tolist()
        matching = [(min(p), max(p)) for p in zip(order[::2], order[1::2], strict=True)]
        rounds += [*([[]] * (period - 1)), [matching]]
    return matcha.plan(families.complete(M), 1.0, strategy="rounds", rounds=rounds, wire=wire)


@dataclass(frozen=True)
class Method:
    """A row: who talks when, over which wire, and what momentum does around it."""

    plan: Callable[[], Plan]
    momentum: str = "local"


def _outer(momentum: float, nesterov: int = 0) -> str:
    return f"outer:outer_rate=0.7,outer_momentum={momentum},nesterov={nesterov}"


METHODS: dict[str, Method] = {
    "allreduce": Method(lambda: matcha.plan(families.complete(M), 1.0, strategy="allreduce")),
    "silent": Method(lambda: matcha.plan(families.complete(M), 1.0, strategy="silent")),
    "pairs-f32-1": Method(lambda: pairs(1, "float32")),
    **{f"local-{h}": Method(lambda h=h: exact(h)) for h in (8, 32)},
    **{
        f"diloco-{h}-{beta}": Method(lambda h=h: exact(h), _outer(beta, 1))
        for h in (8, 32, 128)
        for beta in (0.5, 0.9)
    },
    **{f"noloco-{h}": Method(lambda h=h: random_pairs(h), _outer(0.5)) for h in (8, 32)},
    **{f"g3-{t}": Method(lambda t=t: pairs(t)) for t in (1, 4, 16, 32, 64)},
    **{f"g3-{t}-outer": Method(lambda t=t: pairs(t), _outer(0.5)) for t in (4, 16, 32, 64)},
    **{f"g3-{t}-shared": Method(lambda t=t: pairs(t), "shared") for t in (1, 2, 4, 8, 32)},
    **{f"g4-{t}-shared": Method(lambda t=t: pairs(t, "modulo:4"), "shared") for t in (1, 4)},
    "pairs-f32-1-shared": Method(lambda: pairs(1, "float32"), "shared"),
}


def main() -> None:
    """Run what is asked for and not done yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder of text files")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, separated by commas")
    parser.add_argument("--rates", default="1e-3,3e-3,6e-3", help="learning rates")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--iterations", type=int, default=2500)
    parser.add_argument("--model", default="transformer-14m")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, help="start no run that would end after these")
    asked = parser.parse_args()
    began = time.monotonic()
    lasted = 0.0
    engines: dict[int, Engine] = {}
    for seed in map(int, asked.seeds.split(",")):
        for rate in map(float, asked.rates.split(",")):
            for name in asked.methods.split(","):
                row = {
                    "method": name,
                    "rate": rate,
                    "seed": seed,
                    "iterations": asked.iterations,
                    "model": asked.model,
                    "batch_size": asked.batch_size,
                }
                if is_done(asked.output, row):
                    continue
                if asked.seconds and time.monotonic() - began + 1.2 * lasted > asked.seconds:
                    print("no time is left for another run", flush=True)
                    return
                started = time.monotonic()
                found = row | run(row, asked.data, asked.device, engines)
                lasted = time.monotonic() - started
                asked.output.parent.mkdir(parents=True, exist_ok=True)
                with asked.output.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(
                    f"{name:20s} rate {rate:.0e} seed {seed}  loss {found['loss']:.3f}  bytes 1/"
                    f"{1 / found['share'] if found['share'] else float('inf'):.1f}  distance "
                    f"{found['consensus_distance']:.2f}  {lasted:.0f} s",
                    flush=True,
                )


def is_done(file: Path, row: dict[str, Any]) -> bool:
    """Whether a run of these choices stands in the results."""
    if not file.exists():
        return False
    known = map(json.loads, file.read_text().splitlines())
    return any(all(one.get(key) == value for key, value in row.items()) for one in known)


def run(row: dict[str, Any], data: str, device: str, engines: dict[int, Engine]) -> dict[str, Any]:
    """Train once; loss of the average model and what a worker sent."""
    method, seed = METHODS[row["method"]], row["seed"]
    execution = Execution(device=device, batching="stacked")
    if device == "cuda":
        execution = Execution(device=device, precision="bfloat16", compile=True)
    optimizer = adamw(beta2=0.95, weight_decay=0.1, clip_norm=1.0)
    if seed not in engines:
        chosen = recipe("text")
        task = chosen.task(
            Choices(
                num_workers=M,
                data=data,
                model=row["model"],
                batch_size=row["batch_size"],
                seed=seed,
            )
        )
        engines[seed] = Engine(task, optimizer, execution=execution)
    engine = engines[seed]
    epochs = row["iterations"] / engine.task.steps_per_epoch
    assert epochs == int(epochs), "iterations must be a multiple of the task's epoch"
    settings = Settings(
        epochs=int(epochs),
        schedule=Cosine(base=row["rate"], epochs=epochs, warmup=0.04 * epochs),
        optimizer=optimizer,
        momentum=method.momentum,
        evaluate_every=int(epochs),
        execution=execution,
    )
    simulation = Simulation(engine.task, method.plan(), settings, engine=engine, compute_time=0.0)
    started = time.perf_counter()
    records = list(simulation)
    if device == "cuda":
        torch.cuda.synchronize()
    last = records[-1]
    whole = 8 * (M - 1) / M * engine.workers.num_parameters * row["iterations"] / 1e6
    return {
        "loss": last.test_loss if last.test_loss is not None else float("nan"),
        "train_loss": last.train_loss,
        "worker_loss": last.worker_loss,
        "consensus_distance": last.consensus_distance,
        "share": (last.megabytes_sent or 0.0) / whole,
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


if __name__ == "__main__":
    main()
