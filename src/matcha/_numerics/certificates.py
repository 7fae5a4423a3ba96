"""Certificates: how good an optimised value is known to be."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How good an optimised value is known to be.

    `value` was reached and no answer can exceed `bound`; `gap` is (bound − value) / value.
    """

    value: float
    bound: float
    gap: float
    iterations: int
    seconds: float = field(compare=False)
