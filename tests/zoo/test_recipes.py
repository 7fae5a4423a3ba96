from __future__ import annotations

import pytest
from tests.datasets import write_cifar10, write_cifar100, write_ptb, write_text

import matcha
from matcha.errors import InputError
from matcha.simulation import Plateau, Settings, Simulation, StepDecay
from matcha.training.optimizers import make_optimizer
from matcha.zoo.recipes import RECIPES, Choices, recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_trains_an_epoch_on_tiny_data(name, tmp_path):
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    write_ptb(tmp_path, sentences=500)
    write_text(tmp_path)
    chosen = recipe(name)
    small = {
        "cifar10": "resnet8",
        "cifar100": "resnet8",
        "ptb": "lstm-small",
        "ptb-transformer": "transformer-small",
        "text": "transformer-1m",
    }.get(name)
    whole = name in ("ptb", "ptb-transformer", "quadratic", "text")
    task = chosen.task(
        Choices(
            num_workers=2,
            data=tmp_path,
            model=small,
            batch_size=None if name == "quadratic" else 8 if whole else 2,
            num_train=None if whole else 8,
            num_test=None if whole else 4,
        )
    )
    settings = Settings(epochs=1, schedule=chosen.schedule(1), optimizer=chosen.optimizer)
    pair = matcha.plan(matcha.families.path(2), 1.0, "vanilla")
    (record,) = Simulation(task, pair, settings)
    assert record.train_loss > 0
    assert record.test_loss > 0


def test_the_papers_hyperparameters():
    images, text = recipe("cifar10"), recipe("ptb")
    assert images.batch_size == 64
    schedule = images.schedule(200)
    assert isinstance(schedule, StepDecay)
    assert schedule.milestones == (100, 150)
    assert schedule.rate(50) == 0.8
    assert schedule.rate(199) == pytest.approx(0.008)
    assert text.batch_size == 10
    assert text.schedule(40) == Plateau(base=40.0, factor=4)


def test_choices_reach_the_task():
    task = recipe("digits").task(
        Choices(num_workers=4, batch_size=5, partition="shards", num_train=100, seed=3)
    )
    assert (task.num_workers, task.batch_size, task.seed) == (4, 5, 3)
    assert sum(map(len, task.parts)) == 100


def test_unknown_names():
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        recipe("cifar")
    with pytest.raises(InputError, match="did you mean 'adam'"):
        make_optimizer("adma")
    with pytest.raises(InputError, match="sgd"):
        make_optimizer("sgd", speed=1)


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("digits", {"batch_size": 0}, "batch_size must be 1 or more, not 0"),
        ("digits", {"num_train": 0}, "num_train must be"),
        ("digits", {"num_test": -1}, "num_test must be"),
        ("digits", {"batch_size": 10**6}, "larger than the whole training set of 1,497"),
        ("logistic", {"model": "resnet20"}, "no choice of model, but got 'resnet20'"),
        ("quadratic", {"partition": "shards"}, "no choice of partition"),
        ("quadratic", {"num_train": 10}, "no choice of num_train"),
        ("ptb", {"partition": "dirichlet"}, "no choice of partition"),
    ],
)
def test_choices_that_cannot_be_heeded_are_refused(name, choices, message):
    with pytest.raises(InputError, match=message):
        recipe(name).task(Choices(num_workers=8, **choices))


@pytest.mark.parametrize(("epochs", "rate"), [(-3, None), (0, None), (2, 0.0), (2, -1.0)])
def test_schedules_refuse_nonsense(epochs, rate):
    with pytest.raises(InputError, match="must be"):
        recipe("digits").schedule(epochs, rate)
