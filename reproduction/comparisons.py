"""Results of several runs side by side: means over seeds, and times to a loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matcha.records import MODEL_FIGURES
from matcha.training.settings import Delays
from reproduction.trials import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Results that share a task and a learning rate, to be asked by topology and label."""

    results: tuple[Result, ...]
    delays: Delays

    @classmethod
    def of(cls, results: Iterable[Result], task: str, delays: Delays) -> Results:
        """The results of a task at the learning rate that won the tuning on vanilla.

        The tuning ran vanilla at several rates; all other trials ran at the winner only.
        """
        chosen = [result for result in results if result.trial.task == task]
        others = {r.trial.learning_rate for r in chosen if r.trial.strategy != "vanilla"}
        kept = [r for r in chosen if not others or r.trial.learning_rate in others]
        return cls(results=tuple(kept), delays=delays)

    def __bool__(self) -> bool:
        return bool(self.results)

    @property
    def loss(self) -> str:
        """Which loss decides: the average model's, where every run recorded it.

        Runs of 0.1 recorded only the workers' own.
        """
        known = all(result.final("train_loss") is not None for result in self.results)
        return "train_loss" if known else "worker_loss"

    @property
    def loss_name(self) -> str:
        """What to call that loss in tables and claims."""
        return "training loss" if self.loss == "train_loss" else "workers' own loss"

    @property
    def topologies(self) -> list[str]:
        """In order of appearance."""
        return list(dict.fromkeys(result.trial.topology for result in self.results))

    def labels(self, topology: str) -> list[str]:
        """What was run on a topology, in order of appearance."""
        found = (r.trial.label for r in self.results if r.trial.topology == topology)
        return list(dict.fromkeys(found))

    def seeds(self, topology: str, label: str) -> list[Result]:
        """One result a seed."""
        return [r for r in self.results if r.trial.topology == topology and r.trial.label == label]

    def final(self, topology: str, label: str, name: str) -> float | None:
        """A field's last value, the mean over seeds; None where it was not measured.

        A run that diverged has no final model: what was measured before does not count, it is NaN.
        """
        runs = self.seeds(topology, label)
        if name in MODEL_FIGURES and any(result.diverged for result in runs):
            return math.nan
        return _mean(result.final(name) for result in runs)

    def seconds(self, result: Result) -> list[float]:
        """The simulated clock at each record, by these delays.

        Worked out from iterations and units, so that other delays can be asked about afterwards.
        """
        compute = self.delays.compute_time or 0.0
        unit = self.delays.link_time
        return [r.iteration * compute + r.comm_units * unit for r in result.records]

    def curve(self, results: Sequence[Result]) -> list[tuple[float, float]]:
        """Simulated seconds and loss after each epoch in which all runs have it: their means."""
        points = [
            {
                record.iteration: (seconds, loss)
                for seconds, record in zip(self.seconds(result), result.records, strict=True)
                if (loss := getattr(record, self.loss)) is not None
            }
            for result in results
        ]
        shared = sorted(set.intersection(*map(set, points)))
        each = [[run[k] for run in points] for k in shared]
        return [
            (sum(s for s, _ in at) / len(at), sum(loss for _, loss in at) / len(at)) for at in each
        ]

    def gain(self, topology: str, label: str, loss: float | None = None) -> float | None:
        """How many times sooner than vanilla a loss was reached.

        Both curves are means over the seeds that both were run with.

        Args:
            topology: where.
            label: the run that is compared.
            loss: to be reached; None takes vanilla's final one.

        Returns:
            The ratio of the simulated times, or None where one of the two never got there.
        """
        ours = {result.trial.seed: result for result in self.seeds(topology, label)}
        theirs = {result.trial.seed: result for result in self.seeds(topology, "vanilla")}
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            return None
        slow = self.curve([theirs[seed] for seed in common])
        fast = self.curve([ours[seed] for seed in common])
        target = slow[-1][1] if loss is None else loss
        before, after = time_to(slow, target), time_to(fast, target)
        return before / after if before and after else None

    def table(self, topology: str) -> str:
        """Markdown: one row a label."""
        lines = [
            f"| run | seeds | {self.loss_name} | test loss | test accuracy | consensus distance "
            "| units | simulated seconds |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for label in self.labels(topology):
            runs = self.seeds(topology, label)

            def value(name: str, form: str, label: str = label, scale: float = 1.0) -> str:
                found = self.final(topology, label, name)
                return "–" if found is None or found != found else format(found * scale, form)

            seconds = _mean(self.seconds(result)[-1] for result in runs)
            note = " (diverged)" if any(result.diverged for result in runs) else ""
            accuracy = value("test_accuracy", ".1f", scale=100.0)
            lines.append(
                f"| {label}{note} | {len(runs)} | {value(self.loss, '.4f')} "
                f"| {value('test_loss', '.4f')} "
                f"| {accuracy if accuracy == '–' else accuracy + ' %'} "
                f"| {value('consensus_distance', '.3g')} "
                f"| {value('comm_units', ',.0f')} | {seconds or 0:,.0f} |"
            )
        return "\n".join(lines)


def time_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """When a curve of (seconds, loss) first reaches a loss, interpolated; None if never.

    >>> time_to([(10.0, 4.0), (20.0, 2.0)], 3.0)
    15.0
    """
    before: tuple[float, float] | None = None
    for seconds, now in curve:
        if now <= loss:
            if before is None:
                return seconds
            share = (before[1] - loss) / (before[1] - now)
            return before[0] + share * (seconds - before[0])
        before = (seconds, now)
    return None


def _mean(values: Iterable[float | None] | Sequence[float]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
