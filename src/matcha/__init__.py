"""Plan, simulate and run decentralized SGD on any network within a communication budget.

>>> import matcha
>>> topology = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0)])
>>> topology.max_degree
2
"""

from matcha.errors import MatchaError
from matcha.plans import Plan, StagedPlan, load_plan
from matcha.rounds import Round
from matcha.strategies import plan, staged_plan
from matcha.sweeps import sweep
from matcha.topology import Topology, families
from matcha.tuning import tune

__version__ = "0.2.0"
__all__ = [
    "MatchaError",
    "Plan",
    "Round",
    "StagedPlan",
    "Topology",
    "families",
    "load_plan",
    "plan",
    "staged_plan",
    "sweep",
    "tune",
]
