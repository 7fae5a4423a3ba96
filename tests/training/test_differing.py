"""Whether workers' data differ, and what momentum `auto` is then."""

import logging

import pytest
import torch

import matcha
from matcha.plans import Events
from matcha.plans.events import Loss
from matcha.simulation import Constant, Settings, Simulation
from matcha.training.differing import data_differ
from matcha.training.optimizers import SGD, Adam
from matcha.training.settings import Execution
from matcha.zoo.recipes import Choices, recipe

RING = matcha.families.ring(4)


def digits(partition, concentration=0.5):
    choices = Choices(
        num_workers=4, model="cnn-gn", partition=partition, concentration=concentration
    )
    return recipe("digits").task(choices)


@pytest.mark.parametrize(
    ("partition", "concentration", "differ"),
    [("iid", 0.5, False), ("dirichlet", 1.0, True), ("shards", 0.5, True)],
)
def test_gradients_tell_whether_data_differ(partition, concentration, differ, caplog):
    state = torch.get_rng_state()
    task = digits(partition, concentration)
    task.to(torch.device("cpu"), torch.float32)
    with caplog.at_level(logging.WARNING, "matcha"):
        assert data_differ(task, Execution()) is differ
    assert len([r for r in caplog.records if "data differ" in r.getMessage()]) == differ
    assert torch.equal(state, torch.get_rng_state())


def kind(partition, *, strategy="greedy", events=None, **settings):
    settings = {"optimizer": SGD(momentum=0.9), "momentum": "auto", **settings}
    chosen = Settings(epochs=1, schedule=Constant(base=0.05), **settings)
    plan = matcha.plan(RING, 0.5, strategy)
    return Simulation(digits(partition), plan, chosen, events=events).momentum.kind


def test_auto_corrects_where_data_differ_and_nothing_forbids_it():
    assert kind("iid") == "quasi-global"
    assert kind("shards") == kind("shards", optimizer=SGD()) == "exact-diffusion"
    assert kind("shards", strategy="relaysum") == "local"
    assert kind("shards", overlap=True) == "quasi-global"
    assert kind("shards", events=Events(losses=(Loss(worker=1, at=2),))) == "quasi-global"
    assert kind("shards", optimizer=Adam()) == kind("iid", optimizer=Adam())
    assert kind("shards", momentum="local") == "local"
