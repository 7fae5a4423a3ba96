"""Meetings one after another do what a round does at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from matcha import Round
from matcha.distributed import run_threads
from matcha.distributed.exchange.exchange import Exchange, meetings
from matcha.distributed.exchange.turns import take_turns

VALUES = np.array([[1.0, 5.0], [2.0, -4.0], [9.0, 0.0]])


@pytest.mark.parametrize("mixing", ["pairwise", "laplacian"])
def test_turns_are_the_round(mixing) -> None:
    round = Round(matchings=(((0, 1),), ((1, 2),)), indices=(0, 1), mixing=mixing, weight=0.25)

    def work(transport):
        values = torch.from_numpy(VALUES[transport.rank].copy())
        exchange = Exchange(transport, [values], bucket_bytes=1000, timeout=150)

        def hold(meeting) -> bool:
            exchange.run(round, (meeting,), 0)
            return True

        take_turns([values], round, meetings(round, transport.rank), hold)
        return values.numpy()

    np.testing.assert_allclose(np.stack(run_threads(3, work)), round.mix(VALUES), atol=1e-15)


def test_what_was_not_held_changes_nothing() -> None:
    values = torch.ones(2)
    round = Round(matchings=(((0, 1),), ((0, 2),)), indices=(0, 1), mixing="laplacian", weight=0.3)

    def hold(meeting) -> bool:
        values.add_(meeting.peer)
        return meeting.peer == 2

    take_turns([values], round, meetings(round, 0), hold)
    assert values.tolist() == [3.0, 3.0]
