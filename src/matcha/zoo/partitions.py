"""How a data set's examples are shared among workers: evenly, by shards, or by Dirichlet draws."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError
from matcha.training.task import generator

PartitionKind: TypeAlias = Literal[
    "iid", "shards", "dirichlet", "dirichlet-even", "documents", "folders"
]
"""The last two are for text: `matcha.zoo.text.share`."""
_BY_LABEL: tuple[PartitionKind, ...] = ("iid", "shards", "dirichlet", "dirichlet-even")
Indices: TypeAlias = npt.NDArray[np.int64]
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
        return tuple(
            np.sort(p) for p in np.array_split(random.permutation(len(labels)), num_workers)
        )
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
