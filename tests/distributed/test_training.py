from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.distributed import cases

from matcha import families, plan
from matcha.distributed import Training
from matcha.errors import InputError
from matcha.records import Record
from matcha.simulation import Constant, Delays, Execution, Plateau, Settings, Simulation
from matcha.testing import run_threads
from matcha.training.optimizers import SGD
from matcha.zoo.quadratics import QuadraticTask
from matcha.zoo.recipes import Choices, recipe

NUM_WORKERS = 4
RING = families.ring(NUM_WORKERS)


@pytest.mark.parametrize(("strategy", "mixing", "rule"), cases.CASES)
def test_every_case_equals_the_simulator_in_float64(strategy, mixing, rule) -> None:
    """50 iterations on quadratics with noise and heterogeneity, 8 workers."""

    def task() -> QuadraticTask:
        return QuadraticTask(8, heterogeneity=1.0, steps_per_epoch=10, seed=2)

    chosen = cases.real_plan(strategy, mixing)
    rates = Constant(base=0.05)
    settings = Settings(
        epochs=5,
        schedule=rates,
        overlap=rule == "footnote",
        execution=Execution(precision="float64"),
    )
    simulated = list(Simulation(task(), chosen, settings))

    def work(transport) -> list[Record]:
        options = {"bucket_cap_mb": 1e-4, "timeout": 60}
        training = Training(task(), chosen, settings, transport, **options)
        return [e for e in training if isinstance(e, Record) and e.worker is None]

    trained = run_threads(8, work)[0]
    for real, ideal in zip(trained, simulated, strict=True):
        for name in ("train_loss", "test_loss", "consensus_distance"):
            assert getattr(real, name) == pytest.approx(getattr(ideal, name), rel=1e-10, abs=1e-10)
    assert trained[-1].iteration == 50


def test_both_engines_decide_alike_what_momentum_auto_is() -> None:
    def task() -> QuadraticTask:
        return QuadraticTask(NUM_WORKERS, heterogeneity=5.0, steps_per_epoch=10, seed=2)

    chosen = plan(RING, 0.5, "greedy")
    settings = Settings(
        epochs=3,
        schedule=Constant(base=0.02),
        optimizer=SGD(momentum=0.9),
        momentum="auto",
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(task(), chosen, settings)
    assert simulation.momentum.kind == "exact-diffusion"
    simulated = [record.train_loss for record in simulation]

    def work(transport) -> tuple[str, list[float | None]]:
        training = Training(task(), chosen, settings, transport, timeout=60)
        kind = training.gossip.state.momentum.spec.kind
        return kind, [e.train_loss for e in training if isinstance(e, Record) and e.worker is None]

    for kind, losses in run_threads(NUM_WORKERS, work):
        assert kind == "exact-diffusion"
        assert losses == pytest.approx(simulated, rel=1e-10)


@pytest.mark.parametrize("momentum", ["local", "exact-diffusion"])
def test_workers_count_as_the_plan_says_in_both_engines(momentum) -> None:
    """Towards the weighted average of the losses, with the rounds as they are."""
    weights = (1.0, 5.0, 0.0, 2.0)
    chosen = plan(RING, 1.0, "vanilla", worker_weights=weights)

    def make() -> QuadraticTask:
        return QuadraticTask(NUM_WORKERS, heterogeneity=5.0, noise=0.0, condition=1.0, seed=2)

    settings = Settings(
        epochs=4,
        schedule=Constant(base=0.05),
        optimizer=SGD(momentum=0.5),
        momentum=momentum,
        execution=Execution(precision="float64"),
    )
    simulation = Simulation(make(), chosen, settings)
    simulated = list(simulation)

    def work(transport) -> tuple[list[float | None], torch.Tensor]:
        training = Training(make(), chosen, settings, transport, timeout=60)
        found = [e.train_loss for e in training if isinstance(e, Record) and e.worker is None]
        return found, torch.cat([p.detach().flatten() for p in training.model.parameters()])

    rows = run_threads(NUM_WORKERS, work)
    for losses, _ in rows:
        assert losses == pytest.approx([record.train_loss for record in simulated], rel=1e-10)
    # Where it ends, the workers' own gradients cancel as they are weighed.
    x = torch.stack([end for _, end in rows]).mean(0)
    task = make()
    task.to(torch.device("cpu"), torch.float64)
    tables = {name: torch.from_numpy(table)[0] for name, table in task.tables(0).items()}
    inputs, targets = task.batch(tables)
    model = task.model().double()
    total = torch.zeros_like(x)
    for i, weight in enumerate(weights):
        torch.nn.utils.vector_to_parameters(x.clone(), model.parameters())
        loss, _ = task.loss(model, inputs[i], targets[i], ())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        own = torch.cat([g.flatten() for g in grads])
        assert weight != 5.0 or own.norm() > 1e-3  # each alone pulls elsewhere
        total += weight * own
    if momentum == "exact-diffusion":  # which leaves no difference between workers
        assert total.norm() < 1e-8


def test_how_far_apart_answers_are_is_the_same_in_both_engines() -> None:
    choices = Choices(num_workers=NUM_WORKERS, model="cnn-gn", partition="shards", num_train=256)
    how, chosen = recipe("digits"), plan(RING, 0.3, "greedy")
    settings = how.settings(epochs=2)

    def work(transport) -> list[Record]:
        training = Training(how.task(choices), chosen, settings, transport, timeout=60)
        return [e for e in training if isinstance(e, Record) and e.worker is None]

    simulation = Simulation(how.task(choices), chosen, settings)
    for real, ideal in zip(run_threads(NUM_WORKERS, work)[0], simulation, strict=True):
        assert ideal.function_distance is not None
        assert 0.01 < ideal.function_distance < math.sqrt(math.log(NUM_WORKERS))
        assert real.function_distance == pytest.approx(ideal.function_distance, rel=1e-3)


@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_rates_that_follow_the_loss_are_the_same_everywhere(evaluate_every) -> None:
    """Unlike data: each worker's own training loss would lower its rate at another epoch."""
    schedule = Plateau(base=0.3, factor=2)
    settings = Settings(epochs=6, schedule=schedule, evaluate_every=evaluate_every)
    chosen = plan(RING, 0.3, "periodic")

    def task() -> QuadraticTask:
        return QuadraticTask(NUM_WORKERS, heterogeneity=2.0, steps_per_epoch=3, start=0.1)

    simulated = [r.learning_rate for r in Simulation(task(), chosen, settings)]
    often = replace(settings, evaluate_every=1)
    assert simulated == [r.learning_rate for r in Simulation(task(), chosen, often)]
    assert len(set(simulated)) > 2

    def work(transport) -> list[float | None]:
        training = Training(task(), chosen, settings, transport, timeout=60)
        return [e.learning_rate for e in training if isinstance(e, Record) and e.worker is not None]

    for rates in run_threads(NUM_WORKERS, work):
        assert rates == simulated


def refused(kind: type[Exception], sentence: str, *arguments) -> None:
    def work(transport) -> None:
        with pytest.raises(kind, match=sentence):
            Training(*arguments, transport, timeout=60)  # type: ignore[call-arg]

    run_threads(NUM_WORKERS, work)


def test_a_task_for_another_team_is_refused() -> None:
    task = recipe("logistic").task(Choices(num_workers=3, num_train=100, num_test=20))
    settings = Settings(epochs=1)
    vanilla = plan(RING, 1.0, "vanilla")
    refused(InputError, "for 4 workers and the task for 3", task, vanilla, settings)


@pytest.mark.parametrize(
    "change", [{"delays": Delays(compute_time=1.0)}, {"execution": Execution(batching="vmap")}]
)
def test_a_simulations_settings_are_refused(change) -> None:
    settings = Settings(epochs=1, **change)
    arguments = QuadraticTask(NUM_WORKERS), plan(RING, 1.0, "vanilla"), settings
    refused(InputError, "choices of a simulation", *arguments)


def test_workers_with_other_settings_or_tasks_find_out() -> None:
    def work(transport) -> None:
        rate = 0.2 if transport.rank == 2 else 0.1
        settings = Settings(epochs=1, schedule=Constant(base=rate))
        with pytest.raises(InputError, match=r"rank 2.* another settings"):
            Training(QuadraticTask(NUM_WORKERS), plan(RING, 1.0, "vanilla"), settings, transport)

    run_threads(NUM_WORKERS, work)
