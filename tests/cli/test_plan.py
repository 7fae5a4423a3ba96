"""The command line as a person meets it: real processes, exit codes, one sentence for errors."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest
from tests.commands import matcha_command

import matcha
from matcha import Plan, families
from matcha.cli.plan import _distinct
from matcha.plans import StagedPlan, load_plan


def test_the_table_says_what_the_plan_promises(tmp_path):
    done = matcha_command("plan", "paper:er8", "--budget", "0.5", "--matchings", "authors")
    assert done.returncode == 0, done.stderr
    for part in ("matching", "activation", "0.6440", "2.5 units", "certified gap"):
        assert part in done.stdout


def test_a_round_that_uses_a_matching_twice_says_how_often(tmp_path):
    """1.0000 stood there beside 3.5 units per iteration of three matchings."""
    done = matcha_command("plan", "complete:8", "-s", "hypercube")
    assert "3.5 units per iteration" in done.stdout
    assert done.stdout.count("1.1667") == 3
    assert "activation" not in done.stdout


def test_json_output_is_the_plan(tmp_path):
    output = tmp_path / "deep" / "plan.json"
    done = matcha_command("plan", "ring:6", "-b", "0.3", "--seed", "4", "--json", "-o", output)
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(json.loads(done.stdout)) == Plan.load(output)


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_plots_are_written(tmp_path, ending):
    figure = tmp_path / f"topology.{ending}"
    done = matcha_command("plan", "torus:3x3", "--effort", "none", "--plot", figure)
    assert done.returncode == 0, done.stderr
    assert figure.stat().st_size > 1000


def test_files_are_not_overwritten(tmp_path):
    output = tmp_path / "plan.json"
    output.write_text("precious")
    done = matcha_command("plan", "ring:4", "-o", output)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert output.read_text() == "precious"
    assert matcha_command("plan", "ring:4", "-o", output, "--force").returncode == 0
    assert Plan.load(output).topology == families.ring(4)


def test_delay_exponent():
    done = matcha_command("plan", "paper:er8", "--delay-exponent", "0.5", "--json")
    assert json.loads(done.stdout)["timing"]["model"] == "scaled"
    assert matcha_command("plan", "paper:er8", "--delay-exponent", "0").returncode == 2


def test_worker_weights_are_numbers_or_what_a_task_shares_out(tmp_path):
    file, weights = tmp_path / "plan.json", ["--worker-weights", "4,1,1,2"]
    assert matcha_command("plan", "ring:4", *weights, "-o", file).returncode == 0
    assert Plan.load(file).worker_weights == (2.0, 0.5, 0.5, 1.0)
    shared = ["--partition", "dirichlet", "--worker-weights", "data", "-e", "1", "--json"]
    few = ["-s", "greedy", "--num-train", "200", "--num-test", "20", "-o", tmp_path / "runs"]
    done = matcha_command("simulate", "ring:4", *few, *shared, "--format", "none")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").glob("*/plan.json")
    found = load_plan(run).worker_weights
    assert sum(found) == pytest.approx(4)
    assert max(found) > min(found)


BAD = [
    (["ring:4", "--worker-weights", "4,x"], "numbers separated by commas"),
    (["ring:4", "--worker-weights", "4,1"], "for each of 4 workers"),
    (["rign:8"], "did you mean 'ring'"),
    (["ring:8", "--budget", "0"], "(0, 1]"),
    (["ring:8", "--budget", "1.5"], "(0, 1]"),
    (["ring:8", "--budget", "nan"], "(0, 1]"),
    (["ring:8", "--strategy", "macha"], "did you mean 'matcha'"),
    (["ring:8", "--matchings", "nowhere.json"], "cannot be read"),
    (["ring:8", "--matchings", "authors"], "graph of the paper"),
    (["nowhere.graphml"], "no topology file"),
    (["ring:8", "--plot", "figure.docx"], ".svg"),
    (["path:1"], "at least 2"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=lambda v: str(v)[:40])
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    done = matcha_command("plan", *arguments, "-o", "plan.json", cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


BAD_FILES = [
    ("split.edges", b"0 1\n2 3\n", ["worker 0", "worker 2"]),
    ("loop.edges", b"0 1\n1 1\n", ["self-loop"]),
    ("twice.edges", b"0 1\n1 0\n", ["twice"]),
    ("negative.csv", b"0,-1\n-1,0\n", ["negative"]),
    ("garbage.json", os.urandom(20_000_000), ["could not be read"]),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES, ids=[n for n, _, _ in BAD_FILES])
def test_bad_topology_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    done = matcha_command("plan", name, cwd=tmp_path)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)
    assert done.stderr.count("\n") == 1


def test_a_matching_that_shares_a_worker(tmp_path):
    (tmp_path / "mine.json").write_text("[[[0, 1], [1, 2]], [[0, 2]]]")
    (tmp_path / "triangle.json").write_text("[[0, 1], [1, 2], [0, 2]]")
    done = matcha_command("plan", "triangle.json", "--matchings", "mine.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "worker 1 twice" in done.stderr


def test_saved_plans_are_checked_and_shown(tmp_path):
    plan = tmp_path / "plan.json"
    assert matcha_command("plan", "ring:6", "-b", "0.4", "-o", plan).returncode == 0
    shown = matcha_command("plan", plan, "--json")
    assert Plan.from_json(json.loads(shown.stdout)) == Plan.load(plan)
    text = plan.read_text()
    for damaged, sentence in (
        (text[: len(text) // 2], "truncated"),
        (text.replace("0.4", "0.5", 1), "checksum"),
        (text.replace("matcha.plan/2", "matcha.plan/7"), "checksum"),
        ('{"hello": 1}', "neither a list of links"),
    ):
        plan.write_text(damaged)
        done = matcha_command("plan", plan)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1


def test_help_reads_like_documentation():
    done = matcha_command("plan", "--help")
    assert done.returncode == 0
    assert "[[[i, j], …], …]" in done.stdout
    for part in ("matchings", "certificate", "Examples", "geometric", "--budget", "--plot"):
        assert part in done.stdout
    assert matcha_command("--version").stdout.startswith("matcha 0.")


def test_a_saved_staged_plan_is_shown_stage_by_stage(staged_file, tmp_path):
    done = matcha_command("plan", staged_file)
    assert done.returncode == 0, done.stderr
    assert "staged periodic plan" in done.stdout
    rows = [line.split("│")[1:4] for line in done.stdout.splitlines() if "periodic │" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "periodic", "1"],
        ["4", "periodic", "0.25"],
    ]
    printed = json.loads(matcha_command("plan", staged_file, "--json").stdout)
    assert StagedPlan.from_json(printed) == load_plan(staged_file)


def test_a_staged_plan_is_not_drawn(staged_file, tmp_path):
    done = matcha_command("plan", staged_file, "--plot", tmp_path / "a.svg", "-o", tmp_path / "b")
    assert done.returncode == 2
    assert "several in stages" in done.stderr
    assert not list(tmp_path.iterdir())


def test_stages_are_planned_and_saved(tmp_path):
    file = tmp_path / "staged.json"
    stages = ["--stage", "40:0.25", "--stage", "9:0.5"]
    done = matcha_command("plan", "ring:6", "-b", 1, "-s", "periodic", *stages, "-o", file)
    assert done.returncode == 0, done.stderr
    made = load_plan(file)
    assert [(stage.start, made.levels[stage.level].budget) for stage in made.stages] == [
        (0, 1.0),
        (9, 0.5),
        (40, 0.25),
    ]
    again = matcha_command("plan", file, "--stage", "60:0.1")
    assert again.returncode == 2
    assert "--stage is for planning" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stage", "soon"], "it is ITERATION:BUDGET"),
        (["--stage", "0:0.1"], "starts at iteration 1 or later"),
        (["--stage", "5:0.1", "--stage", "5:0.2"], "two stages start at iteration 5"),
        (["--stage", "5:7"], "budget"),
        (["--stage", "5:0.1", "--plot", "a.svg"], "--stage makes several"),
    ],
)
def test_bad_stages_are_told(arguments, sentence):
    done = matcha_command("plan", "ring:6", *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_plan_has_a_wire(tmp_path):
    path = tmp_path / "plan.json"
    done = matcha_command("plan", "ring:4", "-b", "0.1", "--wire", "modulo:3", "-o", path)
    assert done.returncode == 0, done.stderr
    assert Plan.load(path).wire.name == "modulo:3"
    refused = matcha_command("plan", "ring:4", "--wire", "modulo:5")
    assert refused.returncode == 2
    assert "modulo wire has" in refused.stderr


def test_ctrl_c_is_answered_by_a_word_and_130(tmp_path):
    waiting = tmp_path / "matchings.json"
    os.mkfifo(waiting)  # nobody ever writes: the command waits until it is stopped
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # To this thread: a signal that another takes does not wake it.
        here = [threading.get_ident(), signal.SIGINT]
        threading.Timer(1.0, signal.pthread_kill, here).start()
        done = matcha_command("plan", "ring:4", "--matchings", waiting)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert done.stderr == "matcha: stopped.\n"


def test_a_matching_is_listed_once_whatever_its_weights():
    """Greedy's cycle here holds five matchings, each with two sets of weights."""
    made = matcha.plan(matcha.families.paper("er8"), 0.5, "greedy")
    rows = _distinct(made)
    assert len(rows) < len(made.matchings)
    assert len({frozenset(matching) for matching, _ in rows}) == len(rows)
    assert sum(p for _, p in rows) == pytest.approx(sum(made.probabilities))


def test_a_saved_plan_takes_no_options_of_planning(tmp_path):
    matcha_command("plan", "ring:4", "-o", "plan.json", cwd=tmp_path)
    done = matcha_command("plan", "plan.json", "-b", "0.2", "-s", "matcha", cwd=tmp_path)
    assert done.returncode == 2
    assert "--budget and --strategy are for planning" in done.stderr


@pytest.mark.parametrize("strategy", ["silent", "allreduce"])
def test_a_plan_that_uses_no_links_lists_no_matchings(strategy, tmp_path):
    done = matcha_command("plan", "complete:4", "-s", strategy, cwd=tmp_path)
    assert "matching" not in done.stdout.splitlines()[1]
    assert "0–1" not in done.stdout


def test_a_period_is_for_strategies_that_have_one():
    result = matcha_command("plan", "complete:8", "-s", "diloco", "--period", "32", "--json")
    document = json.loads(result.stdout)
    assert len(document["schedule"]["cycle"]) == 32
    assert document["outer"]["nesterov"] is True
    result = matcha_command("plan", "complete:8", "-s", "greedy", "--period", "32")
    assert result.returncode == 2
    assert "--period is for local, diloco, noloco, gasloc, sparseloco" in result.stderr
