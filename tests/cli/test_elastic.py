"""`matcha train` over links of our own, through the command line."""

from __future__ import annotations

import pytest
from tests.commands import matcha_command, matcha_fork

from matcha._io.keys import new_keys
from matcha.records import read_run


@pytest.mark.slow
def test_a_task_trains_elastically_with_keys(tmp_path) -> None:
    new_keys(tmp_path / "keys", 3)
    done = matcha_fork(
        "train", "logistic", "--topology", "ring:3", "--strategy", "greedy", "--epochs", 2,
        "--elastic", "--keys", tmp_path / "keys", "--no-report", "--output", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "run")
    assert [record.members for record in run.records] == [3, 3]
    assert set(run.worker_records) == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rank", 1], "--rank needs --peers"),
        (["--keys", "keys"], "--keys needs --links, --elastic or --peers"),
    ],
)
def test_options_that_say_nothing_alone_are_refused(options, sentence) -> None:
    done = matcha_command("train", "logistic", "--topology", "ring:3", *options)
    assert done.returncode == 2
    assert sentence in done.stderr
