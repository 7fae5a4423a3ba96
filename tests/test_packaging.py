"""The distribution: an sdist and a wheel that install and run where there is nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.commands import matcha_command

import matcha

ROOT = Path(__file__).parent.parent
DATA = ("data/paper_graphs.json", "py.typed", "report/assets/page.html")


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made from it, so that both are known to be complete."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel's console script in a new environment that borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("a new") / "env"  # the space is deliberate
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--force-reinstall", built[1]),
        env=_plain(),
    )
    return folder / "bin"


def _plain():
    """This environment without the source tree on the path."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


@pytest.mark.slow
def test_wheel_is_pure_and_holds_the_package_with_its_data(built):
    _, wheel = built
    assert wheel.name == f"matcha_sgd-{matcha.__version__}-py3-none-any.whl"  # no compiler needed
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    source = ROOT / "src" / "matcha"
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert f"matcha/{path.relative_to(source).as_posix()}" in inside, path
    assert {f"matcha/{name}" for name in DATA} <= inside
    assert not any(name.startswith(("tests/", "docs/")) for name in inside)


@pytest.mark.slow
def test_sdist_holds_what_a_packager_needs(built):
    sdist, _ = built
    prefix = f"matcha_sgd-{matcha.__version__}/"
    with tarfile.open(sdist) as archive:
        inside = {name.removeprefix(prefix) for name in archive.getnames()}
    for wanted in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml"):
        assert wanted in inside
    assert {"src/matcha/__init__.py", "tests/conftest.py", "docs/index.md"} <= inside
    assert not any(name.startswith((".venv", "site/", "runs/")) for name in inside)


@pytest.mark.slow
def test_the_wheel_runs_in_a_new_environment(installed, tmp_path):
    where = run(installed / "python", "-c", "import matcha; print(matcha.__file__)", env=_plain())
    assert Path(where.strip()).is_relative_to(installed.parent)
    command = installed / "matcha"
    assert run(command, "--version", env=_plain()) == f"matcha {matcha.__version__}\n"
    text = run(command, "plan", "paper:er8", "--json", env=_plain(), cwd=tmp_path)
    document = json.loads(text)
    assert document["strategy"] == "matcha"
    assert len(document["topology"]["links"]) == len(matcha.families.paper("er8").links)


@pytest.mark.slow
def test_the_wheel_declares_its_dependencies(built):
    with zipfile.ZipFile(built[1]) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    for extra in ("torch", "mpi", "report", "dev"):
        assert f"Provides-Extra: {extra}" in text
    for needed in ("numpy", "scipy", "networkx", "rustworkx", "clarabel", "typer", "rich"):
        assert f"Requires-Dist: {needed}" in text
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.10" in text


def test_version_is_the_same_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{matcha.__version__}"' in project
    assert matcha_command("--version").stdout == f"matcha {matcha.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell):
    # The shell is named outright: in a container none may be found by looking at the parents.
    done = matcha_command(
        "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert done.returncode == 0, done.stderr
    assert "_MATCHA_COMPLETE=complete_" in done.stdout


def test_completion_proposes_commands():
    done = matcha_command(_MATCHA_COMPLETE="complete_bash", COMP_WORDS="matcha pl", COMP_CWORD="1")
    assert done.stdout.split() == ["plan"]


@pytest.mark.parametrize("command", [["train", "digits"]])
def test_a_command_that_needs_torch_says_so(command):
    without = (
        "import sys; sys.modules['torch'] = None; from matcha.cli import main; "
        f"sys.argv = {['matcha', *command]!r}; main()"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'matcha: this needs torch: pip install "matcha-sgd[torch]"\n'


def test_constraints_pin_every_dependency_that_make_installs():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["torch"] + extras["report"] + extras["dev"]
    for requirement in wanted:
        package = requirement.split(">")[0].split("[")[0].strip().lower().replace("_", "-")
        assert package in pinned | {"matcha-sgd"}, package
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
