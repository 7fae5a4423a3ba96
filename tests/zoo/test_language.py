from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.simulation.tasks import er8

import matcha
from matcha.errors import DataError
from matcha.simulation import SGD, Delays, Plateau, Settings, Simulation
from matcha.zoo.data import Text
from matcha.zoo.language import LanguageTask
from matcha.zoo.models import LanguageModel

WORDS = np.arange(2000) % 17
TEXT = Text(train=WORDS, valid=WORDS[:200], test=WORDS[:200], vocabulary=tuple("abcdefghijklmnopq"))


def make(workers=8, dropout=0.0, **choices):
    options = {"batch_size": 4, "length": 10} | choices
    return LanguageTask(
        "text", TEXT, workers, lambda: LanguageModel(17, 12, dropout=dropout), **options
    )


def test_targets_are_the_next_words_of_the_workers_own_stretch():
    task = make()
    task.to(torch.device("cpu"), torch.float32)
    assert task.steps_per_epoch == (250 // 4 - 1) // 10
    rows = {name: torch.from_numpy(table[2]) for name, table in task.tables(0).items()}
    inputs, targets = task.batch(rows)
    assert inputs.shape == targets.shape == (8, 10, 4)
    columns = WORDS[3 * 250 : 4 * 250][: 62 * 4].reshape(4, 62).T
    assert np.array_equal(inputs[3].numpy(), columns[20:30])
    assert np.array_equal(targets[3].numpy(), columns[21:31])


def test_state_is_carried_within_an_epoch_and_cleared_between():
    task = make()
    simulation = Simulation(task, er8(), Settings(epochs=1, schedule=Plateau(base=1.0)))
    engine = simulation.engine
    rounds = [er8().round(k) for k in range(task.steps_per_epoch)]
    engine.begin_epoch(0, [0.0] * task.steps_per_epoch, rounds)
    assert not any(tensor.any() for tensor in engine.carried[0])
    engine.step(0)
    first = [tensor.clone() for tensor in engine.carried[0]]
    assert all(tensor.any() for tensor in first)
    engine.step(1)
    assert not torch.equal(engine.carried[0][0], first[0])
    engine.begin_epoch(1, [0.0] * task.steps_per_epoch, rounds)
    assert not any(tensor.any() for tensor in engine.carried[0])


def test_runs_with_dropout_repeat():
    settings = Settings(
        epochs=2,
        schedule=Plateau(base=8.0),
        optimizer=SGD(clip_norm=1.0),
        delays=Delays(compute_time=1.0),
    )
    runs = [list(Simulation(make(dropout=0.5), er8(), settings)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][-1].test_accuracy is None


def test_a_cyclic_text_is_learnt():
    settings = Settings(epochs=12, schedule=Plateau(base=8.0), optimizer=SGD(clip_norm=1.0))
    *_, last = Simulation(make(4), matcha.plan(matcha.families.ring(4), 1.0, "vanilla"), settings)
    assert last.test_loss < 0.8 * math.log(17)


def test_too_little_text():
    with pytest.raises(DataError, match="too few for 8 workers"):
        make(length=100)


def test_one_validation_word_predicts_nothing():
    words = np.arange(200, dtype=np.int64) % 7
    text = Text(train=words, valid=words[:1], test=words, vocabulary=tuple("abcdefg"))
    with pytest.raises(DataError, match="2 words or more"):
        LanguageTask("tiny", text, 2, lambda: LanguageModel(7, 4), batch_size=2, length=3)
