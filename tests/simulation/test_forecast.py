"""The forecast of the consensus distance: its steady state, and what training makes of it."""

from __future__ import annotations

import pytest
from tests.simulation.tasks import er8

from matcha.simulation import Settings, Simulation
from matcha.simulation.forecast import Forecast
from matcha.zoo.recipes import Choices, recipe


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_the_steady_state_is_the_plans_consensus_error(memory):
    error, rate, spread = 3.0, 0.1, 2.0
    forecast = Forecast(momentum=memory)
    found = forecast.advance([rate] * 2000, spread, memory, error)
    w = (error / (1 + error)) ** 0.5
    expected = error * rate**2 * spread * (1 + w * memory) / (1 - w * memory)
    assert found == pytest.approx(expected)


def test_a_drop_of_the_rate_is_forgotten_only_slowly():
    forecast = Forecast(momentum=0.0)
    before = forecast.advance([0.1] * 2000, 1.0, 0.0, 50.0)
    after = forecast.advance([0.001] * 10, 1.0, 0.0, 50.0)
    assert after == pytest.approx(before * (50 / 51) ** 10, rel=0.01)


def test_its_state_can_be_kept():
    first, second = Forecast(momentum=0.9), Forecast(momentum=0.9)
    first.advance([0.1] * 5, 1.0, 0.95, 2.0)
    second.load(first.state())
    assert second.advance([0.1], 1.0, 0.9, 2.0) == first.advance([0.1], 1.0, 0.9, 2.0)


@pytest.mark.parametrize("partition", ["iid", "shards"])
@pytest.mark.parametrize(("strategy", "budget"), [("greedy", 0.1), ("matcha", 0.5)])
def test_rates_that_change_and_data_that_differ_keep_it_within_a_factor_of_ten(
    strategy, budget, partition
):
    chosen = recipe("logistic")
    task = chosen.task(Choices(num_workers=8, partition=partition))
    settings = Settings(epochs=6, schedule=chosen.schedule(6), optimizer=chosen.optimizer)
    for record in Simulation(task, er8(strategy, budget), settings, compute_time=0.01):
        assert 0.1 < record.predicted_consensus / record.consensus_distance < 10
