"""The topology: workers, and the links over which they can talk."""

from matcha.topology.topology import Link, Matching, Topology, check_matchings, joins_all, parts_of

__all__ = ["Link", "Matching", "Topology", "check_matchings", "joins_all", "parts_of"]
