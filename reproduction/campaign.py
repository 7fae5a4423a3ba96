"""A campaign: trains the trials of the paper's figures, or finds them among earlier results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from matcha.plans import Plan
from matcha.records import Run, RunHeader
from matcha.simulation import Engine, Execution, Settings
from matcha.strategies import plan
from matcha.topology import families
from matcha.zoo.recipes import Choices, recipe
from reproduction.learning_rates import best_rate, tuning_loss
from reproduction.paper import GROUPS, Group
from reproduction.trials import Result, Trial, read_results, run_trial

QUICK_EPOCHS = 12


class Campaign:
    """Answers a figure's request for results.

    Args:
        earlier: files of results; where given, nothing is trained, and missing trials stay missing.
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
        self._made: tuple[str, int, Engine] | None = None
        self._execution = Execution(
            device=device,
            precision=precision,  # type: ignore[arg-type]
            compile=compile,
        )

    def run(self, trials: Sequence[Trial]) -> Iterator[Result]:
        """One result a trial, in order; the learning rate is tuned on vanilla first."""
        if not trials:
            return
        if self._earlier is not None:
            wanted = {_identity(trial) for trial in trials}
            yield from (r for r in self._earlier if _identity(r.trial) in wanted)
            return
        yield from self._train(trials)

    def _train(self, trials: Sequence[Trial]) -> Iterator[Result]:
        chosen = _group(trials[0])
        tried: dict[float, Result] = {}

        def loss_at(rate: float) -> float:
            tried[rate] = self._one(trials[0], chosen, rate)
            return tuning_loss(tried[rate])

        rate = best_rate(chosen.rates, loss_at)
        yield tried[rate]
        for trial in trials[1:]:
            yield self._one(trial, chosen, rate)

    def _one(self, trial: Trial, chosen: Group, rate: float) -> Result:
        how, engine = recipe(chosen.task), self._engine(chosen, trial.seed)
        usual = QUICK_EPOCHS if self._quick else how.epochs
        epochs = usual if self._epochs is None else self._epochs
        epochs = round(epochs * trial.stretch)
        settings = Settings(
            epochs=epochs,
            schedule=how.schedule(epochs, rate),
            optimizer=how.optimizer,
            evaluate_every=max(1, epochs // 6),
            delays=chosen.delays,
            execution=self._execution,
        )
        named = replace(trial, learning_rate=rate)
        return run_trial(named, engine.task, plan_of(trial), settings, engine=engine)

    def _engine(self, chosen: Group, seed: int) -> Engine:
        """An engine for a group's task under a seed: of weights, order and partition alike."""
        if self._made is None or self._made[:2] != (chosen.name, seed):
            how = recipe(chosen.task)
            choices = Choices(
                num_workers=chosen.num_workers,
                data=self._data,
                batch_size=8 if self._quick and chosen.num_workers > 8 else None,
                seed=seed,
            )
            engine = Engine(how.task(choices), how.optimizer, execution=self._execution)
            self._made = (chosen.name, seed, engine)
        return self._made[2]


def plan_of(trial: Trial) -> Plan:
    """An trial's plan; on the paper's graphs with the authors' decomposition, as the paper did."""
    topology = families.parse(trial.topology)
    theirs = None
    if trial.strategy != "greedy" and trial.topology.startswith("paper:"):
        theirs = families.paper_matchings(trial.topology.removeprefix("paper:"))
    return plan(topology, trial.budget, trial.strategy, seed=trial.seed, matchings=theirs)


def _identity(trial: Trial) -> Trial:
    return replace(trial, learning_rate=None, epochs=None)


def _group(trial: Trial) -> Group:
    return next(g for g in GROUPS.values() if _identity(trial) in map(_identity, g.trials))


def run_of(result: Result) -> Run:
    """A result as the run that a report reads; nothing of it is on disk.

    The plan is made again, and left out where it is no longer the one that was run.
    """
    trial, plan = result.trial, plan_of(result.trial)
    return Run(
        header=RunHeader(
            name=trial.label,
            kind="reproduction",
            task=trial.task,
            strategy=trial.strategy,
            budget=trial.budget,
            seed=trial.seed,
            num_workers=plan.num_workers,
            clock="simulated",
            config=result.config | {"topology": trial.topology, "device": result.device},
        ),
        plan=plan if plan.digest == result.plan["digest"] else None,
        records=result.records,
        worker_records={},
        spans=(),
        path=Path(),
    )
