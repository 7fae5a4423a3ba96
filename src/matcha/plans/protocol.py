"""What plans share, in one piece or in stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from matcha._io import save_document
from matcha.plans.averaging import all_reduce_time
from matcha.rounds import Round
from matcha.schedules import check_iteration
from matcha.timing import Timing
from matcha.topology import Topology


class Rounds(Protocol):
    """Who talks when: what the members below are made of."""

    @property
    def topology(self) -> Topology:
        """The workers and their links."""

    @property
    def timing(self) -> Timing:
        """The delay model."""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""

    def summary(self) -> str:
        """The plan in a few lines of text."""

    def _round(self, k: int) -> Round: ...

    def _rounds(self, start: int, stop: int | None) -> Iterator[Round]: ...


class Members:
    """Members that follow from those of `Rounds`, for every kind of plan alike."""

    @property
    def num_workers(self: Rounds) -> int:
        """How many workers the plan is for."""
        return self.topology.num_workers

    def round(self: Rounds, k: int) -> Round:
        """What is active at iteration k: the same on every worker, in any order of k."""
        check_iteration(k)
        return self._round(k)

    def rounds(self: Rounds, start: int = 0, stop: int | None = None) -> Iterator[Round]:
        """The rounds of iterations start, start + 1, … in order; quicker than one by one."""
        check_iteration(start)
        return self._rounds(start, stop)

    def round_time(self: Rounds, round: Round) -> float:
        """The communication time of a round, in the delay model's unit."""
        if round.mixing == "average" and round:
            return all_reduce_time(self.timing, self.topology)
        return self.timing.round_time(round.matchings)

    def mixing_matrix(self: Rounds, k: int) -> npt.NDArray[np.float64]:
        """W(k) as a dense matrix: new x = W(k) @ x, rows are workers. For small m."""
        check_iteration(k)
        return self._round(k).matrix(self.topology.num_workers)

    def save(self: Rounds, path: str | Path) -> None:
        """Write the plan as JSON, with a checksum, whole or not at all."""
        save_document(self.to_json(), Path(path))

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle holds the parts; what was derived from them is derived again.
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __str__(self: Rounds) -> str:
        return self.summary()
