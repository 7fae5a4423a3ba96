from __future__ import annotations

import io
import json
import time

import pytest

from matcha.cli.output import (
    check_free,
    free_directory,
    make_folder,
    patient_progress,
    print_json,
)
from matcha.errors import InputError


def test_a_file_is_overwritten_only_when_told_to(tmp_path):
    path = tmp_path / "file"
    check_free(path, force=False)
    path.write_text("")
    check_free(path, force=True)
    check_free(None, force=False)
    with pytest.raises(InputError, match="--force"):
        check_free(path, force=False)


def test_a_file_where_a_folder_should_be_is_one_sentence(tmp_path):
    make_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be a folder"):
        make_folder(tmp_path / "file" / "below")


def test_directories_are_numbered_until_one_is_free(tmp_path):
    names = []
    for _ in range(3):
        path = free_directory(tmp_path, "run")
        path.mkdir()
        names.append(path.name)
    assert names == ["run", "run-2", "run-3"]


def test_json_is_one_document(capsys):
    print_json({"rho": 0.5})
    assert json.loads(capsys.readouterr().out) == {"rho": 0.5}


def test_quick_work_shows_no_progress(capsys):
    with patient_progress("planning") as progress:
        progress(1, 2, "plans")
    assert capsys.readouterr().err == ""


def test_long_work_says_so_where_no_bar_can_be_seen(capsys, monkeypatch):
    monkeypatch.setattr("matcha.cli.output._WORD_SECONDS", 0.01)
    said, deadline = "", time.monotonic() + 150
    with patient_progress("planning") as progress:
        progress(3, 7, "plans")
        while said.count("\n") < 2 and time.monotonic() < deadline:  # again and again
            said += capsys.readouterr().err
            time.sleep(0.01)
    assert said.startswith(2 * "matcha: still planning … 3 of 7 plans\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_fills_and_says_what_is_counted(monkeypatch):
    terminal, deadline = Terminal(), time.monotonic() + 150
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("matcha.cli.output._PATIENCE_SECONDS", 0.01)
    with patient_progress("planning") as progress:
        for step in ((30, 100, "iterations at most"), (3, 7, "plans")):
            progress(*step)
            said = "{} of {} {}".format(*step)
            while said not in terminal.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert said in terminal.getvalue()
    assert "planning" in terminal.getvalue()
