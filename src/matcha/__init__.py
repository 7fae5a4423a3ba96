"""Plan, simulate and run decentralized SGD on any network within a communication budget.

>>> import matcha
>>> topology = matcha.Topology.from_links([(0, 1), (1, 2), (2, 0)])
>>> topology.max_degree
2
"""

from matcha import families
from matcha.errors import MatchaError
from matcha.plans import Plan
from matcha.rounds import Round
from matcha.strategies import plan
from matcha.sweeps import sweep
from matcha.topology import Topology
from matcha.tuning import tune

__version__ = "0.1.0"
__all__ = ["MatchaError", "Plan", "Round", "Topology", "families", "plan", "sweep", "tune"]
