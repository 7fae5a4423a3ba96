"""Drawing plans: how often links are used, and rounds as they go on, for a class or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from matcha._io import write_atomically
from matcha.errors import InputError
from matcha.rounds import Round, RoundProcess
from matcha.topology import Link, Topology
from matcha.topology.drawing import PALETTE, draw

_FRAME_SECONDS = 0.9
_UNUSED = "#bbbbbb"
_LOW, _MIDDLE, _HIGH = (np.array(rgb) for rgb in ((0, 114, 178), (255, 255, 255), (213, 94, 0)))


def link_activity(process: RoundProcess) -> dict[Link, float]:
    """How often each link is used, as `Plan.link_activity` says."""
    # An exact average uses no link of the plan's own. Where links carry both ways a message is half
    # an exchange, whichever way it goes.
    part = 0.5 if process.is_one_way and not process.topology.directed else 1.0
    part = 0.0 if process.is_all_reduce else part
    return {link: part * uses for link, uses in process.link_uses.items()}


def matching_of(process: RoundProcess) -> dict[Link, int] | None:
    """The matching of each link; None where matchings overlap, so that a link has no single one."""
    links = [link for matching in process.matchings for link in matching]
    if len(links) > len(set(links)) or not set(links) <= set(process.topology.links):
        return None
    return {link: j for j, matching in enumerate(process.matchings) for link in matching}


def plot(ax: Any, process: RoundProcess) -> None:
    """Links coloured by matching, their width by activation probability (Figure 1a).

    Where matchings overlap (`greedy`), width and shade both show how often a link is used.
    """
    from matplotlib.lines import Line2D

    topology, activity = process.topology, link_activity(process)
    most = max(*activity.values(), 1e-12)
    shares = [used / most for used in activity.values()]
    colors, legend = _link_colors(process, shares, most)
    draw(
        ax,
        topology.layout,
        topology.links,
        topology.labels,
        colors=colors,
        widths=shares,
        directed=topology.directed,
    )
    handles = [Line2D([], [], color=color, lw=3, label=label) for color, label in legend]
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _link_colors(
    process: RoundProcess, shares: Sequence[float], most: float
) -> tuple[list[Any], list[tuple[Any, str]]]:
    """A colour for each link, and what the colours mean."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex, to_rgb

    if not any(shares):
        return [_UNUSED] * len(shares), [(_UNUSED, "not used by this plan")]
    numbers, count = matching_of(process), len(PALETTE)
    if numbers is not None and len(process.matchings) <= 2 * count:
        colors: list[Any] = list(PALETTE)
        colors += [tuple(0.5 + part / 2 for part in to_rgb(color)) for color in PALETTE]
        legend = [
            (colors[j], f"matching {j + 1}: p = {p:.2f}")
            for j, p in enumerate(process.schedule.probabilities)
        ]
        links = process.topology.links
        return [colors[numbers[e]] if e in numbers else _UNUSED for e in links], legend
    shade = colormaps["viridis_r"]
    steps = (0.25, 0.5, 0.75, 1.0)
    legend = [(to_hex(shade(0.1 + 0.9 * s)), f"{s * most:.2g} exchanges/iteration") for s in steps]
    return [to_hex(shade(0.1 + 0.9 * share)) for share in shares], legend


def link_styles(process: RoundProcess) -> list[str]:
    """Width and colour of each link as SVG attributes: how often it is used, in which matching."""
    activity, numbers = link_activity(process), matching_of(process)
    most = max(*activity.values(), 1e-12)
    styles = []
    for link, used in activity.items():
        color, opacity = PALETTE[0], f"{0.2 + 0.8 * used / most:.2g}"
        if numbers is not None:
            color, opacity = PALETTE[numbers.get(link, 0) % len(PALETTE)], "1"
        look = f' stroke="{color}" stroke-opacity="{opacity}"' if used else ""
        styles.append(f'stroke-width="{0.8 + 4.2 * used / most:.2g}"{look}')
    return styles


# -- rounds as they go on -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Animation:
    """Rounds one after another, as an SVG that moves: a notebook shows it."""

    svg: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write it as a file that any browser plays."""
        write_atomically(Path(path), self.svg)

    def _repr_html_(self) -> str:
        return self.svg


def animate(
    topology: Topology, rounds: Sequence[Round], values: npt.ArrayLike | None = None
) -> Animation:
    """The rounds in a loop: links light up as workers meet, and colours show the values held."""
    m = topology.num_workers
    if values is not None and np.shape(values) != (m,):
        raise InputError(f"values holds one number for each worker: {m}, not {values!r}.")
    x = np.random.default_rng(0).normal(size=m) if values is None else np.asarray(values, float)
    state = np.stack([x, np.ones(m)], axis=1)  # beside each value its push-sum weight
    held = [x]
    for one in rounds:
        state = one.mix(state)
        held.append(state[:, 0] / state[:, 1])
    mean, reach = float(x.mean()), float(np.abs(x - x.mean()).max()) or 1.0
    moves = [
        _steps("fill", [_color((now[i] - mean) / reach) for now in held], smooth=True)
        for i in range(m)
    ]
    used = [{frozenset(link) for link in one.links} for one in rounds]
    for link in topology.links:
        shown = ["0.15", *("1" if frozenset(link) in now else "0.15" for now in used)]
        moves.append(_steps("stroke-opacity", shown))
    apart = [float(np.std(now)) for now in held]
    counts = ""
    for number, now in enumerate(apart):
        words = f"round {number}: standard deviation {now:.3g} of {apart[0]:.3g}"
        shown = ["1" if k == number else "0" for k in range(len(held))]
        counts += (
            f'<text x="180" y="266" text-anchor="middle" opacity="0">'
            f"{words if number else 'start'}{_steps('opacity', shown)}</text>"
        )
    bars = [f"{200 * now / (apart[0] or 1.0):.1f}" for now in apart]
    foot = (
        f'<g stroke="none" fill="#888" font-size="11">{counts}<rect x="80" y="274" height="6" '
        f'width="200">{_steps("width", bars, smooth=True)}</rect></g>'
    )
    text = f"{len(rounds)} rounds on {topology}: disagreement {apart[0]:.3g} to {apart[-1]:.3g}"
    styles = ['stroke-width="4" stroke="#00875f" stroke-opacity="0.15"'] * len(topology.links)
    return Animation(topology.picture(styles=styles, moves=moves, foot=foot, text=text))


def _steps(attribute: str, values: Sequence[str], *, smooth: bool = False) -> str:
    """An attribute that takes one value after another, for ever."""
    seconds = _FRAME_SECONDS * len(values)
    shown = [*values, values[-1]] if smooth else values  # the last value is held for a frame too
    return (
        f'<animate attributeName="{attribute}" values="{";".join(shown)}" dur="{seconds:.1f}s" '
        f'repeatCount="indefinite" calcMode="{"linear" if smooth else "discrete"}"/>'
    )


def _color(value: float) -> str:
    """Blue below the mean, white at it, orange above."""
    share = min(abs(value), 1.0)
    rgb = _MIDDLE + share * ((_HIGH if value > 0 else _LOW) - _MIDDLE)
    return "#" + "".join(f"{round(part):02x}" for part in rgb)
