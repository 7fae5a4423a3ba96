"""A team of real processes over TLS that grows and shrinks, and keeps its average."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "growth.py"


def test_one_joins_and_one_leaves_and_the_average_stays(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--case", "small", "--output", str(tmp_path / "growth")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "growth.json").read_text())["small"]
    assert [(row["before"], row["after"]) for row in found["changes"]] == [(3, 4), (4, 3)]
    assert all(row["shift"] < 1e-6 for row in found["changes"])
