"""What the user asked for: what every strategy is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from matcha.rounds import Mixing
from matcha.timing import Timing
from matcha.topology import Matching, Topology

Effort: TypeAlias = Literal["none", "default", "high"]
Decomposition: TypeAlias = Literal["matchings", "links", "cliques"]

STRATEGIES = ("matcha", "vanilla", "periodic", "single", "greedy")
EFFORTS = ("none", "default", "high")
DECOMPOSITIONS = ("matchings", "links", "cliques")
MIXINGS = ("laplacian", "pairwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for; what every strategy is given."""

    topology: Topology
    budget: float
    strategy: str
    seed: int
    mixing: Mixing | None
    """None: the strategy's own (pairwise for `greedy`, Laplacian elsewhere)."""
    matchings: tuple[Matching, ...] | None
    """The user's own decomposition, verified; None: find one."""
    decomposition: Decomposition
    timing: Timing
    effort: Effort
