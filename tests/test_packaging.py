"""The distribution: an sdist and a wheel that install and run where there is nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.commands import matcha_process

import matcha
from matcha.wires import library

ROOT = Path(__file__).parent.parent
DATA = ("topology/paper_graphs.json", "py.typed", "report/assets/page.html")


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
    return new_environment(folder, built[1])


def new_environment(folder, wheel):
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--force-reinstall", wheel),
        env=_plain(),
    )
    return folder / "bin"


def _plain():
    """This environment without the source tree on the path."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def meets(python, folder):
    """Whether compiled kernels are used where a new environment's workers meet."""
    code = (
        "import torch; from matcha.wires import Modulo, kernels\n"
        "from matcha.wires.coding import Coder\n"
        "import matcha, logging; logging.basicConfig(level=logging.INFO)\n"
        "ends = [torch.ones(3, 256), torch.full((3, 256), 1.001)]\n"
        "coders = [Coder(Modulo(bits=8), end) for end in ends]\n"
        "common = coders[0].common(coders[1].told())\n"
        "sent = [torch.empty(coders[0].message_bytes(3), dtype=torch.uint8) for _ in ends]\n"
        "coded = [coders[e].encode(ends[e], 0, common, sent[e], lower=e == 0) for e in (0, 1)]\n"
        "coders[0].move(ends[0], coded[0], sent[1], weight=1.0)\n"
        "assert 0.0005 < float((ends[0] - 1).mean()) < 0.0015, 'it has not moved to the other'\n"
        "print(matcha.__file__, coders[0].kernels is kernels)"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, cwd=folder, env=_plain()
    )
    assert done.returncode == 0, done.stderr
    where, compiled = done.stdout.strip().rsplit(" ", 1)
    assert Path(where).is_relative_to(folder)
    assert done.stderr.count("torch alone") == (compiled == "False")
    return compiled == "True"


@pytest.mark.long("installs the wheel in a new environment; wires/test_kernels.py compiles too")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_an_install_with_a_compiler_has_kernels(installed):
    assert meets(installed / "python", installed.parent)


@pytest.mark.long("builds a wheel and makes an environment; wires/test_kernels.py does without too")
def test_an_sdist_installs_without_a_compiler(built, tmp_path):
    environment = {**_plain(), "CC": "no-such-compiler"}
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index")
    made = subprocess.run(
        [*build, "--no-build-isolation", "-v", "-w", tmp_path / "wheel", built[0]],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert made.returncode == 0, made.stderr
    assert "coded wires will be slower" in made.stdout + made.stderr
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert wheel.name == f"matcha_sgd-{matcha.__version__}-py3-none-any.whl"
    assert not meets(new_environment(tmp_path / "env", wheel) / "python", tmp_path)


@pytest.mark.long("builds the wheel")
def test_wheel_holds_the_package_with_its_data_and_kernels(built):
    _, wheel = built
    if shutil.which("cc"):
        assert f"{matcha.__version__}-py3-none-" in wheel.name  # of this platform, for any Python
        assert not wheel.name.endswith("-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            (compiled,) = [name for name in archive.namelist() if name.endswith(".so")]
        assert compiled == f"matcha/wires/{library.path().name}"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    source = ROOT / "src" / "matcha"
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            assert f"matcha/{path.relative_to(source).as_posix()}" in inside, path
    assert {f"matcha/{name}" for name in DATA} <= inside
    assert not any(name.startswith(("tests/", "docs/")) for name in inside)


@pytest.mark.long("builds the sdist")
def test_sdist_holds_what_a_packager_needs(built):
    sdist, _ = built
    prefix = f"matcha_sgd-{matcha.__version__}/"
    with tarfile.open(sdist) as archive:
        inside = {name.removeprefix(prefix) for name in archive.getnames()}
    for wanted in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "mkdocs.yml"):
        assert wanted in inside
    assert {"CITATION.cff", "SECURITY.md", "hatch_build.py"} <= inside
    assert not any(name.endswith(".so") for name in inside)
    assert {"src/matcha/__init__.py", "tests/conftest.py", "docs/index.md"} <= inside
    assert not any(name.startswith((".venv", "site/", "runs/")) for name in inside)


@pytest.mark.long("installs the wheel in a new environment")
def test_the_wheel_runs_in_a_new_environment(installed, tmp_path):
    where = run(installed / "python", "-c", "import matcha; print(matcha.__file__)", env=_plain())
    assert Path(where.strip()).is_relative_to(installed.parent)
    command = installed / "matcha"
    assert run(command, "--version", env=_plain()) == f"matcha {matcha.__version__}\n"
    text = run(command, "plan", "paper:er8", "--json", env=_plain(), cwd=tmp_path)
    document = json.loads(text)
    assert document["strategy"] == "greedy"
    assert len(document["topology"]["links"]) == len(matcha.families.paper("er8").links)


@pytest.fixture(scope="module")
def declared(built):
    """What the wheel says of itself."""
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_string(archive.read(name).decode())


@pytest.mark.long("builds the wheel")
def test_the_wheel_declares_its_dependencies(declared):
    needed = {
        requirement.split(">")[0]
        for requirement in declared.get_all("Requires-Dist")
        if "extra ==" not in requirement
    }
    assert needed == {
        "numpy", "scipy", "networkx", "rustworkx", "threadpoolctl", "typer", "rich",
    }  # fmt: skip
    extras = {"torch", "text", "mpi", "plot", "keys", "ray", "tensorboard"}
    extras |= {"test", "docs", "integration", "dev"}
    assert extras == set(declared.get_all("Provides-Extra"))
    assert declared["License-Expression"] == "Apache-2.0"
    assert declared["Requires-Python"] == ">=3.10"
    assert declared["Author"]
    labels = {url.split(",")[0] for url in declared.get_all("Project-URL")}
    assert labels == {"Source", "Documentation", "Changelog", "Issues", "Paper"}


@pytest.mark.long("builds the wheel")
def test_pypi_can_show_the_readme(declared):
    """PyPI has the text alone: every picture and link must be an address of its own."""
    text = declared.get_payload()
    assert "# matcha" in text
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    source = dict(url.split(", ") for url in declared.get_all("Project-URL"))["Source"]
    pages = [target for target in targets if target.startswith(source)]
    for page in pages:
        path = page.removeprefix(f"{source}/blob/main/").partition("#")[0]
        assert (ROOT / path).is_file(), page
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    raw = source.replace("github.com", "raw.githubusercontent.com") + "/main/"
    assert images
    assert all((ROOT / image.removeprefix(raw)).is_file() for image in images)


def test_version_is_the_same_everywhere():
    assert matcha_process("--version").stdout == f"matcha {matcha.__version__}\n"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["readme", "version"]' in project
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)", log, flags=re.MULTILINE)
    assert newest is not None
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert newest[1] == str(citation["version"]) == matcha.__version__
    assert newest[2] == str(citation["date-released"])


def requirements(name):
    """The distributions that a bare install of one brings, itself included."""
    found, waiting = {}, [name]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        wanted = map(Requirement, found[name].requires or [])
        waiting += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare(built, declared, tmp_path_factory):
    """An environment with the wheel and the packages that it requires, and no others.

    Their files are linked from this environment, so that no network is needed.
    """
    folder = tmp_path_factory.mktemp("bare") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(site)
    wanted = [Requirement(text) for text in declared.get_all("Requires-Dist")]
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            for distribution in requirements(requirement.name).values():
                link_files(distribution, site)
    return folder


def link_files(distribution, site):
    for file in distribution.files or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(file.locate())


@pytest.mark.long("makes an environment with a bare install")
def test_a_bare_install_is_small(bare):
    size = sum(path.stat().st_size for path in bare.rglob("*") if path.is_file())
    assert size < 250e6
    inside = {path.name for path in next((bare / "lib").glob("python*/site-packages")).iterdir()}
    assert {"matcha", "numpy", "scipy"} <= inside
    assert not {"torch", "matplotlib", "clarabel", "sklearn"} & inside


@pytest.mark.long("makes an environment with a bare install; test_import.py imports no torch")
def test_core_commands_work_in_a_bare_install(bare, tmp_path):
    def command(*arguments, code=0):
        done = subprocess.run(
            [str(bare / "bin" / "python"), "-m", "matcha.cli", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=_plain(),
        )
        assert done.returncode == code, done.stderr
        return done

    command("plan", "paper:er8", "-b", "0.5", "--effort", "none", "-o", "plan.json")
    command("plan", "plan.json")
    command("sweep", "ring:4", "-b", "0.5", "--effort", "none", "--json")
    times = ("--compute-time", "0.1", "--link-time", "0.1", "--effort", "none")
    command("tune", "ring:4", "-b", "0.5", "-s", "greedy,vanilla", *times)
    command("report", "plan.json")
    assert "[plot]" in command("plan", "plan.json", "--plot", "plan.svg", code=4).stderr
    assert "[torch]" in command("simulate", "ring:4", code=4).stderr
    assert "[torch]" in command("train", "digits", code=4).stderr
    assert not (tmp_path / "plan.svg").exists()


@pytest.mark.parametrize("rival", ["matcha", "matcha-tts"])
def test_another_package_of_the_same_import_name_is_noticed(rival, tmp_path):
    folder = tmp_path / f"{rival.replace('-', '_')}-0.0.7.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {rival}\nVersion: 0.0.7\n")
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)])
    done = matcha_process("--version", PYTHONPATH=path)
    assert done.returncode == 2
    assert f"the package {rival!r} is installed here" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell):
    # The shell is named outright: in a container none may be found by looking at the parents.
    done = matcha_process(
        "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert done.returncode == 0, done.stderr
    assert "_MATCHA_COMPLETE=complete_" in done.stdout


def test_completion_proposes_commands():
    done = matcha_process(_MATCHA_COMPLETE="complete_bash", COMP_WORDS="matcha pl", COMP_CWORD="1")
    assert done.stdout.split() == ["plan"]


@pytest.mark.parametrize("command", [["train", "digits"]])
def test_a_command_that_needs_torch_says_so(command):
    without = (
        "import sys; sys.modules['torch'] = None; from matcha.cli import main; "
        f"sys.argv = {['matcha', *command]!r}; main()"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr == 'matcha: this needs torch: pip install "matcha-sgd[torch]"\n'


def test_constraints_pin_every_dependency_that_make_installs():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    extras = project["optional-dependencies"].values()
    wanted = project["dependencies"] + [name for extra in extras for name in extra]
    for requirement in wanted:
        package = requirement.split(">")[0].split("[")[0].strip().lower().replace("_", "-")
        assert package in pinned | {"matcha-sgd"}, package
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
