"""Trials of a task: how many iterations a plan takes to a target, for `matcha.tune`."""

from __future__ import annotations

import math
from dataclasses import replace

from matcha.errors import InputError
from matcha.plans import PlanLike
from matcha.records import has_diverged
from matcha.simulation.run import Simulation
from matcha.strategies import plan as make_plan
from matcha.topology import Topology
from matcha.training.settings import Delays, Settings
from matcha.training.targets import arrival, lowest_held
from matcha.training.task import Task


class TaskTrials:
    """Trains a task by plan after plan, until the average model holds a target.

    Args:
        task: data, model and loss.
        topology: whose workers train.
        settings: how; `epochs` is how long exact averaging trains to find the target.
        target: the average model's training loss; None takes what exact averaging holds after two
            thirds of its epochs.

    Raises:
        InputError: Exact averaging does not hold the target within its epochs.
    """

    def __init__(
        self, task: Task, topology: Topology, settings: Settings, *, target: float | None = None
    ) -> None:
        if target is not None and not target > 0:
            raise InputError(f"the target loss is {target}, but it is above 0.")
        if target is None and settings.epochs < 2:
            raise InputError(
                "a target is what exact averaging holds in two epochs: train for more, or give it."
            )
        self.task = task
        # Nobody reads the clock: a trial counts iterations.
        clock = Delays(compute_seconds=0.0)
        self.settings = replace(settings, delays=clock, evaluate_every=1, target_loss=None)
        exact = Simulation(task, make_plan(topology, strategy="allreduce"), self.settings)
        self._engine = exact.engine
        losses = [loss for r in exact if (loss := r.train_loss) is not None]
        held = lowest_held(losses[: max(2, round(2 / 3 * len(losses)))])
        self.target = held if target is None else target
        found = None if self.target is None else arrival(losses, self.target)
        if self.target is None or found is None:
            raise InputError(
                f"exact averaging does not hold a training loss of {self.target} within "
                f"{settings.epochs} epochs: train for more, or raise the target."
            )
        self.exact_iterations = self._iterations(*found)

    def __call__(self, plan: PlanLike, limit: float) -> float:
        """Iterations until the average model holds the target; infinite if not within a limit."""
        assert self.target is not None
        steps = self.task.steps_per_epoch
        epochs = math.ceil(limit / steps) + 1  # one more shows that the target is held
        settings = replace(self.settings, epochs=epochs, target_loss=self.target)
        losses: list[float] = []
        for record in Simulation(self.task, plan, settings, engine=self._engine):
            if record.train_loss is None or has_diverged(record.train_loss):
                return math.inf
            losses.append(record.train_loss)
            if len(losses) * steps >= limit and losses[-1] > self.target:
                return math.inf
        found = arrival(losses, self.target)
        needed = math.inf if found is None else self._iterations(*found)
        return needed if needed <= limit else math.inf

    def _iterations(self, place: int, share: float) -> float:
        """From an evaluation's place and the share of the way to it."""
        # Before the first evaluation there is none to draw a line from.
        return (place + share) * self.task.steps_per_epoch
