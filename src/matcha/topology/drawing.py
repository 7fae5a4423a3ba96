"""Drawing networks: a point for each worker, with matplotlib, or as a picture for notebooks."""

from __future__ import annotations

import html
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha.errors import require

Points = npt.NDArray[np.float64]
Links = Sequence[tuple[int, int]]
# Okabe and Ito's palette: told apart by colour-blind readers too.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31",
    "#7B4173", "#637939",
)  # fmt: skip
_CAREFUL = 64
"""Up to this many workers several layouts are tried, the clearest is kept, and all have labels."""
_NAMED = 24
"""Up to this many workers long names stand beneath their numbers."""
MOST_DRAWN = 256
"""A notebook draws no more workers than this unasked: it takes seconds and shows a blot."""
_NEAR = 0.11
"""A link that passes a worker closer than this (in a unit square) looks attached to it."""


def layout(num_workers: int, links: Links) -> Points:
    """A point for each worker that shows the structure of the links."""
    import networkx as nx

    graph = nx.Graph(links)
    if num_workers > _CAREFUL:
        found = [nx.spring_layout(graph, seed=0, iterations=50)]
    else:
        found = [nx.kamada_kawai_layout(graph), nx.circular_layout(range(num_workers))]
        for seed in range(12):
            start = nx.spring_layout(graph, seed=seed)
            found += [start, nx.kamada_kawai_layout(graph, pos=start)]
    drawn = [np.array([at[i] for i in range(num_workers)], dtype=np.float64) for at in found]
    if len(drawn) == 1:
        return drawn[0]
    return min(drawn, key=lambda points: _confusion(points, np.array(links)))


def _confusion(points: Points, links: npt.NDArray[np.int64]) -> float:
    """How hard a drawing is to read: links through workers, workers in a heap, links that cross."""
    span = np.ptp(points, axis=0).max() or 1.0
    unit = points / span
    starts, ends = unit[links[:, 0]], unit[links[:, 1]]
    along = ends - starts
    offset = unit[:, None, :] - starts[None]
    t = (offset * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-12)
    foot = starts[None] + np.clip(t, 0, 1)[..., None] * along
    distance = np.linalg.norm(unit[:, None, :] - foot, axis=-1)
    m = len(points)
    own = (links[None] == np.arange(m)[:, None, None]).any(-1)
    through = np.clip(_NEAR - distance, 0, None)[~own].sum() / _NEAR
    apart = np.linalg.norm(unit[:, None] - unit[None], axis=-1) + 9 * np.eye(m)
    heaped = np.clip(2 * _NEAR - apart, 0, None).sum() / _NEAR
    return float(4 * through + 2 * heaped + 0.5 * _crossings(starts, ends))


def _crossings(starts: Points, ends: Points) -> int:
    p, q = (points @ [1, 1j] for points in (starts, ends))

    def side(a: Any, b: Any, c: Any) -> Any:
        """Positive where c lies to the left of the way from a to b."""
        return (np.conj(b - a) * (c - a)).imag

    a, b, c, d = p[:, None], q[:, None], p[None], q[None]
    cross = (side(a, b, c) * side(a, b, d) < -1e-12) & (side(c, d, a) * side(c, d, b) < -1e-12)
    return int(cross.sum()) // 2


# -- with matplotlib ------------------------------------------------------------------------------


def axes_or_new(ax: Any) -> Any:
    """The axes to draw on: those given, or those of a new figure, which a notebook shows."""
    if ax is not None:
        return ax
    require("matplotlib")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def draw(
    ax: Any,
    points: Points,
    links: Links,
    labels: Sequence[Hashable],
    *,
    colors: Sequence[Any] | None = None,
    widths: Sequence[float] | None = None,
    directed: bool = False,
) -> None:
    """Draw workers and links on matplotlib's axes, in link order; widths lie between 0 and 1."""
    from matplotlib.collections import LineCollection

    crowded = len(points) > _CAREFUL
    thin = 0.4 if crowded else 0.8
    lines = LineCollection(
        [points[list(link)] for link in links],
        colors="#777777" if colors is None else colors,
        linewidths=1.2 if widths is None else [thin + 5.2 * width for width in widths],
        capstyle="round",
        alpha=0.9,
    )
    ax.add_collection(lines)
    if directed and not crowded:
        for i, j in links:
            head, tail = (points[i] + part * (points[j] - points[i]) for part in (0.72, 0.70))
            ax.annotate("", head, tail, arrowprops={"arrowstyle": "-|>", "color": "0.25"})
    ax.scatter(*points.T, s=12 if crowded else 300, c="white", edgecolors="#333333", zorder=3)
    if not crowded:
        for (x, y), label in zip(points, labels, strict=True):
            ax.text(x, y, str(label), ha="center", va="center", fontsize=9, zorder=4)
    ax.set_aspect("equal")
    ax.margins(0.08)
    ax.set_axis_off()


# -- for notebooks --------------------------------------------------------------------------------


def picture(
    points: Points,
    links: Links,
    labels: Sequence[Hashable],
    *,
    styles: Sequence[str] | None = None,
    moves: Sequence[str] = (),
    foot: str = "",
    directed: bool = False,
    text: str,
) -> str:
    """A network as SVG, without matplotlib: for a light page and a dark one.

    `styles` are SVG attributes of each link, `moves` animations of each worker and then of each
    link, `foot` stands beneath the drawing, where y is 250 to 290; `text` is for readers.
    """
    low, span = points.min(axis=0), np.ptp(points, axis=0)
    scale = 200 / (span.max() or 1.0)
    at = (points - low - span / 2) * scale * (1, -1) + (180, 125)
    radius = 11.0 if len(points) <= _CAREFUL else 3.0
    drawn = []
    for number, (i, j) in enumerate(links):
        (x1, y1), (x2, y2) = at[i], at[j]
        style = 'stroke-width="1.5"' if styles is None else styles[number]
        place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        drawn.append(f"<line {place} {style}>{moves[len(points) + number] if moves else ''}</line>")
        if directed:
            drawn.append(_arrowhead(at[i], at[j]))
    for number, ((x, y), label) in enumerate(zip(at, map(str, labels), strict=True)):
        name = html.escape(label)
        drawn.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="#fff" stroke="#444">'
            f"<title>{name}</title>{moves[number] if moves else ''}</circle>"
        )
        inner = name if len(label) <= 4 else str(number)
        if len(points) <= _CAREFUL:
            drawn.append(_word(x, y + 3.5, inner, "#111"))
        if len(points) <= _NAMED and inner != name:
            drawn.append(_word(x, y + 22, name, "#888"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 360 {290 if foot else 250}" '
        f'width="360" role="img" aria-label="{html.escape(text)}" stroke="#888" '
        f'font-family="sans-serif" font-size="10">{"".join(drawn)}{foot}</svg>'
    )


def _word(x: float, y: float, name: str, color: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle" pointer-events="none"'
    return f'<text {place} fill="{color}" stroke="none">{name}</text>'


def _arrowhead(start: Points, end: Points) -> str:
    along = (end - start) / max(float(np.linalg.norm(end - start)), 1e-9)
    tip = start + 0.72 * (end - start)
    across = np.array([-along[1], along[0]])
    corners = (tip, tip - 7 * along + 3 * across, tip - 7 * along - 3 * across)
    return f'<polygon fill="#444" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'
