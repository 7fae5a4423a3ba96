"""The paper's claims beside what was measured, with a verdict that code decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["holds", "holds nearly", "does not hold", "not measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One sentence of the paper (or of our issue) and how it fared."""

    statement: str
    measured: str
    verdict: Verdict
    source: str = "paper"
    """``paper``, or ``ours`` for what this project promises beyond it."""


def judge(value: float | None, wanted: float, *, nearly: float, at_least: bool = True) -> Verdict:
    """Whether a measured value meets a claim, misses it by little, or misses it.

    Args:
        value: what was measured; None where it was not.
        wanted: the claim.
        nearly: a value this good still nearly holds.
        at_least: larger is better.

    >>> judge(2.07, 2.2, nearly=2.0)
    'holds nearly'
    >>> judge(0.3, 0.5, nearly=1.0, at_least=False)
    'holds'
    """
    if value is None or value != value:
        return "not measured" if value is None else "does not hold"
    if not at_least:
        value, wanted, nearly = -value, -wanted, -nearly
    if value >= wanted:
        return "holds"
    return "holds nearly" if value >= nearly else "does not hold"


def table(claims: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    lines = ["| claim | measured | verdict |", "| --- | --- | --- |"]
    for claim in claims:
        prefix = "" if claim.source == "paper" else "*(ours)* "
        lines.append(f"| {prefix}{claim.statement} | {claim.measured} | **{claim.verdict}** |")
    return "\n".join(lines)
