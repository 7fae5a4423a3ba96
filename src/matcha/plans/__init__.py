"""Plans: which links talk when, and with which weights. Values, saved as JSON."""

from matcha.plans.plan import Plan, check_budget
from matcha.plans.staged import AnyPlan, Stage, StagedPlan, levels, load_plan

__all__ = ["AnyPlan", "Plan", "Stage", "StagedPlan", "check_budget", "levels", "load_plan"]
