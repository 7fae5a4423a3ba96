"""Small tasks and plans that the simulation's tests share."""

from __future__ import annotations

from functools import cache

import numpy as np

import matcha
from matcha.zoo.quadratics import QuadraticTask
from matcha.zoo.recipes import Choices, recipe


def digits(num_workers=8, *, name="digits", steps=3, batch_size=4, seed=0, num_test=60, **choices):
    """A part of the digits that makes ``steps`` iterations per epoch."""
    return recipe(name).task(
        Choices(
            num_workers=num_workers,
            batch_size=batch_size,
            num_train=num_workers * batch_size * steps,
            num_test=num_test,
            seed=seed,
            **choices,
        )
    )


def quadratic(num_workers=8, **choices):
    return QuadraticTask(num_workers, **{"steps_per_epoch": 4, "heterogeneity": 1.0} | choices)


@cache
def er8(strategy="matcha", budget=0.5, mixing=None, seed=0):
    """A plan for the paper's graph of eight workers, its mixing replaced if asked for."""
    plan = matcha.plan(matcha.families.paper("er8"), budget, strategy, seed=seed)
    if mixing in (None, plan.mixing):
        return plan
    weight = 0.5 if mixing == "pairwise" else 0.1
    return plan.with_process(mixing=mixing, alpha=weight, weights=None)


def rows(engine):
    """The workers' parameters without the layout's padding, as numpy."""
    views = dict(engine.workers.layout.views(engine.workers.parameters))
    return np.concatenate(
        [view.reshape(engine.workers.num_workers, -1).numpy() for view in views.values()], axis=1
    )
