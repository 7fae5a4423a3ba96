from __future__ import annotations

from dataclasses import replace

import pytest
from tests.reproduction.test_figures import invented

from matcha.zoo.recipes import Choices, recipe
from reproduction import campaign, paper
from reproduction.campaign import Campaign, plan_of
from reproduction.paper import group
from reproduction.trials import Trial, run_trial


def test_earlier_results_are_found_and_nothing_is_trained(tmp_path):
    trials = group("digits8").trials[:2]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(result.to_line() + "\n" for result in invented(trials)))
    found = Campaign(earlier=[path])
    assert [result.trial.label for result in found.run(trials)] == ["vanilla", "matcha 0.5"]
    assert not list(found.run(group("ptb").trials))
    assert not list(found.run([]))


def test_training_tunes_the_rate_on_vanilla(monkeypatch):
    tuned = replace(group("digits8"), rates=(1e-5, 0.05))
    monkeypatch.setitem(paper.GROUPS, "digits8", tuned)
    found = list(campaign.Campaign(quick=True, epochs=1, device="cpu").run(tuned.trials[:2]))
    assert [result.trial.learning_rate for result in found] == [0.05, 0.05]
    assert [result.trial.strategy for result in found] == ["vanilla", "matcha"]
    assert len(found[0].records) == 1


def test_a_seed_decides_the_partition_too(monkeypatch):
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
