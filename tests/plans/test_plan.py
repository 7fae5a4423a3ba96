from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.graphs import topologies

import matcha
from matcha import Plan, families
from matcha.errors import InputError, PlanError
from matcha.rounds import ONE_WAY
from matcha.strategies import STRATEGIES, Greedy, Matcha, Single, strategy_with
from matcha.timing import LinkSeconds, Scaled

ER8 = families.paper("er8")
AUTHORS = families.paper_matchings("er8")


@pytest.fixture(scope="module")
def plan():
    return matcha.plan(ER8, 0.5, matchings=AUTHORS, seed=3)


@given(
    topology=topologies(max_workers=8),
    budget=st.floats(0.01, 1.0),
    strategy=st.sampled_from(["matcha", "vanilla", "periodic", "single"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_saving_and_loading_changes_nothing(tmp_path_factory, topology, budget, strategy, seed):
    plan = matcha.plan(topology, budget, strategy_with(strategy, effort="none"), seed)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    back = Plan.load(path)
    assert back == plan
    assert back.to_json() == plan.to_json()
    assert back.digest == plan.digest
    assert [back.round(k) for k in range(20)] == [plan.round(k) for k in range(20)]


def test_how_much_workers_count_is_part_of_a_plan(tmp_path):
    plain = matcha.plan(families.ring(4), 0.5, "greedy")
    plan = matcha.plan(families.ring(4), 0.5, "greedy", worker_weights=[10, 20, 30, 20])
    assert plan.worker_weights == (0.5, 1.0, 1.5, 1.0)
    assert plan.digest != plain.digest
    assert "0.5 to 1.5 times" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    for wrong in ([1, 2], [1, 2, 3, -1], [0, 0, 0, 0]):
        with pytest.raises(PlanError, match="worker_weights are"):
            matcha.plan(families.ring(4), 0.5, "greedy", worker_weights=wrong)
    staged = matcha.staged_plan("ring:4", {0: 0.5, 9: 1.0}, "greedy", worker_weights=[1, 2, 3, 2])
    assert staged.worker_weights == (0.5, 1.0, 1.5, 1.0)
    with pytest.raises(PlanError, match="share one list of worker_weights"):
        replace(staged, levels=(plain, staged.levels[1]))
    with pytest.raises(InputError, match="plan without them where workers join"):
        matcha.strategies.with_workers(plan, {4: [0, 2]})


CUBE = families.hypercube(3)
NINE = families.complete(9)
FULL = families.complete(8)
WHERE = {"hypercube": CUBE, "base": NINE, "one-peer": FULL, "ceca": FULL}


def made(strategy, **options):
    """A plan of any strategy, on a graph that has the links for it."""
    topology = WHERE.get(strategy, ER8)
    rounds = [[], AUTHORS[:2], AUTHORS[2:3], [AUTHORS[4], AUTHORS[3]]]
    return matcha.plan(
        topology, 0.4, strategy_with(strategy, effort="none", rounds=rounds), **options
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rounds_are_random_access_and_average(strategy):
    plan = made(strategy, seed=5)
    in_order = list(itertools.islice(plan.rounds(100), 40))
    assert in_order == [plan.round(k) for k in range(100, 140)]
    for k in range(20):
        W = plan.mixing_matrix(k)
        np.testing.assert_allclose(W.sum(axis=0), 1)
        np.testing.assert_allclose(W.sum(axis=1), 1)
        if plan.mixing == "laplacian":
            np.testing.assert_array_equal(W, W.T)
    links = plan.topology.arrows if plan.mixing in ONE_WAY else plan.topology.links
    assert all(set(round_.links) <= set(links) for round_ in in_order)


@given(topology=topologies(max_workers=7), budget=st.floats(0.05, 1.0))
@settings(max_examples=10)
def test_activation_frequencies_match_probabilities(topology, budget):
    plan = matcha.plan(topology, budget, Matcha(effort="none"), seed=1)
    n = 4000
    counts = np.zeros(len(plan.matchings))
    for round_ in plan.rounds(0, n):
        counts[list(round_.indices)] += 1
    p = np.array(plan.probabilities)
    # Of a coin that nearly always falls alike a few exceptions are many standard deviations.
    assert (abs(counts - n * p) <= 4 * np.sqrt(n * p * (1 - p)) + 5).all()


def test_sampled_second_moment_matches_the_formula(plan):
    n = 20_000
    moment = np.zeros((8, 8))
    for round_, count in _counted(plan, n):
        W = round_.matrix(8)
        moment += count * (W.T @ W)
    rho = np.linalg.norm(moment / n - np.ones((8, 8)) / 8, 2)
    assert rho == pytest.approx(plan.rho, abs=0.01)


def _counted(plan, n):
    counts = {}
    for round_ in plan.rounds(0, n):
        counts[round_.indices] = counts.get(round_.indices, 0) + 1
    made = {round_.indices: round_ for round_ in plan.rounds(0, n)}
    return [(made[indices], count) for indices, count in counts.items()]


def test_the_same_rounds_in_a_fresh_process(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    code = (
        "import matcha, sys; plan = matcha.Plan.load(sys.argv[1]); "
        "print([plan.round(k).indices for k in (0, 5, 10**9)], plan.digest)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "plan.json")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    expected = [plan.round(k).indices for k in (0, 5, 10**9)]
    assert printed.strip() == f"{expected} {plan.digest}"


def test_digest_covers_what_workers_must_agree_on(plan):
    assert plan.with_process(schedule=replace(plan.schedule, seed=4)).digest != plan.digest
    assert plan.with_process(alpha=plan.alpha * (1 + 1e-15)).digest != plan.digest
    assert replace(plan, notes=("hello",)).digest == plan.digest


def test_delay_models_survive_saving(plan, tmp_path):
    timed = ER8.with_link_times([0.1 * (e + 1) for e in range(len(ER8.links))])
    for number, options in enumerate(
        ({"topology": timed}, {"topology": ER8, "timing": Scaled(lambda n: n**0.5, 6)})
    ):
        made = matcha.plan(budget=0.5, strategy=Matcha(effort="none"), **options)
        made.save(tmp_path / f"{number}.json")
        back = Plan.load(tmp_path / f"{number}.json")
        assert back.expected_comm_time == made.expected_comm_time
        assert back.round_time(back.round(3)) == made.round_time(made.round(3))
    assert isinstance(matcha.plan(timed, 0.5, Matcha(effort="none")).timing, LinkSeconds)


def test_a_link_counts_as_often_as_a_round_uses_it():
    plan = matcha.plan(families.complete(6), 0.5, Greedy(effort="none"))
    rounds = list(plan.rounds(0, len(plan.schedule.period)))
    assert any(len(round_.links) > len(set(round_.links)) for round_ in rounds)
    used = Counter(link for round_ in rounds for link in round_.links)
    shares = {link: used[link] / len(rounds) for link in plan.topology.links}
    assert plan.link_activity == pytest.approx(shares)


@pytest.mark.parametrize("strategy", ["matcha", "periodic", "greedy"])
def test_long_run_time_is_the_expected_time(strategy):
    timed = ER8.with_link_times([0.1 * (e + 1) for e in range(len(ER8.links))])
    plan = matcha.plan(timed, 0.4, strategy_with(strategy, effort="none"), seed=2)
    n = 6000
    spent = sum(plan.round_time(round_) for round_ in plan.rounds(0, n)) / n
    assert spent == pytest.approx(plan.expected_comm_time, rel=0.06)


def test_negative_self_weights_are_told():
    vanilla = matcha.plan(families.paper("geometric16-d10"), 1.0, "vanilla")
    assert vanilla.smallest_self_weight < 0
    assert any("below zero" in note for note in vanilla.notes)
    pairwise = matcha.plan(ER8, 0.5, Single(mixing="pairwise"))
    assert pairwise.smallest_self_weight == 0.5


def test_summary_reads_like_a_plan(plan):
    text = plan.summary()
    for part in ("matcha plan at budget 0.5", "rho 0.6440", "units of communication"):
        assert part in text


DAMAGE = [
    (lambda text: text[: len(text) // 2], "truncated"),
    (lambda text: "", "truncated"),
    (lambda text: text.replace("0.5", "0.6", 1), "checksum"),
    (lambda text: text.replace("matcha.plan/2", "matcha.plan/9"), "checksum"),
    (lambda text: '{"hello": 1}', "not a matcha plan"),
    (lambda text: "[1, 2]", "not a matcha plan"),
    (lambda text: "[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damaged_and_foreign_files_are_refused(plan, tmp_path, damage, message):
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(PlanError, match=message) as error:
        Plan.load(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


EDITS = [
    ({"budget": 1.5}, "budget"),
    ({"budget": float("nan")}, "budget"),
    ({"alpha": -0.1}, "weight"),
    ({"probabilities": [0.5]}, "probabilities"),
    ({"probabilities": [1.5] * 5}, r"in \[0, 1\]"),
    ({"schema": "matcha.plan/9"}, "matcha.plan/9"),
    ({"mixing": "shaken"}, "shaken"),
    ({"schedule": {"kind": "dice"}}, "dice"),
    ({"schedule": {"kind": "cycle", "cycle": [[99]]}}, "does not exist"),
    ({"timing": {"model": "sundial"}}, "sundial"),
    ({"matchings": [[[0, 1], [1, 2]]] * 5}, "twice"),
    ({"matchings": [[[0, 2]]] * 5}, "not a link"),
    ({"matchings": "x"}, "malformed"),
    ({"topology": {"links": [[0, 1], [2, 3]]}}, "not connected"),
]


@pytest.mark.parametrize(("edit", "message"), EDITS)
def test_loading_validates_everything(plan, edit, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_json({**plan.to_json(), **edit})


def test_a_missing_field_is_named(plan):
    document = plan.to_json()
    del document["alpha"]
    with pytest.raises(PlanError, match="lacks 'alpha'"):
        Plan.from_json(document)


def test_unreadable_files(tmp_path):
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "garbage.json").write_bytes(os.urandom(20_000_000))
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(tmp_path / "garbage.json")


@pytest.mark.parametrize("budget", [0, -0.1, 1.5, float("nan"), float("inf"), "0.5", True, None])
def test_bad_budgets(budget):
    with pytest.raises(InputError, match=r"\(0, 1\]"):
        matcha.plan(ER8, budget, "matcha")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "gredy"}, "did you mean 'greedy'"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"matchings": [[(0, 1), (1, 2)]]}, "twice"),
        ({"matchings": [[(0, 1)]]}, "in no matching"),
        ({"matchings": 3}, "pairs of worker numbers"),
        ({"matchings": [*AUTHORS, [(0, 1)]]}, "two matchings"),
        ({"matchings": [[(0, 2)]]}, "not a link"),
    ],
)
def test_bad_requests_are_refused_in_one_sentence(options, message):
    with pytest.raises(InputError, match=message) as error:
        matcha.plan(ER8, 0.5, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixing": "pairwis"}, "did you mean 'pairwise'"),
        ({"effort": "heroic"}, "effort"),
        ({"decomposition": "clique"}, "did you mean 'cliques'"),
    ],
)
def test_bad_options_of_a_strategy_are_refused_in_one_sentence(options, message):
    with pytest.raises(InputError, match=message) as error:
        Matcha(**options)
    assert "\n" not in str(error.value)


def test_json_is_plain(plan):
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
