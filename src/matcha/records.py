"""Records: what happened at a step. Simulation, training and reports meet here.

A run is a directory: `run.json` (what was run), `plan.json`, `records.jsonl` (over all workers),
`worker-NNN.jsonl` (one worker's view) and `spans.jsonl` (who was busy when).
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypeVar

from matcha.documents import write_atomically
from matcha.errors import InputError

SCHEMA = "matcha.run/1"
COMMAND_VARIABLE = "MATCHA_COMMAND"
"""Where a launcher leaves its own command line for the workers' records."""
RunKind: TypeAlias = Literal["simulation", "training", "demo", "reproduction"]
Clock: TypeAlias = Literal["simulated", "wall"]
SpanKind: TypeAlias = Literal["compute", "exchange", "wait"]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known at one moment of a run, of one worker or of all (worker None)."""

    iteration: int
    epoch: float
    worker: int | None = None
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    consensus_distance: float | None = None
    """(1/m) Σ ‖x_i − x̄‖²."""
    predicted_consensus: float | None = None
    """The same as the plan predicts it, where the task knows its gradient noise."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """‖∇F(x̄)‖² averaged over all iterations so far, where the task can say."""
    gradient_bound: float | None = None
    """Theorem 2's bound on it, where the theorem speaks: plain SGD at an admissible rate."""
    comm_units: float = 0.0
    """Communication time spent so far, in the plan's own unit."""
    megabytes_sent: float | None = None
    """By a worker so far, in the mean over workers."""
    time: float = 0.0
    """Seconds on the run's clock so far."""
    compute_seconds: float | None = None
    """Since this worker's previous record; likewise below."""
    comm_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of one worker's time, for timelines."""

    worker: int
    iteration: int
    kind: SpanKind
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What was run, in enough detail to run it again."""

    name: str
    kind: RunKind
    task: str
    strategy: str
    budget: float
    seed: int
    num_workers: int
    clock: Clock
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    command: str | None = field(default_factory=lambda: invoked())
    """The command line that does it again; None where the run came from a program of its own."""
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    schema: str = SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read back from its directory."""

    header: RunHeader
    plan: Any
    """The run's Plan (or staged plan)."""
    records: tuple[Record, ...]
    worker_records: dict[int, tuple[Record, ...]]
    spans: tuple[Span, ...]
    path: Path


class RunWriter:
    """Writes a run's directory as it goes; every line is whole on disk once written.

    Several processes may write to one directory when each writes its own workers' records:
    `primary=False` leaves run.json and plan.json to the process that has them.
    """

    def __init__(
        self,
        directory: str | Path,
        header: RunHeader,
        plan: Any,
        *,
        resume: bool = False,
        primary: bool = True,
    ) -> None:
        self.path = Path(directory)
        self._files: dict[str, IO[str]] = {}
        self._mode = "a" if resume else "w"
        self.path.mkdir(parents=True, exist_ok=True)
        if not primary:
            return
        if (self.path / "run.json").exists() and not resume:
            raise InputError(f"{str(self.path)!r} already holds a run: choose another directory.")
        if not resume:
            write_atomically(self.path / "run.json", json.dumps(asdict(header), indent=1) + "\n")
            plan.save(self.path / "plan.json")

    def record(self, record: Record) -> None:
        """Append a record: to its worker's file, or to the run's."""
        name = "records" if record.worker is None else f"worker-{record.worker:03d}"
        self._append(f"{name}.jsonl", record)

    def span(self, span: Span) -> None:
        """Append a span of a worker's time."""
        self._append("spans.jsonl", span)

    def _append(self, name: str, entry: Record | Span) -> None:
        if name not in self._files:
            self._files[name] = (self.path / name).open(self._mode, encoding="utf-8")
        file = self._files[name]
        file.write(json.dumps(_compact(asdict(entry))) + "\n")
        file.flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_run(directory: str | Path) -> Run:
    """Read a run's directory; a last line cut short by a crash is left out.

    Raises:
        InputError: The directory does not hold a run of this version.
    """
    from matcha.plans import load_plan

    path = Path(directory)
    try:
        document = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{str(path)!r} does not hold a run (no readable run.json).") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError(f"{str(path)!r} holds a run of another version than {SCHEMA!r}.")
    plan_file = path / "plan.json"
    return Run(
        header=_build(RunHeader, document),
        plan=load_plan(plan_file) if plan_file.exists() else None,
        records=_read_lines(path / "records.jsonl", Record),
        worker_records={
            int(file.stem.removeprefix("worker-")): _read_lines(file, Record)
            for file in sorted(path.glob("worker-*.jsonl"))
        },
        spans=_read_lines(path / "spans.jsonl", Span),
        path=path,
    )


def find_runs(path: str | Path) -> list[Path]:
    """The run directories at or below `path`, sorted."""
    root = Path(path)
    return sorted({file.parent for file in root.glob("**/run.json")})


def versions() -> dict[str, str]:
    """The versions of what the results depend on."""
    found = {"python": _python_version()}
    for name in ("matcha-sgd", "numpy", "scipy", "torch", "rustworkx"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def invoked() -> str | None:
    """The `matcha` command line that this process serves, if one does."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    if COMMAND_VARIABLE in os.environ:
        return os.environ[COMMAND_VARIABLE]
    if program.name == "matcha" or program.parts[-3:] == ("matcha", "cli", "__main__.py"):
        return shlex.join(["matcha", *sys.argv[1:]])
    return None


def _python_version() -> str:
    import platform

    return platform.python_version()


def _compact(entry: dict[str, Any]) -> dict[str, Any]:
    """Without empty fields; NaN and infinities as words, since JSON has none."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in entry.items()
        if value is not None
    }


def _build(cls: type[_T], document: dict[str, Any]) -> _T:
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values = {key: value for key, value in document.items() if key in known}
    for key, value in values.items():
        if value in ("nan", "inf", "-inf") and "float" in str(known[key].type):
            values[key] = float(value)
    return cls(**values)


def _read_lines(path: Path, cls: type[_T]) -> tuple[_T, ...]:
    if not path.exists():
        return ()
    return tuple(_parsed(path.read_text(encoding="utf-8").splitlines(), cls))


def _parsed(lines: Iterable[str], cls: type[_T]) -> Iterable[_T]:
    for line in lines:
        try:
            yield _build(cls, json.loads(line))
        except ValueError:
            return
