"""Clipping: opposite among honest ends, short with others, and what the simulator does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.distributed import cases

from matcha import Round
from matcha.distributed.exchange.codecs import FloatCodec
from matcha.distributed.exchange.exchange import Exchange
from matcha.distributed.exchange.hooks import Clipping
from matcha.distributed.exchange.meeting import meetings
from matcha.distributed.train import Training
from matcha.errors import InputError
from matcha.simulation import Simulation
from matcha.testing import run_threads
from matcha.training.optimizers import SGD
from matcha.training.rates import Constant
from matcha.training.settings import Execution, Settings
from matcha.zoo.recipes import Choices, recipe


def met(start: np.ndarray, now: np.ndarray, allowance: float) -> tuple[list, Round]:
    """Two workers meet once, having gone from `start` to `now` since the last time."""
    round = Round(matchings=(((0, 1),),), indices=(0,), mixing="pairwise", weight=0.5)

    def work(transport):
        values = torch.tensor(start[transport.rank])
        exchange = Exchange(transport, [FloatCodec([values], bucket_bytes=1000)], timeout=150)
        clipping = Clipping(exchange, [values], allowance)
        exchange.hooks.append(clipping)
        exchange.takes_all = True  # as a worker's state sets it where it clips
        values.copy_(torch.tensor(now[transport.rank]))
        exchange.run(round, meetings(round, transport.rank), 0)
        return values.numpy(), clipping

    return run_threads(2, work), round


def test_honest_ends_move_by_opposite_amounts() -> None:
    start, now = np.zeros((2, 3)), np.array([[3.0, 0.0, 0.0], [0.0, 8.0, 0.0]])
    results, round = met(start, now, 1.0)
    found = np.stack([x for x, _ in results])
    np.testing.assert_allclose(found.sum(0), now.sum(0), atol=1e-14)
    moves = np.linalg.norm(found - now, axis=1)
    np.testing.assert_allclose(moves, 0.5 * 3.0)  # the smaller of the two ways
    wide, _ = met(start, now, 9.0)
    np.testing.assert_array_equal(np.stack([x for x, _ in wide]), round.mix(now))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300])
def test_what_is_no_number_moves_nobody(garbage, monkeypatch) -> None:
    monkeypatch.setattr(Exchange, "_check_finite", lambda *_: None)  # an honest one looks first
    now = np.array([[1.0, 0.0], [garbage, 0.0]])
    results, _ = met(np.zeros((2, 2)), now, 1.0)
    assert np.linalg.norm(results[0][0] - now[0]) <= 0.5 * (1 + 1e-12)


def test_a_round_without_a_meeting_leaves_nothing_behind() -> None:
    values = torch.ones(2)
    clipping = Clipping(None, [values], 1.0)
    values.fill_(3.0)
    clipping.begin_round(0)
    clipping.end_round(0)
    assert clipping.state()["reach"] == 0
    clipping.end_round(1)
    assert clipping.state()["reach"] == 8


@pytest.mark.parametrize("mixing", ["pairwise", "laplacian"])
def test_the_simulator_clips_alike(mixing) -> None:
    plan = cases.make_plan("matcha", mixing)
    settings = Settings(
        epochs=1,
        clip=0.4,  # so that honest workers are clipped, too
        optimizer=SGD(momentum=0.9),
        schedule=Constant(base=0.05),
        execution=Execution(precision="float64"),
    )

    def make_task():
        return recipe("digits").task(Choices(num_workers=8))

    def work(transport):
        training = Training(make_task(), plan, settings, transport, timeout=150.0)
        list(training)
        named = sorted(training.model.named_parameters())
        return torch.cat([p.detach().flatten() for _, p in named]).numpy()

    found = np.stack(run_threads(8, work))

    def simulated(how):
        simulation = Simulation(make_task(), plan, how)
        list(simulation)
        stacked = sorted(simulation.engine.workers.stacked().items())
        return torch.cat([v.reshape(8, -1) for _, v in stacked], dim=1).numpy()

    np.testing.assert_allclose(found, simulated(settings), rtol=0, atol=1e-10)
    free = simulated(Settings(**{f: getattr(settings, f) for f in FIELDS}))
    assert np.abs(found - free).max() > 1e-4


FIELDS = ("epochs", "optimizer", "schedule", "execution")


def test_tracking_is_refused() -> None:
    plan = cases.make_plan("matcha", "pairwise")
    settings = Settings(epochs=1, clip=1.0, momentum="tracking")
    task = recipe("digits").task(Choices(num_workers=8))
    with pytest.raises(
        InputError, match="leave tracking, momentum-tracking and shared momentum out"
    ):
        Simulation(task, plan, settings)

    def work(transport):
        with pytest.raises(InputError, match="tracking sends gradients"):
            Training(task, plan, settings, transport, timeout=150.0)

    run_threads(8, work)
