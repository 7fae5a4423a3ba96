from __future__ import annotations

from dataclasses import replace

import pytest

from matcha.records import read_run
from matcha.report.figures import draw_curves, draw_loads, draw_timeline, write_figures
from matcha.report.series import timeline, worker_loads


@pytest.fixture(scope="module")
def runs(run_folders):
    return [read_run(folder) for folder in run_folders]


def test_curves_are_the_records(runs):
    axes = draw_curves(runs, "train_loss", "time", target=0.5).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    for run in runs:
        y = lines[run.header.strategy].get_ydata()
        assert y[-1] == pytest.approx(run.records[-1].train_loss, rel=1e-4)
    assert axes.get_yscale() == "log"
    assert len(axes.lines) == len(runs) + 1


def test_runs_have_distinct_colours_and_dashes(runs):
    axes = draw_curves(runs, "train_loss", "epoch").axes[0]
    assert len({line.get_color() for line in axes.lines}) == len(runs)
    assert len({line.get_linestyle() for line in axes.lines}) == len(runs)


def test_a_curve_of_zeros_has_no_logarithmic_axis(runs):
    """matplotlib warned of it on the terminal; two workers that average agree exactly."""
    still = replace(
        runs[0], records=tuple(replace(r, consensus_distance=0.0) for r in runs[0].records)
    )
    axes = draw_curves([still], "consensus_distance", "iteration").axes[0]
    assert axes.get_yscale() == "linear"


def test_bars_are_the_workers_loads(runs):
    axes = draw_loads(runs).axes[0]
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert heights == worker_loads(runs[0])["planned"]


def test_a_timeline_shows_its_first_rounds(runs):
    axes = draw_timeline(runs[2], "matcha", rounds=5).axes[0]
    lines = timeline(runs[2])
    shown = sum(len(container) for container in axes.containers)
    assert shown == sum(1 for k in lines["iteration"] if k < 5)


def test_figures_are_named_by_what_they_show(runs, tmp_path):
    written = write_figures(runs[:1], tmp_path, "svg")
    assert {path.name for path in written} == {
        "train_loss-epoch.svg",
        "train_loss-time.svg",
        "consensus.svg",
        "workers.svg",
        "timeline-vanilla.svg",
        "topology-vanilla.svg",
    }


def test_accuracy_is_drawn_against_megabytes_where_they_were_counted(runs, tmp_path):
    counted = [
        replace(
            run,
            records=tuple(
                replace(record, megabytes_sent=1.0 * k, test_accuracy=0.5)
                for k, record in enumerate(run.records)
            ),
        )
        for run in runs
    ]
    written = {path.name for path in write_figures(counted, tmp_path, "svg")}
    assert "test_accuracy-megabytes.svg" in written
    axes = draw_curves(counted, "test_accuracy", "megabytes_sent").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.get_xlabel() == "megabytes sent by a worker"


def test_thin_lines_are_explained_and_seconds_say_whose(runs):
    axes = draw_curves(runs, "consensus_distance", "epoch").axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "thin: forecast, mostly within a factor of 3" in labels
    assert all(tick == int(tick) for tick in axes.get_xticks())
    clocks = {run.header.clock for run in runs}
    named = draw_curves(runs, "train_loss", "time").axes[0].get_xlabel()
    assert named == ("simulated seconds" if clocks == {"simulated"} else "seconds")


def test_a_diverged_run_is_named_so(runs):
    last = replace(runs[0].records[-1], train_loss=float("nan"))
    broken = replace(runs[0], records=(*runs[0].records, last))
    axes = draw_curves([broken, *runs[1:]], "train_loss", "epoch").axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert labels[0] == "vanilla (diverged)"
    assert not any("diverged" in label for label in labels[1:])


def test_a_diverged_run_does_not_flatten_the_others(runs):
    ends = [replace(runs[0].records[-1], train_loss=value) for value in (1e12, float("nan"))]
    broken = replace(runs[0], records=(*runs[0].records, *ends))
    highest = max(r.train_loss for run in runs[1:] for r in run.records)
    axes = draw_curves([broken, *runs[1:]], "train_loss", "epoch").axes[0]
    assert axes.get_ylim()[1] == pytest.approx(1.15 * highest, rel=1e-4)  # curves are rounded
