"""All workers of a plan on one device: what a plan does to training, before touching a cluster."""

from matcha.simulation.engine import Engine, Execution
from matcha.simulation.optimizers import SGD, Adam
from matcha.simulation.rates import Constant, Plateau, StepDecay
from matcha.simulation.run import Delays, Settings, Simulation
from matcha.simulation.task import Evaluation, Task

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
