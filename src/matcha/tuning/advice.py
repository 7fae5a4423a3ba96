"""Advice before anything was trained: DDP, local SGD or a plan, from speeds and sizes alone.

An iteration that leaves workers apart is worth less than an exact one. How much less depends on the
task, which is not known here, so every row is weighed by what disagreement cost on two reference
tasks, an easy one and a hard one: `COSTS`. What is compared is the geometric mean over both of the
seconds in which a row does what one exact iteration does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from matcha._io.tables import Table
from matcha.errors import InputError
from matcha.plans import Plan
from matcha.strategies import AllReduce, Greedy, Local, with_budget
from matcha.strategies import plan as make_plan
from matcha.sweeps import make_plans
from matcha.topology import Topology
from matcha.topology.families import TopologyLike, as_topology, complete
from matcha.topology.topology import MAX_SECONDS
from matcha.tuning.search import DEFAULT_WIRES, disagreement

BUDGETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
COSTS = {
    "alike": {"plain": (0.00141, 0.05888), "momentum": (0.00589, 0.11749)},
    "different": {"plain": (0.22387, 0.16596), "momentum": (0.53703, 0.21878)},
}
"""The share of more iterations per unit of disagreement on two tasks each, as `benchmarks/advise.py
--fit` finds it: by whether workers' data are alike, and whether the optimizer has momentum."""
_WORTH_CHANGING = 0.95
"""A plan that saves less than this over DDP is not worth leaving it."""
_AS_QUICK = 1.02
"""What communicates less is preferred to what is quicker by less: encoding is not in the model."""
_BACKWARD = 2 / 3
"""The part of computing beside which DDP averages gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedPoint:
    """One way to train, and what an iteration of it takes and is worth."""

    name: str
    strategy: str
    budget: float
    wire: str
    iteration_seconds: float
    comm_seconds: float
    """Communication per iteration."""
    megabytes: float | None
    """What a worker sends per iteration, in the mean; None where the model's size is not known."""
    disagreement: float
    """The consensus error: mean squared distance to the average under unit gradient noise."""
    iterations: tuple[float, float]
    """Predicted iterations on the two reference tasks, as multiples of exact averaging's."""
    plan: Plan = field(repr=False, compare=False)

    @property
    def seconds(self) -> float:
        """Predicted seconds in which it does what one exact iteration does."""
        return self.iteration_seconds * math.sqrt(math.prod(self.iterations))


@dataclass(frozen=True, kw_only=True)
class Advice:
    """DDP, local SGD and three plans side by side, and what to use."""

    topology: Topology
    compute_time: float
    alike: bool
    """Whether workers draw from the same data."""
    momentum: bool
    """Whether the optimizer has momentum."""
    choices: tuple[AdvisedPoint, ...]
    best: AdvisedPoint

    @property
    def sentence(self) -> str:
        """What to use, and why."""
        best, ddp = self.best, self.choices[0]
        if best is ddp:
            other = min(self.choices[1:], key=lambda c: c.seconds)
            return (
                f"Use DDP: an iteration takes {ddp.iteration_seconds:.3g} s, and nothing here "
                f"saves a twentieth ({other.name}: {other.seconds:.3g} s for as much)."
            )
        least, most = (100 * (n - 1) for n in best.iterations)
        return (
            f"Use {best.name}: {best.iteration_seconds:.3g} s per iteration instead of DDP's "
            f"{ddp.iteration_seconds:.3g}, and {least:.0f} to {most:.0f} % more iterations; "
            f"predicted {ddp.seconds / best.seconds:.2g} times as fast."
        )

    def table(self) -> str:
        """The choices as text, and the sentence."""
        columns = {
            "": [c.name for c in self.choices],
            "s/iter": [f"{c.iteration_seconds:.3g}" for c in self.choices],
            "MB/iter": ["–" if c.megabytes is None else f"{c.megabytes:.3g}" for c in self.choices],
            "disagreement": [f"{c.disagreement:.3g}" for c in self.choices],
            "iterations": [
                "–".join(dict.fromkeys(f"{n:.2f}" for n in c.iterations)) + "×"
                for c in self.choices
            ],
            "s for as much": [f"{c.seconds:.3g}" for c in self.choices],
        }
        table = Table(list(columns), list(zip(*columns.values(), strict=True)))
        return f"{table}\n\n{self.sentence}"

    def __repr__(self) -> str:
        return f"{self.topology}\n{self.table()}"

    def to_json(self) -> dict[str, Any]:
        """The advice as plain JSON values."""
        shown = [each.name for each in fields(AdvisedPoint) if each.repr]
        return {
            "topology": self.topology.name,
            "num_workers": self.topology.num_workers,
            "compute_time": self.compute_time,
            "alike": self.alike,
            "momentum": self.momentum,
            "recommendation": self.best.name,
            "sentence": self.sentence,
            "rows": [
                {name: getattr(c, name) for name in [*shown, "seconds"]} for c in self.choices
            ],
        }


def advise(
    topology: TopologyLike | int,
    *,
    compute_time: float,
    model_mb: float | None = None,
    link_mbps: float | None = None,
    latency: float = 0.0,
    alike: bool = False,
    momentum: bool = True,
    overlap: bool = False,
    seed: int = 0,
) -> Advice:
    """Say what to train with: DDP, local SGD, or a plan.

    Args:
        topology: Who can reach whom, with link times where they were measured; a number of workers
            stands for a switch behind which all reach all.
        compute_time: Seconds that a worker computes per step.
        model_mb: Megabytes of the parameters as float32.
        link_mbps: Megabits per second of a worker's link, each way.
        latency: Seconds that a message of any size takes.
        alike: Whether all workers draw from the same data; else each has its own.
        momentum: Whether the optimizer has momentum, as Adam does too.
        overlap: Whether plans exchange beside the gradient. DDP averages beside its backward pass
            here, two thirds of computing, in any case.
        seed: Of the plans.

    Raises:
        InputError: A time or size is missing or not positive.

    >>> advise(4, compute_time=0.1, model_mb=100, link_mbps=100_000).best.name
    'DDP'
    """
    if isinstance(topology, int) and topology < 2:
        raise InputError(f"advice is for 2 workers or more, not {topology}.")
    graph = complete(topology) if isinstance(topology, int) else as_topology(topology)
    if not 0 < compute_time <= MAX_SECONDS:
        raise InputError(f"the compute time is {compute_time!r}, but it is positive seconds.")
    network = _with_times(graph, model_mb, link_mbps, latency)
    easy, hard = sorted(
        COSTS["alike" if alike else "different"]["momentum" if momentum else "plain"]
    )

    def choice(name: str, plan: Plan) -> AdvisedPoint:
        comm, left = plan.expected_comm_time, disagreement(plan)
        together = compute_time if overlap else 0.0
        if name == "DDP":
            together = _BACKWARD * compute_time
        return AdvisedPoint(
            name=name,
            strategy=plan.strategy,
            budget=plan.budget,
            wire=plan.wire.name,
            iteration_seconds=compute_time - together + max(together, comm),
            comm_seconds=comm,
            megabytes=None if model_mb is None else model_mb * _models_sent(plan),
            disagreement=left,
            iterations=(1 + easy * left, 1 + hard * left),
            plan=plan,
        )

    averages = [
        choice(f"local SGD, every {round(1 / max(plan.probabilities))}", plan)
        for plan in (make_plan(network, budget, Local()) for budget in BUDGETS)
    ]
    plans = [
        choice(_name(plan), plan)
        for plan in make_plans(network, Greedy(effort="none"), BUDGETS, DEFAULT_WIRES, seed=seed)
    ]
    ddp = choice("DDP", make_plan(network, 1.0, AllReduce()))
    choices = (ddp, _least(averages), *_three(plans))
    best = _least(choices)
    return Advice(
        topology=graph,
        compute_time=compute_time,
        alike=alike,
        momentum=momentum,
        choices=choices,
        best=ddp if best.seconds > _WORTH_CHANGING * ddp.seconds else best,
    )


def _least(choices: Sequence[AdvisedPoint]) -> AdvisedPoint:
    """The quickest, or of those that are as quick the one that communicates least."""
    quickest = min(choice.seconds for choice in choices)
    as_quick = [choice for choice in choices if choice.seconds <= _AS_QUICK * quickest]
    return min(as_quick, key=lambda choice: choice.comm_seconds)


def _name(plan: Plan) -> str:
    name = with_budget("greedy", plan.budget)
    return name if plan.wire.name == "float32" else f"{name}, {plan.wire.name}"


def _three(plans: Sequence[AdvisedPoint]) -> list[AdvisedPoint]:
    """The quickest plan, and the quickest with far less disagreement, or communication."""
    best = _least(plans)
    closer = [p for p in plans if p.disagreement <= best.disagreement / 4]
    lighter = [p for p in plans if p.comm_seconds <= best.comm_seconds / 2]
    return [best, *(_least(some) for some in (closer, lighter) if some and best not in some)]


def _models_sent(plan: Plan) -> float:
    """What a worker sends per iteration, in the mean over workers and in whole models."""
    m = plan.num_workers
    if plan.process.is_all_reduce:
        return 2 * (m - 1) / m * max(plan.probabilities)
    links = sum(p * len(ms) for p, ms in zip(plan.probabilities, plan.matchings, strict=True))
    return 2 * links / m * plan.wire.size_ratio()


def _with_times(
    topology: Topology, model_mb: float | None, link_mbps: float | None, latency: float
) -> Topology:
    """The topology with the seconds of a whole model over each link."""
    if topology.link_times is not None:
        if link_mbps is not None or latency:
            raise InputError(
                "the topology has its own link times: leave link_mbps and latency out."
            )
        return topology
    for name, value in (("model_mb", model_mb), ("link_mbps", link_mbps)):
        if value is None:
            raise InputError(f"the topology has no link times: give {name}.")
        if not 0 < value < math.inf:
            raise InputError(f"{name} is {value!r}, but it must be positive.")
    assert model_mb is not None
    assert link_mbps is not None
    if not 0 <= latency < math.inf:
        raise InputError(f"the latency is {latency!r}, but it is 0 or more seconds.")
    number, seconds = len(topology.links), latency + 8 * model_mb / link_mbps
    return topology.with_link_times([seconds] * number, latencies=[latency] * number)
