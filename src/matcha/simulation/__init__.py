"""All workers of a plan on one device: what a plan does to training, before touching a cluster."""

from matcha.simulation.asynchronous import AsynchronousSimulation
from matcha.simulation.engine import Engine
from matcha.simulation.run import Simulation
from matcha.simulation.runner import Runner
from matcha.simulation.trials import TaskTrials
from matcha.tasks.delays import Delays
from matcha.tasks.execution import Execution
from matcha.tasks.optimizers import SGD, Adam
from matcha.tasks.rates import Constant, Plateau, StepDecay
from matcha.tasks.settings import Settings
from matcha.tasks.task import Evaluation, Task

__all__ = [
    "SGD",
    "Adam",
    "AsynchronousSimulation",
    "Constant",
    "Delays",
    "Engine",
    "Evaluation",
    "Execution",
    "Plateau",
    "Runner",
    "Settings",
    "Simulation",
    "StepDecay",
    "Task",
    "TaskTrials",
]
