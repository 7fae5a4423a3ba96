"""How a data set's examples are shared among workers: evenly, by shards, or by Dirichlet draws."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError
from matcha.training.task import generator

PartitionKind: TypeAlias = Literal["iid", "shards", "dirichlet", "documents", "folders"]
"""The last two are for text: `matcha.zoo.text.share`."""
_BY_LABEL: tuple[PartitionKind, ...] = ("iid", "shards", "dirichlet")
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

    >>> parts = partition(np.array([0, 1, 0, 1]), 2, "shards", shards_per_worker=1)
    >>> sorted(part.tolist() for part in parts)
    [[0, 2], [1, 3]]

    Raises:
        InputError: There are fewer examples than workers, or a parameter makes no sense.
    """
    labels = np.asarray(labels)
    if kind not in _BY_LABEL:
        raise InputError(f"partition must be iid, shards or dirichlet, not {kind!r}")
    if num_workers < 1 or len(labels) < num_workers:
        raise InputError(f"{len(labels)} examples cannot be shared among {num_workers} workers")
    random = generator(seed, _PURPOSE)
    if kind == "iid":
        return tuple(
            np.sort(p) for p in np.array_split(random.permutation(len(labels)), num_workers)
        )
    if kind == "shards":
        return _shards(labels, num_workers, shards_per_worker, random)
    return _dirichlet(labels, num_workers, concentration, random)


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
    if not concentration > 0:
        raise InputError(f"the Dirichlet concentration must be above 0, not {concentration}")
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
