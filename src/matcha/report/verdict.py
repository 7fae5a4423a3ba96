"""Verdicts: what each choice came to, and who won, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matcha.report import words
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


REFERENCES = ("vanilla", "allreduce")
"""What everything is compared with: the paper's baseline, and what people run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A sentence for people, and the number of the row that it names."""

    sentence: str
    winner: int | None = None


def judge(
    rows: Sequence[Summary],
    objective: str | None,
    target: float | None,
    *,
    unlike: str | None = None,
) -> Verdict:
    """Say who reached the target first, in comparison with what, if that may be said.

    Args:
        rows: What was compared.
        objective: Which loss the target is of.
        target: The loss to reach.
        unlike: Why the runs' times do not compare, where they do not.
    """
    if not rows:
        return Verdict(sentence="What each budget buys, by every strategy.")
    if unlike is not None:
        return Verdict(sentence=f"No verdict: {unlike}.")
    if target is None or objective is None:
        return Verdict(sentence=_plain(rows))
    what = f"{words.LOSSES[objective]} {target:.4g}"
    timed = sorted(
        (row for row in rows if row.time_to_target is not None and row.diverged_at is None),
        key=lambda row: row.time_to_target or 0.0,
    )
    contenders = [row for row in timed if not row.idle]
    if not timed:
        return Verdict(sentence=f"{_plain(rows)[:-1]}; none held {what}.")
    if not contenders:
        return Verdict(sentence=_needs_nothing(timed[0], what))
    standing = [row for row in contenders if _worse_than(row, rows) is None]
    if not standing:
        return Verdict(sentence=_no_verdict(contenders[0], rows, what))
    best = standing[0]
    idle = _needless(best, timed)
    if idle is not None:
        return Verdict(sentence=_needs_nothing(idle, what, f", no later than {best.label}"))
    return Verdict(
        sentence=_praise(best, rows, timed, what),
        winner=next(number for number, row in enumerate(rows) if row is best),
    )


def accuracy_gap(row: Summary, other: Summary) -> float | None:
    """How much less accurate a row is than another beyond their errors; None if it is not."""
    if row.test_accuracy is None or other.test_accuracy is None:
        return None
    gap = other.test_accuracy - row.test_accuracy
    error = math.hypot(row.accuracy_error or 0.0, other.accuracy_error or 0.0)
    return gap if gap > error else None


def _worse_than(row: Summary, rows: Sequence[Summary]) -> Summary | None:
    """The reference that is more accurate than a row by more than their errors."""
    others = [o for o in rows if o.strategy in REFERENCES and o is not row and not o.diverged_at]
    return next((other for other in others if accuracy_gap(row, other) is not None), None)


def _idle_first(best: Summary, timed: Sequence[Summary]) -> list[Summary]:
    """Who did not communicate and was as soon as the best."""
    limit = best.time_to_target or 0.0
    return [row for row in timed if row.idle and (row.time_to_target or 0.0) <= limit]


def _needless(best: Summary, timed: Sequence[Summary]) -> Summary | None:
    """One who did not communicate, was as soon as the best and no less accurate."""
    idle = _idle_first(best, timed)
    return next((row for row in idle if accuracy_gap(row, best) is None), None)


def _needs_nothing(idle: Summary, what: str, than: str = "") -> str:
    silence = "never communicates" if is_control(idle.strategy) else "had not communicated yet"
    return (
        f"No verdict: {idle.label}, which {silence}, held {what} in "
        f"{words.seconds(idle.time_to_target)}{than}; this target does not need communication."
    )


def _no_verdict(first: Summary, rows: Sequence[Summary], what: str) -> str:
    other = _worse_than(first, rows)
    assert other is not None, "only rows that are worse than a reference come here"
    return (
        f"No verdict: {first.label} held {what} first, but is less accurate than {other.label} "
        f"({words.percent(first.test_accuracy)} against {words.percent(other.test_accuracy)})."
    )


def _praise(best: Summary, rows: Sequence[Summary], timed: Sequence[Summary], what: str) -> str:
    contenders = [row for row in timed if not row.idle]
    clock = " (simulated)" if best.clock == "simulated" else ""
    first = f"{best.label} held {what} after {words.seconds(best.time_to_target)}{clock}"
    references = [
        row for name in REFERENCES for row in contenders if row.strategy == name and row is not best
    ]
    if references:
        first += ", " + words.join_names([_factor(best, row) for row in references])
    elif len(contenders) > 1:
        first += (
            f", before {words.join_names([row.label for row in contenders if row is not best])}"
        )
    for idle in _idle_first(best, timed)[:1]:
        first += (
            f"; {idle.label} held it without communicating, but is less accurate in the end "
            f"({words.percent(idle.test_accuracy)} against {words.percent(best.test_accuracy)})"
        )
    missed = [r.label for r in rows if r.strategy in REFERENCES and r.time_to_target is None]
    if missed:
        first += f"; {words.join_names(missed)} never held it"
    seeds = "one seed" if best.seeds == 1 else f"mean of {best.seeds} seeds"
    return f"{first} ({seeds})." if len(rows) > 1 else f"{first}."


def _factor(best: Summary, other: Summary) -> str:
    ratio = (other.time_to_target or 0.0) / (best.time_to_target or math.inf)
    return f"{ratio:.3g}× sooner than {other.label}"


def _plain(rows: Sequence[Summary]) -> str:
    least, most = (choose(row.epochs for row in rows) for choose in (min, max))
    epochs = f"{most:g} epoch{'' if most == 1 else 's'}"
    span = epochs if least == most else f"{least:g} to {epochs}"
    said = f"{words.count_noun(len(rows), 'run')} of {span}"
    lost = [row.label for row in rows if row.diverged_at is not None]
    return f"{said}; {words.join_names(lost)} diverged." if lost else f"{said}."
