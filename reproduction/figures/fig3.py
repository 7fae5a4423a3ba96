"""Figure 3: the spectral norm against the budget on two graphs of sixteen workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from matcha.strategies import plan
from matcha.topology import families
from reproduction.claims import Claim, judge
from reproduction.figures.drawing import COLORS, axes
from reproduction.figures.outcome import Outcome, Train

GRAPHS = {"geometric16-d10": "geometric graph", "er16": "Erdős–Rényi graph"}


def curves(name: str, budgets: Sequence[float]) -> dict[str, list[float]]:
    """ρ by strategy over the budgets, with the authors' decomposition."""
    topology, parts = families.paper(name), families.paper_matchings(name)
    return {
        strategy: [plan(topology, float(b), strategy, matchings=parts).rho for b in budgets]
        for strategy in ("matcha", "periodic")
    } | {"vanilla": [plan(topology, 1.0, "vanilla", matchings=parts).rho]}


def equal_budget(budgets: Sequence[float], rhos: Sequence[float], vanilla: float) -> float | None:
    """The smallest budget at which ρ is vanilla's, interpolated.

    >>> equal_budget([0.2, 0.4], [0.9, 0.7], 0.8)
    0.3
    """
    for k in range(1, len(budgets)):
        high, low = rhos[k - 1], rhos[k]
        if low <= vanilla < high:
            share = (high - vanilla) / (high - low)
            return float(round(budgets[k - 1] + share * (budgets[k] - budgets[k - 1]), 6))
    return None


def reproduce(train: Train, *, quick: bool) -> Outcome:
    """Figure 3; it needs plans only."""
    budgets = np.linspace(0.05, 1.0, 20 if quick else 39).tolist()
    figure, grid = axes(2)
    claims: list[Claim] = []
    rows = [
        "| graph | vanilla ρ | equal at C_b | ρ at 0.5 | periodic ρ at 0.5 |",
        "|" + " --- |" * 5,
    ]
    for ax, (name, kind) in zip(grid[0], GRAPHS.items(), strict=True):
        rho = curves(name, budgets)
        vanilla = rho["vanilla"][0]
        _draw(ax, kind, budgets, rho)
        equal = equal_budget(budgets, rho["matcha"], vanilla)
        half = float(np.interp(0.5, budgets, rho["matcha"]))
        periodic = float(np.interp(0.5, budgets, rho["periodic"]))
        shown = "never" if equal is None else f"{equal:.3f}"
        rows.append(f"| {name} | {vanilla:.4f} | {shown} | {half:.4f} | {periodic:.4f} |")
        claims += _claims(kind, equal, half, vanilla, budgets, rho)
    return Outcome(
        name="fig3",
        title="Figure 3: spectral norm and budget",
        figure=figure,
        claims=tuple(claims),
        sections={"Spectral norms": "\n".join(rows)},
    )


def _draw(ax: Any, kind: str, budgets: Any, rho: dict[str, list[float]]) -> None:
    for strategy in ("matcha", "periodic"):
        ax.plot(budgets, rho[strategy], color=COLORS[strategy], label=strategy)
    ax.plot([1.0], rho["vanilla"], "kx", ms=9, mew=2, label="vanilla")
    ax.axhline(rho["vanilla"][0], color="0.7", lw=0.8, ls=":")
    ax.set(title=kind, xlabel="communication budget $C_b$", ylabel="spectral norm ρ")
    ax.legend(frameon=False)


def _claims(
    kind: str,
    equal: float | None,
    half: float,
    vanilla: float,
    budgets: Any,
    rho: dict[str, list[float]],
) -> list[Claim]:
    gain = None if equal is None else 1 / equal
    pairs = zip(budgets[:-1], rho["matcha"], rho["periodic"], strict=False)
    below = [matcha < periodic for _, matcha, periodic in pairs]
    return [
        Claim(
            statement=f"{kind}: 2–3 times less communication at vanilla's ρ",
            measured="never equal" if gain is None else f"{gain:.2f} times less",
            verdict=judge(gain, 2.0, nearly=1.8),
        ),
        Claim(
            statement=f"{kind}: C_b near 0.5 gives a lower ρ than vanilla",
            measured=f"{half:.4f} against {vanilla:.4f}",
            verdict=judge(half, vanilla, nearly=vanilla * 1.01, at_least=False),
        ),
        Claim(
            statement=f"{kind}: a lower ρ than periodic at every budget",
            measured=f"at {sum(below)} of {len(below)} budgets",
            verdict=judge(sum(below) / len(below), 1.0, nearly=0.9),
        ),
    ]
