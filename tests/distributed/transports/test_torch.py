from __future__ import annotations

import pytest

import matcha.distributed.transports.torch as module
from matcha.distributed import TorchTransport
from matcha.errors import InputError


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        TorchTransport()


def test_a_dead_store_costs_the_better_message_only() -> None:
    def gone() -> bytes:
        raise RuntimeError("connection refused")

    assert module._quickly(gone) is None
