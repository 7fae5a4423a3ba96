from __future__ import annotations

import math
from dataclasses import replace

import pytest

from matcha.records import Record
from matcha.simulation import Delays
from reproduction.comparisons import Results, time_to
from reproduction.trials import Result, Trial

DELAYS = Delays(compute_time=1.0, link_time=2.0)


def make(strategy, losses, *, budget=0.5, seed=0, rate=0.1, units=1.0, topology="ring:4"):
    records = tuple(
        Record(
            iteration=10 * (k + 1),
            epoch=k + 1,
            train_loss=loss,
            worker_loss=loss,
            comm_units=units * (k + 1),
        )
        for k, loss in enumerate(losses)
    )
    trial = Trial(
        task="digits", topology=topology, strategy=strategy, budget=budget, seed=seed,
        learning_rate=rate,
    )  # fmt: skip
    return Result(trial=trial, records=records, device="", seconds=0.0, plan={}, config={})


def results(*made):
    return Results.of(made, "digits", DELAYS)


def test_only_vanilla_at_the_tuned_rate_is_kept():
    found = results(
        make("vanilla", [1.0], budget=1.0, rate=0.1),
        make("vanilla", [2.0], budget=1.0, rate=0.2),
        make("matcha", [3.0], rate=0.2),
    )
    assert found.final("ring:4", "vanilla", "train_loss") == 2.0
    assert found.labels("ring:4") == ["vanilla", "matcha 0.5"]


def test_means_over_seeds():
    found = results(make("matcha", [1.0]), make("matcha", [3.0], seed=1))
    assert len(found.seeds("ring:4", "matcha 0.5")) == 2
    assert found.final("ring:4", "matcha 0.5", "train_loss") == 2.0
    assert found.final("ring:4", "greedy 0.5", "train_loss") is None


def test_a_diverged_run_has_no_final_model():
    run = make("periodic", [1.0, float("nan")])
    before = replace(run.records[0], test_accuracy=0.9)
    found = results(replace(run, records=(before, run.records[1])))
    assert math.isnan(found.final("ring:4", "periodic 0.5", "test_accuracy"))
    assert found.final("ring:4", "periodic 0.5", "comm_units") == 2.0
    row = found.table("ring:4").splitlines()[-1]
    assert "(diverged) | 1 | – | – | – |" in row


def test_time_to_a_loss_is_interpolated():
    found = results(make("matcha", [4.0, 2.0, 1.0]))
    clock = [10 + 2, 20 + 4, 30 + 6]
    assert found.seconds(found.results[0]) == clock
    curve = found.curve(found.results)
    assert curve == list(zip(clock, [4.0, 2.0, 1.0], strict=True))
    assert time_to(curve, 3.0) == pytest.approx((clock[0] + clock[1]) / 2)
    assert time_to(curve, 9.0) == clock[0]
    assert time_to(curve, 0.5) is None


def test_gain_compares_mean_curves_over_common_seeds():
    found = results(
        make("vanilla", [4.0, 3.0], budget=1.0, units=20.0),
        make("vanilla", [4.0, 1.0], budget=1.0, units=20.0, seed=1),
        make("matcha", [3.0, 1.0]),
        make("matcha", [1.0, 1.0], seed=1),
        make("matcha", [9.0, 9.0], seed=2),  # vanilla has no such seed
        make("greedy", [9.0, 2.5]),
    )
    # Vanilla's mean ends at 2 after 2 x (10 + 40) seconds, matcha's is there after one epoch.
    assert found.gain("ring:4", "matcha 0.5") == pytest.approx(100 / 12)
    assert found.gain("ring:4", "matcha 0.5", 4.0) == pytest.approx(50 / 12)
    assert found.gain("ring:4", "matcha 0.5", 0.5) is None  # nobody gets there
    # Greedy has one seed, so vanilla's other one does not count: the loss to reach is 3.
    assert found.gain("ring:4", "greedy 0.5") == pytest.approx(100 / (12 + 12 * 6 / 6.5))
    assert found.gain("ring:4", "greedy 0.5", 2.0) is None
    assert found.gain("ring:4", "periodic 0.5") is None


def test_runs_with_more_epochs_are_rows_of_their_own():
    longer = replace(make("matcha", [1.0]).trial, stretch=1.5)
    found = results(make("matcha", [3.0]), replace(make("matcha", [1.0]), trial=longer))
    assert found.labels("ring:4") == ["matcha 0.5", "matcha 0.5, 1.5 × epochs"]
    assert found.final("ring:4", "matcha 0.5", "train_loss") == 3.0


def test_table_has_a_row_a_label_and_tells_of_divergence():
    found = results(make("matcha", [1.0]), make("periodic", [float("nan")]))
    lines = found.table("ring:4").splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| matcha 0.5 | 1 | 1.0000 |")
    assert "periodic 0.5 (diverged)" in lines[3]
