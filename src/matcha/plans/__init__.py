"""Plans: which links talk when, and with which weights. Values, saved as JSON."""

from matcha.plans.events import Cut, Events, Join, Leave, Loss, Return, Slowdown
from matcha.plans.plan import OuterStep, Plan, check_budget
from matcha.plans.staged import PlanLike, Stage, StagedPlan, check_plan, load_plan

__all__ = [
    "Cut",
    "Events",
    "Join",
    "Leave",
    "Loss",
    "OuterStep",
    "Plan",
    "PlanLike",
    "Return",
    "Slowdown",
    "Stage",
    "StagedPlan",
    "check_budget",
    "check_plan",
    "load_plan",
]
