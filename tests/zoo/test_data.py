from __future__ import annotations

import pickle

import numpy as np
import pytest
from tests.datasets import write_cifar10, write_cifar100, write_ptb

from matcha.errors import DataError
from matcha.zoo import data


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar10_in_both_layouts(tmp_path, layout):
    pixels, labels = write_cifar10(tmp_path, layout)
    images = data.cifar10(tmp_path)
    assert images.train_images.shape == (40, 32, 32, 3)
    assert images.test_images.shape == (8, 32, 32, 3)
    assert images.num_classes == 10
    expected = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert np.array_equal(images.train_images[:8], expected)
    assert np.array_equal(images.train_labels[:8], labels)


@pytest.mark.parametrize("layout", ["binary", "python"])
def test_cifar100_takes_the_fine_labels(tmp_path, layout):
    pixels, fine = write_cifar100(tmp_path, layout)
    images = data.cifar100(tmp_path)
    assert images.num_classes == 100
    assert np.array_equal(images.train_labels, fine)
    assert np.array_equal(images.train_images, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    write_cifar10(tmp_path)
    monkeypatch.setenv("MATCHA_DATA", str(tmp_path))
    assert len(data.cifar10().test_labels) == 8


def test_no_folder_named(monkeypatch):
    monkeypatch.delenv("MATCHA_DATA", raising=False)
    with pytest.raises(DataError, match=r"--data DIR or \$MATCHA_DATA"):
        data.cifar10()


def test_missing_folder_and_missing_set(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        data.cifar10(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cifar-10-batches-bin .* there"):
        data.cifar10(tmp_path)
    with pytest.raises(DataError, match=r"cifar-100-binary .* there"):
        data.cifar100(tmp_path)
    with pytest.raises(DataError, match="Penn Treebank is incomplete"):
        data.penn_treebank(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin/data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin.*cannot be read"):
        data.cifar10(tmp_path)


def test_a_cut_file_is_damaged(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not whole records"):
        data.cifar10(tmp_path)


def test_a_label_out_of_range_is_damaged(tmp_path):
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin/test_batch.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])
    with pytest.raises(DataError, match="a label is 11 of 10 classes"):
        data.cifar10(tmp_path)


class _Trap:
    def __reduce__(self):
        return (print, ("a data set ran code",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({b"data": _Trap(), b"labels": [1]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}),
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
        pickle.dumps([1, 2]),
        b"not a pickle",
        b"",
    ],
)
def test_python_batches_never_run_code(tmp_path, capsys, content):
    write_cifar10(tmp_path, "python")
    (tmp_path / "cifar-10-batches-py/data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match="data_batch_1"):
        data.cifar10(tmp_path)
    assert "ran code" not in capsys.readouterr().out


def test_pickles_of_older_numpy_are_read(tmp_path):
    """The public files name numpy.core, where numpy 2 says numpy._core."""
    write_cifar10(tmp_path, "python")
    path = tmp_path / "cifar-10-batches-py/data_batch_1"
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert b"numpy.core.multiarray" in path.read_bytes()
    assert len(data.cifar10(tmp_path).train_labels) == 40


def test_penn_treebank_numbers_words_by_first_appearance(tmp_path):
    lines = write_ptb(tmp_path)
    text = data.penn_treebank(tmp_path)
    assert text.vocabulary[:3] == ("w0", "w1", "w2")
    assert len(text.vocabulary) == 21
    words = [text.vocabulary[k] for k in text.train[: len(lines[0].split()) + 1]]
    assert words == [*lines[0].split(), "<eos>"]
    assert len(text.train) == sum(len(line.split()) + 1 for line in lines)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("valid", "unheard words", "not the usual 10,000-word version"),
        ("test", "", "it is empty"),
        ("train", b"\xff\xfe\x00", "not text"),
    ],
)
def test_damaged_text(tmp_path, name, content, message):
    write_ptb(tmp_path)
    path = tmp_path / f"ptb/ptb.{name}.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        data.penn_treebank(tmp_path)


def test_digits_need_no_folder():
    images = data.digits()
    assert len(images.train_labels) + len(images.test_labels) == 1797
    assert images.train_images.shape[1:] == (8, 8, 1)
    assert np.array_equal(images.train_images, data.digits().train_images)


def test_subset_is_random_and_repeatable():
    images = data.digits()
    part = images.subset(100, 20)
    assert (len(part.train_labels), len(part.test_labels)) == (100, 20)
    assert np.array_equal(part.train_images, images.subset(100, 20).train_images)
    assert not np.array_equal(part.train_labels, images.train_labels[:100])
