from __future__ import annotations

import pytest
import torch

from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.meeting import RUNNING, Handshake, Meeting, meetings
from matcha.distributed.transports.torch import _is_sign
from matcha.errors import ExchangeError
from matcha.rounds import OneWayRole, Round
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads


def shake(transport, iteration: int = 3, content: torch.Tensor | None = None) -> Handshake:
    """Two workers' handshake, once the other's has come."""
    meeting = Meeting(position=0, peer=1 - transport.rank, weight=0.5)
    handshake = Handshake(transport, meeting, 7, iteration, RUNNING, content)
    handshake.pending = transport.post(handshake.messages)
    handshake.wait(timeout=20)
    return handshake


def test_a_handshake_carries_bytes() -> None:
    def work(transport):
        return shake(transport, content=torch.full((5,), 10 + transport.rank, dtype=torch.uint8))

    first, second = run_threads(2, work)
    assert first.answer.tolist() == [11] * 5
    assert second.answer.tolist() == [10] * 5


class Recording(MemoryTransport):
    """Keeps what was posted."""

    def post(self, messages):
        self.posted = list(messages)
        return super().post(messages)


@pytest.mark.parametrize("size", [0, 5])
def test_a_handshake_begins_with_a_sign_that_is_watched_for_while_a_worker_is_away(size) -> None:
    transport = Recording(MemoryNetwork(2), 0)
    content = torch.zeros(size, dtype=torch.uint8) if size else None
    meeting = Meeting(position=0, peer=1, weight=0.5)
    transport.post(Handshake(transport, meeting, 7, 3, RUNNING, content).messages)
    sign, *others = transport.posted
    assert _is_sign(sign)
    assert [len(message.incoming) for message in others] == ([size] if size else [])


def test_one_way_a_worker_hears_only_from_its_sender() -> None:
    """A ring of three: each sends to the next, and is at the iteration that it hears of."""

    def work(transport):
        me = transport.rank
        role = OneWayRole(to=(me + 1) % 3, given=0.5, source=(me - 1) % 3, taken=0.5)
        meeting = Meeting(position=0, peer=(me - 1) % 3, weight=0.5, role=role)
        content = torch.full((2,), me, dtype=torch.uint8)
        handshake = Handshake(transport, meeting, 7, 3, RUNNING, content)
        handshake.pending = transport.post(handshake.messages)
        handshake.wait(timeout=20)
        return handshake.answer.tolist()

    assert run_threads(3, work) == [[2, 2], [0, 0], [1, 1]]


def test_a_partner_at_another_iteration_is_named() -> None:
    def work(transport) -> str:
        with pytest.raises(ExchangeError) as caught:
            shake(transport, iteration=3 + transport.rank)
        return str(caught.value)

    first, second = run_threads(2, work)
    assert first.startswith("rank 1 is at iteration 4, but rank 0 is at 3")
    assert second.startswith("rank 0 is at iteration 3, but rank 1 is at 4")


@pytest.mark.parametrize(("ends", "rests"), [((2, 3), True), ((2, RUNNING), False)])
def test_a_link_rests_only_when_both_ends_said_that_they_have_finished(ends, rests) -> None:
    round = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)

    def work(transport):
        codec = FloatCodec([torch.ones(3)], bucket_bytes=100)
        exchange = Exchange(transport, [codec], timeout=20)
        exchange.finished_at = ends[transport.rank]
        exchange.run(round, meetings(round, transport.rank), 4)
        return exchange.finished

    assert run_threads(2, work) == ([{1}, {0}] if rests else [set(), set()])
