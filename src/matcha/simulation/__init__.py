"""All workers of a plan on one device: what a plan does to training, before touching a cluster."""

from matcha.simulation.engine import Engine
from matcha.simulation.execution import Execution
from matcha.simulation.run import Delays, Settings, Simulation
from matcha.tasks.optimizers import SGD, Adam
from matcha.tasks.rates import Constant, Plateau, StepDecay
from matcha.tasks.task import Evaluation, Task

__all__ = [
    "SGD",
    "Adam",
    "Constant",
    "Delays",
    "Engine",
    "Evaluation",
    "Execution",
    "Plateau",
    "Settings",
    "Simulation",
    "StepDecay",
    "Task",
]
