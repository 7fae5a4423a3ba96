from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import matcha
from matcha import families, plan
from matcha.distributed import Network, run_worker, train
from matcha.distributed.launch.launcher import Hosts
from matcha.errors import InputError
from matcha.records import Record, read_run
from matcha.simulation import Constant, Settings, Simulation
from matcha.testing import run_threads
from matcha.training.jobs import Job
from matcha.training.task import TaskSpec
from matcha.zoo.recipes import Choices, recipe

NUM_WORKERS = 4
RING = families.ring(NUM_WORKERS)
NETWORK = Network(timeout=60)


def choices(**changes) -> Choices:
    return Choices(**{"num_workers": NUM_WORKERS, "num_train": 400, "num_test": 100} | changes)


def job(directory: Path, task: str = "logistic", plan_=None, choices_=None, **settings) -> Job:
    """A recipe's task at a constant rate: its own schedule depends on the number of epochs."""
    chosen = recipe(task)
    settings = {"schedule": Constant(base=0.02), "optimizer": chosen.optimizer} | settings
    return Job(
        directory=directory,
        task=chosen.spec(choices_ or choices()),
        plan=plan_ or plan(RING, 0.6, "matcha", seed=4),
        settings=Settings(**settings),
    )


def train_all(job_: Job, network: Network = NETWORK, **options) -> list[list[Record]]:
    return run_threads(NUM_WORKERS, lambda t: run_worker(job_, t, network, **options))


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    def part(name: str, epochs: int, **options) -> list[Record]:
        return train_all(job(tmp_path / name, epochs=epochs), checkpoint_every=1, **options)[0]

    whole = part("whole", 4)
    part("parts", 2)
    rest = part("parts", 4, resume=True)
    assert [record.epoch for record in rest] == [3.0, 4.0]
    assert [record.train_loss for record in rest] == [record.train_loss for record in whole[2:]]
    assert len(read_run(tmp_path / "parts").records) == 4


def test_resuming_drops_what_the_checkpoint_does_not_cover(tmp_path: Path) -> None:
    """Checkpoints every two epochs, stopped after the third: its records are written again."""

    class StoppedError(Exception):
        pass

    def stop(record: Record) -> None:
        if record.epoch == 3:
            raise StoppedError

    wanted = job(tmp_path, epochs=4)

    def work(transport) -> None:
        with pytest.raises(StoppedError):
            run_worker(wanted, transport, NETWORK, checkpoint_every=2, on_record=stop)

    run_threads(NUM_WORKERS, work)
    assert len(read_run(tmp_path).records) == 3
    train_all(wanted, checkpoint_every=2, resume=True)
    run = read_run(tmp_path)
    assert [record.epoch for record in run.records] == [1, 2, 3, 4]
    for records in run.worker_records.values():
        assert [record.epoch for record in records] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"choices_": choices(batch_size=8)}, "another batch_size"),
        ({"choices_": choices(num_train=300)}, "another num_train"),
        ({"schedule": Constant(base=0.1)}, "another schedule"),
    ],
)
def test_a_run_is_resumed_only_as_it_was(tmp_path: Path, change, sentence) -> None:
    train_all(job(tmp_path, epochs=1), checkpoint_every=1)
    other = job(tmp_path, **{"epochs": 2} | change)

    def work(transport) -> None:
        with pytest.raises(InputError, match=sentence):
            run_worker(other, transport, NETWORK, resume=True)

    run_threads(NUM_WORKERS, work)
    (tmp_path / "run.json").unlink()  # the checkpoint knows by itself
    names = {"another batch_size": "batch size", "another num_train": "number of examples"}

    def alone(transport) -> None:
        with pytest.raises(InputError, match=names.get(sentence, sentence)):
            run_worker(other, transport, NETWORK, resume=True)

    run_threads(NUM_WORKERS, alone)


def test_training_stops_at_its_target_and_writes_event_files(tmp_path: Path) -> None:
    chosen = recipe("logistic")
    wanted = job(
        tmp_path,
        plan_=plan(RING, 1.0, "vanilla"),
        epochs=50,
        schedule=chosen.schedule(50),
        target_loss=1.5,
    )
    seen: list[Record] = []

    def work(transport) -> list[Record]:
        show = seen.append if transport.rank == 0 else None
        network = Network(timeout=60, link_mbps=1000)
        return run_worker(wanted, transport, network, tensorboard=True, on_record=show)

    records = run_threads(NUM_WORKERS, work)[0]
    assert 1 < len(records) < 50
    losses = [record.train_loss or 0.0 for record in records]
    assert 0 < max(losses[-2:]) <= 1.5 < losses[-3]
    assert seen == records
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert "emulated" in read_run(tmp_path).header.setting("link_mbps")
    simulated = list(Simulation(chosen.task(choices()), wanted.plan, wanted.settings))
    assert len(simulated) == len(records)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_digits_curves_coincide_with_the_simulators(tmp_path: Path, overlap) -> None:
    digits = recipe("digits")
    wanted = job(tmp_path, "digits", epochs=3, schedule=digits.schedule(3), overlap=overlap)
    simulated = list(Simulation(digits.task(choices()), wanted.plan, wanted.settings))
    trained = train_all(wanted)
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
    assert run.plan.digest == wanted.plan.digest
    assert run.header.clock == "wall"
    assert run.header.setting("overlap") == overlap
    assert {span.worker for span in run.spans} == set(range(NUM_WORKERS))
    assert {span.kind for span in run.spans} == {"compute", "wait", "exchange"}


# -- as a library ----------------------------------------------------------------------------------


def settings() -> Settings:
    return Settings(epochs=1, schedule=Constant(base=0.02))


@pytest.mark.slow
def test_a_task_trains_by_a_call_and_continues(tmp_path: Path) -> None:
    pair = plan(families.path(2), 1.0, "vanilla")
    options = {"output": tmp_path / "run", "checkpoint_every": 1}
    run = train("quadratic", pair, settings(), **options)
    assert [record.epoch for record in run.records] == [1.0]
    assert sorted(run.worker_records) == [0, 1]
    two = Settings(epochs=2, schedule=Constant(base=0.02))
    run = matcha.distributed.train("quadratic", pair, two, resume=True, **options)
    assert [record.epoch for record in run.records] == [1.0, 2.0]


def refused(sentence: str, output: Path, *arguments, **options) -> None:
    with pytest.raises(InputError, match=sentence):
        train(*arguments, output=output, **options)
    assert not output.exists(), "a directory was left behind"


def test_what_every_worker_would_find_wrong_is_said_before_any_is_started(tmp_path: Path) -> None:
    output, ring = tmp_path / "run", plan(RING, 1.0, "vanilla")
    quadratic = recipe("quadratic")
    refused("did you mean 'quadratic'", output, "quadratics", ring)
    other = quadratic.spec(Choices(num_workers=3))
    refused("for 4 workers and the task for 3", output, other, ring, settings())
    staged = replace(settings(), momentum="tracking", overlap=True)
    refused("overlap=True does not go with", output, "quadratic", ring, staged)
    refused("give Settings", output, quadratic.spec(choices()), ring)
    three = Network(hosts=Hosts(number=3, rendezvous="a:1"))
    refused("split evenly", output, "quadratic", ring, settings(), network=three)
    here = TaskSpec.of(quadratic.task(Choices(num_workers=4)))
    refused("cannot be sent to them", output, here, ring, settings())
