from __future__ import annotations

import torch

from matcha import Round
from matcha.simulation.clipping import ClippedMixing


def test_pairs_keep_their_sum_and_move_no_further_than_allowed() -> None:
    rows = torch.zeros(4, 3, dtype=torch.float64)
    mixing = ClippedMixing(rows, allowance=1.0)
    rows[0, 0], rows[1, 1], rows[2, 2], rows[3, 0] = 1.0, 2.0, torch.nan, 5.0
    before = rows.clone()
    matchings = (((0, 1), (2, 3)),)
    mixing.fill([Round(matchings=matchings, indices=(0,), mixing="pairwise", weight=0.5)])
    mixing.mix(0)
    torch.testing.assert_close(rows[:2].sum(0), before[:2].sum(0))
    torch.testing.assert_close((rows[:2] - before[:2]).norm(dim=1), torch.full((2,), 0.5).double())
    torch.testing.assert_close(rows[3], before[3])  # its partner sent what is no number
    assert mixing.state["reach"][:2].tolist() == [1.0, 4.0]
    mixing.reset()
    assert mixing.state["reach"].tolist() == [0.0] * 4
