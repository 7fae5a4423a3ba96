from __future__ import annotations

import json

from tests.commands import matcha_command


def test_sweep_table_json_and_figure(tmp_path):
    figure = tmp_path / "sweep.svg"
    options = ["sweep", "paper:er8", "--budget", "0.2,0.5", "--effort", "none"]
    done = matcha_command(*options, "--strategy", "matcha,vanilla,periodic", "--plot", figure)
    assert done.returncode == 0, done.stderr
    assert "0.4666" in done.stdout
    assert "best for the consensus error" in done.stdout
    assert "<svg" in figure.read_text()
    done = matcha_command(*options, "--strategy", "matcha,vanilla", "--json")
    points = json.loads(done.stdout)["points"]
    assert [(p["strategy"], p["budget"]) for p in points] == [
        ("matcha", 0.2),
        ("matcha", 0.5),
        ("vanilla", 1.0),
    ]


def test_the_papers_weights_are_there_for_the_asking():
    options = ["sweep", "paper:er8", "-b", "0.5", "-s", "matcha,vanilla"]
    done = matcha_command(*options, "--alpha", "rho")
    assert "0.6538" in done.stdout
    assert "best for rho, as in the paper" in done.stdout
    done = matcha_command(*options, "--alpha", "rhoo")
    assert done.returncode == 2
    assert "did you mean 'rho'" in done.stderr


def test_wires_stand_in_the_table_and_the_figure(tmp_path):
    figure = tmp_path / "sweep.svg"
    options = ["sweep", "ring:6", "-b", "0.1", "-s", "greedy", "--effort", "none"]
    done = matcha_command(*options, "--wire", "float32,modulo:3", "--plot", figure)
    assert done.returncode == 0, done.stderr
    assert "modulo:3" in done.stdout
    assert "greedy, modulo:3" in figure.read_text()


def test_a_terminal_of_eighty_columns_has_room_for_every_row():
    done = matcha_command("sweep", "ring:6", "-b", "0.1,0.3", "-s", "vanilla,greedy",
                          "--wire", "float32,modulo:3", COLUMNS="80")  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == ["vanilla"] * 2 + ["greedy"] * 3
    assert all("*" in row for row in rows[2:])
    assert "*: a mean over a cycle" in done.stdout
    assert "…" not in done.stdout


def test_bad_sweeps_are_one_sentence():
    for arguments, sentence in (
        (["--budget", "a,b"], "separated by commas"),
        (["--budget", "0.5,2"], "(0, 1]"),
        (["--strategy", "vanila"], "did you mean 'vanilla'"),
        (["--strategy", ""], "at least one"),
        (["--wire", "modulo:9"], "bits"),
    ):
        done = matcha_command("sweep", "ring:4", *arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
