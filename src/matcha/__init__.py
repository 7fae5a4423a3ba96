"""Plan, simulate and run decentralized SGD on any network within a communication budget.

>>> import matcha
>>> topology = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0)])
>>> topology.max_degree
2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matcha.errors import MatchaError
from matcha.plans import Plan, StagedPlan, load_plan
from matcha.rounds import Round
from matcha.strategies import plan, staged_plan
from matcha.sweeps import sweep
from matcha.topology import Topology, families
from matcha.tuning import advise, tune

if TYPE_CHECKING:
    from matcha.simulation import simulate

__version__ = "0.2.0"
__all__ = [
    "MatchaError",
    "Plan",
    "Round",
    "StagedPlan",
    "Topology",
    "advise",
    "families",
    "load_plan",
    "plan",
    "simulate",
    "staged_plan",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "simulate":  # needs torch, which planning does not
        from matcha.simulation import simulate

        return simulate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
