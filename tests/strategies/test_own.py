"""What users bring themselves: strategies, probabilities, matchings, rounds, weights, delays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import matcha
from matcha import Plan, families, timing
from matcha.errors import InputError, PlanError
from matcha.matchings import decompose
from matcha.mixing import metropolis_weights
from matcha.rounds import RoundProcess
from matcha.schedules import Cycle
from matcha.strategies import Matcha, Request, Rounds, Single, Vanilla, make_strategy, strategy_with

ER8 = families.paper("er8")
AUTHORS = families.paper_matchings("er8")


def in_turn(request: Request) -> Plan:
    matchings = decompose(request.topology, seed=request.seed)
    cycle = tuple((j,) for j in range(len(matchings)))
    return Plan(
        process=RoundProcess(
            topology=request.topology,
            matchings=matchings,
            schedule=Cycle(cycle=cycle, num_matchings=len(matchings)),
            mixing="pairwise",
            alpha=request.alpha or 0.5,
        ),
        strategy=request.strategy,
        budget=request.budget,
        timing=request.timing,
        num_colors=len(matchings),
    )


def test_a_strategy_of_ones_own(tmp_path):
    plan = matcha.plan(ER8, 0.2, in_turn)
    assert plan.strategy == "in_turn"
    assert [plan.round(k).indices for k in range(3)] == [(0,), (1,), (2,)]
    assert 0 < plan.rho < 1
    assert plan.expected_comm_time == 1.0
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(InputError, match="returned None, which is not a Plan"):
        matcha.plan(ER8, 0.2, lambda request: None)


def test_probabilities_of_ones_own():
    p = [0.9, 0.2, 0.3, 0.4, 0.2]
    plan = matcha.plan(ER8, 0.4, Matcha(probabilities=p), matchings=AUTHORS)
    best = matcha.plan(ER8, 0.4, matchings=AUTHORS)
    assert plan.probabilities == tuple(p)
    assert best.rho <= plan.rho < 1
    assert plan.expected_comm_time == pytest.approx(2.0)
    # The weight is the best for these probabilities.
    for alpha in (0.9 * plan.alpha, 1.1 * plan.alpha):
        assert plan.with_process(alpha=alpha).rho > plan.rho
    pairs = matcha.plan(ER8, 0.4, Matcha(probabilities=p, mixing="pairwise"), matchings=AUTHORS)
    assert pairs.rho < plan.rho
    one = matcha.plan(ER8, 0.2, Single(probabilities=[0.2] * 5), matchings=AUTHORS)
    assert one.probabilities == (0.2,) * 5
    for budget, strategy, given, message in (
        (0.3, "matcha", p, "more than the budget of 0.3: give budget=0.4"),
        (0.1, "single", [0.2] * 5, "more than the budget"),
        (0.9, "single", [0.5] * 5, "sum to more than 1"),
        (0.5, "greedy", p, "takes no probabilities: leave it out, or use matcha, single"),
        (0.5, "matcha", "x", "list of numbers"),
        (0.5, "matcha", [0.1], "1 probabilities were given for 5 matchings"),
        (1.0, "matcha", [float("nan")] * 5, r"in \[0, 1\]"),
    ):
        with pytest.raises(InputError, match=message):
            matcha.plan(
                ER8, budget, make_strategy(strategy, probabilities=given), matchings=AUTHORS
            )


def test_rounds_of_ones_own():
    rounds = [[AUTHORS[0]], [], [AUTHORS[1], AUTHORS[2]], [AUTHORS[3], [(1, 0)]]]
    plan = matcha.plan(ER8, strategy=Rounds(rounds=rounds))
    assert plan.strategy == "rounds"
    assert [len(plan.round(k).matchings) for k in range(5)] == [1, 0, 2, 2, 1]
    assert plan.expected_comm_time == 5 / 4
    spread = matcha.plan(ER8, strategy=Rounds(rounds=rounds, mixing="laplacian"))
    assert spread.smallest_self_weight >= 0
    for given, message in (
        ([[[(0, 1), (1, 2)]]], "twice"),
        ([[[(0, 2)]]], "not a link"),
        ([[], []], "no round has a matching"),
        (3, "lists of matchings"),
        ([[3]], "pairs of worker numbers"),
    ):
        with pytest.raises(InputError, match=message):
            matcha.plan(ER8, strategy=Rounds(rounds=given))
    with pytest.raises(InputError, match=r"give budget=0\.6"):
        matcha.plan(ER8, 0.5, Rounds(rounds=[AUTHORS[:3]]))
    with pytest.raises(InputError, match=r"greedy strategy takes no rounds: .* use rounds"):
        make_strategy("greedy", rounds=rounds)
    with pytest.raises(InputError, match="needs rounds="):
        matcha.plan(ER8, 0.5, "rounds")


@pytest.mark.parametrize("strategy", ["matcha", "vanilla", "periodic", "single", "greedy"])
def test_alpha_of_ones_own(strategy):
    plan = matcha.plan(ER8, 0.4, strategy_with(strategy, alpha=0.11, effort="none"))
    found = matcha.plan(ER8, 0.4, strategy_with(strategy, effort="none"))
    assert plan.alpha == 0.11
    assert plan.rho != found.rho
    assert any("is yours" in note for note in plan.notes)
    assert found.with_process(alpha=0.11).rho == pytest.approx(plan.rho)
    with pytest.raises(InputError, match=r"in \(0, 1\]"):
        matcha.plan(ER8, 0.4, strategy_with(strategy, alpha=-1))


@pytest.mark.parametrize("strategy", ["matcha", "vanilla", "periodic", "single"])
def test_weights_of_ones_own(strategy, tmp_path):
    plan = matcha.plan(ER8, 0.2, strategy_with(strategy, weights="metropolis", effort="none"))
    weights = metropolis_weights(ER8)
    W = np.eye(8)
    for (i, j), w in weights.items():
        W[[i, j], [j, i]] += w
        W[[i, j], [i, j]] -= w
    if strategy == "vanilla":
        np.testing.assert_allclose(plan.mixing_matrix(0), W, atol=1e-15)
        assert plan.rho == pytest.approx(np.linalg.norm(W - 1 / 8, 2) ** 2)
    assert plan.smallest_self_weight >= W.diagonal().min() - 1e-12
    same = matcha.plan(ER8, 0.2, strategy_with(strategy, weights=W, effort="none"))
    np.testing.assert_allclose(np.concatenate(same.weights), np.concatenate(plan.weights))
    # What theory says is what happens.
    moment, spread = np.zeros((8, 8)), np.zeros(8)
    x, rng = np.zeros((8, 400)), np.random.default_rng(0)
    for k, round_ in enumerate(plan.rounds(0, 6000)):
        moment += round_.matrix(8).T @ round_.matrix(8)
        x = (
            round_.mix(x + rng.standard_normal(x.shape))
            if round_
            else x + rng.standard_normal(x.shape)
        )
        if k >= 200:
            spread += np.square(x - x.mean(axis=0)).mean(axis=1)
    assert np.linalg.norm(moment / 6000 - 1 / 8, 2) == pytest.approx(plan.rho, abs=0.02)
    assert spread.mean() / 5800 == pytest.approx(plan.consensus_error, rel=0.08)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert (again, again.digest) == (plan, plan.digest)
    assert plan.digest != plan.with_process(weights=None).digest


def test_weights_that_are_none_are_refused():
    W = matcha.plan(ER8, 0.5, Vanilla(weights="metropolis")).mixing_matrix(0)
    for options, message in (
        ({"weights": W[:4]}, "symmetric 8 × 8"),
        ({"weights": 2 * W}, "rows sum to one"),
        ({"weights": np.full((8, 8), 1 / 8)}, "not a link"),
        ({"weights": {(0, 1): 1.5}}, r"in \[0, 1\]"),
        ({"weights": {(0, 2): 0.5}}, "not a link"),
        ({"weights": "metropolys"}, "did you mean 'metropolis'"),
        ({"weights": object()}, "a matrix W"),
        ({"weights": W, "alpha": 0.1}, "leave one out"),
        ({"weights": W, "name": "greedy"}, "takes no weights"),
        ({"weights": W, "mixing": "pairwise"}, "laplacian mixing"),
    ):
        name = options.pop("name", "matcha")
        with pytest.raises(InputError, match=message):
            matcha.plan(ER8, 0.5, make_strategy(name, effort="none", **options))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("greedy", {"decomposition": "links"}),
        ("single", {"decomposition": "cliques"}),
        ("vanilla", {"decomposition": "links"}),
        ("matcha", {"decomposition": "links", "matchings": AUTHORS}),
    ],
)
def test_a_decomposition_is_heeded_or_refused(strategy, options):
    """Before, it was silently ignored."""
    matchings = options.get("matchings")
    with pytest.raises(InputError, match="decomposition"):
        matcha.plan(
            ER8,
            0.5,
            make_strategy(strategy, decomposition=options["decomposition"]),
            matchings=matchings,
        )


# -- delay models ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowded(timing.Timing):
    """A matching costs its number of links."""

    factor: float
    unit: str = "units"

    def matching_time(self, matching):
        return self.factor * len(matching)

    def to_json(self):
        return {"model": "tests-crowded", "factor": self.factor}


class Unsavable(timing.Timing):
    unit = "units"

    def matching_time(self, matching):
        return 1.0


def read_crowded(document, topology):
    return Crowded(factor=document["factor"])


def test_a_delay_model_of_ones_own_is_saved_and_loaded(tmp_path):
    plan = matcha.plan(ER8, 0.4, Matcha(effort="none"), timing=Crowded(factor=2.0))
    assert plan.expected_comm_time == pytest.approx(0.4 * 2 * len(ER8.links), rel=1e-6)
    with pytest.raises(PlanError, match="register_timing"):
        plan.save(tmp_path / "plan.json")
    timing.register_timing("tests-crowded", read_crowded)
    timing.register_timing("tests-crowded", read_crowded)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.expected_comm_time == plan.expected_comm_time
    with pytest.raises(InputError, match="registered already"):
        timing.register_timing("units", read_crowded)


def test_a_model_that_nobody_could_read_is_refused_before_anything_is_lost(tmp_path):
    file = tmp_path / "plan.json"
    matcha.plan(ER8, 0.4, "periodic").save(file)
    before = file.read_text()
    with pytest.raises(PlanError, match="Unsavable cannot be saved"):
        matcha.plan(ER8, 0.4, "periodic", timing=Unsavable()).save(file)
    assert file.read_text() == before
