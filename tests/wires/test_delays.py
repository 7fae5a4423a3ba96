from __future__ import annotations

import numpy as np
import pytest
from tests.wires.definition import Definition

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.strategies import Local
from matcha.timing import LinkSeconds, RandomLinks, Scaled, Units
from matcha.wires import parse_wire
from matcha.wires.wire import BLOCK, budget_over, timing_over

ER8 = families.paper("er8")
WIRES = ("bfloat16", "modulo:8", "modulo:3", "lowrank:4")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", ["matcha", "periodic", "single", "greedy"])
def test_a_budget_keeps_its_meaning_and_buys_more_rounds(strategy, wire) -> None:
    budget = 0.02 if "lowrank" not in wire else 0.0005
    whole = matcha.plan(ER8, budget, strategy)
    small = matcha.plan(ER8, budget, strategy, wire=wire)
    share = parse_wire(wire).size_ratio()
    assert small.budget == budget
    assert small.expected_comm_time == pytest.approx(whole.expected_comm_time, rel=0.02)
    assert sum(small.probabilities) == pytest.approx(sum(whole.probabilities) / share, rel=0.05)


@pytest.mark.parametrize("strategy", ["allreduce", Local(mixing="average")])
def test_an_exact_average_takes_whole_values(strategy) -> None:
    """Neither engine averages over a coded wire; both took it for meetings of weight 1/m."""
    with pytest.raises(InputError, match="adds up whole values, not what the wire 'modulo:3'"):
        matcha.plan(matcha.families.ring(4), 0.5, strategy, wire="modulo:3")


def test_no_more_rounds_than_vanilla_has() -> None:
    plan = matcha.plan(ER8, 0.5, "matcha", wire="modulo:3")
    assert sum(plan.probabilities) == pytest.approx(5)
    assert plan.budget == 0.5
    vanilla = matcha.plan(ER8, 1.0, "vanilla", wire="modulo:8")
    assert vanilla.budget == 1.0
    assert vanilla.expected_comm_time == pytest.approx(5 * parse_wire("modulo:8").size_ratio())


def test_a_plan_with_a_wire_is_saved_agreed_and_loaded(tmp_path) -> None:
    plans = {wire: matcha.plan(ER8, 0.02, "greedy", wire=wire) for wire in ("float32", "modulo:3")}
    plan = plans["modulo:3"]
    plan.save(tmp_path / "plan.json")
    again = matcha.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.wire == parse_wire("modulo:3")
    assert again.digest == plan.digest != plans["float32"].digest
    assert again.consensus_error == pytest.approx(plan.consensus_error)
    assert "modulo:3" in plan.summary()


@pytest.mark.parametrize("name", ["modulo:8", "modulo:4", "modulo:3"])
def test_a_plan_predicts_the_disagreement_that_a_wire_leaves(name) -> None:
    exact, wire = matcha.plan(ER8, 0.2, "greedy"), parse_wire(name)
    rough = matcha.plan(ER8, 0.2 * wire.size_ratio(), "greedy", wire=name)
    random = np.random.default_rng(0)
    x = np.repeat(1e3 * random.normal(size=(1, 4 * BLOCK)), 8, 0)
    definition, found = Definition(wire, [(4 * BLOCK,)], x), []
    for k, round in enumerate(exact.rounds(0, 200)):
        x = definition.mix(round, x + random.normal(size=x.shape))
        found.append(np.square(x - x.mean(0)).mean() if k >= 50 else 0.0)
    measured = np.sum(found) / 150
    assert 0.8 < rough.consensus_error / measured < 1.25
    assert rough.consensus_error > exact.consensus_error


def test_latency_is_not_saved() -> None:
    links = len(ER8.links)
    timing = LinkSeconds(ER8.with_link_times([1.0] * links, [0.1] * links))
    assert timing.matching_time((ER8.links[0],)) == pytest.approx(1.0)
    wire = parse_wire("modulo:8")
    small = timing_over(timing, wire)
    assert small.matching_time((ER8.links[0],)) == pytest.approx(0.1 + 0.9 * wire.size_ratio())
    assert budget_over(ER8, timing, wire, 0.1) == pytest.approx(
        0.1 / (0.1 + 0.9 * wire.size_ratio())
    )
    plan = matcha.plan(ER8, 0.1, "greedy", wire="modulo:8", timing=timing)
    assert plan.expected_comm_time == pytest.approx(0.1 * 5, rel=0.02)


@pytest.mark.parametrize(
    "timing",
    [
        Units(),
        Scaled(lambda n: n**0.5, 5),
        LinkSeconds(ER8.with_link_times([0.5 + k for k in range(len(ER8.links))])),
        RandomLinks(ER8, ((1.0,) * len(ER8.links), (2.0,) * len(ER8.links))),
    ],
)
def test_every_delay_model_knows_smaller_messages(timing) -> None:
    matching = (ER8.links[0],)
    small = timing_over(timing, parse_wire("bfloat16"))
    assert small.matching_time(matching) == pytest.approx(timing.matching_time(matching) / 2)
    assert small.unit == timing.unit


def test_a_wire_that_does_not_exist_is_refused() -> None:
    for name in ("modulo:5", "modulo", "lowrank:0", "float8"):
        with pytest.raises(InputError):
            matcha.plan(ER8, 0.1, "matcha", wire=name)


def test_measured_latencies_of_a_topology_are_not_saved_by_a_wire() -> None:
    number = len(ER8.links)
    timed = ER8.with_link_times([0.11] * number, [0.01] * number)
    link, wire = ((0, 1),), parse_wire("modulo:8")
    small = timing_over(LinkSeconds(timed), wire)
    assert small.matching_time(link) == pytest.approx(0.01 + 0.1 * wire.size_ratio())
    twice = timing_over(LinkSeconds(timed), parse_wire("lowrank:4"))
    assert twice.matching_time(link) > 0.02
    plan = matcha.plan(timed, 0.1, "periodic", wire=wire)
    again = matcha.Plan.from_json(plan.to_json())
    assert again.expected_comm_time == plan.expected_comm_time


def test_a_plan_with_the_transfers_of_old_says_what_to_do() -> None:
    document = matcha.plan(matcha.families.ring(4), 0.5, "periodic").to_json()
    with pytest.raises(InputError, match="'transfers' is unknown: plan again"):
        matcha.Plan.from_json(document | {"timing": {"model": "transfers"}})
