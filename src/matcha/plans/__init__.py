"""Plans: which links talk when, and with which weights. Values, saved as JSON."""

from matcha.plans.averaging import all_reduce_time
from matcha.plans.events import Cut, Events, Loss, Return, Slowdown
from matcha.plans.figures import Figures
from matcha.plans.files import PlanLike, load_plan
from matcha.plans.plan import Plan, check_budget
from matcha.plans.staged import Stage, StagedPlan

__all__ = [
    "Cut",
    "Events",
    "Figures",
    "Loss",
    "Plan",
    "PlanLike",
    "Return",
    "Slowdown",
    "Stage",
    "StagedPlan",
    "all_reduce_time",
    "check_budget",
    "load_plan",
]
