"""Layouts: where to draw each worker so that a reader can follow the links."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.topology import Topology

Points = npt.NDArray[np.float64]
_CAREFUL = 64
"""Up to this many workers several layouts are tried and the clearest is kept."""
_NEAR = 0.11
"""A link that passes a worker closer than this (in a unit square) looks attached to it."""


def layout(topology: Topology) -> Points:
    """A point for each worker: the topology's own, or one that shows its structure."""
    if topology.positions is not None:
        return np.array(topology.positions, dtype=np.float64)
    import networkx as nx

    graph = nx.Graph(topology.links)
    if topology.num_workers > _CAREFUL:
        return _array(nx.spring_layout(graph, seed=0, iterations=50), topology)
    candidates = [nx.kamada_kawai_layout(graph), nx.circular_layout(range(topology.num_workers))]
    for seed in range(12):
        start = nx.spring_layout(graph, seed=seed)
        candidates += [start, nx.kamada_kawai_layout(graph, pos=start)]
    drawn = [_array(points, topology) for points in candidates]
    return min(drawn, key=lambda points: _confusion(points, topology))


def _array(points: Any, topology: Topology) -> Points:
    return np.array([points[i] for i in range(topology.num_workers)], dtype=np.float64)


def _confusion(points: Points, topology: Topology) -> float:
    """How hard a drawing is to read: links through workers, workers in a heap, links that cross."""
    span = np.ptp(points, axis=0).max() or 1.0
    unit = points / span
    starts, ends = unit[topology.link_array[:, 0]], unit[topology.link_array[:, 1]]
    along = ends - starts
    offset = unit[:, None, :] - starts[None]
    t = (offset * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-12)
    foot = starts[None] + np.clip(t, 0, 1)[..., None] * along
    distance = np.linalg.norm(unit[:, None, :] - foot, axis=-1)
    m = topology.num_workers
    own = (topology.link_array[None] == np.arange(m)[:, None, None]).any(-1)
    through = np.clip(_NEAR - distance, 0, None)[~own].sum() / _NEAR
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=-1) + 9 * np.eye(m)
    heaped = np.clip(2 * _NEAR - apart, 0, None).sum() / _NEAR
    return float(4 * through + 2 * heaped + 0.5 * _crossings(starts, ends))


def _crossings(starts: Points, ends: Points) -> int:
    def side(a: Points, b: Points, c: Points) -> npt.NDArray[np.float64]:
        left: npt.NDArray[np.float64] = (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1]) - (
            b[..., 1] - a[..., 1]
        ) * (c[..., 0] - a[..., 0])
        return left

    a, b, c, d = starts[:, None], ends[:, None], starts[None], ends[None]
    cross = (side(a, b, c) * side(a, b, d) < -1e-12) & (side(c, d, a) * side(c, d, b) < -1e-12)
    return int(cross.sum()) // 2
