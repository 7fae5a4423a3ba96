"""Rows: what one choice of strategy, budget and settings came to, over its seeds."""

from __future__ import annotations

from dataclasses import dataclass, field

from matcha.strategies import is_control


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one choice came to, and what it took to reach the target: means over its seeds."""

    label: str
    strategy: str
    budget: float
    wire: str = "float32"
    """What messages held."""
    momentum: str | None = None
    """How momentum and meetings went together; None where the records do not say."""
    clock: str
    unit: str
    """The unit of `comm_units`."""
    seeds: int
    iterations: int
    epochs: float
    time: float
    """Seconds on the run's clock, start to end."""
    train_loss: float | None
    """The average model's, on all workers' training data."""
    train_loss_error: float | None
    """The standard error of that estimate."""
    worker_loss: float | None
    """Each worker's own model on its own data, averaged: says nothing about agreement."""
    test_loss: float | None
    test_accuracy: float | None
    accuracy_error: float | None
    """Its standard error: of the test sample, and of the seeds where there are several."""
    consensus_distance: float | None
    comm_units: float
    megabytes_sent: float | None = None
    """By a worker in the whole run, in the mean over workers."""
    comm_seconds: float | None
    """The mean worker's seconds of communication, to the target where it was reached."""
    time_to_target: float | None
    """None: a run never reached it, or did not stay there."""
    epochs_to_target: float | None
    diverged_at: int | None
    """The iteration at which a loss stopped being a number, in the first run where it did."""
    speedup: float | None = None
    """Vanilla's time to target over this one's; vanilla itself has 1.

    None also where this one did not communicate, diverged, or is less accurate beyond the errors.
    """
    speedup_over_allreduce: float | None = None
    deviations: dict[str, float] = field(default_factory=dict)
    """Standard deviation over seeds, by the name of the field; empty for one seed."""

    @property
    def idle(self) -> bool:
        """Whether it came this far without communicating."""
        return is_idle(self.strategy, self.comm_units, self.megabytes_sent)


def is_idle(strategy: str, comm_units: float, megabytes_sent: float | None) -> bool:
    """Whether nothing was communicated: a control, or one in effect.

    A budget of nearly nothing is `silent` under another name. Records that do not count what was
    sent are taken at their word.

    >>> is_idle("silent", 0.0, None), is_idle("periodic", 0.0, 0.0), is_idle("periodic", 0.0, None)
    (True, True, False)
    """
    return is_control(strategy) or (comm_units == 0 and megabytes_sent is not None)
