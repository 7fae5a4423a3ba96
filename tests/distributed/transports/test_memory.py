from __future__ import annotations

import pytest
import torch

from matcha.distributed import MemoryNetwork, Message, run_threads
from matcha.errors import ExchangeError, InputError


def test_messages_of_one_tag_arrive_in_order_and_tags_apart():
    def work(transport):
        if transport.rank == 0:
            for tag, value in ((1, 1.0), (2, 2.0), (1, 3.0)):
                transport.post([Message(peer=1, tag=tag, outgoing=torch.tensor([value]))]).wait(9)
            return None
        found = []
        for tag in (2, 1, 1):
            arriving = torch.zeros(1)
            transport.post([Message(peer=0, tag=tag, incoming=arriving)]).wait(9)
            found.append(float(arriving))
        return found

    assert run_threads(2, work)[1] == [2.0, 1.0, 3.0]


def test_what_was_sent_may_be_changed_at_once():
    network = MemoryNetwork(2)
    sent, arrived = torch.ones(1), torch.zeros(1)
    network.transport(0).post([Message(peer=1, tag=0, outgoing=sent)]).wait(1)
    sent.zero_()
    network.transport(1).post([Message(peer=0, tag=0, incoming=arrived)]).wait(1)
    assert float(arrived) == 1.0


def test_a_silent_peer_is_named():
    waiting = MemoryNetwork(2).transport(0)
    pending = waiting.post([Message(peer=1, tag=0, incoming=torch.zeros(1))])
    with pytest.raises(ExchangeError, match=r"rank 1.*did not answer within 0.1 s"):
        pending.wait(0.1)


def test_the_first_workers_error_is_raised():
    def work(transport):
        raise ValueError(transport.rank)

    with pytest.raises(ValueError, match="0"):
        run_threads(3, work)


def test_a_network_of_nobody_is_refused():
    with pytest.raises(InputError, match="at least one worker"):
        MemoryNetwork(0)
