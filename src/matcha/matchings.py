"""Decompositions of a topology's links into matchings, and their verifiers."""

from __future__ import annotations

from collections.abc import Sequence

from matcha.errors import PlanError
from matcha.topology import Matching, Topology, check_matchings


def check_decomposition(topology: Topology, matchings: Sequence[Matching]) -> None:
    """Refuse matchings that do not split the topology's links.

    Raises:
        PlanError: Names the link that is missing, foreign or used twice, or the shared worker.
    """
    check_matchings(topology, tuple(matchings))
    seen = [link for matching in matchings for link in matching]
    if len(seen) != len(set(seen)):
        twice = next(link for k, link in enumerate(seen) if link in seen[:k])
        raise PlanError(f"link {twice} is in two matchings: a decomposition uses each link once.")
    missing = sorted(set(topology.links) - set(seen))
    if missing:
        raise PlanError(
            f"link {missing[0]} is in no matching: a decomposition uses each link once."
        )
