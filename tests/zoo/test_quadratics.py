from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.simulation.tasks import er8

import matcha
from matcha.errors import InputError
from matcha.simulation import Constant, Engine, Execution, Settings, Simulation
from matcha.theory import admissible_learning_rate, gradient_bound
from matcha.training.task import Evaluation
from matcha.zoo.quadratics import Point, QuadraticTask

EXACT = Execution(precision="float64")


def last_record(task, plan, rate, epochs):
    settings = Settings(
        epochs=epochs, schedule=Constant(base=rate), execution=EXACT, evaluate_every=epochs
    )
    return list(Simulation(task, plan, settings))[-1]


def test_constants_hold_exactly():
    task = QuadraticTask(6, smoothness=2.0, noise=3.0, heterogeneity=1.5, dimension=10)
    task.to(torch.device("cpu"), torch.float64)
    eigenvalues, minima = task._held
    assert float(eigenvalues.max()) == pytest.approx(2.0)
    assert minima.mean(0).abs().max() < 1e-12
    pulls = eigenvalues * (minima - minima.mean(0))
    assert float(pulls.square().sum(1).mean()) == pytest.approx(1.5**2)
    noise = task.tables(0)["noise"]
    assert (noise**2).sum(-1).mean() == pytest.approx(3.0**2, rel=0.1)
    model = task.model()
    assert task.evaluate(model).loss == pytest.approx(task.initial_gap)


def test_gradients_are_what_the_formula_says():
    task = QuadraticTask(3, heterogeneity=1.0, dimension=4, steps_per_epoch=1)
    engine = Engine(task, execution=EXACT)
    silent = er8().round(0)
    engine.begin_epoch(
        0, [0.0], [type(silent)(matchings=(), indices=(), mixing="laplacian", weight=0)]
    )
    engine.step(0)
    eigenvalues, minima = task._held
    noise = torch.from_numpy(task.tables(0)["noise"][0])
    expected = eigenvalues * (task.model().x - minima) + noise
    torch.testing.assert_close(engine.workers.updates[:, :4], expected.detach())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "budget"),
    [
        ("vanilla", 1.0),
        ("matcha", 0.5),
        ("matcha", 0.1),
        ("periodic", 0.5),
        ("single", 0.1),
        ("greedy", 0.3),
    ],
)
def test_theorem_2_bounds_the_gradient_norm(strategy, budget):
    plan = er8(strategy, budget)
    rate = 0.3 * admissible_learning_rate(plan.rho, 1.0)
    records = [
        last_record(
            QuadraticTask(8, noise=1.0, heterogeneity=1.0, steps_per_epoch=50, seed=seed),
            plan,
            rate,
            epochs=8,
        )
        for seed in range(6)
    ]
    measured = np.mean([record.gradient_norm for record in records])
    bound = np.mean([record.gradient_bound for record in records])
    assert 0 < measured <= bound
    assert bound < 6 * measured  # a bound that is far away would hold of anything


class Valleys:
    """Fᵢ(x) = log cosh(x − bᵢ), all bᵢ at 0 but one far out: L = 1, σ = 0, and ζ is bounded.

    Its gradients are not linear, so unlike on quadratics the workers' mean goes astray when they
    do not agree: left alone, they would settle with x̄ = 1, where F is steep.
    """

    name, seed, num_workers, steps_per_epoch = "valleys", 0, 8, 1000

    def __init__(self):
        self.bottoms = torch.tensor([0.0] * 7 + [8.0], dtype=torch.float64)
        grid = torch.linspace(-20, 20, 4001, dtype=torch.float64)[:, None] - self.bottoms
        slopes = torch.tanh(grid)
        self.dissimilarity = float(slopes.var(1, correction=0).max())
        self.gap = float(self._value(torch.zeros(8)) - torch.log(torch.cosh(grid)).mean(1).min())

    def _value(self, x):
        return torch.log(torch.cosh(x - self.bottoms)).mean()

    def model(self):
        return Point(torch.zeros(1, dtype=torch.float64))

    def to(self, device, dtype):
        pass

    def tables(self, epoch):
        return {"none": np.zeros((self.steps_per_epoch, self.num_workers))}

    def batch(self, rows):
        return self.bottoms[:, None], rows["none"]

    def initial_state(self):
        return ()

    def loss(self, model, inputs, targets, state):
        return torch.log(torch.cosh(model() - inputs)).sum(), ()

    def evaluate(self, model):
        return Evaluation(loss=float(self._value(model.x.detach())))

    def recalibration(self):
        return iter(())

    def gradient_norm(self, model):
        return float(torch.tanh(model.x.detach() - self.bottoms).mean() ** 2)

    def gradient_bound(self, rho, iterations, learning_rate):
        return gradient_bound(
            rho=rho,
            num_workers=8,
            iterations=iterations,
            learning_rate=learning_rate,
            smoothness=1.0,
            gradient_variance=0.0,
            dissimilarity=self.dissimilarity,
            initial_gap=self.gap,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "budget"), [("vanilla", 1.0), ("matcha", 0.5)])
def test_theorem_2_where_disagreement_bends_the_mean(strategy, budget):
    plan = er8(strategy, budget)
    record = last_record(Valleys(), plan, 0.01, epochs=5)
    assert 0 < record.gradient_norm < record.gradient_bound
    left_alone = float(torch.tanh(1 - Valleys().bottoms).mean() ** 2)
    assert record.gradient_bound < left_alone / 4  # so workers that never mixed would break it


@pytest.mark.slow
def test_corollary_1_linear_speed_up():
    """With η = √(m/K) the mean gradient norm falls as 1/√(mK): half of it for four times m."""
    iterations, sizes = 1000, (2, 4, 8, 16)
    means = []
    for m in sizes:
        plan = matcha.plan(matcha.families.complete(m), 0.5, "matcha")
        rate = math.sqrt(m / iterations)
        runs = [
            last_record(
                QuadraticTask(m, noise=3.0, start=0.5, steps_per_epoch=500, seed=seed),
                plan,
                rate,
                iterations // 500,
            ).gradient_norm
            for seed in range(2)
        ]
        means.append(np.mean(runs))
    slope = np.polyfit(np.log(sizes), np.log(means), 1)[0]
    assert -0.65 < slope < -0.35


def test_nonsense_is_refused():
    with pytest.raises(InputError):
        QuadraticTask(4, smoothness=0.0)
    with pytest.raises(InputError):
        QuadraticTask(4, dimension=0)
