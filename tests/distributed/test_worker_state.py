from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import matcha
from matcha.distributed import Gossip
from matcha.errors import InputError
from matcha.strategies import Greedy
from matcha.testing import MemoryNetwork, run_threads

PATH = matcha.families.path(2)
PERIODIC = matcha.plan(PATH, 0.5, "periodic")


def make(topology=PATH):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = matcha.plan(topology, 0.5, Greedy(effort="none"))
    return Gossip(model, optimizer, plan, transport=MemoryNetwork(1).transport(0))


def test_a_state_of_0_1_has_no_stages() -> None:
    state = make().state_dict() | {"iteration": 7}
    del state["replanning"]
    gossip = make()
    gossip.load_state_dict(state)
    assert gossip.iteration == 7
    assert gossip.plan is gossip.state.replanning.given


def test_a_state_between_the_steps_of_an_iteration_says_which_were_taken() -> None:
    """Otherwise the resumed worker was a round behind the others."""

    def make_two():
        model = nn.Linear(2, 1)
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        plan = matcha.plan(PATH, 0.5, Greedy(effort="none"))
        return optimizers, Gossip(model, optimizers, plan, transport=MemoryNetwork(1).transport(0))

    (first, _), gossip = make_two()
    first.step()
    assert gossip.iteration == 0
    (_, second), resumed = make_two()
    resumed.load_state_dict(gossip.state_dict())
    second.step()
    assert resumed.iteration == 1


def test_a_state_of_another_plan_is_refused() -> None:
    with pytest.raises(InputError, match="another plan_digest"):
        make().load_state_dict(make(matcha.families.ring(3)).state_dict())


def test_a_round_without_a_meeting_is_none_met() -> None:
    def work(transport):
        model = nn.Linear(2, 1)
        gossip = Gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), PERIODIC,
                        transport=transport, timeout=150.0)  # fmt: skip
        state, found = gossip.state, []
        for _ in range(4):
            state.has_met = False
            gossip.step()
            found.append(state.has_met)
        gossip.detach()
        return found

    busy = [bool(PERIODIC.round(k)) for k in range(4)]
    assert run_threads(2, work) == [busy, busy]


def test_gossip_stays_small_enough_to_know_by_heart() -> None:
    gossip = make()
    public = {name for name in {*dir(Gossip), *vars(gossip)} if not name.startswith("_")}
    assert len(public) <= 20, sorted(public)
    parameters = inspect.signature(Gossip).parameters.keys() - {"options", "keywords"}
    assert len(parameters) <= 8, sorted(parameters)
