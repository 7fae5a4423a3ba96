"""Records: what happened at a step. Simulation, training and reports meet here.

A run is a directory: `run.json` (what was run), `plan.json`, `records.jsonl` (over all workers),
`worker-NNN.jsonl` (one worker's view) and `spans.jsonl` (who was busy when).
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias, TypeVar

from matcha._io import decode_number, encode_number, write_atomically
from matcha._io.tables import data_frame
from matcha.errors import InputError, PackageError
from matcha.plans import PlanLike, load_plan

SCHEMA = "matcha.run/2"
DIVERGED = 1e8
"""A loss from here on is divergence, even where arithmetic still has a number for it."""
MODEL_FIGURES = (
    "train_loss",
    "worker_loss",
    "test_loss",
    "test_accuracy",
    "consensus_distance",
    "function_distance",
    "predicted_consensus",
)
"""The fields of a record that speak of the workers' models: a diverged run has none."""
COMMAND_VARIABLE = "MATCHA_COMMAND"
"""Where a launcher leaves its own command line for the workers' records."""
RunKind: TypeAlias = Literal["simulation", "training", "demo", "reproduction"]
Clock: TypeAlias = Literal["simulated", "wall"]
SpanKind: TypeAlias = Literal["compute", "exchange", "wait"]
RESUMABLE = frozenset(("epochs", "target_loss", "data"))
"""What may change when a run is resumed: where it ends, and where its data lie."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known at one moment of a run, of one worker or of all (worker None)."""

    iteration: int
    epoch: float
    worker: int | None = None
    train_loss: float | None = None
    """The average model's, on a fixed sample of all workers' training data: what decides."""
    train_loss_error: float | None = None
    """The standard error of that estimate."""
    worker_loss: float | None = None
    """Each worker's own model on its own batches, averaged over the epoch and the workers."""
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_accuracy_error: float | None = None
    """Its standard error, were other examples drawn."""
    consensus_distance: float | None = None
    """(1/m) Σ ‖x_i − x̄‖²."""
    function_distance: float | None = None
    """√ of the Jensen–Shannon divergence of the workers' own outputs on a fixed held-out batch."""
    predicted_consensus: float | None = None
    """A forecast of it from the plan and the spread of the steps; None where there is none."""
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
    members: int | None = None
    """How many workers were there, where they may come and go."""
    changes: list[list[int]] | None = None
    """Workers lost or back since the last record: iteration, worker, and 1 where it is back."""
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


Entry: TypeAlias = Record | Span


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
    wire: str = "float32"
    """What messages held."""
    momentum: str | None = None
    """How momentum and meetings went together; `auto` where the first gradients decided it, else
    resolved; None where it was not said."""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    command: str | None = field(default_factory=lambda: invoked())
    """The command line that does it again; None where the run came from a program of its own."""
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat())
    schema: str = SCHEMA

    def setting(self, name: str) -> Any:
        """One of the run's settings by name; None where it has none of that name."""
        places = (self.config, *(v for v in self.config.values() if isinstance(v, dict)))
        return next((place[name] for place in places if name in place), None)


_IS_FLOAT: dict[type, dict[str, bool]] = {
    cls: {f.name: "float" in str(f.type) for f in fields(cls)} for cls in (Record, Span, RunHeader)
}
"""Which fields each has, and whether they are floats; found once, not for every line of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run read back from its directory."""

    header: RunHeader
    plan: PlanLike | None
    records: tuple[Record, ...]
    worker_records: dict[int, tuple[Record, ...]] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    path: Path | None = None
    """Its directory; None where it was kept in memory."""

    def to_frame(self) -> Any:
        """The records over all workers as a pandas DataFrame, one row per record."""
        return to_frame(self.records)


def to_frame(records: Sequence[Record]) -> Any:
    """Records as a pandas DataFrame; columns that none of them fills are left out.

    Raises:
        PackageError: pandas is not installed.
    """
    return data_frame(map(asdict, records))


class RunWriter:
    """Writes a run's directory as it goes; every line is whole on disk once written.

    Several processes may write to one directory when each writes its own workers' records; the
    primary one writes the files of the run as a whole.

    Args:
        directory: The run's.
        header: What is run.
        plan: Which workers talk when.
        after: Resume the run that is there after this many iterations; records of later ones are
            dropped, as they will be run again. None starts a new run.
        primary: Whether this process is the primary one; a function where that may change.

    Raises:
        InputError: There is a run already, or, when going on, one of other choices.
    """

    def __init__(
        self,
        directory: str | Path,
        header: RunHeader,
        plan: PlanLike,
        *,
        after: int | None = None,
        primary: bool | Callable[[], bool] = True,
    ) -> None:
        self.path = Path(directory)
        self._files: dict[str, IO[str]] = {}
        self._after = after
        self._is_primary = primary if callable(primary) else lambda: primary
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = f"{str(self.path)!r} cannot be a folder: {error.strerror}."
            raise InputError(reason) from None
        self._began = self._is_primary()
        if not self._began:
            return
        if after is not None:
            check_same(self.path, header)
            self._file("records.jsonl")
            return
        if holds_run(self.path):
            raise InputError(f"{str(self.path)!r} already holds a run: choose another directory.")
        write_atomically(self.path / "run.json", json.dumps(asdict(header), indent=1) + "\n")
        plan.save(self.path / "plan.json")

    def record(self, entry: Entry) -> None:
        """Append a record, to its worker's file or to the run's, or a span of a worker's time."""
        if isinstance(entry, Span):
            file = self._file("spans.jsonl")
        elif entry.worker is not None:
            file = self._file(f"worker-{entry.worker:03d}.jsonl")
        elif self._is_primary():
            file = self._file("records.jsonl")
        else:
            return
        file.write(json.dumps(_compact(entry)) + "\n")
        file.flush()

    def _file(self, name: str) -> IO[str]:
        if name not in self._files:
            path = self.path / name
            if self._after is not None:
                _forget(path, self._after)
            # A worker that takes over from a lost one continues its file.
            inherited = name == "records.jsonl" and not self._began
            mode = "w" if self._after is None and not inherited else "a"
            self._files[name] = path.open(mode, encoding="utf-8")
        return self._files[name]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def has_diverged(loss: float) -> bool:
    """Whether a loss says that training has diverged: NaN, infinite, or beyond all reason.

    >>> has_diverged(float("nan")), has_diverged(1e30), has_diverged(2.3)
    (True, True, False)
    """
    return not loss < DIVERGED


def holds_run(directory: str | Path) -> bool:
    """Whether a run was started in a directory."""
    return (Path(directory) / "run.json").exists()


def last_written(directory: Path) -> float:
    """When one of a run's files was last written, in seconds since the epoch."""
    times = [0.0]
    for file in directory.glob("*.json*"):
        with suppress(FileNotFoundError):  # it is being replaced
            times.append(file.stat().st_mtime)
    return max(times)


def check_same(directory: str | Path, header: RunHeader) -> None:
    """Refuse to go on with a run under other choices: its records would not be of one run."""
    theirs = read_header(directory)
    changed = [] if theirs.task == header.task else ["task"]
    for part, mine in header.config.items():
        before = theirs.config.get(part)
        if isinstance(mine, dict) and isinstance(before, dict):
            changed += [name for name in differences(before, mine) if name in before]
    if changed:
        raise InputError(
            f"{str(directory)!r} was started with another {' and '.join(changed)}: --resume "
            "it as it was, or start a new run"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names whose values changed and may not when a run is resumed.

    >>> differences({"batch_size": 8, "epochs": 2}, {"batch_size": 16, "epochs": 4})
    ['batch_size']
    """
    return [
        name
        for name in {**now, **before}
        if name not in RESUMABLE and before.get(name) != now.get(name)
    ]


def current_settings(written: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as 0.2 wrote them, under today's names.

    >>> current_settings({"rule": "footnote", "wire": None, "epochs": 2})
    {'epochs': 2, 'overlap': True}
    """
    settings = dict(written)
    if "rule" in settings:
        settings["overlap"] = settings.pop("rule") == "footnote"
    if settings.get("wire") is None:
        settings.pop("wire", None)
    return settings


def read_header(directory: str | Path) -> RunHeader:
    """What was run in a directory.

    Raises:
        InputError: The directory does not hold a run of this version.
    """
    path = Path(directory)
    try:
        document = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{str(path)!r} does not hold a run (no readable run.json).") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise InputError(
            f"{str(path)!r} holds a run of another version than {SCHEMA!r}: run it again."
        )
    try:
        header = _build(RunHeader, document)
        if isinstance(settings := header.config.get("settings"), dict):
            header.config["settings"] = current_settings(settings)
        if isinstance(network := header.config.get("network"), dict):
            network.pop("wire_dtype", None)  # of 0.2; the plan's wire says it
        return header
    except (TypeError, ValueError):
        raise InputError(f"the run.json in {str(path)!r} is damaged: it lacks a field.") from None


def read_run(directory: str | Path) -> Run:
    """Read a run's directory; a last line cut short by a crash is left out.

    Raises:
        InputError: The directory does not hold a run of this version, or a line is damaged.
    """
    path = Path(directory)
    plan_file = path / "plan.json"
    return Run(
        header=read_header(path),
        plan=load_plan(plan_file) if plan_file.exists() else None,
        records=_read_lines(path / "records.jsonl", Record),
        worker_records={
            int(file.stem.removeprefix("worker-")): _read_lines(file, Record)
            for file in sorted(path.glob("worker-*.jsonl"))
            if file.stem.removeprefix("worker-").isdecimal()
        },
        spans=_read_lines(path / "spans.jsonl", Span),
        path=path,
    )


def follow(directory: str | Path) -> Iterator[list[Record]]:
    """Each time it is asked: the run's records since the last time, while the run goes on."""
    count = 0
    while True:
        found = _read_lines(Path(directory) / "records.jsonl", Record, skip=count)
        count += len(found)
        yield list(found)


def find_runs(path: str | Path) -> list[Path]:
    """The run directories at or below `path`, sorted."""
    return sorted({file.parent for file in Path(path).glob("**/run.json")})


def versions() -> dict[str, str]:
    """The versions of what the results depend on."""
    found = {"python": platform.python_version()}
    for name in ("matcha-sgd", "numpy", "scipy", "torch", "rustworkx"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def invoked() -> str | None:
    """The `matcha` command line that this process serves, if one does."""
    program = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    if COMMAND_VARIABLE in os.environ:
        return os.environ[COMMAND_VARIABLE]
    if program.name == "matcha" or program.parts[-3:] == ("matcha", "cli", "__main__.py"):
        return shlex.join(["matcha", *sys.argv[1:]])
    return None


def _compact(entry: Entry) -> dict[str, Any]:
    """Without empty fields; NaN and infinities as words, since JSON has none."""
    values = ((name, getattr(entry, name)) for name in _IS_FLOAT[type(entry)])
    return {name: encode_number(value) for name, value in values if value is not None}


def _build(cls: type[_T], document: dict[str, Any]) -> _T:
    known = _IS_FLOAT[cls]
    values = {name: value for name, value in document.items() if name in known}
    return cls(**{name: decode_number(v) if known[name] else v for name, v in values.items()})


def _whole_lines(path: Path) -> list[str]:
    """A file's lines, without a last one that a crash cut short; none where there is no file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is damaged: it is not text ({error.reason} at byte {error.start})."
        ) from None
    return lines[:-1] if lines and not lines[-1].endswith("\n") else lines


def _read_lines(path: Path, cls: type[_T], skip: int = 0) -> tuple[_T, ...]:
    found = []
    for place, line in enumerate(_whole_lines(path)[skip:], start=skip + 1):
        try:
            found.append(_build(cls, json.loads(line)))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise InputError(
                f"line {place} of {str(path)!r} is damaged: delete that line to read the others."
            ) from None
    return tuple(found)


def _forget(path: Path, after: int) -> None:
    """Drop what was recorded after an iteration: what follows will be run again."""
    # A record comes after its iterations; a span is of an iteration counted from 0.
    is_spans = path.name == "spans.jsonl"
    entries: Sequence[Entry] = _read_lines(path, Span if is_spans else Record)
    if path.exists():
        lines = zip(_whole_lines(path), entries, strict=True)
        kept = [line for line, entry in lines if entry.iteration + is_spans <= after]
        write_atomically(path, "".join(kept))


def arrival(losses: Sequence[float], target: float) -> tuple[int, float] | None:
    """Where losses fall to a target and are still there at the next evaluation.

    One evaluation below the target may be luck, so two in a row are asked for.

    Returns:
        The first of the two, and how much of the way to it from the evaluation before had gone when
        a straight line meets the target; None where the target is never held.

    >>> arrival([3.0, 0.9, 2.0, 1.0, 0.5], 1.5)
    (3, 0.5)
    """
    for place, (first, second) in enumerate(pairwise(losses)):
        if first <= target and second <= target:
            before = losses[place - 1] if place else target
            return place, 1.0 if before <= target else (before - target) / (before - first)
    return None


def lowest_held(losses: Sequence[float]) -> float | None:
    """The lowest loss that two evaluations in a row were at or below; None without two.

    It is the lowest target with an `arrival`.

    >>> lowest_held([3.0, 1.0, 2.0, 1.5])
    2.0
    """
    return min(map(max, pairwise(losses)), default=None)


# -- loggers that people have; none is a dependency. Each function gives a callback for records.


def metrics(record: Record) -> dict[str, float]:
    """The numbers of a record by name; what is unknown or no number is left out.

    >>> metrics(Record(iteration=5, epoch=1.0, train_loss=0.5, test_loss=float("nan")))
    {'epoch': 1.0, 'train_loss': 0.5, 'comm_units': 0.0, 'time': 0.0}
    """
    return {
        name: float(value)
        for name, value in asdict(record).items()
        if name not in ("iteration", "worker")
        and isinstance(value, (int, float))
        and math.isfinite(value)
    }


def wandb_logger(run: Any) -> Callable[[Record], None]:
    """A callback that logs records to a run of Weights & Biases, what `wandb.init(...)` gave."""
    return lambda record: run.log(metrics(record), step=record.iteration)


def mlflow_logger(mlflow: Any) -> Callable[[Record], None]:
    """A callback that logs records to MLflow's active run, by the module's `log_metrics`."""
    return lambda record: mlflow.log_metrics(metrics(record), step=record.iteration)


@contextmanager
def tensorboard_logger(directory: str | Path) -> Iterator[Callable[[Record], None]]:
    """A callback that writes records as TensorBoard's event files into a directory.

    Raises:
        PackageError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise PackageError("this needs TensorBoard: pip install tensorboard") from None
    writer: Any = SummaryWriter(str(directory))
    with writer as board:

        def show(record: Record) -> None:
            for name, value in metrics(record).items():
                board.add_scalar(name, value, record.iteration)

        yield show
