from __future__ import annotations

import pytest
import torch
from tests.distributed.perceptrons import Fixed, double_step, mlp
from torch import nn

from matcha.distributed import Gossip
from matcha.distributed.options import wrapped_by
from matcha.errors import InputError
from matcha.testing import MemoryNetwork, MemoryTransport, run_threads


def test_an_optimizer_that_gossip_does_not_know_is_refused() -> None:
    """Made anew after Gossip, it trained without an exchange; a second one lost updates."""

    def work(transport: MemoryTransport) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossip = Gossip(model, optimizer, Fixed(2), transport=transport, timeout=30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with pytest.raises(InputError, match=r"does not know \(SGD\).*Gossip\(model, \[first, sec"):
            double_step(model, optimizer, torch.ones(2, 4))
        gossip.detach()
        double_step(model, optimizer, torch.ones(2, 4))
        stranger = nn.Linear(4, 1).double()
        double_step(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1), torch.ones(2, 4))

    run_threads(2, work)


def test_a_second_gossip_on_a_model_is_refused_until_the_first_is_detached() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Gossip(model, optimizer, Fixed(2), transport=alone())
    with pytest.raises(InputError, match=r"'0.weight' already belongs to another Gossip"):
        Gossip(model, optimizer, Fixed(2), transport=alone())
    first.detach()
    Gossip(model, optimizer, Fixed(2), transport=alone()).detach()
    Gossip(model, optimizer, Fixed(2), transport=alone())
    optimizer, first = torch.optim.SGD(model.parameters(), lr=0.1), None
    Gossip(model, optimizer, Fixed(2), transport=alone())  # nobody holds the one before


def alone() -> MemoryTransport:
    return MemoryNetwork(1).transport(0)


def test_only_a_gossip_with_optimizers_keeps_others_away() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model.weight.grad = torch.ones(1, 1)
    stranger = torch.optim.SGD(model.parameters(), lr=0.5)
    updates_by_hand = Gossip(model, None, Fixed(2), transport=alone())
    stranger.step()
    assert model.weight.item() == 0.5
    updates_by_hand.detach()

    class Calling(torch.optim.SGD):
        """One of ours that calls another."""

        def step(self, closure=None):
            stranger.step()

    exclusive = Calling(model.parameters(), lr=0.5)
    with Gossip(model, exclusive, Fixed(2), transport=alone()):
        with pytest.raises(InputError, match="does not know"):
            stranger.step()
        assert model.weight.item() == 0.5
        exclusive.step()
        assert model.weight.item() == 0.0


def test_a_wrapper_is_what_holds_another_optimizer() -> None:
    inside = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    wrapper = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    setattr(wrapper, "optimizer", inside)  # noqa: B010  (mypy knows no such field)
    assert wrapped_by(wrapper) is inside
    assert wrapped_by(inside) is None
