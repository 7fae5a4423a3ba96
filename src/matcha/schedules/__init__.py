"""Schedules: which round comes at iteration k, by random access."""

from matcha.schedules.drawn import Bernoulli, Choice
from matcha.schedules.files import register_schedule, schedule_from_json, schedule_to_json
from matcha.schedules.repeated import Cycle, Periodic
from matcha.schedules.schedule import Active, Coin, Schedule, check_iteration

__all__ = [
    "Active",
    "Bernoulli",
    "Choice",
    "Coin",
    "Cycle",
    "Periodic",
    "Schedule",
    "check_iteration",
    "register_schedule",
    "schedule_from_json",
    "schedule_to_json",
]
