from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed import cases
from torch import nn

import matcha.experiments.training
from matcha import families, plan
from matcha.distributed import Training, run_threads, train_task
from matcha.errors import InputError
from matcha.experiments.training import TaskTraining, run_worker, torch_optimizer
from matcha.records import read_run
from matcha.simulation import Constant, Execution, Settings, Simulation
from matcha.tasks.optimizers import Adam
from matcha.tasks.quadratics import QuadraticTask
from matcha.tasks.recipes import Choices, recipe

NUM_WORKERS = 4
RING = families.ring(NUM_WORKERS)


def choices() -> Choices:
    return Choices(num_workers=NUM_WORKERS, num_train=400, num_test=100)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_digits_curves_coincide_with_the_simulators(tmp_path: Path, overlap) -> None:
    digits = recipe("digits")
    chosen = plan(RING, 0.6, "matcha", seed=4)
    settings = Settings(
        epochs=3,
        schedule=digits.schedule(3),
        optimizer=digits.optimizer,
        rule="footnote" if overlap else "eq2",
        statistics="averaged",
    )
    simulated = list(Simulation(digits.task(choices()), chosen, settings))
    request = TaskTraining(
        task="digits", choices=choices(), epochs=3, overlap=overlap, deadline=60, directory=tmp_path
    )
    trained = run_threads(NUM_WORKERS, lambda t: run_worker(request, chosen, t))
    assert all(records == trained[0] for records in trained)
    for real, ideal in zip(trained[0], simulated, strict=True):
        assert real.iteration == ideal.iteration
        assert real.train_loss == pytest.approx(ideal.train_loss, abs=1e-4)
        assert real.test_loss == pytest.approx(ideal.test_loss, abs=1e-4)
        assert real.consensus_distance == pytest.approx(ideal.consensus_distance, rel=1e-2)
        assert real.comm_units == ideal.comm_units
        assert real.learning_rate == ideal.learning_rate

    run = read_run(tmp_path)
    assert run.records == tuple(trained[0])
    assert sorted(run.worker_records) == list(range(NUM_WORKERS))
    assert run.plan.digest == chosen.digest
    assert run.header.config["update_rule"] == settings.rule
    assert {span.worker for span in run.spans} == set(range(NUM_WORKERS))
    assert {span.kind for span in run.spans} == {"compute", "wait", "exchange"}


@pytest.mark.parametrize(("strategy", "mixing", "rule"), cases.CASES)
def test_every_case_equals_the_simulator_in_float64(strategy, mixing, rule) -> None:
    """50 iterations on quadratics with noise and heterogeneity, 8 workers."""

    def task() -> QuadraticTask:
        return QuadraticTask(8, heterogeneity=1.0, steps_per_epoch=10, seed=2)

    chosen = cases.real_plan(strategy, mixing)
    rates = Constant(base=0.05)
    settings = Settings(
        epochs=5, schedule=rates, rule=rule, execution=Execution(precision="float64")
    )
    simulated = list(Simulation(task(), chosen, settings))
    training = Training(
        epochs=5,
        rate=rates.rate,
        optimizer=torch.optim.SGD,
        dtype=torch.float64,
        gossip={"overlap": rule == "footnote", "bucket_mb": 1e-4, "deadline": 60},
    )
    trained = run_threads(8, lambda t: train_task(task(), chosen, training, t))[0]
    for real, ideal in zip(trained, simulated, strict=True):
        for name in ("train_loss", "test_loss", "consensus_distance"):
            assert getattr(real, name) == pytest.approx(getattr(ideal, name), rel=1e-10, abs=1e-10)
    assert trained[-1].iteration == 50


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch) -> None:
    chosen = plan(RING, 0.6, "matcha", seed=4)

    def train(name: str, epochs: int, resume: bool = False) -> list:
        request = TaskTraining(
            task="logistic",
            choices=choices(),
            epochs=epochs,
            learning_rate=0.02,
            deadline=60,
            directory=tmp_path / name,
            checkpoint_every=1,
            resume=resume,
        )
        return run_threads(NUM_WORKERS, lambda t: run_worker(request, chosen, t))[0]

    # A constant rate: recipes scale theirs with the number of epochs.
    constant = replace(recipe("logistic"), decay="none")
    monkeypatch.setattr(matcha.experiments.training, "recipe", lambda _: constant)
    whole = train("whole", 4)
    train("parts", 2)
    rest = train("parts", 4, resume=True)
    assert [record.epoch for record in rest] == [3.0, 4.0]
    assert [record.train_loss for record in rest] == [record.train_loss for record in whole[2:]]
    assert len(read_run(tmp_path / "parts").records) == 4


def test_training_stops_at_its_target_and_writes_event_files(tmp_path: Path) -> None:
    chosen = plan(RING, 1.0, "vanilla")
    seen: list = []
    request = TaskTraining(
        task="logistic",
        choices=choices(),
        epochs=50,
        target_loss=1.5,
        deadline=60,
        directory=tmp_path,
        tensorboard=True,
        link_mbps=1000,
    )
    records = run_threads(
        NUM_WORKERS, lambda t: run_worker(request, chosen, t, seen.append if t.rank == 0 else None)
    )[0]
    assert 1 < len(records) < 50
    assert records[-1].train_loss <= 1.5 < records[-2].train_loss
    assert seen == records
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert "emulated" in read_run(tmp_path).header.config["link_mbps"]


def test_recipes_map_to_torch_optimizers() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    sgd = torch_optimizer(recipe("digits").optimizer)(parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.defaults["momentum"] == 0.9
    assert isinstance(torch_optimizer(Adam())(parameters), torch.optim.Adam)


def test_a_task_for_another_team_is_refused() -> None:
    task = recipe("logistic").task(Choices(num_workers=3, num_train=100, num_test=20))
    training = Training(epochs=1, rate=lambda *_: 0.1, optimizer=torch.optim.SGD)

    def work(transport) -> None:
        with pytest.raises(InputError, match="for 4 workers and the task for 3"):
            train_task(task, plan(RING, 1.0, "vanilla"), training, transport)

    run_threads(NUM_WORKERS, work)
    with pytest.raises(InputError, match="need a directory"):
        Training(epochs=1, rate=lambda *_: 0.1, optimizer=torch.optim.SGD, resume=True)
