"""Loggers people have: records handed on to TensorBoard, Weights & Biases or MLflow.

None is a dependency. Each function gives a callback for records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matcha.errors import PackageError
from matcha.records import Record

_NOT_METRICS = frozenset(("iteration", "worker"))


def metrics(record: Record) -> dict[str, float]:
    """The numbers of a record by name; what is unknown or no number is left out.

    >>> metrics(Record(iteration=5, epoch=1.0, train_loss=0.5, test_loss=float("nan")))
    {'epoch': 1.0, 'train_loss': 0.5, 'comm_units': 0.0, 'time': 0.0}
    """
    return {
        name: float(value)
        for name, value in asdict(record).items()
        if name not in _NOT_METRICS and isinstance(value, (int, float)) and math.isfinite(value)
    }


def wandb_logger(run: Any) -> Callable[[Record], None]:
    """A callback that logs records to a run of Weights & Biases, what `wandb.init(...)` gave."""
    return lambda record: run.log(metrics(record), step=record.iteration)


def mlflow_logger(mlflow: Any) -> Callable[[Record], None]:
    """A callback that logs records to MLflow's active run, by the module's `log_metrics`."""
    return lambda record: mlflow.log_metrics(metrics(record), step=record.iteration)


@contextmanager
def tensorboard_logger(directory: str | Path) -> Iterator[Callable[[Record], None]]:
    """A callback that writes records as TensorBoard's event files into a directory.

    Raises:
        PackageError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PackageError("this needs TensorBoard: pip install tensorboard") from None
    board: Any = SummaryWriter(str(directory))

    def show(record: Record) -> None:
        for name, value in metrics(record).items():
            board.add_scalar(name, value, record.iteration)

    try:
        yield show
    finally:
        board.close()
