"""A round applied to the parameter matrix: rows in pairs on the host, one product on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from matcha.rounds import Round


def mix_rows(parameters: Tensor, round: Round) -> None:
    """Apply a round in place on the host: :meth:`Round.mix` itself, on the tensor's own memory.

    Only rows that exchange are touched, and the bits are the definition's by construction.

    >>> x = torch.tensor([[0.0], [2.0], [5.0]])
    >>> mix_rows(x, Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5))
    >>> x.flatten().tolist()
    [1.0, 1.0, 5.0]
    """
    if not round:
        return
    rows = parameters.numpy()
    active = sorted({worker for link in round.links for worker in link})
    with np.errstate(over="ignore", invalid="ignore"):  # the loss tells of divergence
        if len(active) == rows.shape[0]:
            rows[:] = round.mix(rows)
            return
        number = {worker: k for k, worker in enumerate(active)}
        local = Round(
            matchings=tuple(
                tuple((number[i], number[j]) for i, j in matching) for matching in round.matchings
            ),
            indices=round.indices,
            mixing=round.mixing,
            weight=round.weight,
        )
        rows[active] = local.mix(rows[active])


def matrices(
    rounds: Sequence[Round], num_workers: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """W(k) of several rounds, stacked; each distinct round is worked out once."""
    known: dict[Round, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    for round in rounds:
        if round not in known:
            known[round] = round.matrix(num_workers)
    return np.stack([known[round] for round in rounds])


def mix_product(parameters: Tensor, matrix: Tensor, scratch: Tensor) -> None:
    """Apply W(k) in place as one small product; ``scratch`` is as large as the parameters."""
    torch.mm(matrix, parameters, out=scratch)
    parameters.copy_(scratch)
