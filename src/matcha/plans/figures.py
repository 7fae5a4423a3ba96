"""Figures of a plan: what whoever made it found on the way, and for which parts it holds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures that whoever made a plan came across; what is None the plan works out when asked.

    They hold for one set of parts. A plan made of others, as by `dataclasses.replace`, drops them.
    """

    rho: float | None = None
    algebraic_connectivity: float | None = None
    consensus_error: float | None = None
    parts: tuple[Any, ...] = field(default=(), repr=False)
    """What they were found for; the plan that they were first given to fills this in."""

    def held_for(self, parts: tuple[Any, ...]) -> Figures:
        """These figures where they hold for the parts, none where they do not."""
        if not self.parts:
            return replace(self, parts=parts)
        alike = all(mine is theirs for mine, theirs in zip(self.parts, parts, strict=True))
        return self if alike else Figures(parts=parts)
