"""The topology: who can talk to whom."""

from matcha.topology.topology import Link, Matching, Topology, check_matchings

__all__ = ["Link", "Matching", "Topology", "check_matchings"]
