from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulation.tasks import digits, er8, quadratic

from matcha.errors import InputError
from matcha.training.jobs import check_identity, check_schema, identity
from matcha.training.settings import Settings

SETTINGS = Settings(epochs=2)
PATH = Path("checkpoint.pt")


def test_the_same_made_twice_is_the_same():
    assert identity(digits(), er8(), SETTINGS) == identity(digits(), er8(), SETTINGS)
    check_identity(
        PATH,
        identity(quadratic(), er8(), SETTINGS),
        identity(quadratic(), er8(), replace(SETTINGS, epochs=9, target_loss=0.1)),
    )


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (quadratic(heterogeneity=2.0), "losses"),
        (quadratic(noise=2.0), "noise"),
        (quadratic(steps_per_epoch=5), "epoch's length"),
        (quadratic(seed=1), "seed and losses"),
    ],
)
def test_what_differs_is_named(task, name):
    saved = identity(quadratic(), er8(), SETTINGS)
    with pytest.raises(InputError, match=f"another {name}: resume it as it was"):
        check_identity(PATH, saved, identity(task, er8(), SETTINGS))


def test_files_that_do_not_say_what_they_are_of_are_refused():
    with pytest.raises(InputError, match="start the run again"):
        check_identity(PATH, None, identity(quadratic(), er8(), SETTINGS))
    with pytest.raises(InputError, match="start the run again"):
        check_schema(PATH, "matcha.checkpoint/1", "matcha.checkpoint/2")
