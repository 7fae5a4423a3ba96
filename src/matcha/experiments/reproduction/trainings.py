"""Trains the items of the paper's figures, or finds them among earlier results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from matcha.experiments.reproduction.items import Item, Result, read_results, run_item
from matcha.experiments.reproduction.ladders import lowest_rung, tuning_loss
from matcha.experiments.reproduction.paper import GROUPS, Group
from matcha.plans import Plan
from matcha.records import Run, RunHeader
from matcha.simulation import Engine, Execution, Settings
from matcha.strategies import plan
from matcha.tasks.recipes import Choices, Recipe, recipe
from matcha.topology import families

QUICK_EPOCHS = 12


class Trainings:
    """Answers a figure's request for results.

    Args:
        earlier: files of results; where given, nothing is trained, and missing items stay missing.
        data: folder of the data sets.
        device: ``auto``, ``cpu`` or ``cuda``.
        compile: compile the models' blocks.
        epochs: of every training; None takes the task's own, or a dozen where ``quick``.
        quick: small data on a CPU.
    """

    def __init__(
        self,
        *,
        earlier: Sequence[Path] = (),
        data: Path | None = None,
        device: str = "auto",
        compile: bool = False,
        epochs: int | None = None,
        quick: bool = False,
    ) -> None:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        precision = "bfloat16" if device.startswith("cuda") else "float32"
        self._earlier = list(read_results(earlier)) if earlier else None
        self._data, self._epochs, self._quick = data, epochs, quick
        self._execution = Execution(
            device=device,
            precision=precision,  # type: ignore[arg-type]
            compile=compile,
        )

    def run(self, items: Sequence[Item]) -> Iterator[Result]:
        """One result an item, in order; the learning rate is tuned on vanilla first."""
        if not items:
            return
        if self._earlier is not None:
            wanted = {_identity(item) for item in items}
            yield from (r for r in self._earlier if _identity(r.item) in wanted)
            return
        yield from self._train(items)

    def _train(self, items: Sequence[Item]) -> Iterator[Result]:
        chosen = _group(items[0])
        how = recipe(chosen.task)
        batch_size = 8 if self._quick and chosen.num_workers > 8 else None
        task = how.task(
            Choices(num_workers=chosen.num_workers, data=self._data, batch_size=batch_size)
        )
        engine = Engine(task, how.optimizer, execution=self._execution)
        tried: dict[float, Result] = {}

        def loss_at(rate: float) -> float:
            tried[rate] = self._one(items[0], how, chosen, engine, rate)
            return tuning_loss(tried[rate])

        rate = lowest_rung(chosen.rates, loss_at)
        yield tried[rate]
        for item in items[1:]:
            yield self._one(item, how, chosen, engine, rate)

    def _one(self, item: Item, how: Recipe, chosen: Group, engine: Engine, rate: float) -> Result:
        engine.task.seed = item.seed
        usual = QUICK_EPOCHS if self._quick else how.epochs
        epochs = usual if self._epochs is None else self._epochs
        epochs = round(epochs * item.stretch)
        settings = Settings(
            epochs=epochs,
            schedule=how.schedule(epochs, rate),
            optimizer=how.optimizer,
            evaluate_every=max(1, epochs // 6),
            delays=chosen.delays,
            execution=self._execution,
        )
        named = replace(item, learning_rate=rate)
        return run_item(named, engine.task, plan_of(item), settings, engine=engine)


def plan_of(item: Item) -> Plan:
    """An item's plan; on the paper's graphs with the authors' decomposition, as the paper did."""
    topology = families.parse(item.topology)
    theirs = None
    if item.strategy != "greedy" and item.topology.startswith("paper:"):
        theirs = families.paper_matchings(item.topology.removeprefix("paper:"))
    return plan(topology, item.budget, item.strategy, seed=item.seed, matchings=theirs)


def _identity(item: Item) -> Item:
    return replace(item, learning_rate=None, epochs=None)


def _group(item: Item) -> Group:
    return next(g for g in GROUPS.values() if _identity(item) in map(_identity, g.items))


def run_of(result: Result) -> Run:
    """A result as the run that a report reads; nothing of it is on disk.

    The plan is made again, and left out where it is no longer the one that was run.
    """
    item, plan = result.item, plan_of(result.item)
    return Run(
        header=RunHeader(
            name=item.label,
            kind="reproduction",
            task=item.task,
            strategy=item.strategy,
            budget=item.budget,
            seed=item.seed,
            num_workers=plan.num_workers,
            clock="simulated",
            config=result.config | {"topology": item.topology, "device": result.device},
        ),
        plan=plan if plan.digest == result.plan["digest"] else None,
        records=result.records,
        worker_records={},
        spans=(),
        path=Path(),
    )
