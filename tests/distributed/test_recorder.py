"""A training loop of one's own with a Recorder: what it writes, and how it goes on."""

from __future__ import annotations

import logging
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import matcha
from matcha.distributed import Gossip, Recorder
from matcha.errors import InputError
from matcha.records import Record, read_run
from matcha.report import compare
from matcha.testing import run_threads

RING = matcha.families.ring(4)
PLAN = matcha.plan(RING, 0.5, "greedy", wire="modulo:3")
STEPS = 5


class Script:
    """What a script has: a model, an optimizer, a schedule, and data of this worker's own."""

    def __init__(self, transport, plan=PLAN, **options) -> None:
        self.model = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.goal = float(transport.rank)
        options = {"transport": transport, "timeout": 60.0, **options}
        self.gossip = Gossip(self.model, self.optimizer, plan, **options)

    def loss(self) -> torch.Tensor:
        return (self.model(torch.eye(3).double()) - self.goal).square().mean()

    def epoch(self, log: Recorder, **metrics) -> Record:
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
        with torch.no_grad(), self.gossip.averaged():
            found = self.loss()
        self.schedule.step()
        return log(loss=self.loss(), train_loss=found, **metrics)

    def train(self, folder: Path, epochs: int, **options) -> list[Record]:
        options = {"checkpoint_every": 1, "stateful": {"schedule": self.schedule}, **options}
        with self.gossip, Recorder(self.gossip, folder, **options) as log:
            return [self.epoch(log) for _ in log.epochs(epochs)]


def test_a_resumed_script_ends_with_the_same_bits_and_one_run(tmp_path, capfd) -> None:
    def part(name, epochs, **options):
        return run_threads(4, lambda t: Script(t).train(tmp_path / name, epochs, **options))

    whole = part("whole", 4, tensorboard=True)
    assert all(records == whole[0] for records in whole)
    part("parts", 2, report=False, view=None)
    assert not (tmp_path / "parts" / "report.html").exists()
    rest = part("parts", 4, resume=True)[0]
    assert [r.epoch for r in rest] == [3, 4]
    for name in ("train_loss", "consensus_distance", "learning_rate", "comm_units"):
        assert [getattr(r, name) for r in rest] == [getattr(r, name) for r in whole[0][2:]], name
    for name in ("whole", "parts"):
        run = read_run(tmp_path / name)
        assert [r.iteration for r in run.records] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
        assert {w: len(r) for w, r in run.worker_records.items()} == dict.fromkeys(range(4), 4)
        assert run.spans
        assert (run.header.wire, run.header.strategy) == ("modulo:3", "greedy")
        units = sum(map(PLAN.round_time, (PLAN.round(k) for k in range(4 * STEPS))))
        assert run.records[-1].comm_units == pytest.approx(units)
        assert run.records[-1].megabytes_sent == run.records[-1].megabytes_sent > 0
        assert "Who was busy when" in (tmp_path / name / "report.html").read_text()
    assert list((tmp_path / "whole" / "tensorboard").glob("events*"))
    said = capfd.readouterr().out
    first = next(k for k in range(9) if PLAN.round(k))
    assert f"4 workers, greedy at 0.5, modulo:3, first round at iteration {first}" in said
    assert "epoch 4/4" in said


def test_it_stops_at_its_target_and_tells_loggers(tmp_path) -> None:
    """The target is reached where it is held in two records; reports judge by the same."""
    losses, seen = [3.0, 0.9, 2.0, 0.8, 0.7, 0.1], []

    def work(transport) -> int:
        script = Script(transport)
        show = seen.append if transport.rank == 0 else None
        with Recorder(script.gossip, tmp_path, target_loss=1.0, on_record=show) as log:
            for k in log.epochs(6):
                alone = losses[k] if transport.rank == 1 else None  # one worker evaluates
                log(loss=1.0, train_loss=alone, accuracy=0.25 * transport.rank)
            return log.epoch

    assert run_threads(4, work) == [5] * 4
    assert [r.train_loss for r in seen] == losses[:5]
    assert [r.test_accuracy for r in seen] == [0.375] * 5
    (row,) = compare([read_run(tmp_path)]).rows
    assert row.time_to_target is not None


def test_a_run_stopped_midway_says_how_to_go_on(tmp_path, capfd) -> None:
    class StoppedError(Exception):
        pass

    def work(transport) -> None:
        script = Script(transport)
        with Recorder(script.gossip, tmp_path, checkpoint_every=2) as log:
            for k in log.epochs(9):
                script.epoch(log)
                if k == 2:
                    raise StoppedError

    def stopped(transport) -> None:
        with pytest.raises(StoppedError):
            work(transport)

    run_threads(4, stopped)
    assert f"stopped; resume=True goes on at iteration {2 * STEPS}" in capfd.readouterr().err
    assert len(read_run(tmp_path).records) == 3
    options = {"stateful": {}, "resume": True, "view": "dashboard"}
    rest = run_threads(4, lambda t: Script(t).train(tmp_path, 4, **options))[0]
    assert [r.epoch for r in rest] == [3, 4]
    assert [r.epoch for r in read_run(tmp_path).records] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "metrics", "sentence"),
    [
        ({"resume": True}, {}, "holds no run to go on with"),
        ({"checkpoint_every": 0.5}, {}, "a number of records"),
        ({"view": "loud"}, {}, "'lines', 'dashboard' or None"),
        ({"target_loss": -1.0}, {}, "must be positive"),
        ({}, {"perplexity": 2.0}, "a record has no 'perplexity'"),
        ({"target_loss": 1.0}, {}, r"log\(train_loss"),
    ],
)
def test_what_cannot_be_recorded_is_refused_on_every_worker(
    tmp_path, options, metrics, sentence
) -> None:
    def work(transport) -> None:
        gossip = Script(transport).gossip
        with pytest.raises(InputError, match=sentence):
            Recorder(gossip, tmp_path / "run", **options)(loss=1.0, **metrics)

    run_threads(4, work)


def test_calls_at_the_wrong_moment_are_refused(tmp_path) -> None:
    def work(transport) -> None:
        script = Script(transport)
        log = Recorder(script.gossip, tmp_path / "run", view=None)
        with pytest.raises(InputError, match="already holds a run"):
            Recorder(script.gossip, tmp_path / "run")
        with script.gossip.averaged(), pytest.raises(InputError, match="averaged"):
            log(loss=1.0)
        with pytest.raises(InputError, match="an epoch went by"):
            list(log.epochs(2))
        log.close()
        with pytest.raises(InputError, match="is closed"):
            log(loss=1.0)

    run_threads(4, work)


def test_gossip_logs_one_line_when_it_begins(caplog) -> None:
    caplog.set_level(logging.INFO, logger="matcha")
    quiet = matcha.plan(RING, 1.0, "silent")
    run_threads(4, lambda t: Script(t).gossip.detach())
    run_threads(4, lambda t: Script(t, quiet).gossip.detach())
    first = next(k for k in range(9) if PLAN.round(k))
    assert [record.getMessage() for record in caplog.records] == [
        f"4 workers, greedy at 0.5, modulo:3, first round at iteration {first}",
        "4 workers, silent, float32, nothing to exchange",
    ]


def test_a_script_serves_its_run(tmp_path) -> None:
    def work(transport) -> list[str]:
        script = Script(transport)
        pages = []
        with Recorder(script.gossip, tmp_path, serve=0, view=None) as log:
            for _ in log.epochs(1):
                script.epoch(log)
                if log.url is not None:
                    with urllib.request.urlopen(log.url) as answer:
                        pages.append(answer.read().decode())
        return pages

    first, *others = run_threads(4, work)
    assert others == [[]] * 3
    assert 'id="live"' in first[0]
    assert 'id="live"' not in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "now.json").exists()
