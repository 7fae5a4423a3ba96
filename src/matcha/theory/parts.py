"""What theory needs to know of a plan: its rounds and its weights, not how it was made."""

from __future__ import annotations

from typing import Protocol

from matcha.rounds import Mixing, Shares
from matcha.schedules import Schedule
from matcha.topology import Matching, Topology


class Parts(Protocol):
    """The parts of a plan that decide what it promises; every `Plan` has them."""

    @property
    def topology(self) -> Topology: ...  # noqa: D102
    @property
    def num_workers(self) -> int: ...  # noqa: D102
    @property
    def matchings(self) -> tuple[Matching, ...]: ...  # noqa: D102
    @property
    def schedule(self) -> Schedule: ...  # noqa: D102
    @property
    def mixing(self) -> Mixing: ...  # noqa: D102
    @property
    def alpha(self) -> float: ...  # noqa: D102
    @property
    def weights(self) -> Shares | None: ...  # noqa: D102
