"""Bounds that hold for every schedule: by doubling, and by supports over all choices of matchings.

A support is the workers that a value can have reached after a few matchings.
`theory.graph_bound` lets every worker's noise spread as if matchings were made for it alone. Here
all workers share them. With B the product of some matchings and A one more, of weights in [0, 1],

    ‖A B‖² >= Σ_{i–j in A} ½ ‖r_i + r_j‖² + Σ_{others} ‖r_u‖²

for the rows r of B; these are not negative, sum to 1, and vanish outside their supports. So a pair
keeps at least what two such rows leave at best, and over all A the best is a heaviest matching.
All B of maximal matchings are searched through: larger ones have larger supports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from matcha.errors import InputError
from matcha.topology import Topology

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
_MOST_MATCHINGS = 6000
_MOST_STEPS = 4e9


def doubling_bound(num_workers: int, matchings_per_iteration: float) -> float:
    """A consensus error that no strategy goes below, whatever its links and weights.

    After a matchings, one worker's noise has reached at most 2^a workers, so it still has squared
    length max(2^-a, 1/m); and by convexity no timing beats an even one. Hence
    tr(X)/m >= Σ_{n>=1} (max(2^{-cn}, 1/m) − 1/m) at c matchings per iteration.

    >>> doubling_bound(8, 1.0)
    0.5
    """
    if not matchings_per_iteration > 0:
        raise InputError("a bound needs a positive number of matchings per iteration.")
    last = math.ceil(math.log2(num_workers) / matchings_per_iteration)
    ages = np.arange(1, last + 1)
    lengths = np.maximum(2.0 ** (-matchings_per_iteration * ages), 1 / num_workers)
    return float(np.sum(lengths - 1 / num_workers))


def searched_lengths(topology: Topology, *, seconds: float = 60.0) -> tuple[float, ...]:
    """Least mean squared lengths of a worker's noise after 0, 1, 2, … matchings, as far as found.

    Args:
        topology: The workers and their links, which carry both ways.
        seconds: Stop after this long; what was searched through completely counts.

    >>> from matcha.topology import families
    >>> [round(length, 4) for length in searched_lengths(families.path(3))[:3]]
    [1.0, 0.6667, 0.4167]
    """
    m, links, deadline = topology.num_workers, topology.link_array, time.monotonic() + seconds
    states = np.eye(m, dtype=bool)[None]
    lengths = [1.0, _least(states, links) / m]
    partners = _maximal_matchings(topology)
    while partners is not None and len(states) * len(partners) * m * m < _MOST_STEPS:
        best, seen, grown = math.inf, set[bytes](), []
        for state in states:
            wider = _new(state[None] | state[:, partners].transpose(1, 0, 2), seen)
            if len(wider):
                best = _least(wider, links, best)
                grown.append(wider)
            if time.monotonic() > deadline:
                return tuple(lengths)
        lengths.append(best / m)
        if best <= 1 + 1e-9:
            break
        states = np.concatenate(grown)
    return tuple(lengths)


def sharpen(lengths: Sequence[float], searched: Sequence[float]) -> list[float]:
    """The larger of both; a matching at best halves what is left, beyond where the search ended."""
    sharper = [max(one, other) for one, other in zip(lengths, searched, strict=False)]
    while sharper[-1] > (1 + 1e-9) * lengths[-1]:
        known = lengths[min(len(sharper), len(lengths) - 1)]
        sharper.append(max(known, sharper[-1] / 2))
    return sharper


def _new(states: Bools, seen: set[bytes]) -> Bools:
    """Those that were not met before."""
    keys = [row.tobytes() for row in np.packbits(states.reshape(len(states), -1), axis=1)]
    fresh = [k for k, key in enumerate(keys) if key not in seen and not seen.add(key)]  # type: ignore[func-returns-value]
    found: Bools = states[fresh]
    return found


def _least(states: Bools, links: npt.NDArray[np.int64], best: float = math.inf) -> float:
    """The least sum of squared lengths after one more matching, over all states."""
    alone, gains = _gains(states, links)
    reach = np.zeros((len(states), states.shape[1]))
    for e, (i, j) in enumerate(links.tolist()):
        reach[:, i] = np.maximum(reach[:, i], gains[:, e])
        reach[:, j] = np.maximum(reach[:, j], gains[:, e])
    # A link of a matching is at most what either of its ends could hope for.
    hoped = alone - reach.sum(axis=1) / 2
    for k in np.argsort(hoped):
        if hoped[k] >= best - 1e-12:
            break
        best = min(best, float(alone[k]) - _heaviest(gains[k], links, states.shape[1]))
    return best


def _gains(states: Bools, links: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """What all rows keep alone, and what a meeting over each link takes off at most."""
    sizes, rows = states.sum(axis=2).astype(float), states.astype(np.float32)
    i, j = links.T
    common = np.einsum("nek,nek->ne", rows[:, i], rows[:, j]).astype(float)
    a, b = sizes[:, i], sizes[:, j]
    union, left, right = a + b - common, a - common, b - common
    # Both fill their union evenly, unless one has too little for what it alone can reach.
    kept = 2 / union
    kept = np.where(2 * left > union, 0.5 / np.maximum(left, 1) + 0.5 / b, kept)
    kept = np.where(2 * right > union, 0.5 / np.maximum(right, 1) + 0.5 / a, kept)
    alone: Floats = (1 / sizes).sum(axis=1)
    return alone, np.maximum(1 / a + 1 / b - kept, 0.0)


def _heaviest(gains: Floats, links: npt.NDArray[np.int64], m: int) -> float:
    import rustworkx

    graph = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(m))
    # Rounded up: what a matching takes off may be overstated, never understated.
    worth = np.ceil(gains * 2.0**30).astype(np.int64)
    graph.add_edges_from(
        [(i, j, w) for (i, j), w in zip(links.tolist(), worth.tolist(), strict=True)]
    )
    weight = {(i, j): w for (i, j), w in zip(links.tolist(), worth.tolist(), strict=True)}
    pairs = rustworkx.max_weight_matching(graph, weight_fn=int)
    return float(sum(weight[min(p), max(p)] for p in pairs) / 2.0**30)


def _maximal_matchings(topology: Topology) -> npt.NDArray[np.int64] | None:
    """Each worker's partner (itself where it rests) in every maximal matching; None: too many."""
    around = [set(topology.neighbors(worker)) for worker in range(topology.num_workers)]
    found = []
    for partner in _extended(list(range(topology.num_workers)), around, 0, frozenset()):
        found.append(partner)
        if len(found) > _MOST_MATCHINGS:
            return None
    return np.array(found, dtype=np.int64)


def _extended(
    partner: list[int], around: list[set[int]], worker: int, resting: frozenset[int]
) -> Iterator[list[int]]:
    """Maximal matchings that agree with what was settled for the workers before this one."""
    while worker < len(partner) and partner[worker] != worker:
        worker += 1
    if worker == len(partner):
        yield partner.copy()
        return
    for other in sorted(around[worker]):
        if other > worker and partner[other] == other:
            partner[worker], partner[other] = other, worker
            yield from _extended(partner, around, worker + 1, resting)
            partner[worker], partner[other] = worker, other
    if not around[worker] & resting:  # two neighbours that rest could have met
        yield from _extended(partner, around, worker + 1, resting | {worker})
