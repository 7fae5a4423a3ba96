from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.tasks import digits, er8, quadratic

from matcha.errors import InputError
from matcha.simulation import SGD, Constant, Delays, Settings
from reproduction.trials import Result, Trial, read_results, run_trial

TRIAL = Trial(task="digits", topology="paper:er8", strategy="matcha", budget=0.5)
SETTINGS = Settings(
    epochs=2, schedule=Constant(base=0.05), optimizer=SGD(), delays=Delays(compute_time=1.0)
)


@pytest.fixture(scope="module")
def result():
    return run_trial(TRIAL, digits(), er8(), SETTINGS)


def test_a_result_survives_its_line(result):
    again = Result.from_line(result.to_line())
    assert again.trial == replace(TRIAL, epochs=2)
    assert len(again.records) == 2
    assert again.records[-1].train_loss == pytest.approx(result.records[-1].train_loss, rel=1e-6)
    assert again.records[-1].worker is None
    assert again.plan["rho"] == er8().rho
    assert not again.diverged


def test_divergence_survives_its_line():
    settings = replace(SETTINGS, schedule=Constant(base=1e4), epochs=300)
    result = run_trial(TRIAL, quadratic(), er8(), settings)
    assert result.diverged
    assert Result.from_line(result.to_line()).diverged


def test_final_values(result):
    last = result.records[-1]
    assert result.final("train_loss") == last.train_loss
    assert result.final("gradient_norm") is None
    both = (result.records[0].train_loss + last.train_loss) / 2
    assert result.final("train_loss", 2) == pytest.approx(both)


def test_later_results_replace_earlier_ones(tmp_path, result):
    path = tmp_path / "results.jsonl"
    later = replace(result, seconds=123.0)
    path.write_text(result.to_line() + "\n" + later.to_line() + "\n")
    (found,) = read_results([path])
    assert found.seconds == 123.0


@pytest.mark.parametrize("content", ["nonsense\n", '{"item": {}}\n', "[1]\n"])
def test_damaged_results(tmp_path, content):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="does not hold results: line 1"):
        read_results([path])
