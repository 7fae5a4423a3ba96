from __future__ import annotations

from dataclasses import replace

from tests.report.runs import run_of

from matcha.report.series import presence


def test_changes_become_stretches_away(tmp_path) -> None:
    run = run_of([3.0, 2.0, 1.0], tmp_path=tmp_path)
    assert presence(run) is None
    changes = ([[4, 1, 0], [5, 0, 0]], [[5, 0, 0], [6, 1, 1], [6, 7, 1]], [[9, 1, 0]])
    records = tuple(replace(r, changes=c) for r, c in zip(run.records, changes, strict=True))
    found = presence(replace(run, records=records))
    assert found == {
        "iterations": 2,
        "worker": [0, 1, 1],
        "start": [5, 4, 9],
        "stop": [None, 6, None],
    }
