"""The measure that decides: the average model's loss on all training data."""

from __future__ import annotations

import math

import pytest
import torch
from tests.simulation.tasks import er8

import matcha
from matcha.simulation import Settings, Simulation
from matcha.training import evaluation
from matcha.training.evaluation import sample_losses, score
from matcha.zoo.recipes import Choices, recipe

CHOSEN = recipe("logistic")
SETTINGS = Settings(epochs=4, schedule=CHOSEN.schedule(4), optimizer=CHOSEN.optimizer)


def task_of(**choices):
    task = CHOSEN.task(Choices(num_workers=8, **choices))
    task.to(torch.device("cpu"), torch.float32)
    return task


def test_the_sample_is_the_same_every_time_and_shared_out_among_workers():
    task = task_of()
    model = task.model().eval()
    whole = sample_losses(model, task, SETTINGS)
    assert whole == sample_losses(model, task, SETTINGS)
    parts = [sample_losses(model, task, SETTINGS, workers=[w]) for w in range(8)]
    assert sorted(loss for part in parts for loss in part) == pytest.approx(sorted(whole))


def test_a_sample_says_its_error_and_all_data_have_none(monkeypatch):
    task = task_of()
    model = task.model().eval()
    all_data = score(model, task, SETTINGS)
    assert all_data.train_loss_error == 0
    monkeypatch.setattr(evaluation, "SAMPLE", 300)
    sample = score(model, task, SETTINGS)
    assert sample.train_loss_error > 0
    off = abs(sample.train_loss - all_data.train_loss)
    assert off < 4 * sample.train_loss_error


def test_the_accuracys_error_is_the_samples():
    found = score(task_of().model().eval(), task_of(), SETTINGS).test
    share = found.accuracy * (1 - found.accuracy)
    assert found.accuracy_error == pytest.approx(math.sqrt(share / found.examples))


def test_silence_looks_perfect_to_the_workers_and_not_to_the_measure():
    """On shards each silent worker knows its own classes, and their average knows little."""
    last = {}
    for strategy in ("silent", "vanilla"):
        plan = matcha.plan(matcha.families.paper("er8"), 1.0, strategy)
        task = task_of(partition="shards")
        last[strategy] = list(Simulation(task, plan, SETTINGS, compute_time=0.01))[-1]
    assert last["silent"].worker_loss < last["vanilla"].worker_loss
    assert last["silent"].train_loss > last["vanilla"].train_loss


def test_evaluating_is_not_on_the_clock():
    plan = er8("vanilla")
    seldom = Settings(epochs=4, schedule=CHOSEN.schedule(4), evaluate_every=4)
    often = Settings(epochs=4, schedule=CHOSEN.schedule(4))
    times = [
        list(Simulation(task_of(), plan, settings, compute_time=0.01))[-1].time
        for settings in (seldom, often)
    ]
    assert times[0] == times[1]
