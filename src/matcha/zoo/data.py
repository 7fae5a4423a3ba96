"""Data sets in their public layouts, read from a folder that the user names; nothing is fetched."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.errors import DataError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]

_PIXELS = 3 * 32 * 32
_CIFAR_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Images and labels of both splits; image axes are number, height, width, channel."""

    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels
    num_classes: int

    def subset(self, num_train: int | None, num_test: int | None, seed: int = 0) -> Images:
        """A random part of each split, the same for the same seed; None keeps all."""
        from matcha.training.task import generator

        if num_train is None and num_test is None:
            return self
        train, test = (
            np.sort(generator(seed, 0x5355, k).permutation(len(labels))[:number])
            for k, (labels, number) in enumerate(
                [(self.train_labels, num_train), (self.test_labels, num_test)]
            )
        )
        return Images(
            train_images=self.train_images[train],
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
            num_classes=self.num_classes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A corpus as word numbers; the vocabulary is the training text's."""

    train: Labels
    valid: Labels
    test: Labels
    vocabulary: tuple[str, ...]

    def head(self, num_train: int | None, num_test: int | None) -> Text:
        """The first words of each part, with the whole vocabulary; None keeps all."""
        return replace(
            self,
            train=self.train[:num_train],
            valid=self.valid[:num_test],
            test=self.test[:num_test],
        )


def data_directory(directory: str | Path | None = None) -> Path:
    """The folder that holds data sets: the given one, or ``$MATCHA_DATA``."""
    chosen = directory or os.environ.get("MATCHA_DATA")
    if not chosen:
        raise DataError(
            "this task reads its data from a folder: name it with --data DIR or $MATCHA_DATA"
        )
    path = Path(chosen).expanduser()
    if not path.is_dir():
        raise DataError(f"the data folder {str(path)!r} does not exist")
    return path


def digits(num_train: int = 1497) -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 × 8 pixels; ships with scikit-learn.

    Those that do not train are the test set.
    """
    # The file is read without importing scikit-learn: that takes each worker a second or more.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        table = np.loadtxt(lines, delimiter=",")
    pixels = table[:, :-1].reshape(-1, 8, 8)
    images = np.round(pixels * (255 / 16)).astype(np.uint8)[..., None]
    labels = table[:, -1].astype(np.int64)
    order = np.random.Generator(np.random.Philox(0)).permutation(len(labels))
    train, test = order[:num_train], order[num_train:]
    return Images(
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        num_classes=10,
    )


def cifar10(directory: str | Path | None = None) -> Images:
    """CIFAR-10 from ``cifar-10-batches-bin`` (binary) or ``cifar-10-batches-py`` (python).

    Raises:
        DataError: Neither layout is there, or a file is damaged.
    """
    files = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _cifar("CIFAR-10", directory, folders, files, b"labels", num_classes=10)


def cifar100(directory: str | Path | None = None) -> Images:
    """CIFAR-100 with its 100 fine labels from ``cifar-100-binary`` or ``cifar-100-python``.

    Raises:
        DataError: Neither layout is there, or a file is damaged.
    """
    folders = ("cifar-100-binary", "cifar-100-python")
    files = ["train", "test"]
    return _cifar("CIFAR-100", directory, folders, files, b"fine_labels", num_classes=100)


def _cifar(
    name: str,
    directory: str | Path | None,
    folders: tuple[str, str],
    files: list[str],
    label_key: bytes,
    *,
    num_classes: int,
) -> Images:
    """The images of a folder in either layout; the last file is the test set."""
    root = data_directory(directory)
    binary, python = (root / folder for folder in folders)
    if binary.is_dir():
        coarse = int(num_classes == 100)  # of two label bytes the second is the fine one
        pieces = [
            _binary(binary / f"{file}.bin", skipped=coarse, num_classes=num_classes)
            for file in files
        ]
    elif python.is_dir():
        pieces = [_python(python / file, label_key, num_classes=num_classes) for file in files]
    else:
        raise DataError(
            f"{name} is not in {str(root)!r}: unpack {binary.name} (binary version) or "
            f"{python.name} (python version) from {_CIFAR_SITE} there"
        )
    *train, test = pieces
    return Images(
        train_images=np.concatenate([images for images, _ in train]),
        train_labels=np.concatenate([labels for _, labels in train]),
        test_images=test[0],
        test_labels=test[1],
        num_classes=num_classes,
    )


def penn_treebank(directory: str | Path | None = None) -> Text:
    """Penn Treebank from ``ptb/ptb.{train,valid,test}.txt``, a sentence a line."""
    root = data_directory(directory)
    texts = {name: _words(root / "ptb" / f"ptb.{name}.txt") for name in ("train", "valid", "test")}
    numbers: dict[str, int] = {}
    for word in texts["train"]:
        numbers.setdefault(word, len(numbers))
    try:
        coded = {
            name: np.array([numbers[word] for word in words], dtype=np.int64)
            for name, words in texts.items()
        }
    except KeyError as error:
        raise DataError(
            f"Penn Treebank in {str(root / 'ptb')!r} is not the usual 10,000-word version: "
            f"{error.args[0]!r} is not in its training text"
        ) from None
    return Text(**coded, vocabulary=tuple(numbers))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


def _binary(path: Path, *, skipped: int, num_classes: int) -> tuple[Bytes, Labels]:
    """Records of label bytes (the last one counts) and 3,072 planar pixel bytes."""
    raw = np.frombuffer(_read(path), dtype=np.uint8)
    record = skipped + 1 + _PIXELS
    if not len(raw) or len(raw) % record:
        raise DataError(
            f"{str(path)!r} is damaged: {len(raw):,} bytes are not whole records of {record:,}"
        )
    rows = raw.reshape(-1, record)
    return _checked(path, rows[:, skipped + 1 :], rows[:, skipped].astype(np.int64), num_classes)


def _latin1(text: Any, encoding: Any) -> bytes:
    """How Python 3 writes bytes into old pickle protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("only latin1 text has a place in a data set")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Builds plain containers, bytes and numpy arrays, and refuses every other name."""

    allowed: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a data set")
        return self.allowed[module, name]


def _python(path: Path, label_key: bytes, *, num_classes: int) -> tuple[Bytes, Labels]:
    """A pickled dictionary of pixel rows and labels, never trusted to run code."""
    try:
        document = _ArraysOnly(io.BytesIO(_read(path)), encoding="bytes").load()
        pixels = np.asarray(document[b"data"])
        labels = np.asarray(document[label_key], dtype=np.int64)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{str(path)!r} is not a CIFAR batch: {error}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(f"{str(path)!r} is damaged: its pixels are not rows of {_PIXELS} bytes")
    return _checked(path, pixels, labels, num_classes)


def _checked(path: Path, pixels: Bytes, labels: Labels, classes: int) -> tuple[Bytes, Labels]:
    if labels.shape != (len(pixels),) or labels.min(initial=0) < 0:
        raise DataError(f"{str(path)!r} is damaged: not one label an image")
    if labels.max(initial=0) >= classes:
        raise DataError(f"{str(path)!r} is damaged: a label is {labels.max()} of {classes} classes")
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def _words(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        raise DataError(
            f"Penn Treebank is incomplete: put the language-model text at {str(path)!r}, "
            "a sentence a line"
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{str(path)!r} is damaged: it is not text") from None
    words = [word for line in lines for word in (*line.split(), "<eos>")]
    if not words:
        raise DataError(f"{str(path)!r} is damaged: it is empty")
    return words
