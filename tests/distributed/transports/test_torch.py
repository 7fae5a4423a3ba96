from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed import cases

import matcha.distributed.transports.torch as module
from matcha.distributed import TorchTransport
from matcha.errors import InputError


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_case_over_gloo_equals_the_definition(workers, tmp_path: Path) -> None:
    cases.write_plans(tmp_path)
    workers.run("cases.py", "gloo", str(tmp_path), num_workers=cases.NUM_WORKERS, timeout=250)
    cases.check_folder("gloo", tmp_path)


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        TorchTransport()


def test_a_dead_store_costs_the_better_message_only() -> None:
    def gone() -> bytes:
        raise RuntimeError("connection refused")

    assert module._quickly(gone) is None
