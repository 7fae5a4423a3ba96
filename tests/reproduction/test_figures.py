from __future__ import annotations

import json
from dataclasses import replace

import pytest

from matcha.errors import InputError
from matcha.records import Record
from reproduction.figures import maker
from reproduction.trials import Result


def invented(trials):
    """Results in which fewer exchanges mean a higher loss; periodic is worst, greedy best."""
    order = {"vanilla": 0.0, "greedy": 0.05, "matcha": 0.1, "periodic": 0.4}
    for trial in trials:
        penalty = order[trial.strategy] * (1 - trial.budget)
        units = trial.budget * 5
        records = tuple(
            Record(
                iteration=10 * k, epoch=k, train_loss=1 / k + penalty, worker_loss=1 / k,
                test_accuracy=0.9 - penalty / 50,
                test_loss=1.0, consensus_distance=1e-3, comm_units=10 * k * units,
            )
            for k in range(1, 11)
        )  # fmt: skip
        yield Result(
            trial=replace(trial, learning_rate=0.1),
            records=records,
            device="invented",
            seconds=1.0,
            plan={"expected_comm_time": units},
            config={"steps_per_epoch": 10},
        )


def verdicts(outcome):
    return {claim.statement: claim.verdict for claim in outcome.claims}


def test_fig3_finds_the_figures_of_the_design(tmp_path):
    outcome = maker("fig3")(invented, quick=True)
    assert set(verdicts(outcome).values()) == {"holds"}
    assert "| geometric16-d10 | 0.7958 |" in outcome.sections["Spectral norms"]
    written = outcome.write(tmp_path)
    assert [path.name for path in written] == ["fig3.png", "fig3.md", "fig3.claims.json"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "![Figure 3" in written[1].read_text()
    assert json.loads(written[2].read_text())[0]["verdict"] == "holds"


def test_fig1_judges_communication_norms_and_training():
    outcome = maker("fig1")(invented, quick=True)
    found = verdicts(outcome)
    assert found["C_b = 0.1 takes 10 times less communication time per iteration"] == "holds"
    assert found["vanilla's ρ with 2.2 times less communication"] == "holds nearly"
    assert found["C_b = 0.6 has a lower ρ than vanilla"] == "holds"
    assert outcome.results


def test_fig4_on_invented_results():
    found = verdicts(maker("fig4")(invented, quick=True))
    assert found["digits: matcha below periodic at C_b = 0.1"] == "holds"
    assert found["digits: greedy below matcha at C_b = 0.02"] == "holds"
    assert (
        found["digits: matcha 0.5 has nearly vanilla's training loss, or less"] == "does not hold"
    )
    assert found["digits: matcha 0.5 within 0.5 points of vanilla's accuracy"] == "holds"


def test_fig5_on_invented_results():
    outcome = maker("fig5")(invented, quick=True)
    found = verdicts(outcome)
    assert found["digits on geometric16-d10: matcha below periodic at C_b = 0.4"] == "holds"
    assert set(outcome.sections) == {"geometric16-d5", "geometric16-d10", "geometric16-d13"}


def test_two_diverged_runs_prove_nothing():
    def diverged(trials):
        for result in invented(trials):
            broken = replace(result.records[-1], worker_loss=float("nan"))
            yield replace(result, records=(*result.records[:-1], broken))

    found = verdicts(maker("fig4")(diverged, quick=True))
    assert found["digits: matcha below periodic at C_b = 0.1"] == "does not hold"


@pytest.mark.parametrize("name", ["fig1", "fig4", "fig5"])
def test_nothing_trained_is_not_measured(name):
    outcome = maker(name)(lambda trials: (), quick=True)
    assert "holds" not in {c.verdict for c in outcome.claims if "loss" in c.statement}


def test_unknown_figure():
    with pytest.raises(InputError, match="did you mean 'fig1'"):
        maker("fig11")
