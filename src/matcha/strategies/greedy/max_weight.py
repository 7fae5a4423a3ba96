"""Maximum-weight matchings: exact, and by a linear-time approximation.

A link's weight is what one exchange over it gains; the heaviest matching is the best that one
unit of communication time can do.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from matcha._numerics.spectra import Array, Indices

# Weights become integers of this many bits, so that the search has no rounding of its own, …
_BITS = 40
# … and ties are broken by a fixed pseudo-random number of this many bits per link.
_TIE_BITS = 12
_TIE_SEED = 20190523
_DENSE_UP_TO = 256
_TEMPERATURES = (0.0, *np.geomspace(0.2, 0.02, 16), 0.0, 0.0)


def max_weight_matching(
    links: Indices, weights: Array, num_workers: int, *, bits: int = _BITS, seed: int = 0
) -> Indices:
    """The matching of greatest total weight (Edmonds' blossoms, O(m³)), as positions of links.

    Links without positive weight are never used; `bits` say how finely weights are told apart
    (fewer is quicker), and the seed decides between equal matchings.
    """
    import rustworkx

    top = float(weights.max(initial=0.0))
    if not top > 0:
        return np.zeros(0, dtype=np.int64)
    scaled = np.rint(np.maximum(weights, 0.0) / top * 2.0**bits).astype(np.int64)
    useful = np.flatnonzero(scaled > 0)
    ranked = scaled[useful]
    if bits == _BITS:
        ranked = (ranked << _TIE_BITS) + _ties(len(weights), seed)[useful]
    graph = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(range(num_workers))
    ends = links[useful].tolist()
    graph.add_edges_from([(i, j, w) for (i, j), w in zip(ends, ranked.tolist(), strict=True)])
    pairs = rustworkx.max_weight_matching(graph, weight_fn=int)
    position = {(i, j): e for (i, j), e in zip(ends, useful.tolist(), strict=True)}
    return np.array(sorted(position[min(p), max(p)] for p in pairs), dtype=np.int64)


def max_weight_permutation(
    links: Indices, weights: Array, num_workers: int, *, bits: int = _BITS, seed: int = 0
) -> Indices:
    """The links (receiver, sender) of greatest total weight in which all who send also receive.

    Such messages go round in circles, so no worker's share grows. It is an assignment problem in
    which a worker may be assigned to itself: it then rests. Among many workers with few links each
    weights are told apart by `bits`: fewer is quicker.
    """
    from scipy.optimize import linear_sum_assignment

    i, j = links.T
    top = float(np.abs(weights).max(initial=0.0))
    if num_workers > _DENSE_UP_TO and 8 * len(links) < num_workers**2:
        return _sparse_permutation(links, weights / (top + 1e-300), num_workers, bits)
    worth = np.full((num_workers, num_workers), -4 * (num_workers + 1) * (top + 1e-300))
    np.fill_diagonal(worth, 0.0)
    worth[i, j] = weights + top * 2.0**-_BITS * _ties(len(weights), seed)
    position = np.full((num_workers, num_workers), -1)
    position[i, j] = np.arange(len(i))
    rows, columns = linear_sum_assignment(worth, maximize=True)
    chosen: Indices = position[rows, columns]
    return np.sort(chosen[chosen >= 0])


def _sparse_permutation(
    links: Indices, weights: Array, num_workers: int, bits: int = _BITS
) -> Indices:
    """The same for many workers with few links each; weights are at most 1."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    alone = np.arange(num_workers)
    rows, columns = np.append(links[:, 0], alone), np.append(links[:, 1], alone)
    # All of a full matching's costs may be raised alike; what is 0 would count as no link.
    costs = 2.0 - np.append(np.rint(weights * 2.0**bits) / 2.0**bits, np.zeros(num_workers))
    graph = coo_array((costs, (rows, columns)), shape=(num_workers, num_workers)).tocsr()
    _, senders = min_weight_full_bipartite_matching(graph)
    return np.flatnonzero(senders[links[:, 0]] == links[:, 1])


def approximate_max_weight_matching(links: Indices, weights: Array, num_workers: int) -> Indices:
    """A matching close to the heaviest one, in a few dozen linear passes.

    Every link that is the heaviest at both of its ends is taken; its neighbours leave; repeat.
    That guarantees half the greatest weight but strands workers where weights are nearly equal;
    so then matched links u–v give way to links from u and v to stranded workers while that gains.
    """
    useful = np.flatnonzero(weights > 0)
    # By falling weight, ties by position: a link's rank is its place.
    useful = useful[np.argsort(-weights[useful], kind="stable")]
    i, j, w = links[useful, 0], links[useful, 1], weights[useful]
    rng = np.random.default_rng(_TIE_SEED)
    # The link that holds each worker, −1 where none does.
    held = np.full(num_workers, -1)
    _take_locally_heaviest(i, j, held)
    best, best_weight = held.copy(), float(w[_taken(i, held)].sum())
    for temperature in _TEMPERATURES:
        # Shaken weights let stranded workers wander until they meet; cooling settles the rest.
        if not _augment(i, j, w, held, temperature, rng):
            continue
        _take_locally_heaviest(i, j, held)
        total = float(w[_taken(i, held)].sum())
        if total > best_weight:
            best, best_weight = held.copy(), total
    return np.sort(useful[_taken(i, best)])


def _taken(i: Indices, held: Indices) -> Indices:
    """The links that hold a worker, once each."""
    workers = np.flatnonzero(held >= 0)
    links: Indices = held[workers[i[held[workers]] == workers]]
    return links


def _take_locally_heaviest(i: Indices, j: Indices, held: Indices) -> None:
    """Take links between free workers, heaviest at both ends first, until none is left."""
    free = held < 0
    alive = np.flatnonzero(free[i] & free[j])
    while len(alive):
        a, b = i[alive], j[alive]
        best = _first_at(np.stack([a, b], axis=1), len(held))
        rank = np.arange(len(alive))
        mutual = (best[a] == rank) & (best[b] == rank)
        held[a[mutual]] = held[b[mutual]] = alive[mutual]
        alive = alive[(held[a] < 0) & (held[b] < 0)]


def _augment(
    i: Indices, j: Indices, w: Array, held: Indices, temperature: float, rng: np.random.Generator
) -> bool:
    """Let matched links give way to links from their ends to stranded workers; whether any did.

    Only matched links and links of stranded workers are looked at: few, once most are matched.
    """
    free = held < 0
    crossing = np.flatnonzero(free[i] != free[j])
    if not len(crossing):
        return False
    matched = _taken(i, held)
    offered, kept = w[crossing], w[matched]
    if temperature:
        noise = np.exp(temperature * rng.standard_normal(len(crossing) + len(matched)))
        offered, kept = offered * noise[: len(crossing)], kept * noise[len(crossing) :]
        order = np.argsort(-offered, kind="stable")
        crossing, offered = crossing[order], offered[order]
    # Each busy worker's heaviest link to a free one: `offer`, −1 where there is none.
    left = free[i[crossing]]
    busy_end = np.where(left, j[crossing], i[crossing])
    partner = np.append(np.where(left, i[crossing], j[crossing]), -1)
    offer = _first_at(busy_end[:, None], len(held), missing=-1)
    value = np.append(offered, 0.0)
    a, b = offer[i[matched]], offer[j[matched]]
    # Both want the same stranded worker: the lighter offer is withdrawn.
    clash = (a >= 0) & (b >= 0) & (partner[a] == partner[b])
    lighter = value[a] < value[b]
    a, b = np.where(clash & lighter, -1, a), np.where(clash & ~lighter, -1, b)
    gain = value[a] + value[b] - kept
    better = np.flatnonzero(gain > 1e-12 * kept)
    if not len(better):
        return False
    # A stranded worker can be given to one matched link: to the one that gains most from it.
    better = better[np.argsort(-gain[better], kind="stable")]
    wanted = np.stack([partner[a[better]], partner[b[better]]], axis=1)
    wanted[wanted < 0] = len(held)
    first = _first_at(wanted, len(held) + 1)
    wins = (first[wanted] == np.arange(len(better))[:, None]) | (wanted == len(held))
    winners = better[wins.all(axis=1)]
    held[i[matched[winners]]] = held[j[matched[winners]]] = -1
    for side in (a[winners], b[winners]):
        links = crossing[side[side >= 0]]
        held[i[links]] = held[j[links]] = links
    return True


def _first_at(workers: Indices, num_workers: int, missing: int = 0) -> Indices:
    """For each worker, the first row that names it."""
    first = np.full(num_workers, missing)
    # Written from the last to the first: the last one written stays.
    first[workers[::-1].ravel()] = np.repeat(np.arange(len(workers))[::-1], workers.shape[1])
    return first


@cache
def _ties(count: int, seed: int) -> Indices:
    return np.random.default_rng(_TIE_SEED + seed).integers(0, 1 << _TIE_BITS, size=count)
