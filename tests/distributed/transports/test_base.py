from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import matcha
from matcha.distributed import Message
from matcha.distributed.transports.base import MAX_TAG, Tag, meeting_tag
from matcha.testing import MemoryNetwork


@pytest.mark.parametrize("number", [0, 1, min(Tag) - 1, min(Tag), 10**9])
def test_pieces_of_meetings_take_none_of_the_other_tags(number):
    assert 0 <= meeting_tag(number) < min(Tag)
    assert max(Tag) <= MAX_TAG == 32_767


def test_every_tag_has_one_purpose():
    """Two modules that claim one tag could take each other's messages."""
    users = defaultdict(set)
    for file in Path(matcha.__file__).parent.rglob("*.py"):
        for name in re.findall(r"\bTag\.([A-Z]+)\b", file.read_text(encoding="utf-8")):
            users[Tag[name]].add(file.stem)
    assert users.keys() == set(Tag)
    assert all(len(files) == 1 for files in users.values()), users


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
