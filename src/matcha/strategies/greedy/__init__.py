"""Greedy: the search for a cycle of matchings that removes most disagreement."""

from matcha.strategies.greedy.strategy import EXACT_UP_TO, build, network_of

__all__ = ["EXACT_UP_TO", "build", "network_of"]
