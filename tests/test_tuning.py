"""Tuning: sensible trade-offs, wires that pay, and a choice that training confirms."""

import json
import math

import numpy as np
import pytest

import matcha
from matcha import families, theory
from matcha.errors import InputError
from matcha.plans import OuterStep
from matcha.report.figures import draw_tuning, save_figure
from matcha.simulation import SGD, Constant, Settings, TaskTrials
from matcha.strategies import Greedy
from matcha.tuning import Problem, floor
from matcha.tuning.search import infer_iterations
from matcha.wires import parse_wire
from matcha.zoo.recipes import Choices, recipe

D10 = families.paper("geometric16-d10")
ER8 = families.paper("er8")


def small(**options):
    defaults = {
        "compute_time": 0.1,
        "link_time": 0.05,
        "strategies": [Greedy(effort="none"), "vanilla"],
        "budgets": [0.05, 0.2, 0.5],
        "wires": ["float32"],
    }
    return matcha.tune(D10, **(defaults | options))


def shards(epochs=9):
    """Logistic regression on digits, two digits a worker: silence learns two of ten."""
    task = recipe("logistic").task(Choices(num_workers=8, partition="shards"))
    settings = Settings(epochs=epochs, schedule=Constant(base=0.1), optimizer=SGD())
    return TaskTrials(task, ER8, settings)


def test_slow_links_ask_for_less_communication():
    budgets = [small(link_time=seconds).best.budget for seconds in (0.001, 0.05, 2.0)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[-1]


def test_unlike_data_asks_for_more_communication():
    alike = small(link_time=0.2, problem=Problem(target_gap=0.01))
    unlike = small(link_time=0.2, problem=Problem(target_gap=0.01, dissimilarity=5.0))
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
    assert "is predicted to reach the target" in table
    assert "More communication" in table or "Less communication" in table
    save_figure(draw_tuning(found), tmp_path / "tune.svg")
    assert (tmp_path / "tune.svg").read_text().startswith("<?xml")
    assert json.loads(json.dumps(found.to_json()))["best"]["strategy"] == found.best.strategy
    overlapped = small(overlap=True)
    assert overlapped.best.seconds < found.best.seconds


def test_a_floor_is_what_simulation_settles_to():
    """Of the workers' own models with all of the coupling; of the average with none of it."""
    plan, rate, h = matcha.plan(D10, 0.2, Greedy(effort="none")), 0.05, np.geomspace(0.05, 1, 20)
    rng = np.random.default_rng(0)
    pulls = rng.standard_normal((16, 20))
    pulls -= pulls.mean(0)
    pulls *= math.sqrt(0.3 / (np.square(pulls).sum() / 16))
    x, own, averages = np.zeros((6, 16, 20)), [], []
    for k, round_ in enumerate(plan.rounds(0, 2500)):
        x -= rate * (x * h + pulls + math.sqrt(1 / 20) * rng.standard_normal(x.shape))
        if round_:
            x = round_.matrix(16) @ x
        if k > 500:
            own.append(float((0.5 * np.square(x) @ h).mean()))
            averages.append(float((0.5 * np.square(x.mean(1)) @ h).mean()))
    errors = theory.consensus_error(plan.process), theory.drift_error(plan.process)
    for coupling, seen in ((1.0, own), (0.0, averages)):
        problem = Problem(
            curvature=float(h.mean()), strong_convexity=0.05, dissimilarity=0.3, coupling=coupling
        )
        assert np.mean(seen) == pytest.approx(floor(problem, 16, rate, *errors), rel=0.25)


def test_what_the_average_does_not_feel_is_not_charged():
    felt, unfelt = (small(link_time=1.0, problem=Problem(coupling=c)) for c in (1.0, 0.0))
    assert unfelt.best.budget <= felt.best.budget
    assert unfelt.best.seconds < felt.best.seconds


def test_wires_are_chosen_by_what_they_save():
    wires = ["float32", "modulo:8", "modulo:3"]
    slow = small(link_time=1.0, wires=wires)
    assert slow.best.wire == "modulo:3"
    assert slow.plan.wire.name == "modulo:3"
    assert slow.best.seconds < small(link_time=1.0).best.seconds
    assert "With whole float32 messages" in slow.table()
    # Where nearly all of a link's time is latency a wire saves nothing, and only adds its noise.
    far = small(link_time=1.0, latency=0.999, wires=wires)
    assert far.best.wire == "float32"
    assert far.plan.timing.unit == "seconds"


def test_the_predicted_error_includes_what_a_wire_leaves():
    found = small(strategies=["vanilla"], wires=["float32", "modulo:2"])
    whole, coarse = found.points
    assert coarse.consensus_error == pytest.approx(
        whole.consensus_error / (1 - parse_wire("modulo:2").residual)
    )
    assert coarse.comm_seconds < 0.1 * whole.comm_seconds


def test_trials_decide_and_few_are_needed():
    trials = shards()
    found = matcha.tune(
        ER8, compute_time=0.01, link_time=0.1, budgets=[1e-5, 0.02, 0.1, 0.5],
        strategies=[Greedy(effort="none"), "vanilla", "silent"], trials=trials,
    )  # fmt: skip
    assert 1 <= found.num_tried <= 8 < len(found.points)
    assert found.best.tried
    assert found.best.wire != "float32"
    # Hardly a meeting, or none: the quickest iterations there are, and no way to the target.
    assert found.best.budget >= 0.02
    assert found.best.strategy != "silent"
    again = trials(found.plan, 10 * trials.exact_iterations)
    assert again == found.best.iterations
    assert found.best.seconds == pytest.approx(again * found.best.iteration_seconds)
    assert "tried" in found.table()
    assert "a trial reached" in found.plan.notes[-1]
    assert math.isinf(trials(matcha.plan(ER8, strategy="silent"), 4 * trials.exact_iterations))


def test_outer_steps_are_for_trials_and_teach_nothing_of_others():
    names, tried = ["diloco", "local"], []

    def measure(plan, limit):
        tried.append(plan.strategy)
        return 60.0 if plan.outer is not None else 90.0

    measure.exact_iterations = 100.0
    chosen = {"compute_time": 0.01, "link_time": 0.1, "strategies": names, "wires": ["float32"]}
    found = matcha.tune(families.complete(4), budgets=[0.1], trials=measure, **chosen)
    assert "diloco" in tried
    assert found.best.strategy == "diloco"
    predicted = matcha.tune(families.complete(4), budgets=[0.1], **chosen)
    if predicted.plan.outer is not None:
        assert "knows nothing of outer steps" in predicted.plan.notes[-1]


def test_outer_steps_and_rates_are_tried_beside_wires_and_budgets():
    """What would be quickest by rule is found, in few trials, and said."""
    tried = []

    def measure(plan, limit, rate_factor=1.0):
        tried.append((plan.budget, plan.outer, rate_factor))
        needed = 100 / plan.budget**0.2 * (0.7 if plan.outer else 1.0)
        return needed * (1 + abs(math.log2(rate_factor / 1.4)))

    measure.exact_iterations = 100.0
    step = OuterStep(rate=0.7, momentum=0.5, nesterov=False)
    chosen = {"compute_time": 0.01, "link_time": 0.1, "strategies": ["matcha"]}
    chosen |= {"outer": [None, step], "rate_factors": [0.5, 0.7, 1.0, 1.4, 2.0]}
    found = matcha.tune(families.complete(4), budgets=[0.01, 0.1, 1], trials=measure, **chosen)
    assert found.best.outer == found.plan.outer == step
    assert found.best.rate_factor == 1.4
    assert [factor for *_, factor in tried if factor != 1.0] == [1.4, 2.0]
    assert "outer 0.7/0.5" in found.table()
    assert "use 1.4 of the learning rate" in found.table()
    assert "1.4 of the learning rate" in found.plan.notes[-1]
    assert len(tried) < len(found.points)
    with pytest.raises(InputError, match="theory knows nothing of outer steps"):
        matcha.tune(families.complete(4), budgets=[0.1], **chosen)


def test_trials_scale_the_learning_rate():
    trials = shards(epochs=6)
    plan = matcha.plan(ER8, 0.3, "vanilla")
    slow, usual = (trials(plan, 6 * trials.exact_iterations, f) for f in (0.25, 1.0))
    assert usual < slow


def test_the_rate_that_theory_advises_is_smaller_where_workers_disagree_more():
    found = small(strategies=["vanilla", "periodic"], budgets=[0.1, 1.0])
    factors = {p.budget: p.rate_factor for p in found.points if p.strategy == "periodic"}
    assert 0 < factors[0.1] < factors[1.0] < 1
    assert "exact averaging's" in found.table()


def test_a_control_is_shown_and_never_chosen():
    with pytest.raises(InputError, match="no strategy reaches"):
        small(strategies=["silent"])
    assert small(strategies=["silent", "vanilla"]).best.strategy == "vanilla"


def test_iterations_are_inferred_from_neighbours():
    known = [(0, 100), (4, 140), (1, 104)]
    assert infer_iterations(0.5, known) == pytest.approx(102)
    assert infer_iterations(2.5, known) == pytest.approx(122)
    assert infer_iterations(8, known) == pytest.approx(180)
    assert infer_iterations(math.inf, known) == math.inf


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"compute_time": 0.0}, "compute time"),
        ({"link_time": None}, "no link times"),
        ({"link_time": -1.0}, "link time"),
        ({"latency": 0.05}, "latency"),
        ({"wires": []}, "a wire"),
        ({"wires": ["modulo:5"]}, "bits"),
        ({"problem": Problem(target_gap=1e-9, gradient_variance=1e9)}, "no strategy reaches"),
    ],
)
def test_bad_input_is_explained(options, complaint):
    with pytest.raises(InputError, match=complaint):
        small(**options)


def test_link_times_of_the_topology_are_used():
    timed = D10.with_link_times([0.05] * len(D10.links))
    found = matcha.tune(timed, compute_time=0.1, strategies=["vanilla"], wires=["float32"])
    assert found.best.comm_seconds == pytest.approx(0.5)
    with pytest.raises(InputError, match="leave link_time and latency out"):
        matcha.tune(timed, compute_time=0.1, link_time=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"smoothness": 0.0},
        {"gradient_variance": -1.0},
        {"coupling": -1.0},
        {"strong_convexity": 2.0},
        {"target_gap": 2.0},
    ],
)
def test_tasks_are_checked(wrong):
    with pytest.raises(InputError):
        Problem(**wrong)
