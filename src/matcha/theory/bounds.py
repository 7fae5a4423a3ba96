"""Theorem 2's learning rate and bound, and lower bounds that hold for every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from matcha.errors import InputError
from matcha.rounds import RoundProcess
from matcha.topology import Topology

_BOUND_UP_TO = 512  # workers; all distances between them are needed


def admissible_learning_rate(rho: float, smoothness: float) -> float:
    """The largest learning rate that Theorem 2 allows: ηL <= min{1, (ρ^-½ − 1)/4}.

    >>> admissible_learning_rate(0.25, smoothness=2.0)
    0.125
    """
    if not 0 <= rho < 1:
        raise InputError(f"rho is {rho!r}, but Theorem 2 needs 0 <= rho < 1.")
    if not smoothness > 0:
        raise InputError(f"the smoothness constant is {smoothness!r}, but it must be positive.")
    return min(1.0, (1 / math.sqrt(rho) - 1) / 4 if rho > 0 else 1.0) / smoothness


def gradient_bound(
    *,
    rho: float,
    num_workers: int,
    iterations: int,
    learning_rate: float,
    smoothness: float,
    gradient_variance: float,
    dissimilarity: float,
    initial_gap: float,
) -> float:
    """Theorem 2: a bound on the average of E‖∇F(x̄)‖² over the first K iterations.

    It covers every sequence of doubly stochastic mixing matrices with contraction ρ per iteration;
    for a cycle, which is not i.i.d., ρ is the contraction of the whole cycle per iteration and
    the bound holds up to the factor by which a part of a cycle may lag behind.

    Args:
        rho: Contraction ‖E[WᵀW] − J‖₂.
        num_workers: m.
        iterations: K.
        learning_rate: η.
        smoothness: L, the Lipschitz constant of the gradient.
        gradient_variance: σ², a bound on the variance of a worker's stochastic gradient.
        dissimilarity: ζ², a bound on the mean squared distance of workers' gradients to their mean.
        initial_gap: F(x̄₁) − F_inf.

    Raises:
        InputError: The learning rate is above `admissible_learning_rate`, so nothing is promised.

    >>> bound = gradient_bound(rho=0.0, num_workers=4, iterations=100, learning_rate=0.1,
    ...     smoothness=1.0, gradient_variance=1.0, dissimilarity=0.0, initial_gap=1.0)
    >>> round(bound, 6)
    0.225
    """
    limit = admissible_learning_rate(rho, smoothness)
    if not 0 < learning_rate <= limit * (1 + 1e-12):
        raise InputError(
            f"the learning rate is {learning_rate!r}, but Theorem 2 holds for 0 < rate <= "
            f"{limit:.4g} at rho {rho:.4g} and smoothness {smoothness:g}."
        )
    root, step = math.sqrt(rho), learning_rate * smoothness
    D = 6 * step**2 * rho / (1 - root) ** 2
    synchronous = (
        2 * initial_gap / (learning_rate * iterations) + step * gradient_variance / num_workers
    )
    network = (
        2
        * step**2
        * rho
        / (1 - root)
        * (gradient_variance / (1 + root) + 3 * dissimilarity / (1 - root))
    )
    return (synchronous + network) / (1 - 2 * D)


def error_bound(process: RoundProcess) -> float | None:
    """A consensus error that no schedule goes below with as many matchings per iteration.

    The certificate of rounds that exchange in pairs or by one-way messages, however they were
    made; None for others (all links at once, an all-reduce), for silence, and beyond 512 workers.

    >>> import matcha
    >>> from matcha.strategies import Greedy
    >>> plan = matcha.plan(matcha.families.complete(8), 1 / 7, Greedy(effort="none"))
    >>> error_bound(plan.process)
    0.5
    """
    pace = float(sum(process.schedule.uses))
    paired = process.mixing == "pairwise" or process.is_one_way
    if not paired or not pace > 0 or process.num_workers > _BOUND_UP_TO:
        return None
    return graph_bound(process.topology, pace, one_way=process.is_one_way)


def graph_bound(
    topology: Topology,
    matchings_per_iteration: float,
    *,
    one_way: bool = False,
    sharpen: Callable[[list[float]], list[float]] | None = None,
) -> float:
    """A consensus error that no schedule of matchings on this graph goes below, sharper.

    F(a), the mean squared length of one worker's noise after a matchings, is at least the mean over
    workers of 1/r for r = min(2^a, workers within a links); and since a matching has at most μ
    links and at best halves the squared length of the rows it mixes, at least what halving the 2μ
    longest rows a times leaves. Where matchings come unevenly Jensen's inequality needs a convex F:
    its lower envelope is taken. Then tr(X)/m >= Σ_{n>=1} (F(cn) − 1/m).

    Args:
        topology: The workers and their links.
        matchings_per_iteration: c.
        one_way: Whether messages may go one way: then all rows may be mixed at once.
        sharpen: From these F(0), F(1), … to larger ones (as benchmarks/parts/supports.py finds
            them), where messages go both ways.

    >>> from matcha.topology import families
    >>> graph_bound(families.complete(8), 1.0), round(graph_bound(families.star(8), 1.0), 2)
    (0.5, 3.31)
    """
    if not matchings_per_iteration > 0:
        raise InputError("a bound needs a positive number of matchings per iteration.")
    m = topology.num_workers
    one_way = one_way or topology.directed
    lengths = _shortest_lengths(topology, one_way)
    if sharpen is not None and not one_way:
        lengths = sharpen(lengths)
    ages = np.arange(1, math.ceil(len(lengths) / matchings_per_iteration) + 1)
    hull = _lower_envelope(lengths)
    found = np.interp(matchings_per_iteration * ages, hull, np.array(lengths)[hull])
    return float(np.sum(np.maximum(found - 1 / m, 0.0)))


def _shortest_lengths(topology: Topology, one_way: bool) -> list[float]:
    """F(0), F(1), … until nothing is left but the mean."""
    import rustworkx
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import shortest_path

    m = topology.num_workers
    i, j = np.array(topology.arrows).T
    graph = coo_array((np.ones(len(i)), (i, j)), shape=(m, m)).tocsr()
    distance = shortest_path(graph, unweighted=True)
    links = rustworkx.PyGraph(multigraph=False)
    links.add_nodes_from(range(m))
    links.add_edges_from([(i, j, 1) for i, j in topology.links])
    busy = m if one_way else 2 * len(rustworkx.max_weight_matching(links, True))
    reach, rows, lengths = np.ones(m), np.ones(m), [1.0]
    while lengths[-1] > (1 + 1e-9) / m:
        age = len(lengths)
        reach = np.minimum(2 * reach, (distance <= age).sum(axis=1))
        longest = np.argsort(-rows)[:busy]
        rows[longest] /= 2
        lengths.append(max(float(np.mean(1 / reach)), float(rows.mean())))
    return lengths


def _lower_envelope(values: Sequence[float]) -> list[int]:
    """The places at which the largest convex function below the values touches them."""
    hull: list[int] = []
    for k, value in enumerate(values):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (values[b] - values[a]) * (k - a) < (value - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(k)
    return hull
