"""The options of Gossip, and the table of what does not go together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.distributed import cases
from torch import nn

import matcha
from matcha.distributed import Gossip, GossipOptions, options
from matcha.distributed.options import EXCLUSIONS, Exclusion, Feature, Setup, find_exclusion
from matcha.errors import InputError
from matcha.plans import OuterStep
from matcha.testing import MemoryNetwork, run_threads
from matcha.training.momentum import Momentum
from matcha.training.optimizers import SGD
from matcha.wires import parse_wire

RING = matcha.families.ring(3)
PAIRS = matcha.plan(RING, 0.5, "greedy")
MADE: dict[Feature, dict[str, Any]] = {
    options.OVERLAP: {"options": {"overlap": True}},
    options.ASYNCHRONOUS: {"options": {"asynchronous": True}},
    options.MOMENTUM: {"momentum": Momentum(kind="outer")},
    options.OTHER_MOMENTUM: {"momentum": Momentum(kind="quasi-global")},
    options.FOLLOWED: {"momentum": Momentum(kind="tracking")},
    options.RATE_FIRST: {"momentum": Momentum(kind="outer", rate_first=True)},
    options.OUTER_PLAN: {"plan": replace(PAIRS, outer=OuterStep())},
    options.TOP_K: {"plan": matcha.plan(RING, 1.0, "sparseloco")},
    options.TRACKING: {"momentum": Momentum(kind="tracking")},
    options.MOMENTUM_TRACKING: {"momentum": Momentum(kind="momentum-tracking")},
    options.EXACT_DIFFUSION: {"momentum": Momentum(kind="exact-diffusion")},
    options.SHARED: {"momentum": Momentum(kind="shared")},
    options.CLIP: {"options": {"clip": 1.0}},
    options.REPLAN: {"options": {"replan": 10}},
    options.CONTINUE: {"options": {"on_loss": "continue"}},
    options.MESH: {"has_mesh": True},
    options.TRANSPORT: {"transport_given": True},
    options.GROUP: {"num_parts": 2},
    options.SHARDED: {"model": nn.Linear(1, 1)},
    options.NO_OPTIMIZER: {"optimizers": ()},
    options.SEVERAL_GRADIENTS: {
        "optimizers": (torch.optim.LBFGS(nn.Linear(1, 1).parameters(), lr=0.1),)
    },
    options.LBFGS: {"optimizers": (torch.optim.LBFGS(nn.Linear(1, 1).parameters(), lr=0.1),)},
    options.NOT_SGD: {"optimizers": (torch.optim.Adam(nn.Linear(1, 1).parameters()),)},
    options.BESIDE: {"options": {"overlap": True}},
    options.SHARED_TRANSPORT: {"others": (GossipOptions(),)},
    options.TASK: {"call": "train"},
    options.JOIN: {"call": "join"},
    options.GROWTH: {"call": "grow"},
    options.EPOCHS: {"call": "epochs"},
    options.LOAD_STATE: {"call": "load_state_dict"},
    options.ONE_THREAD: {"transport": SimpleNamespace(threads=False)},
    options.NO_LINKS: {"transport": MemoryNetwork(1).transport(0)},
}


def plan_with(choice: Feature) -> matcha.plans.PlanLike:
    if choice in (options.DIRECTED, options.ONE_WAY_LINKS, options.SET_PLAN):
        topology = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0)], directed=True)
        return matcha.plan(topology, 0.5, "greedy")
    if choice in (options.ONE_WAY_ROUNDS, options.NOT_PAIRS):
        return cases.real_plan("greedy", "push")
    if choice is options.PUSH_SUM:
        return cases.real_plan("rounds", "push", 3)
    if choice is options.STAGES:
        return matcha.staged_plan(RING, {0: 0.5}, "periodic")
    if choice is options.LOW_RANK:
        return matcha.plan(RING, 0.5, "greedy", wire="lowrank:1")
    if choice is options.CODED_WIRE:
        return matcha.plan(RING, 0.5, "greedy", wire="modulo:4")
    if choice is options.NOT_WHOLE:  # of relayed sums, beside which it is refused
        return replace(matcha.plan(RING, 1.0, "relaysum"), wire=parse_wire("bfloat16"))
    if choice is options.WEIGHTS:
        return matcha.plan(RING, 0.5, "greedy", worker_weights=[1, 2, 3])
    if choice is options.RELAY:
        return matcha.plan(RING, 1.0, "relaysum")
    strategy = {options.NO_MEETINGS: "allreduce", options.FIXED_PLAN: "vanilla"}[choice]
    return matcha.plan(RING, 1.0, strategy)


def setup_with(*choices: Feature) -> Setup:
    """A setup that has these choices and otherwise nothing out of the ordinary."""
    chosen: dict[str, Any] = {"plan": PAIRS, "optimizers": (SGD(),)}
    asked: dict[str, Any] = {}
    for choice in choices:
        made = dict(MADE[choice]) if choice in MADE else {"plan": plan_with(choice)}
        asked |= made.pop("options", {})
        chosen |= made
    return Setup(options=GossipOptions(**asked), **chosen)


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda e: e.message.partition(":")[0])
def test_each_pair_of_the_table_is_refused(exclusion: Exclusion, monkeypatch) -> None:
    monkeypatch.setattr(options, "is_sharded", lambda _: True)
    for choice in (exclusion.first, exclusion.second):
        assert choice.is_in(setup_with(choice)), choice.name
        assert not choice.is_in(setup_with()), choice.name
    found = find_exclusion(setup_with(exclusion.first, exclusion.second))
    assert found is not None
    assert found.first is exclusion.first
    assert exclusion.message.endswith(".")


def test_an_ordinary_setup_is_refused_by_nothing() -> None:
    assert find_exclusion(setup_with()) is None
    assert find_exclusion(setup_with(options.OVERLAP, options.CLIP, options.REPLAN)) is None


def test_options_are_given_whole_or_by_keyword() -> None:
    def work(transport) -> list[str]:
        found = []
        for given in (
            {"options": GossipOptions(overlap=True, bucket_cap_mb=1)},
            {"options": GossipOptions(bucket_cap_mb=1), "overlap": True},
            {"overlap": True, "bucket_cap_mb": 1},
        ):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with Gossip(model, optimizer, PAIRS, transport=transport, **given) as gossip:
                found.append(gossip.state.options.describe())
        return found

    for found in run_threads(3, work):
        assert len(set(found)) == 1
        assert "overlap True" in found[0]


def test_unknown_options_are_a_type_error() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="overlapp"):
        Gossip(model, optimizer, PAIRS, overlapp=True)


@pytest.mark.parametrize("option", [{"asynchronous": True}, {}])
def test_automatic_momentum_is_local_where_another_is_excluded(option) -> None:
    """It was refused with `asynchronous=True`, though `local` is a choice that `auto` may make."""

    def work(transport) -> str:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        chosen = {"transport": transport, "momentum": "auto", **option}
        with Gossip(model, optimizer, PAIRS, **chosen) as gossip:
            return gossip.state.momentum.spec.kind

    assert set(run_threads(3, work)) == {"local" if option else "quasi-global"}


def test_a_bad_combination_is_refused_before_any_transport_is_opened(monkeypatch) -> None:
    def opened(*_: object) -> None:
        raise AssertionError("a transport was opened")

    monkeypatch.setattr("matcha.distributed.gossip.find_placement", opened)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="overlap=True does not go with asynchronous=True"):
        Gossip(model, optimizer, PAIRS, overlap=True, asynchronous=True)
