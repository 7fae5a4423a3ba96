"""`import matcha` is quick and torch-free; the core runs where optional packages are absent."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "matplotlib", "sklearn", "plotly", "typer", "rich", "cvxpy", "pandas")
SLOW = ("torch", "matplotlib", "sklearn", "cryptography", "pandas")


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_pulls_in_nothing_heavy():
    loaded = run("import matcha, sys; print(*sorted({name.split('.')[0] for name in sys.modules}))")
    assert not set(HEAVY) & set(loaded.split())


def test_plans_run_where_only_numpy_is_installed(tmp_path):
    """A plan made elsewhere drives an engine on a machine without the planner's packages."""
    import matcha

    matcha.plan(matcha.families.ring(4), 0.5, "periodic").save(tmp_path / "plan.json")
    blocked = ("networkx", "rustworkx", "clarabel", "typer", "rich", "matplotlib", "torch")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"import matcha, matcha.records\n"
        f"print(matcha.Plan.load({str(tmp_path / 'plan.json')!r}).round(1).indices)"
    )
    assert run(code).strip() == "(0, 1)"


COMMANDS = ("advise", "bench", "demo", "keys", "plan", "probe", "report",
            "simulate", "sweep", "train", "tune", "watch")  # fmt: skip
WITHOUT_TORCH = (
    "advise ring:4 --compute-time 0.1 --model-mb 10 --link-mbps 100",
    "bench",
    "keys new keys --workers 2",
    "plan ring:4 -b 0.5 -o plan.json",
    "report {plan} -o page.html",
    "sweep ring:4 -s matcha -b 0.5",
    "tune ring:4 -s matcha,vanilla --wire float32 --compute-time 0.1 --link-time 0.1",
)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    import matcha

    path = tmp_path_factory.mktemp("plan") / "plan.json"
    matcha.plan(matcha.families.ring(4), 0.5, "periodic").save(path)
    return path


def test_no_command_needs_torch_to_say_what_it_does():
    code = (
        "import contextlib, io, sys\n"
        "from matcha.cli import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        app([command, '--help'], prog_name='matcha')\n"
        f"    print(command, *({{name.split('.')[0] for name in sys.modules}} & {{*{SLOW!r}}}))"
    )
    assert run(code).splitlines() == list(COMMANDS)


def bare(arguments, folder):
    """`matcha ARGUMENTS` where PyTorch is not installed."""
    code = "import sys; sys.modules['torch'] = None\nfrom matcha.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, cwd=folder
    )


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=lambda text: text.split()[0])
def test_commands_that_train_nothing_need_no_torch(arguments, tmp_path, plan_file):
    done = bare(arguments.format(plan=plan_file), tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", ["demo -o demo", "train digits", "simulate ring:4 -o runs"])
def test_commands_that_train_say_what_is_missing_before_anything_is_written(arguments, tmp_path):
    done = bare(arguments, tmp_path)
    assert done.returncode == 4
    assert done.stderr == 'matcha: this needs torch: pip install "matcha-sgd[torch]"\n'
    assert not list(tmp_path.iterdir())


def test_training_without_torch_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import matcha.distributed\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == 'this needs torch: pip install "matcha-sgd[torch]"\n', done.stderr
