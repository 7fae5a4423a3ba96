"""The paper's experiments as lists of trials, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from matcha.errors import unknown_name
from matcha.training.settings import Delays
from reproduction.trials import Trial

ER8 = "paper:er8"
GEOMETRIC = {
    "paper:geometric16-d5": 0.5,
    "paper:geometric16-d10": 0.4,
    "paper:geometric16-d13": 0.3,
}
"""Figure 5's graphs and the budget at which the paper shows each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs that share a task, an engine and a learning rate tuned on vanilla."""

    name: str
    task: str
    num_workers: int
    rates: tuple[float, ...]
    """Candidates, rising; vanilla's lowest final training loss wins, walking from the middle."""
    trials: tuple[Trial, ...]
    """The first is vanilla, the one that is tuned."""
    delays: Delays
    model: str | None = None
    """Instead of the task's own."""
    epochs: int | None = None
    """Instead of what fits."""


def _trial(task: str, topology: str, name: str, seed: int = 0) -> Trial:
    strategy, _, budget = name.partition(" ")
    return Trial(
        task=task, topology=topology, strategy=strategy, budget=float(budget or 1), seed=seed
    )


def _trials(
    task: str, topology: str, names: list[str], seeds: tuple[int, ...] = (0,)
) -> list[Trial]:
    return [_trial(task, topology, name, seed) for seed in seeds for name in names]


def _figure5(task: str, topology: str, *more: str) -> list[Trial]:
    budget = GEOMETRIC[topology]
    names = [
        "vanilla",
        *(f"{strategy} {budget:g}" for strategy in ("matcha", "periodic", "greedy")),
        *("matcha 0.1", "greedy 0.1"),
        *more,
    ]
    return _trials(task, topology, names)


def _figure4(task: str) -> tuple[Trial, ...]:
    names = [
        "vanilla",
        "matcha 0.5",
        "matcha 0.02",
        "matcha 0.1",
        "greedy 0.02",
        "greedy 0.1",
        "periodic 0.1",
        "periodic 0.02",
    ]
    return tuple(_trials(task, ER8, names))


def _longer(task: str, names: list[str], stretch: float) -> list[Trial]:
    """Runs with more epochs than vanilla's, which their cheaper rounds leave time for."""
    return [replace(trial, stretch=stretch) for trial in _trials(task, ER8, names)]


# The paper gives Figure 5's times for 200 epochs of 48 iterations: 13 minutes at 5 units an
# iteration and 22 at 13, hence 6.9 ms a unit and 45 ms of computing. A message is 3.1 MB there;
# other models' units are scaled by their size, as 40 Gbit/s Ethernet was not the bottleneck.
_UNIT, _COMPUTE, _MILLIONS = 0.0069, 0.045, 0.777

GROUPS: dict[str, Group] = {
    group.name: group
    for group in (
        Group(
            name="cifar10",
            task="cifar10",
            num_workers=16,
            rates=(0.025, 0.05, 0.1, 0.2, 0.4, 0.8),
            trials=(
                *_figure5("cifar10", "paper:geometric16-d10", "periodic 0.1"),
                *_figure5("cifar10", "paper:geometric16-d13"),
                *_figure5("cifar10", "paper:geometric16-d5"),
            ),
            delays=Delays(compute_time=_COMPUTE, link_time=_UNIT),
        ),
        Group(
            name="cifar100",
            task="cifar100",
            num_workers=8,
            rates=(0.2, 0.4, 0.8),
            trials=(
                *_figure4("cifar100"),
                *_trials(
                    "cifar100",
                    ER8,
                    ["vanilla", "matcha 0.5", "greedy 0.1", "matcha 0.1", "periodic 0.1"],
                    seeds=(1, 2),
                ),
                *_longer("cifar100", ["greedy 0.1", "matcha 0.1"], 1.5),
                *_longer("cifar100", ["greedy 0.02", "matcha 0.02"], 3.0),
            ),
            delays=Delays(compute_time=0.33, link_time=_UNIT * 36.5 / _MILLIONS),
        ),
        Group(
            name="ptb",
            task="ptb",
            num_workers=8,
            rates=(20.0, 40.0),
            trials=_figure4("ptb"),
            delays=Delays(compute_time=0.33, link_time=_UNIT * 51.0 / _MILLIONS),
        ),
        # At the paper's length, what others run and silence beside it, the most telling first.
        Group(
            name="cifar100-long",
            task="cifar100",
            num_workers=8,
            rates=(0.4,),
            trials=(
                *_trials(
                    "cifar100",
                    ER8,
                    [
                        *("vanilla", "allreduce", "matcha 0.5", "greedy 0.1", "silent"),
                        *("matcha 0.1", "greedy 0.5", "greedy 0.02", "matcha 0.02"),
                        *("periodic 0.1", "local 0.1"),
                    ],
                ),
                *_trials("cifar100", ER8, ["vanilla", "matcha 0.5", "greedy 0.1"], seeds=(1, 2)),
            ),
            delays=Delays(compute_time=0.045, link_time=_UNIT * 2.7 / _MILLIONS),
            model="wideresnet16-4",
            epochs=200,
        ),
        Group(
            name="cifar100-wide",
            task="cifar100",
            num_workers=8,
            rates=(0.4,),
            trials=tuple(_trials("cifar100", ER8, ["vanilla", "greedy 0.1"])),
            delays=Delays(compute_time=0.33, link_time=_UNIT * 36.5 / _MILLIONS),
            epochs=36,
        ),
        Group(
            name="cifar10-long",
            task="cifar10",
            num_workers=16,
            rates=(0.2,),
            trials=tuple(
                _trials(
                    "cifar10",
                    "paper:geometric16-d10",
                    ["vanilla", "greedy 0.1", "allreduce", "matcha 0.4", "silent"],
                )
            ),
            delays=Delays(compute_time=_COMPUTE, link_time=_UNIT),
            epochs=100,
        ),
        Group(
            name="ptb-long",
            task="ptb",
            num_workers=8,
            rates=(40.0,),
            trials=tuple(
                _trials("ptb", ER8, ["vanilla", "greedy 0.1", "matcha 0.5", "allreduce", "silent"])
            ),
            delays=Delays(compute_time=0.33, link_time=_UNIT * 51.0 / _MILLIONS),
            epochs=20,
        ),
        # The same comparisons in minutes on two CPU cores; a unit costs as much as a gradient.
        Group(
            name="digits8",
            task="digits",
            num_workers=8,
            rates=(0.05,),
            trials=_figure4("digits"),
            delays=Delays(compute_time=0.01, link_time=0.01),
        ),
        Group(
            name="digits16",
            task="digits",
            num_workers=16,
            rates=(0.05,),
            trials=tuple(trial for graph in GEOMETRIC for trial in _figure5("digits", graph)),
            delays=Delays(compute_time=_COMPUTE, link_time=_UNIT),
        ),
    )
}


def group(name: str) -> Group:
    """A group of runs by name.

    Raises:
        InputError: No group has this name.
    """
    if name not in GROUPS:
        raise unknown_name("group of runs", name, GROUPS)
    return GROUPS[name]
