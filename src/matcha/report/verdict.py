"""The verdict: which run may be called first, and over what; or why none may.

Ask of every measure what doing nothing would score: a control such as `silent` never wins, and
where it does as well as the others, the comparison says so instead of naming a winner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matcha.report import words
from matcha.report.rows import Summary
from matcha.strategies import is_control

REFERENCES = ("vanilla", "allreduce")
"""What everything is compared with: the paper's baseline, and what people run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A sentence for people, and the number of the row that it names."""

    sentence: str
    winner: int | None = None


def judge(rows: Sequence[Summary], objective: str | None, target: float | None) -> Verdict:
    """Say who reached the target first, in comparison with what, if that may be said."""
    if not rows:
        return Verdict(sentence="What each budget buys, by every strategy.")
    if target is None or objective is None:
        return Verdict(sentence=_plain(rows))
    what = f"{words.LOSSES[objective]} {target:.4g}"
    timed = [row for row in rows if row.time_to_target is not None and row.diverged_at is None]
    contenders = sorted(
        (row for row in timed if not is_control(row.strategy)),
        key=lambda row: row.time_to_target or 0.0,
    )
    if not contenders:
        return Verdict(sentence=f"{_plain(rows)[:-1]}; none held {what}.")
    standing = [row for row in contenders if _worse_than(row, rows) is None]
    if not standing:
        return Verdict(sentence=_no_verdict(contenders[0], rows, what))
    best = standing[0]
    idle = _needless(best, timed)
    if idle is not None:
        return Verdict(
            sentence=f"No verdict: {idle.label}, which never communicates, held {what} in "
            f"{words.seconds(idle.time_to_target)}, as soon as {best.label}; this target does not "
            "need communication."
        )
    return Verdict(
        sentence=_praise(best, rows, contenders, what),
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


def _needless(best: Summary, timed: Sequence[Summary]) -> Summary | None:
    """A control that was as soon as the best and no less accurate."""
    for row in timed:
        is_sooner = (row.time_to_target or math.inf) <= (best.time_to_target or 0.0)
        if is_control(row.strategy) and is_sooner and accuracy_gap(row, best) is None:
            return row
    return None


def _no_verdict(first: Summary, rows: Sequence[Summary], what: str) -> str:
    other = _worse_than(first, rows)
    assert other is not None, "only rows that are worse than a reference come here"
    return (
        f"No verdict: {first.label} held {what} first, but is less accurate than {other.label} "
        f"({words.percent(first.test_accuracy)} against {words.percent(other.test_accuracy)})."
    )


def _praise(
    best: Summary, rows: Sequence[Summary], contenders: Sequence[Summary], what: str
) -> str:
    clock = " (simulated)" if best.clock == "simulated" else ""
    first = f"{best.label} held {what} after {words.seconds(best.time_to_target)}{clock}"
    references = [
        row for name in REFERENCES for row in contenders if row.strategy == name and row is not best
    ]
    if references:
        first += ", " + words.listed([_factor(best, row) for row in references])
    elif len(contenders) > 1:
        first += f", before {words.listed([row.label for row in contenders if row is not best])}"
    missed = [r.label for r in rows if r.strategy in REFERENCES and r.time_to_target is None]
    if missed:
        first += f"; {words.listed(missed)} never held it"
    seeds = "one seed" if best.seeds == 1 else f"mean of {best.seeds} seeds"
    return f"{first} ({seeds})." if len(rows) > 1 else f"{first}."


def _factor(best: Summary, other: Summary) -> str:
    ratio = (other.time_to_target or 0.0) / (best.time_to_target or math.inf)
    return f"{ratio:.3g}× sooner than {other.label}"


def _plain(rows: Sequence[Summary]) -> str:
    return f"{words.counted(len(rows), 'run')} of {rows[0].epochs:g} epochs."
