"""A small training under any combination of what a Gossip offers, checked against what must hold.

Run as a script it is the groups of processes: every combination with `mesh`, in real processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

import matcha
from matcha import Plan, families
from matcha.distributed import Gossip
from matcha.distributed.options import EXCLUSIONS
from matcha.errors import InputError
from matcha.plans import OuterStep
from matcha.strategies import Matcha, SparseLoCo
from matcha.wires import parse_wire

NUM_WORKERS = 3
TIMEOUT = 100.0
STEPS, SAVED_AT = 6, 3
LONGER = (0, 2, 1)  # steps that a worker takes more than another, inside join()
MESSAGES = {exclusion.message for exclusion in EXCLUSIONS}

Combination = tuple[str, ...]
"""Names of `CHOICES`."""

CHOICES: dict[str, dict[str, Any]] = {
    "bfloat16": {"wire": "bfloat16"},
    "modulo": {"wire": "modulo:3"},
    "lowrank": {"wire": "lowrank:1"},
    "topk": {"wire": "topk:8", "relay": False},  # both are plans of their own
    "gasloc": {"outer": OuterStep(rate_first=True)},
    "relaysum": {"relay": True},
    "weights": {"weights": (2.0, 0.5, 0.5)},
    "quasi-global": {"momentum": "quasi-global"},
    "outer": {"momentum": "outer"},
    "tracking": {"momentum": "tracking"},
    "momentum-tracking": {"momentum": "momentum-tracking"},
    "exact-diffusion": {"momentum": "exact-diffusion"},
    "shared": {"momentum": "shared"},
    "auto": {"momentum": "auto"},
    "overlap": {"overlap": True},
    "asynchronous": {"asynchronous": True},
    "clip": {"clip": 1.0},
    "replan": {"replan": 2},
    "continue": {"on_loss": "continue"},
    "several": {"several": True},
    "accumulation": {"accumulation": True},
    "scaler": {"scaler": True},
    "join": {"join": True},
    "mesh": {"mesh": True},
}
"""What is combined. Saving and resuming is part of every training."""
TRIPLES: tuple[Combination, ...] = (
    ("modulo", "quasi-global", "overlap"),
    ("modulo", "quasi-global", "clip"),
    ("modulo", "overlap", "clip"),
    ("modulo", "overlap", "accumulation"),
    ("modulo", "overlap", "join"),
    ("modulo", "outer", "overlap"),
    ("modulo", "gasloc", "scaler"),
    ("topk", "several", "scaler"),
    ("modulo", "outer", "accumulation"),
    ("modulo", "weights", "scaler"),
    ("weights", "quasi-global", "overlap"),
    ("weights", "several", "scaler"),
    ("relaysum", "several", "scaler"),
    ("relaysum", "weights", "accumulation"),
    ("modulo", "tracking", "scaler"),
    ("modulo", "momentum-tracking", "scaler"),
    ("modulo", "exact-diffusion", "scaler"),
    ("modulo", "shared", "scaler"),
    ("modulo", "auto", "continue"),
    ("modulo", "clip", "continue"),
    ("modulo", "replan", "overlap"),
    ("lowrank", "quasi-global", "join"),
    ("bfloat16", "overlap", "scaler"),
    ("bfloat16", "asynchronous", "accumulation"),
    ("quasi-global", "scaler", "accumulation"),
    ("quasi-global", "several", "join"),
    ("overlap", "scaler", "accumulation"),
    ("overlap", "replan", "continue"),
    ("overlap", "several", "scaler"),
    ("clip", "replan", "continue"),
    ("scaler", "join", "several"),
)
"""What users would combine."""


def kinds(name: str) -> set[str]:
    return set(CHOICES[name])


def all_combinations(*, mesh: bool) -> list[Combination]:
    """Nothing, each choice alone, every pair of different kinds, and the triples."""
    names = list(CHOICES)
    pairs = [pair for pair in combinations(names, 2) if not kinds(pair[0]) & kinds(pair[1])]
    found = [(), *((name,) for name in names), *pairs, *TRIPLES]
    return [combination for combination in found if ("mesh" in combination) is mesh]


def chosen(combination: Combination) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in combination:
        options |= CHOICES[name]
    return options


@cache
def make_plan(
    wire: str = "float32",
    outer: OuterStep | None = None,
    relay: bool = False,
    weights: tuple[float, ...] | None = None,
) -> Plan:
    ring = families.ring(NUM_WORKERS)
    if relay:
        made = matcha.plan(ring, 0.6, "relaysum")
    elif wire.startswith("topk"):
        made = matcha.plan(ring, 0.6, SparseLoCo(period=2, wire=wire))
    else:
        made = matcha.plan(ring, 0.6, Matcha(mixing="pairwise"), seed=2, wire=wire)
    return replace(made, outer=outer, wire=parse_wire(wire), worker_weights=weights)


# -- one worker ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters for two optimizers, of one and two dimensions; the same on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 1)
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                p.copy_(torch.linspace(-1, 1 + number, p.numel()).view(p.shape) / 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


@dataclass(frozen=True)
class Result:
    """One worker's training: where it began and ended, and what its own steps added up to."""

    begin: torch.Tensor
    moved: torch.Tensor
    end: torch.Tensor
    average: torch.Tensor
    iteration: int


class Worker:
    """One worker of a combination.

    Its own steps are measured between Gossip's hooks: after what Gossip does before a step, and
    before the round that follows it.
    """

    def __init__(self, rank: int, combination: Combination, **how: Any) -> None:
        options = chosen(combination)
        named = {"wire": "float32", "outer": None, "relay": False, "weights": None}
        plan = make_plan(*(options.pop(name, usual) for name, usual in named.items()))
        self.rank = rank
        self.accumulates = options.pop("accumulation", False)
        self.joins = options.pop("join", False)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=256.0) if options.pop("scaler", False) else None
        )
        self.model = Net()
        parts: Iterable[nn.Module] = [self.model]
        if options.pop("several", False):
            parts = [self.model.first, self.model.second]
        options.pop("mesh", None)
        self.optimizers = [
            torch.optim.SGD(part.parameters(), lr=0.05 / k, momentum=0.9)
            for k, part in enumerate(parts, start=1)
        ]
        self.moved = torch.zeros_like(flat(self.model))
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._after)
        how |= {"timeout": TIMEOUT, "scaler": self.scaler}
        self.gossip = Gossip(self.model, self.optimizers, plan, **how, **options)
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._before)
        self.begin = flat(self.model)

    def _before(self, *_: object) -> None:
        self._x = flat(self.model)

    def _after(self, *_: object) -> None:
        self.moved += flat(self.model) - self._x

    def step(self, k: int) -> None:
        """One step; a worker's gradient overflows once where a scaler is used."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for part in range(2 if self.accumulates else 1):
            seed = 1000 * self.rank + 10 * k + part
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            loss = (self.model(x)[:, 0] - x.sum(1) - self.rank).square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return
        if k == SAVED_AT + 1 - self.rank % 2:
            for p in self.model.parameters():
                assert p.grad is not None
                p.grad.fill_(torch.inf)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def stretch(self, first: int, last: int) -> None:
        """The steps from one to another; inside join() some workers take more of them."""
        if not self.joins:
            for k in range(first, last):
                self.step(k)
            return
        with self.gossip.join():
            for k in range(first, last + LONGER[self.rank]):
                self.step(k)

    def train(self, folder: Path | None) -> Result:
        """All steps, saving in the middle where there is a folder."""
        self.stretch(0, SAVED_AT)
        if folder is not None:
            extra = {} if self.scaler is None else self.scaler.state_dict()
            self.gossip.save(folder, extra=extra)
        self.stretch(SAVED_AT, STEPS)
        return self.result()

    def resume(self, folder: Path) -> Result:
        """The steps after the middle, from what was saved there."""
        extra = self.gossip.load(folder)
        if self.scaler is not None:
            self.scaler.load_state_dict(extra)
        self.begin = flat(self.model)
        self.stretch(SAVED_AT, STEPS)
        return self.result()

    def result(self) -> Result:
        self.gossip.state.settle()
        end = flat(self.model)
        with self.gossip.averaged() as model:
            average = flat(model)
        iteration = self.gossip.iteration
        self.gossip.detach()
        return Result(self.begin, self.moved, end, average, iteration)


def run_worker(
    rank: int, combination: Combination, folder: Path, way: Mapping[str, Any]
) -> list[Result] | str:
    """One worker: a training with a checkpoint in the middle, and the same resumed from there.

    Returns:
        The sentence, where the combination is refused.
    """
    try:
        whole = Worker(rank, combination, **way).train(folder)
        resumed = Worker(rank, combination, **way).resume(folder)
    except InputError as error:
        return str(error)
    return [whole, resumed]


# -- what must hold --------------------------------------------------------------------------------


def check(combination: Combination, found: list[list[Result] | str]) -> bool:
    """Whether it trained, rightly; or all workers refused it with a sentence of the table."""
    refusals = [one for one in found if isinstance(one, str)]
    if refusals:
        assert len(refusals) == len(found), refusals
        assert len(set(refusals)) == 1, refusals
        assert refusals[0] in MESSAGES, refusals[0]
        return False
    results = [one for one in found if not isinstance(one, str)]
    wholes, resumed = ([one[k] for one in results] for k in (0, 1))
    for part in (wholes, resumed):
        check_average(combination, part)
    if "asynchronous" not in combination:  # whose meetings depend on who is there
        for one, other in results:
            assert torch.equal(one.end, other.end), f"{combination}: resumed to other bits"
    return True


def check_average(combination: Combination, results: list[Result]) -> None:
    def mean(name: str) -> torch.Tensor:
        return torch.stack([getattr(result, name) for result in results]).mean(0)

    assert len({result.iteration for result in results}) == 1, combination
    centre = mean("end")
    for result in results:
        torch.testing.assert_close(result.average, centre, rtol=0, atol=1e-6)
    assert torch.isfinite(centre).all()
    assert all(result.moved.norm() > 1e-3 for result in results)
    alone = [result.begin + result.moved for result in results]
    spread = [distance([result.end for result in results]), distance(alone)]
    if "asynchronous" not in combination:  # three steps may pass without a meeting
        assert spread[0] < spread[1], f"{combination}: the workers did not come nearer"
    # Their steps at a meeting move the average themselves; top-k leaves a part of the steps out,
    # and relayed sums are of earlier models.
    if not {"outer", "gasloc", "topk", "relaysum"} & set(combination):
        expected = mean("begin") + mean("moved")
        torch.testing.assert_close(centre, expected, rtol=0, atol=1e-6)


def distance(rows: list[torch.Tensor]) -> float:
    stacked = torch.stack(rows)
    return float((stacked - stacked.mean(0)).square().sum())


# -- groups of processes ---------------------------------------------------------------------------

GROUP = 2  # processes per worker


def work(rank: int, folder: Path) -> None:
    """One process of six: each worker is two, with the same data."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_WORKERS * GROUP)
    mesh = init_device_mesh("cpu", (NUM_WORKERS, GROUP), mesh_dim_names=("worker", "process"))
    worker = mesh["worker"].get_local_rank()
    way = {"mesh": mesh["worker"]}
    found = {
        combination: run_worker(worker, combination, folder / "+".join(combination), way)
        for combination in all_combinations(mesh=True)
    }
    plain = {c: one if isinstance(one, str) else list(map(vars, one)) for c, one in found.items()}
    torch.save(plain, folder / f"{rank}.pt")  # this file's classes are `__main__`'s here
    dist.barrier()
    dist.destroy_process_group()


def load(folder: Path) -> list[dict[Combination, list[Result] | str]]:
    """What each process found."""
    loaded = [torch.load(folder / f"{k}.pt") for k in range(NUM_WORKERS * GROUP)]
    return [
        {c: v if isinstance(v, str) else [Result(**r) for r in v] for c, v in found.items()}
        for found in loaded
    ]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    processes = NUM_WORKERS * GROUP
    start_processes(work, (Path(folder),), nprocs=processes, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
