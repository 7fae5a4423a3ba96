"""Tuning: sensible trade-offs, and a choice that simulation confirms."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.tuning import Problem, floor

D10 = families.paper("geometric16-d10")


def small(**options):
    defaults = {
        "compute_time": 0.1,
        "link_time": 0.05,
        "strategies": ["greedy", "vanilla"],
        "budgets": [0.05, 0.2, 0.5],
        "effort": "none",
    }
    return matcha.tune(D10, **(defaults | options))


def benchmark():
    path = Path(__file__).parents[1] / "benchmarks" / "tuning.py"
    spec = importlib.util.spec_from_file_location("tuning_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_slow_links_ask_for_less_communication():
    budgets = [small(link_time=seconds).best.budget for seconds in (0.001, 0.05, 2.0)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def test_unlike_data_asks_for_more_communication():
    alike = small(link_time=0.2, problem=Problem(target=0.01))
    unlike = small(link_time=0.2, problem=Problem(target=0.01, dissimilarity=5.0))
    assert unlike.best.budget >= alike.best.budget
    assert unlike.best.seconds > alike.best.seconds
    assert all(p.drift_error > p.consensus_error for p in unlike.points)


def test_the_report_is_complete(tmp_path):
    found = small()
    assert found.best.seconds == min(point.seconds for point in found.points)
    assert found.plan.budget == found.best.budget
    assert found.plan.strategy == found.best.strategy
    assert "tuned" in found.plan.notes[-1]
    table = found.table()
    assert table.count("*") == 1
    assert "reaches the target" in table
    assert "More communication" in table or "Less communication" in table
    found.plot(tmp_path / "tune.svg")
    assert (tmp_path / "tune.svg").read_text().startswith("<?xml")
    assert json.loads(json.dumps(found.to_json()))["best"]["strategy"] == found.best.strategy
    overlapped = small(overlap=True)
    assert overlapped.best.seconds < found.best.seconds


def test_a_floor_is_what_simulation_settles_to():
    bench = benchmark()
    workload = bench.quadratic("q", D10, dissimilarity=0.3, compute=0.1, link=0.1)
    plan = matcha.plan(D10, 0.2, "greedy", effort="none")
    rate = 0.05
    predicted = floor(
        workload.problem,
        16,
        rate,
        theory.consensus_error(plan),
        theory.drift_error(plan),
    )
    rng = np.random.default_rng(0)
    x = np.zeros((bench.SEEDS, 16, 20))
    gaps = []
    for k, round_ in enumerate(plan.rounds(0, 2500)):
        x -= rate * workload.gradients(x, rng)
        if round_:
            x = round_.matrix(16) @ x
        if k > 500:
            gaps.append(float(workload.gap(x).mean()))
    assert np.mean(gaps) == pytest.approx(predicted, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alike", "unlike", "logistic"])
def test_the_choice_is_near_the_best_of_brute_force(kind):
    bench = benchmark()
    problem = {
        "alike": lambda: bench.quadratic("q", D10, dissimilarity=0.0, compute=0.1, link=0.05),
        "unlike": lambda: bench.quadratic("q", D10, dissimilarity=0.5, compute=0.1, link=0.05),
        "logistic": lambda: bench.logistic("l", families.paper("er8"), compute=0.1, link=0.05),
    }[kind]()
    row = bench.verify(
        problem,
        strategies=("greedy", "vanilla"),
        budgets=(0.05, 0.2, 0.5),
        rates=(1.0, 0.5, 0.25, 0.125),
    )
    assert math.isfinite(row["simulated_seconds"])
    assert row["excess"] <= 0.15


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"compute_time": 0.0}, "compute time"),
        ({"link_time": None}, "no link times"),
        ({"link_time": -1.0}, "link time"),
        ({"problem": Problem(target=1e-9, gradient_variance=1e9)}, "no strategy reaches"),
    ],
)
def test_bad_input_is_explained(options, complaint):
    with pytest.raises(InputError, match=complaint):
        small(**options)


def test_link_times_of_the_topology_are_used():
    timed = D10.with_link_times([0.05] * len(D10.links))
    found = matcha.tune(timed, compute_time=0.1, strategies=["vanilla"], effort="none")
    assert found.best.comm_seconds == pytest.approx(0.5)
    with pytest.raises(InputError, match="leave link_time out"):
        matcha.tune(timed, compute_time=0.1, link_time=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"smoothness": 0.0},
        {"gradient_variance": -1.0},
        {"strong_convexity": 2.0},
        {"target": 2.0},
    ],
)
def test_tasks_are_checked(wrong):
    with pytest.raises(InputError):
        Problem(**wrong)
