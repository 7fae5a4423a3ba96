from __future__ import annotations

from matcha.records import Record, mlflow_logger, wandb_logger

RECORD = Record(iteration=7, epoch=1.0, train_loss=0.5, test_accuracy=float("nan"), time=2.0)
EXPECTED = {"epoch": 1.0, "train_loss": 0.5, "comm_units": 0.0, "time": 2.0}


class Sink:
    """Keeps what a logger's own object would send away."""

    def __init__(self):
        self.lines = []

    def log(self, metrics, step):
        self.lines.append((step, metrics))

    def log_metrics(self, metrics, step):
        self.lines.append((step, metrics))


def test_both_loggers_get_the_numbers_that_are_known():
    for make in (wandb_logger, mlflow_logger):
        sink = Sink()
        make(sink)(RECORD)
        ((step, metrics),) = sink.lines
        assert step == 7
        assert EXPECTED.items() <= metrics.items()
        assert "test_accuracy" not in metrics
        assert "worker" not in metrics
