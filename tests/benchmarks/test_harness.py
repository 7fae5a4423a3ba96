"""Every committed text is what its benchmark makes of its committed document."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("harness")


def test_committed_texts_are_what_their_benchmarks_say(harness):
    written = dict(harness.described())
    assert len(written) >= 20
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name}: python benchmarks/harness.py"
        )


def test_columns_are_as_wide_as_they_need_and_say_what_is_missing(harness):
    columns = [
        harness.Column("wire", "wire"),
        harness.Column("times", lambda row: row["times"] and 2 * row["times"], ".1f"),
    ]
    rows = [{"wire": "modulo:3", "times": 5.0}, {"wire": "float32", "times": None}]
    assert harness.table(columns, rows).splitlines() == [
        "wire      times",
        "modulo:3   10.0",
        "float32       –",
    ]


def test_a_result_is_printed_and_written_where_there_is_a_place(harness, tmp_path, capsys):
    harness.finish(None, {"a": 1}, "one line")
    assert capsys.readouterr().out == "one line\n"
    harness.finish(tmp_path / "folder" / "found", {"a": 1}, "one line")
    assert harness.earlier(tmp_path / "folder" / "found") == {"a": 1}
    assert (tmp_path / "folder" / "found.txt").read_text() == "one line\n"
    assert harness.earlier(tmp_path / "nothing") is None
