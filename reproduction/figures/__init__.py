"""The paper's figures, each made again by one function: figure, table and verdicts."""

from __future__ import annotations

from matcha.errors import unknown_name
from reproduction.figures import fig1, fig3, fig4, fig5
from reproduction.figures.outcome import Maker, Outcome

FIGURES: dict[str, Maker] = {
    "fig1": fig1.reproduce,
    "fig3": fig3.reproduce,
    "fig4": fig4.reproduce,
    "fig5": fig5.reproduce,
}


def maker(name: str) -> Maker:
    """The function that makes a figure.

    Raises:
        InputError: The paper's figures that can be made have other names.
    """
    if name not in FIGURES:
        raise unknown_name("figure", name, FIGURES)
    return FIGURES[name]


__all__ = ["FIGURES", "Maker", "Outcome", "maker"]
