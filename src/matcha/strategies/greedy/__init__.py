"""Greedy: the search for a cycle of matchings that removes most disagreement."""

from matcha.strategies.greedy.strategy import build, network_of

__all__ = ["build", "network_of"]
