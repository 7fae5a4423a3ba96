"""Small real runs: noisy decentralized SGD on quadratics, written with RunWriter."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from matcha.plans import Plan
from matcha.records import Record, RunHeader, RunWriter, Span

COMPUTE_SECONDS = 0.02
EXCHANGE_SECONDS = 0.05


def write_quadratic_run(
    directory: Path,
    plan: Plan,
    *,
    iterations: int = 300,
    dimension: int = 20,
    seed: int = 0,
    record_every: int = 2,
    traced_iterations: int = 10_000,
    config: dict[str, object] | None = None,
) -> Path:
    """Each worker i has F_i(x) = ½‖x − c_i‖²; the clock charges compute and each matching."""
    rng = np.random.default_rng(seed)
    m, rate, noise = plan.num_workers, 0.05, 0.5
    centers = rng.normal(size=(m, dimension)) * 0.3
    x = np.full((m, dimension), 3.0)
    best = 0.5 * float(((centers - centers.mean(axis=0)) ** 2).sum(axis=1).mean())
    header = RunHeader(
        name=directory.name,
        kind="simulation",
        task="quadratics",
        strategy=plan.strategy,
        budget=plan.budget,
        seed=seed,
        num_workers=m,
        clock="simulated",
        config={"learning_rate": rate, **(config or {})},
        command=f"matcha simulate {plan.topology.name} --strategy {plan.strategy}",
    )
    clock = units = 0.0
    talking = np.zeros(m)
    with RunWriter(directory, header, plan) as writer:
        for k, round_ in enumerate(plan.rounds(0, iterations)):
            gradient = x - centers + noise * rng.normal(size=x.shape)
            x = round_.mix(x - rate * gradient)
            if k < traced_iterations:
                for worker in range(m):
                    writer.record(_span(worker, k, "compute", clock, clock + COMPUTE_SECONDS))
            clock += COMPUTE_SECONDS
            for matching in round_.matchings:
                end = clock + EXCHANGE_SECONDS * plan.timing.matching_time(matching)
                for worker in (w for link in matching for w in link):
                    talking[worker] += end - clock
                    if k < traced_iterations:
                        writer.record(_span(worker, k, "exchange", clock, end))
                clock = end
            units += plan.round_time(round_)
            if (k + 1) % record_every:
                continue
            mean = x.mean(axis=0)
            loss = 0.5 * float(((mean - centers) ** 2).sum(axis=1).mean()) - best + 0.01
            writer.record(
                Record(
                    iteration=k + 1,
                    epoch=(k + 1) / 50,
                    train_loss=loss,
                    test_accuracy=1 / (1 + loss),
                    consensus_distance=float(((x - mean) ** 2).sum(axis=1).mean()),
                    predicted_consensus=_predicted(plan, rate * noise, dimension),
                    comm_units=units,
                    time=clock,
                )
            )
            for worker in range(m):
                writer.record(
                    Record(
                        iteration=k + 1,
                        epoch=(k + 1) / 50,
                        worker=worker,
                        time=clock,
                        compute_seconds=record_every * COMPUTE_SECONDS,
                        comm_seconds=float(talking[worker]),
                    )
                )
            talking[:] = 0
    return directory


def _span(worker: int, k: int, kind: str, start: float, end: float) -> Span:
    return Span(worker=worker, iteration=k, kind=kind, start=start, end=end)  # type: ignore[arg-type]


def _predicted(plan: Plan, deviation: float, dimension: int) -> float | None:
    error = plan.consensus_error
    return None if error is None else error * dimension * deviation**2
