"""Low-communication training under the names that others published it by."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.simulation.tasks import digits
from tests.training.test_momentum import RATE, Textbook, simulated

import matcha
from matcha import families
from matcha.errors import InputError, PlanError
from matcha.plans import OuterStep
from matcha.simulation import SGD
from matcha.strategies import DiLoCo, GASLoC, Local, NoLoCo, SparseLoCo
from matcha.wires import TopK
from matcha.wires.topk import choose, largest, spread

COMPLETE = families.complete(8)


def trained(strategy, wire="float32", topology=COMPLETE):
    task, plan = digits(name="logistic", steps=4), matcha.plan(topology, 1.0, strategy, wire=wire)
    return task, plan, simulated(task, plan, "local", SGD())


def sgd(x, g):
    return x - RATE * g


def test_noloco_is_its_authors_code():
    """m ← βm + α·mean(Δ) + α(mean(φ) − φ) within a pair, φ ← φ + m, x ← φ."""
    task, plan, found = trained(NoLoCo(period=2))
    book = Textbook(task, plan)
    anchor, moment = book.x.copy(), np.zeros_like(book.x)

    def iteration(x, g, W, met):
        nonlocal anchor, moment
        x = sgd(x, g)
        if not met.any():
            return x
        moment = 0.5 * moment + 0.7 * (W @ (x - anchor)) + 0.7 * (W @ anchor - anchor)
        anchor = anchor + moment
        return anchor

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


@pytest.mark.parametrize("pairs", [False, True])
def test_gasloc_accelerates_gossip(pairs):
    """y = φ + η(x − φ), φ ← Wy + γ(Wy − Wy₋), x ← φ."""
    strategy, momentum = GASLoC(period=2, pairs=pairs), 0.5 if pairs else 0.9
    topology = COMPLETE if pairs else families.paper("er8")
    task, plan, found = trained(strategy, topology=topology)
    book = Textbook(task, plan)
    anchor, last = book.x.copy(), book.x.copy()

    def iteration(x, g, W, met):
        nonlocal anchor, last
        x = sgd(x, g)
        if not met.any():
            return x
        mixed = W @ (anchor + 0.7 * (x - anchor))
        anchor, last = mixed + momentum * (mixed - last), mixed
        return anchor

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("momentum", "settles"), [(None, True), (0.9, False)])
def test_gaslocs_momentum_over_random_pairs_does_not_drive_them_apart(momentum, settles):
    """Steps of pure noise: what is left of disagreement after 60 rounds and after 600."""
    strategy = GASLoC(period=1, pairs=True, outer_momentum=momentum)
    plan = matcha.plan(COMPLETE, 1.0, strategy)
    random, step = np.random.default_rng(0), plan.outer
    anchor, last, apart = np.zeros((8, 500)), np.zeros((8, 500)), []
    for k in range(600):
        mixed = plan.round(k).mix(anchor + step.rate * random.normal(size=anchor.shape))
        anchor, last = mixed + step.momentum * (mixed - last), mixed
        apart.append(((anchor - anchor.mean(0)) ** 2).mean())
    assert (apart[-1] < 10 * apart[59]) == settles


def test_gasloc_on_a_complete_graph_is_diloco():
    found = [trained(strategy(period=2))[2] for strategy in (GASLoC, DiLoCo)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-10)
    assert not np.allclose(found[0], trained(Local(period=2))[2], atol=1e-4)


def test_an_average_by_a_sequence_of_matchings_is_the_average():
    whole = trained(DiLoCo(period=2))[2]
    np.testing.assert_allclose(trained(DiLoCo(period=2, mixing="pairwise"))[2], whole, atol=1e-10)
    six = matcha.plan(families.complete(6), 0.5, "local", wire="modulo:3")
    x = np.random.default_rng(0).normal(size=(6, 5))
    mixed = next(round for round in six.rounds() if round).mix(x.copy())
    np.testing.assert_allclose(mixed, np.tile(x.mean(0), (6, 1)), atol=1e-12)
    with pytest.raises(
        InputError, match="needs the link from worker 0 to 2, which the topology does not"
    ):
        matcha.plan(families.ring(8), 0.5, "diloco", wire="modulo:3")


def test_sparseloco_sends_the_largest_movements_and_keeps_the_rest():
    """e ← βe + Δ, Δ̂ = Q(top-k(e)), e ← e − Δ̂, x ← anchor + mean(Δ̂)."""
    task, plan, found = trained(SparseLoCo(period=2, wire="topk:8"))
    book = Textbook(task, plan)
    sizes = [p.numel() for p in book.model.parameters()]
    anchor, error = book.x.copy(), np.zeros_like(book.x)

    def iteration(x, g, W, met):
        nonlocal anchor, error
        x = sgd(x, g)
        if not met.any():
            return x
        error = 0.95 * error + (x - anchor)
        sent = np.zeros_like(error)
        for start, size in zip(itertools.accumulate([0, *sizes]), sizes, strict=False):
            part = slice(start, start + size)
            for worker in range(8):
                sent[worker, part] = quantized(error[worker, part], 8)
        error, anchor = error - sent, anchor + sent.mean(0)
        return anchor

    np.testing.assert_allclose(found, book.run(iteration), rtol=0, atol=1e-10)


def quantized(values, kept):
    """The largest values in two bits: sign, and above or below the mean magnitude."""
    sent = np.zeros_like(values)
    for start in range(0, len(values), 4096):
        chunk = values[start : start + 4096]
        places = np.argsort(-np.abs(chunk), kind="stable")[: min(kept, -(-len(values) // 8) * 8)]
        sizes = np.abs(chunk[places])
        large = sizes > sizes.mean()
        for kind in (large, ~large & (sizes > 0)):
            if kind.any():
                level = torch.tensor(sizes[kind].mean()).to(torch.bfloat16).item()
                sent[start + places[kind]] = np.sign(chunk[places[kind]]) * level
    return sent


def test_a_message_holds_the_largest_of_each_chunk():
    wire, values = TopK(kept=16), torch.randn(2, 5000, dtype=torch.float64)
    sent = spread(choose(values, wire), 5000, torch.float64)
    expected = np.stack([quantized(row.numpy(), 16) for row in values])
    np.testing.assert_allclose(sent.numpy(), expected, rtol=1e-6)
    assert (sent != 0).sum(1).tolist() == [32, 32]


@pytest.mark.parametrize("name", ["local", "diloco", "sparseloco", "noloco", "gasloc"])
def test_a_period_is_ones_own_or_what_the_budget_buys(name):
    made = matcha.strategies.make_strategy(name, period=20)
    plan = matcha.plan(COMPLETE, 0.5, made)
    assert [k for k in range(60) if plan.round(k)] == [19, 39, 59]
    spent = plan.expected_comm_time
    cheapest = matcha.plan(COMPLETE, spent / 7, name)  # 7 matchings are a full exchange
    assert cheapest.expected_comm_time == pytest.approx(spent, rel=1e-6)
    with pytest.raises(InputError, match="more than the budget"):
        matcha.plan(COMPLETE, spent / 14, made)
    with pytest.raises(InputError, match="period is 0"):
        matcha.strategies.make_strategy(name, period=0)


def test_gathered_messages_are_charged_as_they_travel():
    """m − 1 whole messages per worker and average, where an all-reduce sends 2(m − 1)/m models."""
    dense = matcha.plan(COMPLETE, 0.5, Local(period=4)).expected_comm_time
    sparse = matcha.plan(COMPLETE, 0.5, SparseLoCo(period=4)).expected_comm_time
    assert sparse / dense == pytest.approx(7 * TopK(kept=64).size_ratio() / (2 * 7 / 8))


def test_plans_with_outer_steps_and_gathered_messages_can_be_saved(tmp_path):
    for strategy in (DiLoCo(), NoLoCo(), GASLoC(), SparseLoCo()):
        plan = matcha.plan(COMPLETE, 0.1, strategy)
        plan.save(tmp_path / "plan.json")
        loaded = matcha.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert loaded.digest == plan.digest
    assert matcha.plan(COMPLETE, 0.1, "diloco").digest != matcha.plan(COMPLETE, 0.1, "local").digest
    assert "outer steps after rounds: rate 0.7, Nesterov momentum 0.9" in str(
        matcha.plan(COMPLETE, 0.1, "diloco")
    )
    document = matcha.plan(COMPLETE, 0.1, "diloco").to_json()
    with pytest.raises(PlanError):
        matcha.Plan.from_json(document | {"outer": {"rate": -1}})
    with pytest.raises(PlanError):
        matcha.Plan.from_json(document | {"outer": {"pace": 1}})


def test_what_does_not_go_with_outer_steps_and_top_k_is_refused():
    task, diloco = digits(name="logistic", steps=4), matcha.plan(COMPLETE, 0.5, "diloco")
    with pytest.raises(InputError, match="diloco plan takes an outer step after each round"):
        simulated(task, diloco, "quasi-global")
    sparse = matcha.plan(COMPLETE, 0.5, "sparseloco")
    with pytest.raises(InputError, match="top-k wire remembers"):
        simulated(task, sparse, "outer")
    with pytest.raises(InputError, match="is for exact averages, but greedy has pairwise"):
        matcha.plan(COMPLETE, 0.5, "greedy", wire="topk:64")
    with pytest.raises(InputError, match="messages of sparseloco are topk:64, not modulo:3"):
        matcha.plan(COMPLETE, 0.5, "sparseloco", wire="modulo:3")
    for wrong in ({"rate": 0}, {"momentum": 1}):
        with pytest.raises(InputError, match="an outer"):
            OuterStep(**wrong)
    with pytest.raises(InputError, match="multiple of 8"):
        TopK(kept=63)
    with pytest.raises(InputError, match="memory of a top-k wire is from 0 to 1, not 2"):
        TopK(kept=64, memory=2)


def test_a_plan_keeps_how_many_largest_values_it_sends_and_what_it_remembers(tmp_path):
    """The memory was lost with the file: a plan of one's own was trained by another rule."""
    plan = matcha.plan(COMPLETE, 0.5, "sparseloco", wire=TopK(kept=40, memory=1))
    plan.save(tmp_path / "plan.json")
    assert matcha.Plan.load(tmp_path / "plan.json").wire == TopK(kept=40, memory=1)
    assert matcha.plan(COMPLETE, 0.5, "sparseloco", wire="topk:40@1").digest == plan.digest
    assert matcha.plan(COMPLETE, 0.5, "sparseloco", wire="topk:40").digest != plan.digest


@pytest.mark.parametrize("number", [8, 16, 128, 136, 512])
def test_the_largest_are_found_by_columns_as_by_sorting(number):
    chunks = torch.randn(3, 2, 4096, generator=torch.Generator().manual_seed(number))
    chunks[2] = 0.0  # any will do, but each once
    found = largest(chunks, number)
    assert torch.equal(found[:2], chunks[:2].abs().topk(number).indices)
    assert all(len(set(places.tolist())) == number for places in found[2])
