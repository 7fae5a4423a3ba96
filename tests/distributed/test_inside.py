"""Calls inside other calls and between steps: saving in the middle, inside averaged(), growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.perceptrons import double_step, flat, mlp
from torch import nn

from matcha import families, plan
from matcha.distributed import Gossip
from matcha.errors import InputError, WriteError
from matcha.testing import MemoryTransport, run_threads

THREE = plan(families.ring(3), 0.6, seed=2)


def make(transport: MemoryTransport, **options: Any) -> tuple[nn.Module, Any, Gossip]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    how = {"transport": transport, "timeout": 60, **options}
    return model, optimizer, Gossip(model, optimizer, THREE, **how)


def batch(rank: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + k)
    return torch.randn(4, 4, generator=generator)


def test_own_values_are_neither_saved_nor_replaced_inside_averaged(tmp_path: Path) -> None:
    """save() wrote the average as each worker's own values; load() was undone, both in silence."""

    def work(transport: MemoryTransport) -> None:
        model, optimizer, gossip = make(transport)
        for k in range(3):
            double_step(model, optimizer, batch(transport.rank, k))
        gossip.save(tmp_path)
        own = flat(model)
        state = gossip.state_dict()
        with gossip.averaged():
            with pytest.raises(InputError, match=r"^save\(\) inside averaged\(\) .*leave the with"):
                gossip.save(tmp_path)
            with pytest.raises(InputError, match=r"^load\(\) inside averaged\(\)"):
                gossip.load(tmp_path)
            with pytest.raises(InputError, match=r"^load_state_dict\(\) inside averaged\(\)"):
                gossip.load_state_dict(state)
            with pytest.raises(InputError, match=r"^join\(\) inside averaged\(\)"), gossip.join():
                pass
        assert torch.equal(flat(model), own)
        gossip.detach()

    run_threads(3, work)


def test_a_step_is_still_refused_after_an_average_inside_another() -> None:
    def work(transport: MemoryTransport) -> None:
        model, optimizer, gossip = make(transport)
        with gossip.averaged():
            gossip.averaged_state_dict()
            with pytest.raises(InputError, match=r"a step inside averaged\(\)"):
                double_step(model, optimizer, batch(transport.rank, 0))
        double_step(model, optimizer, batch(transport.rank, 0))
        gossip.detach()

    run_threads(3, work)


@pytest.mark.parametrize("overlap", [False, True])
def test_training_resumes_between_the_steps_of_an_iteration(tmp_path: Path, overlap) -> None:
    """With overlap the exchange under way was repeated from parameters that had moved."""

    def work(transport: MemoryTransport, resumes: bool) -> torch.Tensor:
        critic, maker = mlp(), mlp()
        both = nn.ModuleList([critic, maker])
        first, second = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in both)
        how = {"transport": transport, "timeout": 60, "overlap": overlap}
        gossip = Gossip(both, [first, second], THREE, **how)
        if resumes:
            gossip.load(tmp_path)
        for k in range(4 if resumes else 0, 9):
            if not (resumes and k == 4):
                double_step(critic, first, batch(transport.rank, k))
            if not resumes and k == 4:
                gossip.save(tmp_path)
            double_step(maker, second, batch(transport.rank, 50 + k))
        gossip.state.settle()
        gossip.detach()
        return flat(both)

    whole = run_threads(3, lambda transport: work(transport, False))
    resumed = run_threads(3, lambda transport: work(transport, True))
    assert all(map(torch.equal, whole, resumed))
    assert not torch.equal(whole[0], whole[1])


class Waves(nn.Module):
    """Complex parameters of double precision, which safetensors does not know."""

    def __init__(self) -> None:
        super().__init__()
        turns = torch.linspace(0, 3, 12, dtype=torch.float64).view(4, 3)
        self.phases = nn.Parameter(torch.polar(torch.ones_like(turns), turns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex128) @ self.phases).abs()


def test_double_complex_parameters_are_saved_and_resumed(tmp_path: Path) -> None:
    def work(transport: MemoryTransport) -> None:
        model = Waves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        gossip = Gossip(model, optimizer, THREE, transport=transport, timeout=60)

        def train(first: int, last: int) -> torch.Tensor:
            for k in range(first, last):
                double_step(model, optimizer, batch(transport.rank, k))
            return model.phases.detach().clone()

        train(0, 3)
        gossip.save(tmp_path)
        end = train(3, 7)
        gossip.load(tmp_path)
        assert torch.equal(train(3, 7), end)
        assert end.imag.abs().max() > 0.1
        gossip.load(tmp_path, average=True)
        gossip.detach()

    run_threads(3, work)


def test_a_parameter_appended_to_a_group_is_refused() -> None:
    """It was stepped and never exchanged: only new groups were noticed."""

    def work(transport: MemoryTransport) -> None:
        model, optimizer, gossip = make(transport)
        extra = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        optimizer.param_groups[0]["params"].append(extra)
        with pytest.raises(InputError, match=r"parameters were added to SGD .*shapes \(5,\)"):
            double_step(model, optimizer, batch(transport.rank, 0))
        gossip.detach()

    run_threads(3, work)


def test_a_number_of_checkpoints_that_is_none_is_refused_before_writing(tmp_path: Path) -> None:
    def work(transport: MemoryTransport) -> None:
        _, _, gossip = make(transport)
        for keep in (0, -1, 1.5, "2", None):
            with pytest.raises(InputError, match=r"^keep is .*1 or more"):
                gossip.save(tmp_path, keep=keep)
        gossip.detach()

    run_threads(3, work)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_failed_leaves_nothing_behind(tmp_path: Path) -> None:
    """On a full disk the parts of those that could write stood in the way of the next."""

    def work(transport: MemoryTransport) -> None:
        model, optimizer, gossip = make(transport)
        double_step(model, optimizer, batch(transport.rank, 0))
        extra = {"loss": object()} if transport.rank == 1 else {"loss": 1.0}
        with pytest.raises(WriteError, match=r"rank 1 .* could not write"):
            gossip.save(tmp_path, extra=extra)
        gossip.consensus_distance()  # all have come so far
        assert not list(tmp_path.rglob("*worker-*"))
        gossip.save(tmp_path)
        gossip.detach()

    run_threads(3, work)


@pytest.mark.parametrize("first", [{"overlap": True}, {}])
def test_gossips_that_share_a_transport_exchange_in_the_script(first: dict[str, Any]) -> None:
    """Two that exchange beside it took each other's messages, and blamed the number of steps."""

    def work(transport: MemoryTransport) -> None:
        _, _, one = make(transport, **first)
        with pytest.raises(InputError, match=r"over the same transport: .*detach\(\)"):
            make(transport, overlap=True)
        one.detach()
        model, optimizer, _ = make(transport, overlap=True)
        double_step(model, optimizer, batch(transport.rank, 0))

    run_threads(3, work)
