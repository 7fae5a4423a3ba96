"""A small problem in several parameters over coded wires; as a script, one worker of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from matcha import Plan, families, plan
from matcha.distributed import Gossip, MpiTransport, TorchTransport, Transport
from matcha.strategies import strategy_with
from matcha.wires import parse_wire

PROCESSES = 4
ITERATIONS = 8
RATE = 0.05
SHAPES = ((24, 20), (300,), (1,), (16, 4, 3, 3))
WIRES = ("bfloat16", "modulo:8", "modulo:4", "modulo:3", "modulo:2", "lowrank:2")
STRATEGIES = (
    ("matcha", "laplacian"),
    ("matcha", "pairwise"),
    ("vanilla", "laplacian"),
    ("greedy", "pairwise"),
    ("periodic", "laplacian"),
    ("single", "laplacian"),
    ("single", "pairwise"),
)


@cache
def base(strategy: str, mixing: str, num_workers: int = 8) -> Plan:
    topology = families.paper("er8") if num_workers == 8 else families.ring(num_workers)
    return plan(
        topology,
        1.0 if strategy == "vanilla" else 0.5,
        strategy_with(strategy, mixing=mixing),
        seed=3,
    )


def wired(strategy: str, mixing: str, wire: str, num_workers: int = 8) -> Plan:
    return replace(base(strategy, mixing, num_workers), wire=parse_wire(wire))


def goal(rank: int) -> np.ndarray:
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    return np.random.default_rng(rank).normal(size=size)


class Model(nn.Module):
    """½‖x − goal‖², x in several parameters."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        sizes = [int(np.prod(shape)) for shape in SHAPES]
        start = torch.from_numpy(goal(99)).split(sizes)  # values on no edge between two levels
        self.parts = nn.ParameterList(v.view(s) for v, s in zip(start, SHAPES, strict=True))
        self.goals = torch.from_numpy(goal(rank)).split(sizes)

    def forward(self) -> torch.Tensor:
        pairs = zip(self.parts, self.goals, strict=True)
        return torch.stack([((p.flatten() - g) ** 2).sum() / 2 for p, g in pairs]).sum()

    def flat(self) -> np.ndarray:
        return torch.cat([part.detach().flatten() for part in self.parts]).numpy().copy()


def worker(rank: int) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(rank)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def train(transport: Transport, plan: Plan, rule: str) -> np.ndarray:
    """One worker's part; buckets of 3 kB, so that there are several and in pieces."""
    model, optimizer = worker(transport.rank)
    options = {"bucket_cap_mb": 0.003, "timeout": 60.0, "overlap": rule == "footnote"}
    with Gossip(model, optimizer, plan, transport=transport, **options) as gossip:
        for _ in range(ITERATIONS):
            step(model, optimizer)
        assert gossip.state.exchange.bytes_sent > 0
    return model.flat()


def expected(plan: Plan, rule: str) -> np.ndarray:
    """The same training with the definition's rounds."""
    goals = np.stack([goal(rank) for rank in range(plan.num_workers)])
    x, memory = np.tile(goal(99), (plan.num_workers, 1)), np.zeros_like(goals)
    from tests.wires.definition import Definition  # not where this file is a script

    definition = Definition(plan.wire, SHAPES, x)
    for k in range(ITERATIONS):
        memory = 0.9 * memory + (x - goals)
        round = plan.round(k)
        if rule == "eq2":
            x = definition.mix(round, x - RATE * memory)
        else:
            x = definition.mix(round, x) - RATE * memory
    return x


def check(found: np.ndarray, plan: Plan, rule: str) -> None:
    np.testing.assert_allclose(found, expected(plan, rule), rtol=0, atol=1e-10)


CASES = (
    ("matcha", "laplacian", "modulo:3"),
    ("matcha", "laplacian", "lowrank:2"),
    ("greedy", "pairwise", "bfloat16"),
    ("greedy", "pairwise", "modulo:4"),
)
"""What each real transport carries out; all others in memory alone."""


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    if kind == "mpi":
        transport: Transport = MpiTransport()
    else:
        torch.distributed.init_process_group("gloo")
        transport = TorchTransport()
    for strategy, mixing, wire in CASES:
        plan = wired(strategy, mixing, wire, PROCESSES)
        values = train(transport, plan, "eq2")
        np.save(Path(folder) / f"{strategy}-{mixing}-{wire}-{transport.rank}.npy", values)
    transport.close()
    if kind != "mpi":
        torch.distributed.destroy_process_group()


def check_folder(folder: Path) -> None:
    for strategy, mixing, wire in CASES:
        names = [f"{strategy}-{mixing}-{wire}-{rank}.npy" for rank in range(PROCESSES)]
        found = np.stack([np.load(folder / name) for name in names])
        check(found, wired(strategy, mixing, wire, PROCESSES), "eq2")


def run_mpi(folder: Path) -> None:
    """All cases under mpirun."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    command = [mpirun, "-n", str(PROCESSES), sys.executable, __file__, "mpi", str(folder)]
    subprocess.run(command, check=True, timeout=200, capture_output=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
