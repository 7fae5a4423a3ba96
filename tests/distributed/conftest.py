"""Real processes for tests, none of which outlives its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.forks import ScriptWorkers

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


class Workers:
    """Starts a script of this folder as several workers and keeps what each of them printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[ScriptWorkers] = []
        self.outputs: list[Path] = []

    def start(self, script: str, *args: str, num_workers: int) -> ScriptWorkers:
        logs = self.folder / f"logs-{len(self.started)}"
        self.outputs = [logs / f"worker-{rank}.log" for rank in range(num_workers)]
        workers = ScriptWorkers(
            [str(HERE / script), *args],
            num_workers,
            environment={"PYTHONPATH": f"{SOURCE}:{HERE}"},
            logs=logs,
        )
        self.started.append(workers)
        return workers

    def run(self, script: str, *args: str, num_workers: int, timeout: float = 200) -> list[str]:
        codes = self.start(script, *args, num_workers=num_workers).wait(timeout, grace=20)
        assert codes == [0] * num_workers, "\n".join(self.texts())
        return self.texts()

    def texts(self) -> list[str]:
        return [path.read_text() for path in self.outputs]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path)
    try:
        yield started
    finally:
        for run in started.started:
            run.stop()
            assert all(process.poll() is not None for process in run.processes)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Workers as threads share two cores; more threads under each only get in the way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
