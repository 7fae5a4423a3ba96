from __future__ import annotations

import pytest
from tests.distributed import manners

from matcha.distributed import Gossip
from matcha.distributed.transports.waiting import StallDetector
from matcha.errors import ExchangeError
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads


def test_a_worker_that_finished_early_is_not_called_dead() -> None:
    errors = run_threads(3, manners.finish_early)
    assert errors[0] == ""
    assert any("finished at iteration 5" in e and "gossip.join()" in e for e in errors[1:])


def test_who_is_away_is_waited_for_beyond_the_timeout() -> None:
    assert run_threads(3, manners.away) == [9, 9, 9]


def test_a_call_that_one_worker_makes_alone_is_named() -> None:
    errors = run_threads(3, manners.average_alone)
    assert any("is in averaged() at iteration 3" in error for error in errors), errors
    assert any("is in the round of iteration" in error for error in errors), errors


def test_different_calls_at_the_same_time_are_named() -> None:
    def work(transport: MemoryTransport) -> str:
        model, optimizer = manners.make()
        gossip = Gossip(model, optimizer, manners.PLAN, transport=transport, timeout=20)
        call = gossip.consensus_distance if transport.rank else gossip.averaged_state_dict
        with pytest.raises(ExchangeError) as caught:
            call()
        return str(caught.value)

    for error in run_threads(3, work):
        assert "consensus_distance() at iteration 0" in error
        assert "averaged() at iteration 0" in error


def test_what_was_noted_is_taken_back_when_the_peer_comes() -> None:
    network = MemoryNetwork(2)
    transport = network.transport(0)
    transport.doing = "the round of iteration 7"
    detector = StallDetector(transport, 1, timeout=60)
    detector.look()
    assert network.transport(1).waiting_on(0) == 1
    assert network.transport(1).get_note(0, "in") == "the round of iteration 7"
    detector.end()
    assert network.transport(1).waiting_on(0) is None
    assert network.transport(1).get_note(0, "in") == ""


@pytest.mark.parametrize("call", ["averaged()", "the round"])
def test_only_who_waits_in_another_call_waits_for_ever(call) -> None:
    """Two wait for one another: in one call they are slow, in two they have gone apart."""
    network = MemoryNetwork(2)
    first, second = network.transport(0), network.transport(1)
    first.doing = "the round"
    second.report_waiting_on(0)
    second.set_note("in", call)
    detector = StallDetector(first, 1, timeout=60)
    detector.look()  # a note may be a moment old: once is not enough
    if call == first.doing:
        detector.look()
        assert not first.failed
    else:
        with pytest.raises(ExchangeError, match=r"1 is in averaged\(\), rank 0 is in the round"):
            detector.look()
        assert first.failed
