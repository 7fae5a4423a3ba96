"""Verdicts: what each choice came to, and who won, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scipy.special import ndtri, stdtrit

from matcha._io.tables import count_noun
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
    function_distance: float | None = None
    comm_units: float
    megabytes_sent: float | None = None
    """By a worker in the whole run, in the mean over workers."""
    comm_seconds: float | None
    """The mean worker's seconds of communication, to the target where it was reached."""
    time_to_target: float | None
    """None: a run never reached it, or did not stay there."""
    epochs_to_target: float | None
    at_first_evaluation: bool = False
    """Whether a run held the target when it was first evaluated, so that `time_to_target` is only
    when that was known, and how much sooner it was is not."""
    diverged_at: int | None
    """The iteration at which a loss stopped being a number, in the first run where it did."""
    speedup: float | None = None
    """Vanilla's time to target over this one's; vanilla itself has 1.

    None also where this one did not communicate, diverged, or is less accurate beyond the errors,
    and where the two times differ by no more than their spread.
    """
    speedup_over_allreduce: float | None = None
    deviations: dict[str, float] = field(default_factory=dict)
    """Standard deviation over seeds, by the name of the field; empty for one seed."""

    @property
    def idle(self) -> bool:
        """Whether it came this far without communicating: a control, or one in effect.

        A budget of nearly nothing is `silent` under another name. Records that do not count what
        was sent are taken at their word.
        """
        return is_control(self.strategy) or (
            self.comm_units == 0 and self.megabytes_sent is not None
        )


REFERENCES = ("vanilla", "allreduce")
"""What everything is compared with: the paper's baseline, and what people run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A sentence for people, and the number of the row that it names."""

    sentence: str
    winner: int | None = None
    """The row that was first beyond the spread; None also in a tie."""
    unranked: Mapping[int, str] = field(default_factory=dict)
    """Why a row takes no part in the ranking, by the row's number."""


def judge(
    rows: Sequence[Summary],
    objective: str | None,
    target: float | None,
    *,
    unlike: str | None = None,
    link_time: float | None = None,
) -> Verdict:
    """Say who reached the target first, in comparison with what, if that may be said.

    `unlike` says why the runs' times do not compare. `link_time` is of a matching, where computing
    beside it was measured on this machine: another has another ratio of the two, and the verdict
    says where it would turn.
    """
    if not rows:
        return Verdict(sentence="What each budget buys, by every strategy.")
    if unlike is not None:
        return Verdict(sentence=f"No verdict: {unlike}.")
    if target is None or objective is None:
        return Verdict(sentence=f"{_ends(rows)}.")
    race = _Race(rows, f"{words.NAMES[objective]} {target:.4g}")
    best, sentence = race.decide(link_time)
    reasons = {number: _unranked(row, rows) for number, row in enumerate(rows)}
    return Verdict(
        sentence=sentence,
        winner=next((number for number, row in enumerate(rows) if row is best), None),
        unranked={number: reason for number, reason in reasons.items() if reason is not None},
    )


CONFIDENCE = 0.95
"""How sure a difference must be before it is called one."""


_ERRORS = float(ndtri((1 + CONFIDENCE) / 2))


def is_sooner(row: Summary, other: Summary) -> bool:
    """Whether a row held the target sooner than another, beyond the spread over their seeds.

    By Welch's t-test at `CONFIDENCE`. Where only one of them has several seeds, its spread stands
    for both; where neither has, there is no spread to ask for. Nothing is sooner than what held the
    target when it was first evaluated.
    """
    if row.time_to_target is None or other.time_to_target is None or other.at_first_evaluation:
        return False
    gap = other.time_to_target - row.time_to_target
    spreads = [each.deviations.get("time_to_target") for each in (row, other)]
    known = [spread for spread in spreads if spread is not None]
    if gap <= 0 or not known:
        return gap > 0
    seeds = (row.seeds, other.seeds)
    errors = [(known[-1] if s is None else s) ** 2 / n for s, n in zip(spreads, seeds, strict=True)]
    freedoms = [n - 1 if n > 1 else max(seeds) - 1 for n in seeds]
    total = sum(errors)
    if total == 0:
        return True
    freedom = total**2 / sum(e**2 / f for e, f in zip(errors, freedoms, strict=True))
    return gap > float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(total)


def accuracy_gap(row: Summary, other: Summary) -> float | None:
    """How much less accurate a row is than another beyond their errors; None if it is not.

    As sure as `is_sooner`: a gap within about two standard errors decides nothing.
    """
    if row.test_accuracy is None or other.test_accuracy is None:
        return None
    gap = other.test_accuracy - row.test_accuracy
    error = math.hypot(row.accuracy_error or 0.0, other.accuracy_error or 0.0)
    return gap if gap > _ERRORS * error else None


def _shortfall(row: Summary, rows: Sequence[Summary]) -> str | None:
    """How a row is less accurate than a reference by more than their errors; None if it is not."""
    for other in rows:
        if other.strategy in REFERENCES and other is not row and other.diverged_at is None:
            gap = accuracy_gap(row, other)
            if gap is not None:
                return (
                    f"{100 * gap:.1f} points less accurate than {other.label} "
                    f"({words.percent(row.test_accuracy)} against "
                    f"{words.percent(other.test_accuracy)})"
                )
    return None


def _unranked(row: Summary, rows: Sequence[Summary]) -> str | None:
    """Why a row takes no part in the ranking; None if it does."""
    if row.diverged_at is not None:
        return f"diverged at iteration {row.diverged_at}"
    return "does not communicate" if row.idle else _shortfall(row, rows)


class _Race:
    """Who held a target when, and what is said of it."""

    def __init__(self, rows: Sequence[Summary], target: str) -> None:
        self.rows, self.target = rows, target
        held = [r for r in rows if r.time_to_target is not None and r.diverged_at is None]
        self.timed = sorted(held, key=lambda row: row.time_to_target or 0.0)
        self.contenders = [row for row in self.timed if not row.idle]

    def decide(self, link_time: float | None) -> tuple[Summary | None, str]:
        """The row that was first beyond the spread, if one was, and the sentence."""
        if not self.timed:
            return None, f"{_ends(self.rows)}; none held {self.target}."
        if not self.contenders:
            return None, self._needs_nothing(self.timed[0])
        standing = [row for row in self.contenders if _shortfall(row, self.rows) is None]
        if not standing:
            first = self.contenders[0]
            return None, (
                f"No verdict: {first.label} held {self.target} first, "
                f"{words.seconds(first.time_to_target)}, but is {_shortfall(first, self.rows)}."
            )
        best = standing[0]
        for idle in self._idle_as_soon(best):
            if accuracy_gap(idle, best) is None:
                return None, self._needs_nothing(idle, f", no later than {best.label}")
        equal = [row for row in standing if row is best or not is_sooner(best, row)]
        if len(equal) > 1 or (len(self.rows) == 1 and best.at_first_evaluation):
            return None, self._tie(equal)
        return best, self._praise(best) + _turn(best, standing, link_time)

    def _idle_as_soon(self, best: Summary) -> list[Summary]:
        return [row for row in self.timed if row.idle and not is_sooner(best, row)]

    def _needs_nothing(self, idle: Summary, than: str = "") -> str:
        silence = "never communicates" if is_control(idle.strategy) else "had not communicated yet"
        return (
            f"No verdict: {idle.label}, which {silence}, held {self.target} in "
            f"{words.seconds(idle.time_to_target)}{than}; this target does not need communication."
        )

    def _tie(self, equal: Sequence[Summary]) -> str:
        best = equal[0]
        names = words.join_names([f"{row.label} ({_time(row)})" for row in equal])
        if any(row.at_first_evaluation for row in equal):
            return (
                f"No verdict: {names} held {self.target} at the first evaluation already: evaluate "
                "more often, or give a lower target."
            )
        where = " in this run" if best.seeds == 1 else ""
        why = (
            "the difference is within the spread over the seeds"
            if any(row.seeds > 1 for row in equal)
            else "their times are equal"
        )
        later = [r for r in _references(self.timed) if r not in equal and is_sooner(best, r)]
        others = "".join(f"; {row.label} took {_time(row)}" for row in later)
        return (
            f"A tie{where}: {names} held {self.target} first, and {why}{others}"
            f"{self._beside(best)}."
        )

    def _praise(self, best: Summary) -> str:
        clock = " (simulated)" if best.clock == "simulated" else ""
        when = f"after {_time(best)}".replace("after ≤", "within")
        first = f"{best.label} held {self.target} {when}{clock}"
        later = [row for row in self.contenders if row is not best and is_sooner(best, row)]
        if references := _references(later):
            first += ", " + words.join_names([_factor(best, row) for row in references])
        elif later:
            first += f", before {words.join_names([row.label for row in later])}"
        first += self._beside(best)
        if len(self.rows) == 1:
            return f"{first}."
        if best.seeds == 1:
            return f"In this run {first} (one seed)."
        return f"{first} (mean of {best.seeds} seeds)."

    def _beside(self, best: Summary) -> str:
        """What a sceptic would ask: what was sooner and is not ranked, what never got there."""
        said = ""
        for row in self.contenders:
            if not is_sooner(best, row) and (shortfall := _shortfall(row, self.rows)):
                how = "sooner" if is_sooner(row, best) else "as soon"
                said += f"; {row.label} was {how}, {_time(row)}, and {shortfall}: not ranked"
        for idle in self._idle_as_soon(best)[:1]:
            said += (
                f"; {idle.label} held it without communicating, but is less accurate in the end "
                f"({words.percent(idle.test_accuracy)} against {words.percent(best.test_accuracy)})"
            )
        missed = [
            row.label
            for row in self.rows
            if row.strategy in REFERENCES and row.time_to_target is None
        ]
        return f"{said}; {words.join_names(missed)} never held it" if missed else said


def _references(rows: Sequence[Summary]) -> list[Summary]:
    return [row for name in REFERENCES for row in rows if row.strategy == name]


_NEAR_TURN = 10.0
"""How many times slower or faster links are looked at: what was measured varies by less."""


def _turn(best: Summary, standing: Sequence[Summary], link_time: float | None) -> str:
    """At which link time another row would be first, if computing takes what it took here."""
    if link_time is None:
        return ""
    turns = []
    for row in standing:
        if row is best or row.comm_seconds is None or best.comm_seconds is None:
            continue
        computing, other = (r.time_to_target - r.comm_seconds for r in (best, row))  # type: ignore[operator]
        if (best.comm_seconds - row.comm_seconds) * (other - computing) > 0:
            factor = (other - computing) / (best.comm_seconds - row.comm_seconds)
            turns.append((abs(math.log(factor)), factor, row.label))
    nearest, factor, label = min(turns, default=(math.inf, 1.0, ""))
    if nearest > math.log(_NEAR_TURN):
        return ""
    return (
        f" Computing was measured here: {label} would be first where a matching takes "
        f"{'more' if factor > 1 else 'less'} than {words.seconds(factor * link_time)} "
        f"(it takes {words.seconds(link_time)} here)."
    )


def _time(row: Summary) -> str:
    """The time to the target, with its deviation over the seeds where there are several."""
    spread = row.deviations.get("time_to_target")
    time = words.seconds(row.time_to_target)
    if row.at_first_evaluation:
        return f"≤ {time}"
    return time if spread is None else f"{time} ± {words.seconds(spread)}"


def _factor(best: Summary, other: Summary) -> str:
    ratio = (other.time_to_target or 0.0) / (best.time_to_target or math.inf)
    return f"{ratio:.3g}× sooner than {other.label}"


def _ends(rows: Sequence[Summary]) -> str:
    """How far the runs went, and which diverged."""
    least, most = (choose(row.epochs for row in rows) for choose in (min, max))
    epochs = f"{most:g} epoch{'' if most == 1 else 's'}"
    span = epochs if least == most else f"{least:g} to {epochs}"
    said = f"{count_noun(len(rows), 'run')} of {span}"
    lost = [row.label for row in rows if row.diverged_at is not None]
    if len(lost) == len(rows) > 1:
        return f"{said}; all diverged"
    return f"{said}; {words.join_names(lost)} diverged" if lost else said
