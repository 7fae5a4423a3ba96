"""The defects that `make defects` plants: thirty, each in a module of its own, and they apply."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

import plant_defects
from plant_defects import DEFECTS, SOURCE, Defect, is_caught

TESTS = Path(__file__).parent


def test_there_are_thirty_in_as_many_modules():
    assert len(DEFECTS) == len({defect.file for defect in DEFECTS}) == 30


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.file)
def test_every_defect_applies_once_and_leaves_a_module(defect, tmp_path):
    file = tmp_path / SOURCE / defect.file
    file.parent.mkdir(parents=True)
    file.write_text((plant_defects.ROOT / SOURCE / defect.file).read_text("utf-8"), "utf-8")
    before = defect.apply(tmp_path)
    after = file.read_text("utf-8")
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    changed = [a != b for a, b in zip(after.splitlines(), before.splitlines(), strict=True)]
    assert sum(changed) == 1
    assert defect.tests
    for name in defect.tests:
        assert (TESTS / name).exists(), name


def test_a_line_that_is_not_there_is_an_error(tmp_path):
    file = tmp_path / SOURCE / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "y"):
        with pytest.raises(ValueError, match="not once"):
            Defect("a.py", old, "z", ("b",)).apply(tmp_path)


def test_a_defect_is_caught_by_a_test_that_fails_and_taken_out_again(tmp_path):
    file = tmp_path / SOURCE / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\n")
    look = f"import runpy\ndef test(): assert runpy.run_path({str(file)!r})['x'] > 0\n"
    (tmp_path / "tests" / "test_a.py").write_text(look)
    found = [
        is_caught(Defect("a.py", "x = 1", new, ("test_a.py",)), tmp_path, all_tests=False)
        for new in ("x = -1", "x = 2")
    ]
    assert found == [True, False]
    assert file.read_text() == "x = 1\n"


def test_tests_that_fail_without_a_defect_catch_nothing(tmp_path, monkeypatch):
    file = tmp_path / SOURCE / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text("x = 1\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests" / "test_a.py").write_text("def test(): assert False\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setattr(plant_defects, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="without any defect"):
        plant_defects.plant([Defect("a.py", "x = 1", "x = 2", ("test_a.py",))], 1, all_tests=False)
