from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.datasets import random_images

from matcha.errors import InputError
from matcha.zoo.data import partition
from matcha.zoo.images import ImageTask
from matcha.zoo.models import build


def make(number=48, workers=4, **choices):
    data = random_images(number)
    parts = choices.pop("parts", None) or partition(data.train_labels, workers)
    options = {"batch_size": 3} | choices
    task = ImageTask("random", data, parts, lambda: build("resnet8", 10), **options)
    task.to(torch.device("cpu"), torch.float32)
    return data, task


def rows(task, epoch=0, step=0):
    return {name: torch.from_numpy(table[step]) for name, table in task.tables(epoch).items()}


def test_an_epoch_walks_through_each_workers_own_examples():
    _, task = make()
    index = task.tables(3)["index"]
    assert index.shape == (4, 4, 3)
    for worker, part in enumerate(task.parts):
        assert np.array_equal(np.sort(index[:, worker].ravel()), part)


def test_short_parts_are_walked_again():
    parts = (np.arange(2), np.arange(2, 48))
    _, task = make(parts=parts, batch_size=4)
    index = task.tables(0)["index"]
    assert index.shape == (6, 2, 4)
    assert set(index[:, 0].ravel()) == {0, 1}


def test_tables_depend_on_seed_worker_and_epoch_alone():
    _, task = make(augment=True)
    _, again = make(augment=True)
    for epoch in (0, 7):
        for name, table in task.tables(epoch).items():
            assert np.array_equal(table, again.tables(epoch)[name])
    assert not np.array_equal(task.tables(0)["index"], task.tables(1)["index"])
    assert not np.array_equal(task.tables(0)["index"], make(seed=1)[1].tables(0)["index"])


def test_plain_batches_are_the_normalised_images():
    data, task = make()
    chosen = rows(task)
    inputs, targets = task.batch(chosen)
    assert inputs.shape == (4, 3, 3, 32, 32)
    pixels = data.train_images[chosen["index"].numpy()].astype(np.float64)
    flat = data.train_images.reshape(-1, 3)
    expected = np.moveaxis((pixels - flat.mean(0)) / flat.std(0), -1, -3)
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-4)
    assert np.array_equal(targets.numpy(), data.train_labels[chosen["index"].numpy()])


def test_augmented_batches_are_shifted_and_flipped():
    data, task = make(augment=True)
    chosen = rows(task)
    inputs, _ = task.batch(chosen)
    padded = np.pad(data.train_images, ((0, 0), (4, 4), (4, 4), (0, 0))).astype(np.float64)
    flat = data.train_images.reshape(-1, 3)
    for worker in range(4):
        for b in range(3):
            down, across, flip = chosen["choices"][worker, b].tolist()
            image = padded[int(chosen["index"][worker, b])][down : down + 32, across : across + 32]
            image = image[:, ::-1] if flip else image
            expected = np.moveaxis((image - flat.mean(0)) / flat.std(0), -1, 0)
            np.testing.assert_allclose(inputs[worker, b].numpy(), expected, atol=1e-4)
    choices = task.tables(0)["choices"]
    assert choices[..., :2].max() == 8
    assert choices.min() == 0
    assert set(choices[..., 2].ravel()) == {0, 1}


def test_evaluation_counts_hits():
    data, task = make()
    data = replace(data, test_labels=np.zeros(10, np.int64))
    task = ImageTask("r", data, task.parts, lambda: build("resnet8", 10), batch_size=4)
    task.to(torch.device("cpu"), torch.float32)
    always_zero = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))
    torch.nn.init.zeros_(always_zero[1].weight)
    always_zero[1].bias.data = torch.eye(10)[0]
    with torch.no_grad():
        result = task.evaluate(always_zero)
    assert result.accuracy == 1.0
    assert result.loss == pytest.approx(np.log(np.e + 9) - 1, rel=1e-6)


def test_recalibration_uses_unshifted_training_images():
    _, task = make(augment=True)
    (batch,) = task.recalibration()
    assert batch.shape == (48, 3, 32, 32)
    assert float(batch.mean()) == pytest.approx(0.0, abs=1e-4)


def test_batch_size_must_be_positive():
    with pytest.raises(InputError, match="batch_size"):
        make(batch_size=0)
