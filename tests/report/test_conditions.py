"""Conditions: when times of runs compare, and why they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.report.runs import run_of

import matcha
from matcha.report import compare
from matcha.report.groups import clock_in_words, difference

DELAYS = {"compute_seconds": None, "seconds_per_unit": 0.01}


def simulated(tmp_path, *, pace=0.005, task="digits", clock="simulated", **config):
    """A run of ten iterations whose settings are given, but for those of most runs."""
    usual = {"delays": DELAYS, "model": "cnn", "partition": "iid", "batch_size": 16}
    run = run_of([4, 3, 2, 2], config={"settings": usual | config}, tmp_path=tmp_path)
    records = [replace(record, iteration=record.iteration + 1) for record in run.records]
    return replace(
        run,
        header=replace(run.header, task=task, clock=clock),
        plan=matcha.plan(matcha.families.ring(4), 0.5, "matcha"),
        records=tuple(replace(record, compute_seconds=pace) for record in records),
    )


def test_runs_of_one_command_compare(tmp_path):
    assert difference([simulated(tmp_path), simulated(tmp_path, pace=0.005001)]) is None
    assert difference([]) is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"task": "logistic"}, "differ in their tasks (digits and logistic)"),
        ({"model": "resnet20"}, "differ in their models (cnn and resnet20)"),
        ({"partition": "shards"}, "differ in their data (iid and shards)"),
        ({"num_train": 100}, "differ in their data (iid and iid of 100)"),
        ({"clock": "wall"}, "differ in their clocks (simulated and wall)"),
        (
            {"delays": DELAYS | {"seconds_per_unit": 0.05}},
            "differ in their links (10 ms and 50 ms)",
        ),
        (
            {"delays": DELAYS | {"compute_seconds": 0.1}},
            "differ in their computing (as measured and 100 ms per iteration)",
        ),
        ({"pace": 0.006}, "computing was measured apart, 5 ms to 6 ms per iteration"),
    ],
)
def test_what_differs_is_said(other, words, tmp_path):
    assert words in difference([simulated(tmp_path), simulated(tmp_path, **other)])


def test_other_batches_rightly_take_other_times(tmp_path):
    assert difference([simulated(tmp_path), simulated(tmp_path, pace=0.01, batch_size=32)]) is None


def test_real_workers_may_take_as_long_as_they_take(tmp_path):
    """A real clock counts what was: strategies differ in it, and so does one from run to run."""
    assert (
        difference([simulated(tmp_path, clock="wall", pace=pace) for pace in (0.005, 0.008)])
        is None
    )


def test_slowed_links_do_not_compare_with_free_ones(tmp_path):
    free = simulated(tmp_path, clock="wall", delays=None)
    slow = simulated(tmp_path, clock="wall", delays=None, link_mbps="2.5 (emulated)")
    assert "links (as they are and 2.5 Mbit/s)" in difference([free, slow])


def test_a_comparison_of_unlike_runs_has_neither_winner_nor_factors(tmp_path):
    vanilla = simulated(tmp_path, task="logistic")
    vanilla = replace(vanilla, header=replace(vanilla.header, strategy="vanilla"))
    comparison = compare([vanilla, simulated(tmp_path)])
    assert comparison.winner is None
    assert comparison.verdict.sentence.startswith("No verdict: the runs differ in their tasks")
    assert [row.speedup for row in comparison.rows] == [None, None]


def test_a_simulated_clock_tells_what_it_counts(tmp_path):
    words = "5 ms of computing per iteration, as measured; 10 ms per matching"
    assert clock_in_words([simulated(tmp_path, pace=0.005)]) == words
    given = simulated(tmp_path, delays=DELAYS | {"compute_seconds": 0.1})
    assert clock_in_words([given]) == "100 ms of computing per iteration; 10 ms per matching"
    slower = simulated(tmp_path, delays=DELAYS | {"speeds": (1, 0.25)})
    assert clock_in_words([slower]) == (
        "computing as measured, workers at speeds 1, 0.25; 10 ms per matching"
    )
    assert clock_in_words([simulated(tmp_path), given]) is None
    assert clock_in_words([simulated(tmp_path, clock="wall")]) is None
    assert clock_in_words([]) is None
