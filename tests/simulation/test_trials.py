"""Trials of a task: the target is exact averaging's, iterations are counted to where it is held."""

from __future__ import annotations

import math

import pytest

import matcha
from matcha import families
from matcha.errors import InputError
from matcha.simulation import Constant, Settings, TaskTrials
from matcha.zoo.quadratics import QuadraticTask

RING = families.ring(4)
SETTINGS = Settings(epochs=8, schedule=Constant(base=0.1))


def task():
    return QuadraticTask(4, heterogeneity=0.5, noise=0.1, steps_per_epoch=10, start=5.0)


def test_exact_averaging_needs_what_it_says():
    trials = TaskTrials(task(), RING, SETTINGS)
    exact = matcha.plan(RING, strategy="allreduce")
    assert trials(exact, 200) == trials.exact_iterations <= 60
    assert math.isinf(trials(exact, trials.exact_iterations - 1))


def test_a_target_may_be_given_and_must_be_reached():
    easy = TaskTrials(task(), RING, SETTINGS, target_loss=1.0)
    usual = TaskTrials(task(), RING, SETTINGS)
    assert easy.exact_iterations < usual.exact_iterations
    with pytest.raises(InputError, match="does not hold a training loss"):
        TaskTrials(task(), RING, SETTINGS, target_loss=1e-9)


def test_what_diverges_never_arrives():
    trials = TaskTrials(task(), RING, SETTINGS)
    wild = TaskTrials(task(), RING, SETTINGS, target_loss=trials.target)
    wild.settings = Settings(epochs=8, schedule=Constant(base=1e6))
    assert math.isinf(wild(matcha.plan(RING, strategy="vanilla"), 300))
