"""All workers of a plan on one device: what a plan does to training, before touching a cluster."""

from matcha.simulation.asynchronous import AsynchronousSimulation
from matcha.simulation.engine import Engine
from matcha.simulation.run import Simulation
from matcha.simulation.simulate import Runner, TaskTrials, run_jobs, simulate
from matcha.training.optimizers import SGD, Adam
from matcha.training.rates import Constant, Plateau, StepDecay
from matcha.training.settings import Delays, Execution, Settings
from matcha.training.task import Evaluation, Task

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
    "run_jobs",
    "simulate",
]
