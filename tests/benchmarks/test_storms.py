"""Storms: what a file says happens, to no worker that is away already, and is counted as it was."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def storms(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("network.storms")


class Clock:
    """A clock that jumps instead of sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("name", "every"), [("eight", 60), ("eight-twice", 30)])
def test_a_storm_of_chance_is_the_same_each_time_and_as_dense_as_it_says(
    storms, name, every
) -> None:
    path = BENCHMARKS / "storms" / f"{name}.json"
    storm = storms.Storm.read(path, 8)
    assert storm == storms.Storm.read(path, 8)
    kills = [event for event in storm.events if event.kind == "kill"]
    assert 0.5 < len(kills) / (storm.seconds / every) < 2
    assert {event.kind for event in storm.events} == {"kill", "stop", "cut"}


def test_who_is_away_is_left_alone_and_all_are_back_in_the_end(storms, monkeypatch) -> None:
    monkeypatch.setattr(storms, "time", Clock())
    events = [(1, 0, "kill", 5), (2, 0, "stop", 1), (3, 1, "cut", 50), (4, 2, "stop", 1)]
    drawn = tuple(storms.Event(at=a, worker=w, kind=k, lasts=s) for a, w, k, s in events)
    storm = storms.Storm(seconds=20, events=drawn)
    done: list[str] = []
    begin = {k: lambda w, k=k: done.append(f"{k} {w}") for k in storms.KINDS}
    end = {k: lambda w, k=k: done.append(f"no {k} {w}") for k in storms.KINDS}
    faults = storm.play(begin, end, 3)
    # Worker 2 would be the last one there.
    assert done == ["kill 0", "cut 1", "no kill 0", "no cut 1"]
    assert [(f.who, f.start, f.end, f.kind) for f in faults] == [
        ((0,), 101.0, 106.0, "kill"), ((1,), 103.0, 120.0, "cut"),
    ]  # fmt: skip


def test_workers_join_and_leave_and_those_that_have_left_are_left_alone(
    storms, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(storms, "time", Clock())
    events = [
        {"at": 1, "join": 3}, {"at": 2, "kill": 3, "for": 2}, {"at": 3, "leave": 3},
        {"at": 5, "leave": 0}, {"at": 6, "kill": 0, "for": 1}, {"at": 7, "stop": 3, "for": 1},
    ]  # fmt: skip
    (tmp_path / "storm.json").write_text(json.dumps({"seconds": 20, "events": events}))
    storm = storms.Storm.read(tmp_path / "storm.json", 3)
    assert storm.num_workers(3) == 4
    done: list[str] = []
    kinds = (*storms.KINDS, *storms.FOR_GOOD)
    begin = {k: lambda w, k=k: done.append(f"{k} {w}") for k in kinds}
    end = {k: lambda w, k=k: done.append(f"no {k} {w}") for k in storms.KINDS}
    faults = storm.play(begin, end, 3)
    # It was killed when it should have left.
    assert done == ["join 3", "kill 3", "no kill 3", "leave 0", "stop 3", "no stop 3"]
    assert [(f.who, f.start, f.end) for f in faults if f.kind in storms.FOR_GOOD] == [
        ((3,), 100.0, 101.0), ((0,), 105.0, float("inf")),
    ]  # fmt: skip


def test_those_that_join_by_chance_get_the_next_numbers(storms, tmp_path) -> None:
    said = {"seconds": 600, "seed": 3, "join": {"every": 60}, "leave": {"every": 200}}
    (tmp_path / "storm.json").write_text(json.dumps(said))
    storm = storms.Storm.read(tmp_path / "storm.json", 8)
    joins = [event.worker for event in storm.events if event.kind == "join"]
    assert joins == [*range(8, 8 + len(joins))]
    assert len(joins) > 3
    assert {event.kind for event in storm.events} == {"join", "leave"}


def test_those_take_part_who_met_somebody(storms, tmp_path: Path) -> None:
    diaries = importlib.import_module("parts.diaries")
    met = {0: [0.5, 1.5, 2.5, 3.5], 1: [0.2, 3.8], 2: [1.1]}
    for rank, times in met.items():
        lines = [json.dumps({"what": "step", "time": t, "met": [9]}) for t in times]
        (tmp_path / f"diary-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    faults = [storms.Fault(who=(1,), start=0.0, end=2.9, kind="stop")]
    found = diaries.participation(tmp_path, faults, 3)
    assert found["participation"] == pytest.approx(4 / 6)  # seconds 0 to 2 of workers 0 and 2
    assert found["median_time_back"] == pytest.approx(0.9)


def test_who_joins_was_away_until_then_and_who_leaves_from_then_on(storms, tmp_path: Path) -> None:
    diaries = importlib.import_module("parts.diaries")
    met = {0: [0.5, 1.5, 2.5, 3.5, 4.5], 1: [0.2, 1.8], 2: [3.1, 4.1], 3: [4.5]}
    for rank, times in met.items():
        lines = [json.dumps({"what": "step", "time": t, "met": [9]}) for t in times]
        (tmp_path / f"diary-{rank}.jsonl").write_text("\n".join(lines) + "\n")
    faults = [
        storms.Fault(who=(2,), start=0.0, end=2.9, kind="join"),
        storms.Fault(who=(1,), start=2.0, end=float("inf"), kind="leave"),
        storms.Fault(who=(3,), start=0.0, end=4.0, kind="kill"),
    ]
    found = diaries.participation(tmp_path, faults, 4)
    assert found["participation"] == 1.0
    assert found["median_time_back"] == pytest.approx(0.5)
    assert found["longest_time_to_join"] == pytest.approx(0.2)
    assert found["faults_by_kind"] == {"kill": 1, "join": 1, "leave": 1}
