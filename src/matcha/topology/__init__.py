"""The topology: workers, and the links over which they can talk."""

from matcha.topology.topology import Link, Matching, Topology, check_matchings

__all__ = ["Link", "Matching", "Topology", "check_matchings"]
