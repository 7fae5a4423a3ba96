"""Plans: which links talk when, and with which weights. Values, saved as JSON."""

from matcha.plans.figures import Figures
from matcha.plans.files import PlanLike, load_plan
from matcha.plans.plan import Plan, check_budget
from matcha.plans.staged import Stage, StagedPlan

__all__ = ["Figures", "Plan", "PlanLike", "Stage", "StagedPlan", "check_budget", "load_plan"]
