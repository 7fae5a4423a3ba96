from __future__ import annotations

import json
from dataclasses import replace

import pytest

from matcha.errors import InputError
from matcha.experiments.reproduction.campaign import Campaign, plan_of
from matcha.experiments.reproduction.figures import maker
from matcha.experiments.reproduction.paper import group
from matcha.experiments.reproduction.trials import Result, Trial, run_trial
from matcha.records import Record
from matcha.tasks.recipes import Choices, recipe


def invented(trials):
    """Results in which fewer exchanges mean a higher loss; periodic is worst, greedy best."""
    order = {"vanilla": 0.0, "greedy": 0.05, "matcha": 0.1, "periodic": 0.4}
    for trial in trials:
        penalty = order[trial.strategy] * (1 - trial.budget)
        units = trial.budget * 5
        records = tuple(
            Record(
                iteration=10 * k, epoch=k, train_loss=1 / k + penalty,
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
    assert found["C_b = 0.1 takes 10 times less communication time an iteration"] == "holds"
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
            broken = replace(result.records[-1], train_loss=float("nan"))
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


def test_earlier_results_are_found_and_nothing_is_trained(tmp_path):
    trials = group("digits8").trials[:2]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(result.to_line() + "\n" for result in invented(trials)))
    campaign = Campaign(earlier=[path])
    assert [result.trial.label for result in campaign.run(trials)] == ["vanilla", "matcha 0.5"]
    assert not list(campaign.run(group("ptb").trials))
    assert not list(campaign.run([]))


def test_training_tunes_the_rate_on_vanilla(monkeypatch):
    from matcha.experiments.reproduction import campaign, paper

    tuned = replace(group("digits8"), rates=(1e-5, 0.05))
    monkeypatch.setitem(paper.GROUPS, "digits8", tuned)
    found = list(campaign.Campaign(quick=True, epochs=1, device="cpu").run(tuned.trials[:2]))
    assert [result.trial.learning_rate for result in found] == [0.05, 0.05]
    assert [result.trial.strategy for result in found] == ["vanilla", "matcha"]
    assert len(found[0].records) == 1


def test_a_seed_decides_the_partition_too(monkeypatch):
    from matcha.experiments.reproduction import campaign, paper

    vanilla = group("digits8").trials[0]
    seeds = replace(group("digits8"), trials=(vanilla, replace(vanilla, seed=1)))
    monkeypatch.setitem(paper.GROUPS, "digits8", seeds)
    tasks = []

    def run(trial, task, *arguments, **options):
        tasks.append(task)
        return run_trial(trial, task, *arguments, **options)

    monkeypatch.setattr(campaign, "run_trial", run)
    found = list(Campaign(quick=True, epochs=1, device="cpu").run(seeds.trials))
    for result, task in zip(found, tasks, strict=True):
        choices = Choices(num_workers=8, seed=result.trial.seed)
        alone = recipe("digits").task(choices)
        assert task.identity() == alone.identity()
    assert tasks[0].identity()["partition"] != tasks[1].identity()["partition"]


def test_plans_use_the_authors_decomposition():
    trial = Trial(task="cifar10", topology="paper:geometric16-d10", strategy="matcha", budget=0.5)
    assert plan_of(trial).rho == pytest.approx(0.7577, abs=1e-4)
    free = Trial(task="digits", topology="ring:6", strategy="periodic", budget=0.5)
    assert plan_of(free).num_workers == 6
