from __future__ import annotations

import pytest
import torch

from matcha.distributed import MemoryNetwork, Message
from matcha.distributed.transports.base import COLLECTIVE_TAGS, MAX_TAG, meeting_tag


@pytest.mark.parametrize("number", [0, 1, COLLECTIVE_TAGS.start - 1, COLLECTIVE_TAGS.start, 10**9])
def test_meetings_and_what_all_do_together_never_share_a_tag(number):
    assert 0 <= meeting_tag(number) < COLLECTIVE_TAGS.start
    assert COLLECTIVE_TAGS[-1] == MAX_TAG == 32_767


@pytest.mark.parametrize("tag", [-1, MAX_TAG + 1])
def test_a_tag_that_mpi_need_not_take_is_our_mistake(tag):
    with pytest.raises(AssertionError):
        Message(peer=0, tag=tag, incoming=torch.zeros(1))


def test_the_cause_is_accused_and_not_who_waited_for_it():
    """0 waits for 1, which waits for 2: 2 is the culprit."""
    network = MemoryNetwork(3)
    network.transport(1).report_waiting_on(2)
    error = network.transport(0).failure(1, "did not answer within 1 s", patience=1.0)
    assert str(error).startswith("rank 2")
