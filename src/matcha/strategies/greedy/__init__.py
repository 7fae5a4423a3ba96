"""Greedy: the search for a cycle of matchings that removes most disagreement."""

from matcha.strategies.greedy.strategy import Greedy, network_of

__all__ = ["Greedy", "network_of"]
