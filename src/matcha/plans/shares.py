"""Weights a link: checked, read, and kept beside the links that are left."""

from __future__ import annotations

from typing import Any

from matcha.errors import PlanError
from matcha.rounds import Mixing, Shares
from matcha.topology import Matching

__all__ = ["check_alpha", "check_shares", "kept_shares", "shares_from_json", "spread"]


def check_shares(
    weights: Shares | None, matchings: tuple[Matching, ...], mixing: Mixing, *, repeats: bool
) -> None:
    """Refuse weights that do not belong to the links, or to rounds that are drawn.

    Raises:
        PlanError: Says what is wrong with them.
    """
    if weights is None:
        return
    if not repeats and mixing != "laplacian":
        raise PlanError("weights a link go with rounds that repeat, or with laplacian mixing.")
    if [len(shares) for shares in weights] != [len(links) for links in matchings]:
        raise PlanError("weights are one for each link of each matching.")
    if not all(0 <= w <= 1 for shares in weights for w in shares):
        raise PlanError("a link's weight is in [0, 1].")


def check_alpha(
    alpha: float, weights: Shares | None, before: tuple[float, Shares | None] | None
) -> None:
    """Refuse an α that was changed where weights a link stand in its place: nothing would follow.

    Args:
        alpha: The plan's.
        weights: The plan's.
        before: Those of the plan that this one was made from, as by `dataclasses.replace`.

    Raises:
        PlanError: Says how to give α a say again.
    """
    if weights is None or before is None or before[1] is not weights or before[0] == alpha:
        return
    raise PlanError(
        f"alpha was changed to {alpha!r}, but this plan has a weight for each link in its place: "
        "give weights=None as well."
    )


def shares_from_json(given: Any) -> Shares | None:
    """The weights in a plan's document; None where it has none."""
    return None if given is None else tuple(tuple(float(w) for w in some) for some in given)


def kept_shares(
    weights: Shares | None, matchings: tuple[Matching, ...], left: tuple[Matching, ...]
) -> Shares | None:
    """The weights of the links that are left of each matching.

    >>> kept_shares(((0.5, 0.6),), (((0, 1), (2, 3)),), (((2, 3),),))
    ((0.6,),)
    """
    if weights is None:
        return None
    return tuple(
        tuple(w for link, w in zip(links, shares, strict=True) if link in some)
        for links, shares, some in zip(matchings, weights, left, strict=True)
    )


def spread(weights: Shares | None, alpha: float) -> str:
    """The weights in a few words."""
    if weights is None:
        return f"weight {alpha:.4f}"
    every = [w for shares in weights for w in shares]
    return f"weights {min(every, default=0.0):.2f} to {max(every, default=0.0):.2f}"
