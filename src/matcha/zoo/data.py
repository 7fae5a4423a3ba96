"""Data sets in their public layouts, from a folder that the user names, and how workers share them.

Nothing is fetched.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.errors import DataError, InputError
from matcha.training.task import generator

Bytes: TypeAlias = npt.NDArray[np.uint8]
Labels: TypeAlias = npt.NDArray[np.int64]
Indices: TypeAlias = npt.NDArray[np.int64]
Examples: TypeAlias = tuple[Bytes, Labels]

_PIXELS = 3 * 32 * 32
_CIFAR_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True, slots=True)
class Images:
    """Images and labels of both splits; image axes are number, height, width, channel."""

    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels
    num_classes: int

    def subset(self, num_train: int | None, num_test: int | None) -> Images:
        """A random part of each split, the same each time; None keeps all."""
        if num_train is None and num_test is None:
            return self
        train, test = (
            np.sort(generator(0, 0x5355, k).permutation(len(labels))[:number])
            for k, labels, number in (
                (0, self.train_labels, num_train),
                (1, self.test_labels, num_test),
            )
        )
        return replace(
            self,
            train_images=self.train_images[train],
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
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
        valid, test = self.valid[:num_test], self.test[:num_test]
        return replace(self, train=self.train[:num_train], valid=valid, test=test)


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
    return Images(images[train], labels[train], images[test], labels[test], num_classes=10)


def cifar10(directory: str | Path | None = None) -> Images:
    """CIFAR-10 from ``cifar-10-batches-bin`` (binary) or ``cifar-10-batches-py`` (python).

    Raises:
        DataError: Neither layout is there, or a file is damaged.
    """
    files = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    folders = ("cifar-10-batches-bin", "cifar-10-batches-py")
    return _cifar(directory, folders, files, b"labels", num_classes=10)


def cifar100(directory: str | Path | None = None) -> Images:
    """CIFAR-100 with its 100 fine labels from ``cifar-100-binary`` or ``cifar-100-python``.

    Raises:
        DataError: Neither layout is there, or a file is damaged.
    """
    folders = ("cifar-100-binary", "cifar-100-python")
    return _cifar(directory, folders, ["train", "test"], b"fine_labels", num_classes=100)


def _cifar(
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
        pieces = [_binary(binary / f"{file}.bin", coarse, num_classes) for file in files]
    elif python.is_dir():
        pieces = [_python(python / file, label_key, num_classes) for file in files]
    else:
        raise DataError(
            f"CIFAR-{num_classes} is not in {str(root)!r}: unpack {binary.name} (binary version) "
            f"or {python.name} (python version) from {_CIFAR_SITE} there"
        )
    *train, test = pieces
    images, labels = map(np.concatenate, zip(*train, strict=True))
    return Images(images, labels, *test, num_classes)


def penn_treebank(directory: str | Path | None = None) -> Text:
    """Penn Treebank from ``ptb/ptb.{train,valid,test}.txt``, a sentence a line."""
    root = data_directory(directory)
    texts = {name: _words(root / "ptb" / f"ptb.{name}.txt") for name in ("train", "valid", "test")}
    numbers = {word: number for number, word in enumerate(dict.fromkeys(texts["train"]))}
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


def _binary(path: Path, skipped: int, num_classes: int) -> Examples:
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


def _python(path: Path, label_key: bytes, num_classes: int) -> Examples:
    """A pickled dictionary of pixel rows and labels, never trusted to run code."""
    content = io.BytesIO(_read(path))
    try:
        document = _ArraysOnly(content, encoding="bytes").load()
        pixels = np.asarray(document[b"data"])
        labels = np.asarray(document[label_key], dtype=np.int64)
    except Exception as error:
        raise DataError(f"{str(path)!r} is not a CIFAR batch: {error}") from None
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataError(f"{str(path)!r} is damaged: its pixels are not rows of {_PIXELS} bytes")
    return _checked(path, pixels, labels, num_classes)


def _checked(path: Path, pixels: Bytes, labels: Labels, classes: int) -> Examples:
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


# -- how a data set's examples are shared among workers: evenly, by shards, or by Dirichlet draws

PartitionKind: TypeAlias = Literal[
    "iid", "shards", "dirichlet", "dirichlet-even", "documents", "folders"
]
"""The last two are for text: `matcha.zoo.language.share`."""
_BY_LABEL: tuple[PartitionKind, ...] = ("iid", "shards", "dirichlet", "dirichlet-even")
_PURPOSE = 0x5041  # keeps these draws apart from a task's others under the same seed


def partition(
    labels: npt.NDArray[Any],
    num_workers: int,
    kind: PartitionKind = "iid",
    *,
    seed: int = 0,
    shards_per_worker: int = 2,
    concentration: float = 0.5,
) -> tuple[Indices, ...]:
    """Each worker's examples: disjoint, together all of them.

    ``iid`` deals shuffled examples evenly, as the paper does. ``shards`` sorts by label, cuts into
    ``shards_per_worker`` pieces per worker and deals those (McMahan et al., 2017). ``dirichlet``
    shares each class by a draw from Dirichlet(``concentration``) (Hsu et al., 2019).
    ``dirichlet-even`` does so among ten workers at a time, skips those that hold their part
    already, and gives all workers equally many (Lin et al., 2021; RelaySGD's experiments).

    >>> parts = partition(np.array([0, 1, 0, 1]), 2, "shards", shards_per_worker=1)
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3]]
    """
    labels = np.asarray(labels)
    if kind not in _BY_LABEL:
        raise InputError(f"partition must be one of {', '.join(_BY_LABEL)}, not {kind!r}")
    if num_workers < 1 or len(labels) < num_workers:
        raise InputError(f"{len(labels)} examples cannot be shared among {num_workers} workers")
    random = generator(seed, _PURPOSE)
    if kind == "iid":
        parts = np.array_split(random.permutation(len(labels)), num_workers)
        return tuple(np.sort(part) for part in parts)
    if kind == "shards":
        return _shards(labels, num_workers, shards_per_worker, random)
    if not concentration > 0:
        raise InputError(f"the Dirichlet concentration must be above 0, not {concentration}")
    share = _dirichlet if kind == "dirichlet" else _dirichlet_even
    return share(labels, num_workers, concentration, random)


def _shards(
    labels: npt.NDArray[Any], num_workers: int, each: int, random: np.random.Generator
) -> tuple[Indices, ...]:
    if each < 1 or each * num_workers > len(labels):
        raise InputError(f"{each} shards per worker need at least {each * num_workers} examples")
    pieces = np.array_split(np.argsort(labels, kind="stable"), num_workers * each)
    dealt = random.permutation(len(pieces)).reshape(num_workers, each)
    return tuple(np.sort(np.concatenate([pieces[k] for k in row])) for row in dealt)


def _dirichlet(
    labels: npt.NDArray[Any], num_workers: int, concentration: float, random: np.random.Generator
) -> tuple[Indices, ...]:
    parts: list[list[Indices]] = [[] for _ in range(num_workers)]
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(num_workers, concentration))
        cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for held, piece in zip(parts, np.split(members, cuts), strict=True):
            held.append(piece)
    shared = [np.sort(np.concatenate(held)) for held in parts]
    # No worker may be left without data: the largest share gives one example up.
    for worker, part in enumerate(shared):
        if not len(part):
            giver = max(range(num_workers), key=lambda k: len(shared[k]))
            shared[worker], shared[giver] = shared[giver][:1], shared[giver][1:]
    return tuple(shared)


_TOGETHER = 10
"""Workers that share a class: as many as CIFAR-10 has classes."""


def _dirichlet_even(
    labels: npt.NDArray[Any], num_workers: int, concentration: float, random: np.random.Generator
) -> tuple[Indices, ...]:
    order, held = random.permutation(len(labels)), []
    cuts = [len(labels) * k // num_workers for k in range(_TOGETHER, num_workers, _TOGETHER)]
    for k, members in enumerate(np.split(order, cuts)):
        number = min(_TOGETHER, num_workers - k * _TOGETHER)
        classes = [members[labels[members] == label] for label in np.unique(labels[members])]
        fair, parts = len(members) / number, _deal(classes, number, concentration, random)
        while min(map(len, parts)) < fair // 2:
            parts = _deal(classes, number, concentration, random)
        held += parts
    return tuple(np.sort(part) for part in np.array_split(np.concatenate(held), num_workers))


def _deal(
    classes: list[Indices], number: int, concentration: float, random: np.random.Generator
) -> list[Indices]:
    """Share class after class among the workers that do not hold their part yet."""
    fair = sum(map(len, classes)) / number
    parts = [np.empty(0, dtype=np.int64)] * number
    for members in classes:
        open_ = np.array([len(part) < fair for part in parts])
        shares = random.dirichlet(np.full(number, concentration)) * open_
        while not shares.sum() > 0:  # all of a class to those who hold their part
            shares = random.dirichlet(np.full(number, concentration)) * open_
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(int)
        parts = [np.concatenate(pair) for pair in zip(parts, np.split(members, cuts), strict=True)]
    return parts
