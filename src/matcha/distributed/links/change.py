"""A change: who came or went, and when."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Change"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A worker was lost or came (back), as this worker learnt it."""

    iteration: int
    seconds: float
    """Of `time.monotonic`."""
    worker: int
    is_member: bool
