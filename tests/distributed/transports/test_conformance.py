"""All transports pass the same cases; each also trains as the definition says in four of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.distributed import cases
from tests.distributed.links.linked import run_linked
from tests.distributed.transports import conformance

from matcha import families
from matcha._io.keys import new_keys
from matcha.distributed import SlowLinks, Transport
from matcha.testing import run_threads

mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
EVERY_PAIR = families.complete(conformance.NUM_WORKERS)
Case = Callable[[Transport], Any]


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "run"
    new_keys(folder, cases.NUM_WORKERS)
    return folder


@pytest.mark.parametrize("case", conformance.CASES)
@pytest.mark.parametrize("kind", ["memory", "slow", "links", "tls"])
def test_every_case_in_threads(kind, case, keys) -> None:
    body = conformance.CASES[case]
    if kind == "memory":
        run_threads(conformance.NUM_WORKERS, body)
    elif kind == "slow":
        run_threads(conformance.NUM_WORKERS, lambda t: body(SlowLinks(t, mbps=10_000)))
    else:
        run_linked(EVERY_PAIR, body, keys=keys if kind == "tls" else None)


def test_every_case_over_gloo(workers) -> None:
    script = "transports/conformance.py"
    texts = workers.run(script, "gloo", num_workers=conformance.NUM_WORKERS, timeout=250)
    assert all(text.rstrip().endswith("passed") for text in texts)


@pytest.mark.parametrize(
    ("strategy", "mixing", "rule", "secure"),
    [*((*case, False) for case in cases.REPRESENTATIVE), (*cases.REPRESENTATIVE[0], True)],
)
def test_training_over_links_equals_the_definition(strategy, mixing, rule, secure, keys) -> None:
    plan = cases.real_plan(strategy, mixing)
    results = run_linked(
        plan.topology,
        lambda transport: cases.train(transport, plan, rule),
        keys=keys if secure else None,
    )
    cases.check(results, plan, rule)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_training_over_gloo_equals_the_definition(workers, tmp_path: Path) -> None:
    cases.write_plans(tmp_path)
    workers.run("cases.py", "gloo", str(tmp_path), num_workers=cases.NUM_WORKERS, timeout=250)
    cases.check_folder("gloo", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(mpirun is None, reason="needs mpirun (pip install mpich)")
def test_every_case_over_mpi() -> None:
    _run_under_mpi(conformance.NUM_WORKERS, conformance.__file__, "mpi")


@pytest.mark.long("eight processes under MPI; training over gloo and links equals the definition")
@pytest.mark.timeout(280)
@pytest.mark.skipif(mpirun is None, reason="needs mpirun (pip install mpich)")
def test_training_over_mpi_equals_the_definition(tmp_path: Path) -> None:
    cases.write_plans(tmp_path)
    _run_under_mpi(cases.NUM_WORKERS, cases.__file__, "mpi", str(tmp_path))
    cases.check_folder("mpi", tmp_path)


def _run_under_mpi(num_workers: int, *script: str) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra `mpi`")
    assert mpirun is not None
    command = [mpirun, "-n", str(num_workers), sys.executable, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
