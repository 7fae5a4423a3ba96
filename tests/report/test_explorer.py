from __future__ import annotations

import pytest

import matcha
from matcha.report.explorer import network
from matcha.strategies import Greedy, Matcha, Rounds
from matcha.sweeps import DEFAULT_BUDGETS


@pytest.fixture(scope="module")
def er8():
    topology = matcha.families.paper("er8")
    own = matcha.plan(topology, 0.33, "matcha")
    strategies = ("vanilla", "periodic", "matcha")
    return own, network(topology, [own], strategies=strategies, budgets=DEFAULT_BUDGETS)


def test_every_stop_holds_the_plan_of_its_budget(er8):
    own, net = er8
    stop = net["budgets"].index(0.5)
    direct = matcha.plan(own.topology, 0.5, Matcha(alpha="error"), matchings=own.matchings)
    point = net["strategies"]["matcha"][stop]
    assert point["rho"] == pytest.approx(direct.rho, rel=1e-4)
    assert point["time"] == pytest.approx(direct.expected_comm_time, rel=1e-4)
    for (i, j), activation, number in zip(
        net["links"], point["activation"], point["matching"], strict=True
    ):
        assert (i, j) in direct.matchings[number]
        assert activation == pytest.approx(direct.probabilities[number], rel=1e-3, abs=1e-6)


def test_the_runs_own_plan_is_a_stop_and_the_start(er8):
    own, net = er8
    assert net["start"] == {"strategy": "matcha", "budget": 0.33}
    point = net["strategies"]["matcha"][net["budgets"].index(0.33)]
    assert point["rho"] == pytest.approx(own.rho, rel=1e-4)


def test_vanilla_has_one_point_and_all_else_one_a_stop(er8):
    _, net = er8
    lengths = {name: len(points) for name, points in net["strategies"].items()}
    assert lengths == {
        "vanilla": 1,
        "periodic": len(net["budgets"]),
        "matcha": len(net["budgets"]),
    }
    assert net["strategies"]["vanilla"][0]["activation"] == [1] * 12


@pytest.mark.parametrize("strategy", ["greedy", "vanilla"])
def test_time_over_a_wire_is_a_share_of_whole_models_time(strategy):
    """The page divided by vanilla over the same wire: a tenth read as all of it."""
    topology = matcha.families.paper("er8")
    budget = 1.0 if strategy == "vanilla" else 0.1
    own = matcha.plan(topology, budget, strategy, wire="modulo:3")
    net = network(topology, [own], strategies=("vanilla", "greedy"), budgets=(0.1,))
    whole = matcha.plan(topology, 1.0, "vanilla")
    assert net["vanilla_time"] == pytest.approx(whole.expected_comm_time, rel=1e-4)
    share = net["strategies"][strategy][0]["time"] / net["vanilla_time"]
    assert share == pytest.approx(0.1, rel=0.03)


def test_without_strategies_only_what_was_run_is_shown():
    topology = matcha.families.ring(6)
    rich, poor = (matcha.plan(topology, b, "periodic") for b in (0.5, 0.25))
    vanilla = matcha.plan(topology, strategy="vanilla")
    net = network(topology, [poor, rich, vanilla, matcha.plan(topology, 0.5, "matcha")])
    assert net["budgets"] == [0.25, 0.5]
    assert list(net["strategies"]) == ["periodic", "vanilla", "matcha"]
    assert [point["budget"] for point in net["strategies"]["periodic"]] == [0.25, 0.5]
    assert net["strategies"]["matcha"][0] is None
    assert net["strategies"]["vanilla"][0]["budget"] == 1
    assert net["vanilla_time"] == 2


def test_a_strategy_over_two_wires_is_two_lines():
    """The slider showed the last of them under the name of both."""
    topology = matcha.families.ring(6)
    whole, small = (matcha.plan(topology, 0.5, "greedy", wire=w) for w in ("float32", "modulo:4"))
    for strategies in ((), ("greedy", "vanilla")):
        net = network(
            topology, [small, whole], strategies=strategies, budgets=(0.2, 0.5), start=small
        )
        own, whole_line = net["strategies"]["greedy, modulo:4"], net["strategies"]["greedy"]
        at = net["budgets"].index(0.5)
        assert own[at]["error"] == pytest.approx(small.consensus_error, rel=1e-4)
        assert whole_line[at]["error"] == pytest.approx(whole.consensus_error, rel=1e-4)
        assert net["start"] == {"strategy": "greedy, modulo:4", "budget": 0.5}
        assert all(own) == bool(strategies)


def test_nothing_is_planned_for_a_page_of_runs(monkeypatch):
    own = matcha.plan(matcha.families.ring(6), 0.1, "greedy")
    monkeypatch.setattr("matcha.report.explorer.plan", None)  # a call would fail
    net = network(own.topology, [own])
    assert net["budgets"] == [0.1]
    assert net["start"] == {"strategy": "greedy", "budget": 0.1}
    assert net["vanilla_time"] is None


def test_positions_fit_the_page_and_own_positions_keep_their_shape():
    net = network(matcha.families.torus(3, 6), strategies=("vanilla",), budgets=(1.0,))
    xs, ys = zip(*net["positions"], strict=True)
    assert (min(xs), max(xs), min(ys)) == (0, 1, 0)
    assert max(ys) == pytest.approx(0.4, abs=0.01)


def test_large_networks_are_not_drawn():
    net = network(matcha.families.complete(70), strategies=("vanilla",), budgets=(1.0,))
    assert net["positions"] is None
    assert net["strategies"]["vanilla"][0]["activation"] == []
    assert net["num_links"] == 70 * 69 // 2


def test_overlapping_matchings_have_no_colour_but_an_activation():
    net = network(matcha.families.paper("er8"), strategies=("greedy",), budgets=(0.3,))
    point = net["strategies"]["greedy"][0]
    assert point["matching"] is None
    assert len(point["activation"]) == 12
    assert sum(point["activation"]) > 0


def test_one_way_links_are_drawn_as_arrows():
    ring = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0), (1, 0)], directed=True)
    payload = network(ring, [], budgets=(0.5,), strategies=("matcha", "greedy"))
    assert payload["directed"]
    assert list(payload["strategies"]) == ["greedy"]
    (point,) = payload["strategies"]["greedy"]
    assert point["mixing"] == "push"
    assert point["matching"] is None
    assert len(point["activation"]) == 4
    both = matcha.plan(matcha.families.ring(4), 0.5, Greedy(mixing="push", effort="none"))
    # Two messages are one exchange, whichever way they go.
    exchanges = sum(p * len(m) for p, m in zip(both.probabilities, both.matchings, strict=True)) / 2
    assert sum(both.link_activity.values()) == pytest.approx(exchanges)


def test_a_plan_over_a_wire_stands_among_plans_over_it():
    topology = matcha.families.paper("er8")
    own = matcha.plan(topology, 0.02, "greedy", wire="modulo:4")
    net = network(topology, [own], strategies=("allreduce", "greedy"), budgets=[0.02, 0.1])
    greedy, (exact,) = net["strategies"]["greedy"], net["strategies"]["allreduce"]
    # Budgets are shares of five whole exchanges at every stop, and an all-reduce sends whole ones:
    # seven eighths twice, and both over worker 4's only link, which a ring has to pass to and fro.
    assert [point["time"] for point in greedy] == pytest.approx([0.1, 0.5], rel=0.02)
    assert exact["time"] == pytest.approx(2 * 2 * 7 / 8)


def test_push_sum_weights_are_told_where_they_are_not_one():
    ring = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0), (1, 0)], directed=True)
    own = matcha.plan(ring, 1.0, Rounds(rounds=[[[(0, 1)]], [[(1, 2)]], [[(2, 0)]], [[(1, 0)]]]))
    payload = network(ring, [own], budgets=(0.5,), strategies=("greedy",))
    (point,) = payload["strategies"]["rounds"]
    assert point["omega"] == pytest.approx(own.omega, rel=1e-3)
    assert sum(point["omega"]) == pytest.approx(3, rel=1e-3)
    assert all(point["omega"] is None for point in payload["strategies"]["greedy"])
    assert "workers' weights go from" in own.summary()
