"""Runs with losses of one's choice, in memory."""

from __future__ import annotations

from matcha.records import Record, Run, RunHeader


def run_of(
    losses, *, strategy="matcha", seconds=1.0, seed=0, budget=0.5, config=None, tmp_path, **fields
):
    header = RunHeader(
        name="r",
        kind="simulation",
        task="t",
        strategy=strategy,
        budget=budget,
        seed=seed,
        num_workers=2,
        clock="simulated",
        config=config or {},
    )
    records = tuple(
        Record(
            iteration=k,
            epoch=float(k),
            train_loss=v,
            time=k * seconds,
            comm_units=2.0 * k,
            **fields,
        )
        for k, v in enumerate(losses)
    )
    return Run(
        header=header, plan=None, records=records, worker_records={}, spans=(), path=tmp_path
    )
