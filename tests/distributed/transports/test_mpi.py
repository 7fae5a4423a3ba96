from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed import cases

mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
pytest.importorskip("mpi4py", reason="needs the extra `mpi`")


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(mpirun is None, reason="needs mpirun (pip install mpich)")
def test_every_case_over_mpi_equals_the_definition(tmp_path: Path) -> None:
    cases.write_plans(tmp_path)
    command = [mpirun, "-n", str(cases.NUM_WORKERS), sys.executable, cases.__file__, "mpi"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    cases.check_folder("mpi", tmp_path)
