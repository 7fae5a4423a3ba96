"""What the demo is to do; that it does it is in tests/cli/test_demo.py."""

from __future__ import annotations

import pytest

from matcha.errors import InputError
from matcha.experiments.demo import Demo, make_plans
from matcha.plans import Plan


def test_every_strategy_has_its_plan_where_workers_look_for_it(tmp_path):
    demo = Demo(
        directory=tmp_path,
        topology="ring:4",
        strategies=("vanilla", "periodic"),
        budget=0.5,
        seed=3,
    )
    plans = make_plans(demo)
    assert [plan.budget for plan in plans.values()] == [1.0, 0.5]
    for strategy, plan in plans.items():
        found = Plan.load(demo.plan_file(strategy))
        assert (found.digest, found.seed, found.strategy) == (plan.digest, 3, strategy)
    assert demo.run_directory("vanilla") != demo.run_directory("periodic")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"link_mbps": 0}, "link_mbps must be positive, not 0"),
        ({"target_loss": -1}, "target_loss must be positive, not -1"),
        ({"epochs": 0}, "epochs must be positive, not 0"),
        ({"strategies": ()}, "at least one strategy"),
    ],
)
def test_a_demo_of_nothing_is_refused(tmp_path, wrong, sentence):
    with pytest.raises(InputError, match=sentence):
        Demo(directory=tmp_path, **wrong)
