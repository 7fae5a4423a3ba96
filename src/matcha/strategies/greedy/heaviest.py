"""Heavy matchings: the exact heaviest one, and a linear-time approximation of it.

A link's weight is what one exchange over it gains; the heaviest matching is the best that one
unit of communication time can do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Weights become integers of this many bits, so that the search has no rounding of its own, …
_BITS = 40
# … and ties are broken by a fixed pseudo-random number of this many bits a link.
_TIE_BITS = 12
_TIE_SEED = 20190523
_TEMPERATURES = (0.0, *np.geomspace(0.2, 0.02, 10), 0.0, 0.0)


def heaviest_matching(links: Indices, weights: Array, num_workers: int) -> Indices:
    """The matching of greatest total weight (Edmonds' blossoms, O(m³)).

    Args:
        links: The links as an array of shape (number of links, 2).
        weights: One a link; links without positive weight are never used.
        num_workers: m.

    Returns:
        The positions of its links, in order.

    >>> path = np.array([(0, 1), (1, 2), (2, 3)])
    >>> heaviest_matching(path, np.array([2.0, 3.0, 2.0]), 4).tolist()
    [0, 2]
    """
    import rustworkx

    top = float(weights.max(initial=0.0))
    if not top > 0:
        return np.zeros(0, dtype=np.int64)
    scaled = np.rint(weights * (2.0**_BITS / top)).astype(np.int64)
    useful = np.flatnonzero(scaled > 0)
    ranked = (scaled[useful] << _TIE_BITS) + _ties(len(weights))[useful]
    graph = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(num_workers))
    ends = links[useful].tolist()
    graph.add_edges_from([(i, j, w) for (i, j), w in zip(ends, ranked.tolist(), strict=True)])
    pairs = rustworkx.max_weight_matching(graph, weight_fn=int)
    position = {(i, j): e for (i, j), e in zip(ends, useful.tolist(), strict=True)}
    return np.array(sorted(position[min(p), max(p)] for p in pairs), dtype=np.int64)


def nearly_heaviest_matching(links: Indices, weights: Array, num_workers: int) -> Indices:
    """A matching close to the heaviest one, in a few dozen linear passes.

    Every link that is the heaviest at both of its ends is taken; its neighbours leave; repeat.
    That guarantees half the greatest weight but strands workers where weights are nearly equal;
    so then matched links u–v give way to links from u and v to stranded workers while that gains.

    >>> path = np.array([(0, 1), (1, 2), (2, 3)])
    >>> nearly_heaviest_matching(path, np.array([2.0, 3.0, 2.0]), 4).tolist()
    [0, 2]
    """
    useful = np.flatnonzero(weights > 0)
    rng = np.random.default_rng(_TIE_SEED)
    taken = np.zeros(len(useful), dtype=bool)
    best, best_weight = taken, 0.0
    for temperature in _TEMPERATURES:
        # Shaken weights let stranded workers wander until they meet; cooling settles the rest.
        shaken = weights[useful] * np.exp(temperature * rng.standard_normal(len(useful)))
        # By falling weight, ties by position: from here on a link's rank is its place.
        order = np.argsort(-shaken, kind="stable")
        ends, w, now = links[useful[order]], shaken[order], taken[order]
        _take_locally_heaviest(ends, now, num_workers)
        _augment(ends, w, now, num_workers)
        _take_locally_heaviest(ends, now, num_workers)
        taken = np.empty_like(now)
        taken[order] = now
        total = float(weights[useful[taken]].sum())
        if total > best_weight:
            best, best_weight = taken.copy(), total
    return np.sort(useful[best])


def _take_locally_heaviest(ends: Indices, taken: Mask, num_workers: int) -> None:
    """Take links between free workers, heaviest at both ends first, until none is left."""
    free = np.ones(num_workers, dtype=bool)
    free[ends[taken].ravel()] = False
    alive = np.flatnonzero(free[ends[:, 0]] & free[ends[:, 1]])
    while len(alive):
        i, j = ends[alive].T
        best = _heaviest_at(np.stack([i, j], axis=1), num_workers)
        rank = np.arange(len(alive))
        mutual = (best[i] == rank) & (best[j] == rank)
        taken[alive[mutual]] = True
        free[ends[alive[mutual]].ravel()] = False
        alive = alive[free[i] & free[j]]


def _augment(ends: Indices, w: Array, taken: Mask, num_workers: int) -> bool:
    """Let matched links give way to links from their ends to stranded workers; whether any did."""
    matched = np.flatnonzero(taken)
    free = np.ones(num_workers, dtype=bool)
    free[ends[matched].ravel()] = False
    # Each busy worker's heaviest link to a free one: `offer`, −1 where there is none.
    crossing = np.flatnonzero(free[ends[:, 0]] != free[ends[:, 1]])
    busy_end = np.where(free[ends[crossing, 0]], ends[crossing, 1], ends[crossing, 0])
    free_end = np.where(free[ends[crossing, 0]], ends[crossing, 0], ends[crossing, 1])
    offer = np.full(num_workers, -1)
    offer[busy_end[::-1]] = np.arange(len(crossing))[::-1]
    u, v = ends[matched].T
    value = np.append(w[crossing], 0.0)
    partner = np.append(free_end, -1)
    a, b = offer[u], offer[v]
    # Both want the same stranded worker: the lighter offer is withdrawn.
    clash = (a >= 0) & (b >= 0) & (partner[a] == partner[b])
    lighter = value[a] < value[b]
    a, b = np.where(clash & lighter, -1, a), np.where(clash & ~lighter, -1, b)
    gain = value[a] + value[b] - w[matched]
    better = np.flatnonzero(gain > 1e-12 * w[matched])
    if not len(better):
        return False
    # A stranded worker can be given to one matched link: to the one that gains most from it.
    better = better[np.argsort(-gain[better], kind="stable")]
    wanted = np.stack([partner[a[better]], partner[b[better]]], axis=1)
    wanted[wanted < 0] = num_workers
    first = _heaviest_at(wanted, num_workers + 1)
    rank = np.arange(len(better))
    wins = ((first[wanted] == rank[:, None]) | (wanted == num_workers)).all(axis=1)
    winners = better[wins]
    taken[matched[winners]] = False
    for side in (a[winners], b[winners]):
        taken[crossing[side[side >= 0]]] = True
    return True


def _heaviest_at(ends: Indices, num_workers: int) -> Indices:
    """For each worker, the first row that names it; rows come by falling weight."""
    first = np.empty(num_workers, dtype=np.int64)
    # Written from the lightest to the heaviest: the last one written stays.
    first[ends[::-1].ravel()] = np.repeat(np.arange(len(ends))[::-1], ends.shape[1])
    return first


def _ties(count: int) -> Indices:
    return np.random.default_rng(_TIE_SEED).integers(0, 1 << _TIE_BITS, size=count)
