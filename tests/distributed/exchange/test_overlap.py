from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from matcha.distributed.exchange.background import Overlap
from matcha.distributed.exchange.buckets import fill_buckets


@pytest.fixture
def model():
    return nn.Linear(2, 1, bias=False)


@pytest.fixture
def overlap(model):
    made = Overlap(fill_buckets(model, bucket_bytes=100, buffers=False))
    yield made
    made.close()


def add_one(overlap):
    for mixed in overlap.mixed:
        mixed.add_(1.0)


def test_both_changes_are_added(model, overlap):
    """x ← Wx − ηg: the exchange sees x as it was, and the step is not lost."""
    before = model.weight.detach().clone()
    overlap.start(lambda: add_one(overlap))
    overlap.finish()
    with torch.no_grad():
        model.weight.sub_(0.25)  # the optimizer's step
    overlap.merge()
    torch.testing.assert_close(model.weight.detach(), before + 0.75)


def test_a_second_start_does_nothing_until_the_first_is_merged(overlap):
    ran = []
    overlap.start(lambda: ran.append(1))
    overlap.start(lambda: ran.append(2))
    overlap.merge()
    overlap.start(lambda: ran.append(3))
    overlap.merge()
    assert ran == [1, 3]


def test_it_runs_beside_the_caller(overlap):
    threads = []
    overlap.start(lambda: threads.append(threading.current_thread()))
    overlap.finish()
    assert threads[0] is not threading.current_thread()


def test_its_error_is_raised_where_it_is_waited_for(overlap):
    def fail():
        raise ConnectionError("gone")

    overlap.start(fail)
    with pytest.raises(ConnectionError, match="gone"):
        overlap.finish()


def test_a_discarded_exchange_changes_nothing(model, overlap):
    before = model.weight.detach().clone()
    overlap.start(lambda: add_one(overlap))
    overlap.discard()
    assert torch.equal(model.weight.detach(), before)
