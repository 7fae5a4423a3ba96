"""Settings shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Subprocesses of tests find the package under test, installed or not.
SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (SOURCE, os.environ.get("PYTHONPATH", "")) if part
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "matcha", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("matcha")
