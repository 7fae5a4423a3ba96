"""A small training problem with a known answer, and the plans to run it under.

Run as a script it is one worker: every case over the transport named on the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from matcha import Plan, Topology, families, plan
from matcha.distributed import Gossip, MpiTransport, TorchTransport, Transport
from matcha.rounds import PushSum, Relay, RoundProcess
from matcha.schedules import Bernoulli, Choice, Cycle, EvenlySpaced
from matcha.strategies import strategy_with
from matcha.timing import Units

NUM_WORKERS = 8
ITERATIONS = 50
PROCESS_ITERATIONS = 20  # what mixing does is seen in memory; here it is the wires
RATE = 0.05
SHAPES = ((7, 3), (13,), (1,), (5, 2, 2))
STRATEGIES = (
    ("matcha", "laplacian"),
    ("matcha", "pairwise"),
    ("vanilla", "laplacian"),
    ("periodic", "laplacian"),
    ("single", "laplacian"),
    ("single", "pairwise"),
    ("greedy", "pairwise"),
    ("greedy", "push"),
    ("rounds", "push"),
    ("ceca", "windows"),
    ("relaysum", "relay"),
)
MIXINGS = ("laplacian", "pairwise")
RULES = ("eq2", "footnote")
DTYPES = ("float64", "float32")


@cache
def real_plan(strategy: str, mixing: str, num_workers: int = NUM_WORKERS) -> Plan:
    """A plan at budget 0.5 on er8, or a path of another number of workers; hops need more links."""
    topology = families.paper("er8") if num_workers == 8 else families.path(num_workers)
    if strategy == "ceca":  # hops need their links
        topology = families.complete(num_workers)
    budget = 1.0 if strategy in ("vanilla", "rounds") else 0.5
    rounds = one_way_rounds(topology) if strategy == "rounds" else None
    return plan(topology, budget, strategy_with(strategy, mixing=mixing, rounds=rounds), seed=3)


def one_way_rounds(topology: Topology) -> list[list[list[tuple[int, int]]]]:
    """Messages in which not everyone who sends also hears: what push-sum is for."""
    random = np.random.default_rng(1)
    rounds = []
    for k in range(12):
        senders: set[int] = set()
        receivers: set[int] = set()
        messages = []
        for i, j in random.permutation(topology.arrows).tolist():
            if i not in senders and j not in receivers and random.random() < 0.6:
                messages.append((i, j))
                senders.add(i)
                receivers.add(j)
        rounds.append([messages] if k % 3 else [])
    return rounds


def write_plans(folder: Path, num_workers: int = NUM_WORKERS) -> None:
    """All plans as files: planning once is quicker than once per worker."""
    for strategy, mixing, _ in REPRESENTATIVE:
        real_plan(strategy, mixing, num_workers).save(folder / f"{strategy}-{mixing}.json")


def make_plan(strategy: str, mixing: str, seed: int = 3) -> Plan:
    """Quickly made, for tests of other things: any schedule with any mixing on er8."""
    matchings = families.paper_matchings("er8")
    count = len(matchings)
    schedule = {
        "matcha": lambda: Bernoulli(probabilities=(0.5,) * count, seed=seed),
        "vanilla": lambda: EvenlySpaced(frequency=1.0, num_matchings=count, seed=seed),
        "periodic": lambda: EvenlySpaced(frequency=0.3, num_matchings=count, seed=seed),
        "single": lambda: Choice(probabilities=(0.9 / count,) * count, seed=seed),
        "greedy": lambda: Cycle(
            cycle=((0, 2), (), (1,), (3, 0, 1), (4,)), num_matchings=count, seed=seed
        ),
    }[strategy]()
    return Plan(
        process=RoundProcess(
            topology=families.paper("er8"),
            matchings=matchings,
            schedule=schedule,
            mixing=mixing,
            alpha=0.17 if mixing == "laplacian" else 0.5,
        ),
        strategy=strategy,
        budget=0.5,
        timing=Units(),
        num_colors=count,
    )


def targets(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Each worker's optimum and curvature: gradient of worker i is curvature_i (x - optimum_i)."""
    random = np.random.default_rng(5)
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    optimum = random.normal(size=(NUM_WORKERS, size)).astype(dtype)
    curvature = random.uniform(0.5, 2.0, size=(NUM_WORKERS, size)).astype(dtype)
    return optimum, curvature


def expected(plan: Plan, rule: str, dtype: str, iterations: int = ITERATIONS) -> np.ndarray:
    """The same training as a loop over `Round.mix`: the definition."""
    optimum, curvature = (values[: plan.num_workers] for values in targets(dtype))
    x = np.ones_like(optimum)
    rate = np.asarray(RATE, dtype=dtype)
    if plan.needs_push_sum:
        state = PushSum(x.astype(np.float64))
        for k in range(iterations):
            x = state.mix(plan.round(k), x - rate * (curvature * (x - optimum)))
        return x
    relay = Relay()
    for k in range(iterations):
        step = rate * (curvature * (x - optimum))
        if plan.mixing == "relay":
            x = relay.mix(plan.round(k), x - step)
            continue
        x = plan.round(k).mix(x - step) if rule == "eq2" else plan.round(k).mix(x) - step
    return x


class Quadratic(nn.Module):
    """½ Σ curvature (x − optimum)², with x in several parameters, once in each precision."""

    def __init__(self, rank: int, device: str = "cpu") -> None:
        super().__init__()
        self.parts = nn.ParameterList()
        self.goals = []
        for dtype in DTYPES:
            kind = getattr(torch, dtype)
            parts = [torch.ones(shape, dtype=kind, device=device) for shape in SHAPES]
            sizes = [part.numel() for part in parts]
            optimum, curvature = (
                torch.from_numpy(t[rank]).to(device).split(sizes) for t in targets(dtype)
            )
            self.parts.extend(parts)
            self.goals += zip(optimum, curvature, strict=True)

    def forward(self) -> torch.Tensor:
        losses = [
            (curvature * (part.flatten() - optimum) ** 2).sum() / 2
            for part, (optimum, curvature) in zip(self.parts, self.goals, strict=True)
        ]
        return torch.stack([loss.double() for loss in losses]).sum()

    def flat(self) -> dict[str, np.ndarray]:
        parts = [part.detach().flatten() for part in self.parts]
        half = len(SHAPES)
        halves = zip(DTYPES, (parts[:half], parts[half:]), strict=True)
        return {dtype: torch.cat(chosen).cpu().numpy().copy() for dtype, chosen in halves}


def train(
    transport: Transport,
    plan: Plan,
    rule: str,
    device: str = "cpu",
    iterations: int = ITERATIONS,
    **options: Any,
) -> dict[str, np.ndarray]:
    """One worker's part; returns its final parameters in each precision."""
    model = Quadratic(transport.rank, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    # 300 bytes: several buckets of several pieces, so that the pipeline is really used.
    settings = {"bucket_cap_mb": 3e-4, "timeout": 60.0, **options}
    with Gossip(
        model, optimizer, plan, transport=transport, overlap=rule == "footnote", **settings
    ):
        for _ in range(iterations):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    return model.flat()


def check(
    results: Sequence[Mapping[str, np.ndarray]],
    plan: Plan,
    rule: str,
    iterations: int = ITERATIONS,
) -> None:
    """Every worker's result equals the definition's."""
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        found = np.stack([result[dtype] for result in results])
        right = expected(plan, rule, dtype, iterations)
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance)


# Push-sum takes its gradients at z = x/ω, which the footnote's rule does not have in time;
# relayed sums are of what the step made.
CASES = tuple(
    (*which, rule)
    for which, rule in product(STRATEGIES, RULES)
    if which[0] not in ("rounds", "relaysum") or rule == "eq2"
)

# What each transport runs besides; the rest is arithmetic, which is the same above all of them.
REPRESENTATIVE = (
    ("vanilla", "laplacian", "eq2"),
    ("greedy", "pairwise", "footnote"),
    ("rounds", "push", "eq2"),
    ("ceca", "windows", "eq2"),
)


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = "cuda:0" if kind == "gpu" else "cpu"
    if kind == "mpi":
        transport: Transport = MpiTransport()
    else:
        if kind == "nccl":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        torch.distributed.init_process_group("nccl" if kind == "nccl" else "gloo")
        transport = TorchTransport()
    for strategy, mixing, rule in REPRESENTATIVE:
        chosen = Plan.load(Path(folder) / f"{strategy}-{mixing}.json")
        result = train(transport, chosen, rule, device, PROCESS_ITERATIONS)
        name = f"{kind}-{strategy}-{mixing}-{rule}-{transport.rank}.npz"
        np.savez(Path(folder) / name, **result)
    transport.close()
    if kind != "mpi":
        torch.distributed.destroy_process_group()


def check_folder(kind: str, folder: Path, num_workers: int = NUM_WORKERS) -> None:
    """Check what the workers of `main` wrote."""
    for strategy, mixing, rule in REPRESENTATIVE:
        names = [f"{kind}-{strategy}-{mixing}-{rule}-{rank}.npz" for rank in range(num_workers)]
        results = [np.load(folder / name) for name in names]
        check(results, real_plan(strategy, mixing, num_workers), rule, PROCESS_ITERATIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
