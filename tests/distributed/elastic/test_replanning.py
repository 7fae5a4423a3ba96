"""Plans that follow the network: a slow link is noticed, agreed on, planned for, and remembered."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from tests.distributed.links.linked import run_linked
from torch import nn

import matcha
from matcha.distributed import Gossip, LinkTransport, Pending
from matcha.distributed.elastic import replanning
from matcha.distributed.elastic.replanning import Planner, Replanning
from matcha.distributed.launch.placement import find_placement
from matcha.errors import InputError
from matcha.plans import StagedPlan
from matcha.strategies import Greedy
from matcha.strategies.planning import next_level
from matcha.testing import MemoryTransport, run_threads

RING = matcha.families.ring(4)
PLAN = matcha.plan(RING, 0.5, Greedy(effort="none"))
SLOW, LAG = {0, 1}, 0.6  # seconds: a loaded machine takes less
EVERY, ITERATIONS = 4, 11
SECONDS = dict.fromkeys(RING.links, 0.1) | {(0, 1): 1.0}


class Late(Pending):
    """What takes some time longer."""

    def __init__(self, pending: Pending) -> None:
        self.pending, self.seconds = pending, LAG

    def wait(self, timeout: float) -> None:
        self.pending.wait(timeout)
        time.sleep(self.seconds)
        self.seconds = 0.0


def lagging(transport):
    """The transport, with one link on which models take long; greetings are quick."""
    post = transport.post

    def slow(messages):
        pending = post(messages)
        large = any(m.incoming is not None and m.incoming.nbytes > 64 for m in messages)
        return Late(pending) if large and {messages[0].peer, transport.rank} == SLOW else pending

    transport.post = slow
    return transport


class Worker:
    """Each worker pulls towards a number of its own."""

    def __init__(self, transport, **options) -> None:
        self.model = nn.Linear(50, 1, bias=False).double()
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.goal = float(transport.rank)
        options = {"transport": transport, "timeout": 150.0, "replan": EVERY} | options
        self.gossip = Gossip(self.model, self.optimizer, PLAN, **options)

    def run(self, stop: int) -> None:
        while self.gossip.iteration < stop:
            self.optimizer.zero_grad()
            (self.model.weight - self.goal).square().sum().div(2).backward()
            self.optimizer.step()

    @property
    def values(self) -> np.ndarray:
        return self.model.weight.detach().numpy().ravel().copy()


def right(plan) -> np.ndarray:
    x, goals = np.ones((4, 50)), np.arange(4.0)[:, None]
    for k in range(ITERATIONS):
        x = plan.round(k).mix(x - 0.1 * (x - goals))
    return x


def follow(transport: MemoryTransport | LinkTransport, **options):
    worker = Worker(lagging(transport), **options)
    worker.run(ITERATIONS)
    found = worker.values, worker.gossip.plan, worker.gossip.state_dict()
    worker.gossip.detach()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "links"])
def test_all_change_to_a_plan_that_spares_the_slow_link(kind) -> None:
    if kind == "memory":
        results = run_threads(4, follow)
    else:
        results = run_linked(RING, lambda t: follow(t, on_loss="continue"))
    plans = [plan for _, plan, _ in results]
    assert all(isinstance(plan, StagedPlan) for plan in plans)
    assert len({plan.digest for plan in plans}) == 1
    assert EVERY < plans[0].stages[1].start <= 2 * EVERY  # nobody waited while it was made
    uses = [sum((0, 1) in plans[0].levels[n].round(k).links for k in range(200)) for n in (0, 1)]
    assert uses[1] < uses[0]
    np.testing.assert_allclose(np.stack([x for x, _, _ in results]), right(plans[0]), atol=1e-12)
    state = results[0][2]
    assert (state["plan_digest"], state["replanning"]["draft"]) == (PLAN.digest, None)


@pytest.mark.slow
def test_a_checkpoint_goes_on_by_the_stages_that_it_had_or_was_making(tmp_path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"

    def first(transport):
        worker = Worker(lagging(transport))
        worker.run(EVERY)
        worker.gossip.save(before)
        worker.run(2 * EVERY + 1)
        worker.gossip.save(after)
        found = worker.gossip.plan
        worker.gossip.detach()
        return found

    def second(transport, folder, **options):
        worker = Worker(transport, **options)
        worker.gossip.load(folder)
        worker.run(ITERATIONS)
        found = worker.values, worker.gossip.plan.digest
        worker.gossip.detach()
        return found

    made = run_threads(4, first)[0]
    assert made.digest != PLAN.digest
    for folder, options in ((after, {"replan": 0}), (before, {})):  # what was planned stays
        results = run_threads(4, lambda t, f=folder, o=options: second(t, f, **o))
        assert {digest for _, digest in results} == {made.digest}
        np.testing.assert_allclose(np.stack([x for x, _ in results]), right(made), atol=1e-12)


def test_links_that_compare_as_planned_leave_the_plan_alone(monkeypatch) -> None:
    monkeypatch.setattr("matcha.distributed.elastic.replanning._TRIFLE", 1e9)
    assert run_threads(4, lambda t: follow(t)[1]) == [PLAN] * 4


def test_what_does_not_go_together_is_refused() -> None:
    def work(transport):
        vanilla = matcha.plan(RING, 1.0, "vanilla")
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match="cannot follow"):
            Gossip(model, optimizer, vanilla, transport=transport, replan=5, timeout=150.0)
        with pytest.raises(InputError, match="number of iterations"):
            Gossip(model, optimizer, vanilla, transport=transport, replan=-5, timeout=150.0)
        worker = Worker(transport)
        with (
            pytest.raises(InputError, match=r"join\(\) does not go with replan"),
            worker.gossip.join(),
        ):
            pass

    run_threads(4, work)


def test_a_process_plans_what_this_one_would() -> None:
    assert Planner(PLAN, SECONDS).plan().digest == next_level(PLAN, SECONDS).digest


def test_where_the_process_fails_the_worker_plans_itself(monkeypatch, caplog) -> None:
    caplog.set_level("INFO", logger="matcha.links")
    monkeypatch.setattr(replanning, "_ANSWER", "raise SystemExit(3)")
    assert Planner(PLAN, SECONDS).plan() == next_level(PLAN, SECONDS)
    assert "planning here" in caplog.text


def test_a_planner_that_is_closed_has_ended() -> None:
    planner = Planner(PLAN, SECONDS)
    planner.close()
    assert planner._process.poll() is not None
    with pytest.raises(ValueError, match="closed"):
        planner.plan()


def test_none_waits_for_a_stage_that_cannot_be_planned(caplog) -> None:
    """Only the worker that plans finds out that nothing in this plan depends on links."""
    plan = matcha.plan(RING, 1.0, "allreduce")
    seconds = dict.fromkeys(RING.links, 0.1)

    def work(transport):
        placement = find_placement(plan, transport, None, 30.0, None)
        following = Replanning(plan, EVERY, placement, [torch.zeros(4)], lambda: 30.0)
        following._begin(seconds, EVERY)
        return following.look(EVERY), following.plan is plan

    assert run_threads(4, work) == [(False, True)] * 4
    assert "the next stage cannot be planned: a allreduce plan" in caplog.text
