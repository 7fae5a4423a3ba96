"""Settings shared by all tests."""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Subprocesses of tests find the package under test, installed or not.
SOURCE = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (SOURCE, os.environ.get("PYTHONPATH", "")) if part
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels for GPUs run on the CPU, unless TRITON_INTERPRET=0; read when Triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "matcha", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("matcha")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every process begins with its share of the slow ones: the last to begin keeps others waiting.

    `--dist worksteal` gives each process a stretch of the list; who is through takes from the ends.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    quick = iter([item for item in items if not item.get_closest_marker("slow")])
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    stretch = math.ceil(len(items) / processes)
    shares = [slow[k::processes] for k in range(processes)]
    items[:] = [item for share in shares for item in (*share, *islice(quick, stretch - len(share)))]


@pytest.fixture
def no_room() -> AbstractContextManager[None]:
    """While it is entered, this process cannot write a file beyond a kilobyte: a full disk."""

    @contextmanager
    def limited() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        # Python keeps a compiled module that was cut short, and every later import of it fails.
        compiles, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            sys.dont_write_bytecode = compiles

    return limited()
