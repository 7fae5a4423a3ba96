from __future__ import annotations

from dataclasses import replace

import pytest
from tests.quadratics import EXCHANGE_SECONDS, write_quadratic_run

import matcha
from matcha.records import read_run
from matcha.report.series import timeline, worker_loads


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    plan = matcha.plan(matcha.families.ring(6), 0.5, "matcha")
    folder = tmp_path_factory.mktemp("runs") / "run"
    return read_run(write_quadratic_run(folder, plan, iterations=200))


def test_a_timeline_holds_whole_rounds_within_its_limit(run):
    lines = timeline(run, limit=100)
    assert len(lines["start"]) <= 100
    last = lines["rounds"][1]
    recorded = [s for s in run.spans if s.iteration <= last]
    assert len(recorded) == len(lines["start"])
    assert not lines["planned"]
    assert lines["start"][0] == 0


def test_without_spans_the_plans_schedule_is_drawn_and_said_to_be_planned(run):
    lines = timeline(replace(run, spans=()), limit=60)
    assert lines["planned"]
    assert lines["unit"] == "units"
    first = next(k for k in range(50) if run.plan.round(k).matchings)
    ends = sorted(w for link in run.plan.round(first).matchings[0] for w in link)
    assert lines["worker"][: len(ends)] == ends


def test_no_spans_and_no_plan_give_no_timeline(run):
    assert timeline(replace(run, spans=(), plan=None)) is None


def test_loads_are_what_the_rounds_cost_each_worker(run):
    loads = worker_loads(run)
    expected = [0.0] * 6
    for round_ in run.plan.rounds(0, 200):
        for i, j in round_.links:
            expected[i] += 1 / 200
            expected[j] += 1 / 200
    assert loads["planned"] == pytest.approx(expected, rel=1e-4)
    assert loads["measured"] == pytest.approx([e * EXCHANGE_SECONDS for e in expected], rel=1e-4)


def test_vanillas_load_is_the_degree(tmp_path):
    plan = matcha.plan(matcha.families.paper("er8"), 1.0, "vanilla")
    run = read_run(write_quadratic_run(tmp_path / "run", plan, iterations=10))
    assert worker_loads(run)["planned"] == list(plan.topology.degrees)


def test_evaluations_are_not_drawn_as_idle_time(run):
    """Between epochs no worker trains: the clock stands still, and so does the timeline."""
    done = 5
    paused = [
        replace(s, start=s.start + 60, end=s.end + 60) if s.iteration >= done else s
        for s in run.spans
    ]
    records = (replace(run.records[0], iteration=done),)
    lines = timeline(replace(run, spans=tuple(paused), records=records), limit=100)
    ends = [start + length for start, length in zip(lines["start"], lines["length"], strict=True)]
    assert max(ends) < 60
    before = [end for end, k in zip(ends, lines["iteration"], strict=True) if k < done]
    after = [s for s, k in zip(lines["start"], lines["iteration"], strict=True) if k >= done]
    assert min(after) == pytest.approx(max(before))
