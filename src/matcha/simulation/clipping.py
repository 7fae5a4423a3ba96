"""Rounds in which no meeting moves a worker further than the plan's disagreement allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from matcha.rounds import Round
from matcha.training.clipping import kept_share, renewed_reach

__all__ = ["ClippedMixing"]


class ClippedMixing:
    """Whole values in meetings that are cut to length; `matcha.training.clipping` defines it.

    Args:
        rows: what is mixed, a row a worker.
        allowance: how many times its reach a worker's difference to a partner may be.
    """

    def __init__(self, rows: Tensor, allowance: float) -> None:
        self.rows, self._allowance = rows, allowance
        self._after = rows.clone()
        self._reach = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        self.state = {"after": self._after, "reach": self._reach}
        self._rounds: Sequence[Round] = ()

    def reset(self) -> None:
        """Start afresh from what the rows hold now."""
        self._after.copy_(self.rows)
        self._reach.zero_()

    def fill(self, rounds: Sequence[Round]) -> None:
        """Take an epoch's rounds in."""
        self._rounds = rounds

    def parts(self) -> dict[str, Callable[[], None]]:
        """Nothing is captured: how much is cut is known on the host."""
        return {}

    def mix(self, index: int) -> None:
        """The round of iteration ``index`` of the epoch."""
        round, x = self._rounds[index], self.rows
        met = sorted({worker for link in round.links for worker in link})
        moved = (x[met] - self._after[met]).double().square().sum(1).tolist()
        before = self._reach[met].tolist()
        renewed = [renewed_reach(r, way) for r, way in zip(before, moved, strict=True)]
        self._reach[met] = torch.tensor(renewed, dtype=torch.float64, device=x.device)
        base = x.clone() if round.mixing == "laplacian" else x
        for position in range(len(round.matchings)):
            self._meet(round, position, base)
        self._after[met] = x[met]

    def _meet(self, round: Round, position: int, base: Tensor) -> None:
        x = self.rows
        i, j = torch.tensor(round.matchings[position], device=x.device).T
        weights = torch.tensor(round.shares(position), dtype=x.dtype, device=x.device)
        move = weights[:, None] * (base[j] - base[i])
        lengths = move.double().square().sum(1).sqrt().tolist()
        reach = torch.minimum(self._reach[i], self._reach[j]).sqrt()
        limits = (weights.double() * self._allowance * reach).tolist()
        shares = [kept_share(a, b) for a, b in zip(lengths, limits, strict=True)]
        kept = torch.tensor(shares, dtype=x.dtype, device=x.device)[:, None]
        move = torch.where(kept > 0, kept * move, 0.0)  # what is no number is nothing
        x[i] += move
        x[j] -= move
