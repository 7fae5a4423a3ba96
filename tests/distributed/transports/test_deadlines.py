"""Deadlines: they follow what was measured, but for one that was given."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.distributed.elastic.test_membership import wait_until
from tests.distributed.links.test_hostile import HOSTILE, besieged, exchange

import matcha
from matcha import families
from matcha.distributed import Gossip
from matcha.distributed.links.framing import Kind
from matcha.distributed.transports.waiting import Durations
from matcha.testing import run_threads


@pytest.mark.parametrize(("given", "expected"), [(None, 800.0), (50.0, 50.0)])
def test_who_takes_long_is_waited_for_longer(given, expected, monkeypatch) -> None:
    clocks = [itertools.count(step=400.0), itertools.count(step=400.0)]
    plan = matcha.plan(families.path(2), 1.0, "vanilla")

    def work(transport) -> tuple[float, float]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = clocks[transport.rank]
        with Gossip(model, optimizer, plan, transport=transport, timeout=given) as gossip:
            state = gossip.state
            note = state.pace.note
            monkeypatch.setattr(state.pace, "note", lambda k, _: note(k, float(next(clock))))
            for _ in range(10):
                optimizer.step()
            return state.timeout, state.exchange.timeout

    assert run_threads(2, work) == [(expected, expected)] * 2


def test_a_rare_outlier_is_no_habit() -> None:
    gaps = Durations()
    for k in range(64):
        gaps.note(0.25 if k else 4.0)
    assert 2 * 0.25 < gaps.deadline(floor=0.0) < 2 * 4.0
    for _ in range(64):
        gaps.note(0.25)
    assert gaps.deadline(floor=0.0) == 0.5


def test_a_neighbour_that_is_silent_is_lost_though_nobody_said_when() -> None:
    with besieged(timeout=None) as (zero, one, stranger):
        zero.start_at(0)
        one.start_at(0)
        connection = one.connections[HOSTILE]

        def is_known() -> bool:
            stranger.send(Kind.HEARTBEAT)
            return len(connection.gaps._recent) > 8

        wait_until(is_known)
        wait_until(lambda: zero.members == (0, 1))
        assert "gave no sign of life" in one.end_reason(HOSTILE)
        exchange(zero, one)
