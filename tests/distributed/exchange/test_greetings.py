from __future__ import annotations

import pytest
import torch

from matcha.distributed import MemoryNetwork, MemoryTransport, run_threads
from matcha.distributed.exchange.exchange import RUNNING, Meeting
from matcha.distributed.exchange.greetings import Courtesy
from matcha.distributed.transports.torch import _is_sign
from matcha.errors import ExchangeError


def greeted(transport, iteration: int = 3, finished_at: int = RUNNING):
    """Two workers greet; the courtesy, and what the other one sent beside its place."""
    courtesy = Courtesy(transport, timeout=20)
    courtesy.finished_at = finished_at
    beside = torch.full((5,), 10 + transport.rank, dtype=torch.uint8)
    meeting = Meeting(position=0, peer=1 - transport.rank, weight=0.5)
    return courtesy, courtesy.hear(courtesy.greet(meeting, 7, iteration, beside))


def test_a_greeting_carries_bytes_and_counts_them() -> None:
    for rank, (courtesy, heard) in enumerate(run_threads(2, greeted)):
        assert heard.tolist() == [11 - rank] * 5
        assert courtesy.bytes_sent == 5


class Recording(MemoryTransport):
    """Keeps what was posted."""

    def post(self, messages):
        self.posted = list(messages)
        return super().post(messages)


def test_a_greeting_begins_with_a_sign_that_is_watched_for_while_somebody_is_away() -> None:
    network = MemoryNetwork(2)
    meeting = Meeting(position=0, peer=1, weight=0.5)
    for beside in (torch.zeros(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)):
        transport = Recording(network, 0)
        Courtesy(transport, timeout=20).greet(meeting, 7, 3, beside)
        sign, *others = transport.posted
        assert _is_sign(sign)
        assert [len(message.incoming) for message in others] == ([5] if len(beside) else [])


def test_a_partner_at_another_iteration_is_named() -> None:
    def work(transport) -> str:
        with pytest.raises(ExchangeError) as caught:
            greeted(transport, iteration=3 + transport.rank)
        return str(caught.value)

    first, second = run_threads(2, work)
    assert first.startswith("rank 1 is at iteration 4, but rank 0 is at 3")
    assert second.startswith("rank 0 is at iteration 3, but rank 1 is at 4")


@pytest.mark.parametrize(("ends", "rests"), [((2, 3), True), ((2, RUNNING), False)])
def test_a_link_rests_only_when_both_ends_said_that_they_have_finished(ends, rests) -> None:
    met = run_threads(2, lambda transport: greeted(transport, finished_at=ends[transport.rank]))
    assert [courtesy.finished for courtesy, _ in met] == ([{1}, {0}] if rests else [set(), set()])
