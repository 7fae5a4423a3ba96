from __future__ import annotations

import pytest
import torch

from matcha.distributed import Message
from matcha.errors import InputError
from matcha.testing import MemoryNetwork, run_threads


def test_what_was_sent_may_be_changed_at_once():
    network = MemoryNetwork(2)
    sent, arrived = torch.ones(1), torch.zeros(1)
    network.transport(0).post([Message(peer=1, tag=0, outgoing=sent)]).wait(1)
    sent.zero_()
    network.transport(1).post([Message(peer=0, tag=0, incoming=arrived)]).wait(1)
    assert float(arrived) == 1.0


def test_the_first_workers_error_is_raised():
    def work(transport):
        raise ValueError(transport.rank)

    with pytest.raises(ValueError, match="0"):
        run_threads(3, work)


def test_a_network_of_nobody_is_refused():
    with pytest.raises(InputError, match="at least one worker"):
        MemoryNetwork(0)
