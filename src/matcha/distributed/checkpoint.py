"""Checkpoints: every worker's state in one safetensors file, complete or not at all.

A checkpoint is a folder `iteration-000001200` with one file per worker and, written last, a list of
them with their checksums: without that list the folder does not count. All workers may share the
folder, or each host may have its own: every worker writes the list where it wrote its file. Nothing
is pickled, so loading a checkpoint cannot run code.

A checkpoint that was written while workers were away is partial: its list lacks their files. Only a
team that goes on without lost workers resumes from it, as there the others give those a state. One
of a team in which workers have joined, or which some have left for good, holds the files of those
in its plan; a new team starts from their average.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matcha._io import fingerprint, save_document
from matcha.distributed.snapshot import (
    Generators,
    average_snapshots,
    checksum,
    restore_snapshot,
    write_snapshot,
)
from matcha.distributed.transports.collectives import gather
from matcha.distributed.worker_state import WorkerState
from matcha.errors import DataError, ExchangeError, InputError, MatchaError, WriteError
from matcha.training.jobs import check_identity, check_schema

SCHEMA = "matcha.checkpoint/2"
_MANIFEST = "complete.json"
_NEW = ".new"
_PARTIAL = ".partial"
_FILE_NAME = re.compile(r"worker-\d{3,9}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint on disk."""

    path: Path
    iteration: int
    num_workers: int
    plan_digest: str
    layout_digest: str
    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each worker's file."""
    left: frozenset[int] | None
    """Who was in the team no more, where it had changed since it started; else None."""
    identity: dict[str, Any] | None
    """What was trained, if it was a task of this package."""
    kinds: dict[str, str]
    """Which optimizer, momentum and wire trained; 0.2 did not say."""
    digest: str
    """Of the list of files: hosts whose lists differ do not have the same checkpoint."""

    @property
    def workers(self) -> list[int]:
        """Whose files it has; a worker that was away wrote none."""
        return sorted(int(name.removeprefix("worker-").partition(".")[0]) for name in self.files)

    @property
    def is_whole(self) -> bool:
        """Whether it has the file of every worker."""
        return len(self.files) == self.num_workers - len(self.left or ())

    def check(self, *names: str) -> None:
        """Compare files with what was written.

        Raises:
            DataError: a file is missing, truncated or damaged.
        """
        for name in names:
            file, (size, expected) = self.path / name, self.files[name]
            if not file.exists():
                raise DataError(f"{file} is missing.")
            found = file.stat().st_size
            if found != size:
                raise DataError(f"{file} is truncated: {found} of {size} bytes are left.")
            if checksum(file) != expected:
                raise DataError(f"{file} is damaged: its checksum does not match.")


def checkpoints(directory: str | Path) -> list[CheckpointInfo]:
    """Return the complete checkpoints in a directory, oldest first.

    A folder without a readable list of its files does not count: it was never finished.

    Raises:
        InputError: all of them are of another version.
    """
    documents = _manifests(Path(directory))
    found = _complete(documents)
    if documents and not found:
        folder, document = documents.popitem()
        check_schema(folder, document.get("schema"), SCHEMA)
    return found


def save_checkpoint(
    state: WorkerState,
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: Generators | None = None,
    keep: int = 2,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of all workers: model, optimizer, position in the plan. Collective.

    Args:
        state: to write.
        directory: shared by all workers, or one on each host.
        extra: a worker's own, such as the state of a learning-rate schedule or the position in its
            data: numbers, text, tensors, and dicts, lists and tuples of them.
        generators: random generators whose state to keep, e.g. `torch.default_generator`.
        keep: how many checkpoints to leave; the one before stays until the new one is complete.
        identity: what is trained, from `matcha.training.jobs`; only the same can go on from it.

    Returns:
        The checkpoint's folder.

    Raises:
        ExchangeError: workers are at different iterations: nothing is written.
        WriteError: on every worker, when one could not write.
    """
    if not isinstance(keep, int) or keep < 1:
        raise InputError(f"keep is {keep!r}, but it is a number of checkpoints, 1 or more.")
    state.settle()
    _check_iteration(state)
    root, name = state.placement.folder(directory), _file_name(state.rank)
    folder = root / _folder_name(state.iteration)
    new = folder / f"{name}{_NEW}"  # one of the same iteration stays whole until all are written

    def write_mine() -> Any:
        write_snapshot(new, state, extra or {}, generators or {})
        return name, new.stat().st_size, checksum(new)

    # Collective calls: the list is written once all files are there, and older checkpoints are
    # removed once all workers have the list. A worker that fails says so there: none waits for it.
    try:
        told = together(state, "write its part of the checkpoint", write_mine, WriteError)
    except WriteError:
        with suppress(OSError):  # on a full disk what was written would stand in the way
            new.unlink(missing_ok=True)
            folder.rmdir()
        raise
    files = {name: (size, crc) for name, size, crc in _counterparts(state, told)}

    def write_list() -> tuple[str, list[tuple[int, bool]]]:
        older = [old for old in _complete(_manifests(root)) if old.path != folder]
        if new.exists():  # else it has its name already
            new.replace(folder / name)
        manifest = {
            "schema": SCHEMA,
            **state.state_dict(),
            "kinds": _kinds(state),
            "files": files,
            "identity": identity,
        }
        save_document(manifest, folder / _MANIFEST)
        return name, [(old.iteration, old.is_whole) for old in older]

    while True:
        told = together(state, "list a checkpoint's files", write_list, WriteError)
        listed = dict(_counterparts(state, told))
        if listed.keys() >= files.keys():
            break
        # A worker died after it had written: its file may not have its name, so it is not listed.
        files = {name: value for name, value in files.items() if name in listed}
    # Shared folder or not: all workers remove what one of them has too many of.
    known = sorted({iteration for older in listed.values() for iteration, _ in older})
    surplus = known[: max(0, len(known) + 1 - keep)]
    left = (state.describe_team() or {"gone": ()})["gone"]
    if len(files) < state.transport.num_workers - len(left):
        # A worker is away, so this one does not load for all: the last that does must stay.
        whole = [k for k in known if all((k, True) in map(tuple, old) for old in listed.values())]
        surplus = [k for k in surplus if k not in whole[-1:]]
    for iteration in surplus:
        _remove(root / _folder_name(iteration), state)
    _remove_leftovers(root, folder, state)
    return folder


def load_checkpoint(
    state: WorkerState,
    directory: str | Path,
    *,
    iteration: int | None = None,
    average: bool = False,
    generators: Generators | None = None,
    identity: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> dict[str, Any] | None:
    """Continue from a checkpoint, to the same bits as an uninterrupted run on CPU. Collective.

    Args:
        state: of a model and optimizer like those that were saved.
        directory: where `save_checkpoint` wrote.
        iteration: which checkpoint; by default the newest that all workers have.
        average: start a new team from an old one: every worker takes the average of the saved
            models, with fresh optimizer state, and the count of iterations goes on. The number of
            workers and the plan may then differ.
        generators: random generators to set as they were.
        identity: what is trained now, where that was kept.
        continues: whether this worker may take a neighbour's state where it has no file, because
            it was away when the checkpoint was written; without that a partial one is not loaded.

    Returns:
        This worker's `extra`, or the first one's when averaging; None if it has to take a
        neighbour's state.

    Raises:
        DataError: no checkpoint, or a damaged one; an intact earlier one is offered.
        InputError: the checkpoint is of another plan, model or number of workers.
    """
    search = _Search(state, state.placement.folder(directory), average, continues and not average)
    info = search.choose(iteration)
    if info is None:
        return None
    if identity is not None:
        check_identity(info.path, info.identity, identity)
    _check_fit(state, info, average)
    if search.fills and state.rank not in info.workers:
        return None
    state.forget()
    if average:
        extra = average_snapshots([info.path / name for name in sorted(info.files)], state)
    else:
        extra = restore_snapshot(info.path / _file_name(state.rank), state, generators or {})
    state.cursor.seek(info.iteration)
    return extra


# -- files -----------------------------------------------------------------------------------------


def _remove(folder: Path, state: WorkerState) -> None:
    """Remove this worker's file; the last worker on a host removes the folder with it."""
    others = {_file_name(rank) for rank in state.transport.members if rank != state.rank}
    # Others may have removed it already, and a file that stays is no reason to stop training.
    with suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)  # first: without it the rest does not count
        for file in folder.iterdir():  # also of those that are away, or were in a larger team
            name = file.name.removesuffix(_NEW)
            if file.suffix == _PARTIAL or (_FILE_NAME.fullmatch(name) and name not in others):
                file.unlink(missing_ok=True)
        folder.rmdir()


def _remove_leftovers(root: Path, newest: Path, state: WorkerState) -> None:
    """Remove what this worker left behind when it was killed while it wrote."""
    name = _file_name(state.rank)
    for folder in root.glob("iteration-*"):
        mine = [f".{name}*{_PARTIAL}"]
        if folder != newest and not (folder / _MANIFEST).exists():
            mine += [name, f"{name}{_NEW}", f".{_MANIFEST}*{_PARTIAL}"]
        with suppress(OSError):
            for file in [file for pattern in mine for file in folder.glob(pattern)]:
                file.unlink(missing_ok=True)
            if len(mine) > 1:
                folder.rmdir()  # unless others have theirs in it


def _manifests(root: Path) -> dict[Path, dict[str, Any]]:
    """Return the lists of files that can be read, by folder, oldest first."""
    found = {}
    for folder in sorted(root.glob("iteration-*")):
        try:
            document = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            found[folder] = document
    return found


def _complete(documents: Mapping[Path, dict[str, Any]]) -> list[CheckpointInfo]:
    """Return those of this version; a list that lacks a field is damaged."""
    found = []
    for folder, document in documents.items():
        if document.get("schema") == SCHEMA:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append(_info(folder, document))
    return found


def _info(folder: Path, document: dict[str, Any]) -> CheckpointInfo:
    """Return what a list says.

    Raises:
        ValueError: it says what no worker of ours writes; it may name any file.
    """
    content = {key: value for key, value in document.items() if key != "checksum"}
    checksum = document.get("checksum")  # 0.2 wrote none
    numbers = [document["iteration"], document["num_workers"]]
    numbers += [number for sizes in document["files"].values() for number in sizes]
    texts = [document["plan_digest"], document["layout_digest"]]
    if (
        not all(type(number) is int and number >= 0 for number in numbers)
        or not all(isinstance(text, str) for text in texts)
        or not all(_FILE_NAME.fullmatch(name) for name in document["files"])
        or folder.name != _folder_name(document["iteration"])
        or checksum not in (None, fingerprint(content))
    ):
        raise ValueError(f"{folder / _MANIFEST} is not a list of a checkpoint's files")
    return CheckpointInfo(
        path=folder,
        iteration=document["iteration"],
        num_workers=document["num_workers"],
        plan_digest=document["plan_digest"],
        layout_digest=document["layout_digest"],
        files={name: (size, crc) for name, (size, crc) in document["files"].items()},
        left=frozenset(document["team"]["gone"]) if document.get("team") else None,
        identity=document.get("identity"),
        kinds=dict(document.get("kinds", {})),
        digest=fingerprint(document),
    )


# -- what all workers do together ------------------------------------------------------------------


_Told = list[tuple[int, int, Any]]
"""Rank, part and result of each process."""


def together(
    state: WorkerState, what: str, work: Callable[[], Any], kind: type[MatchaError] = DataError
) -> _Told:
    """Do something on every process, and tell all what came of it, which JSON must hold.

    Where one of them failed, this raises an error of that kind on all: none waits for it.
    """
    cause: Exception | None = None
    try:
        outcome = {"result": work()}
    except Exception as error:  # any: the others must not wait for this worker
        cause, outcome = error, {"error": str(error)}
    placement = state.placement
    told = {"rank": placement.everyone.rank, "part": placement.part, **outcome}
    answers = gather(placement.everyone, json.dumps(told).encode(), state.timeout)
    outcomes = [json.loads(answer) for answer in answers]
    for found in outcomes:
        if "error" in found:
            name = placement.everyone.name(found["rank"])
            raise kind(f"{name} could not {what}: {found['error']}") from cause
    return [(found["rank"], found["part"], found["result"]) for found in outcomes]


def _counterparts(state: WorkerState, told: _Told) -> list[Any]:
    """The results of the processes that hold the same part of other workers."""
    return [result for _, part, result in told if part == state.placement.part]


def _check_iteration(state: WorkerState) -> None:
    """Refuse to save at different iterations: training could not continue from that."""
    told = together(state, "say its iteration", lambda: state.iteration)
    places = sorted((iteration, rank) for rank, _, iteration in told)
    (low, first), (high, last) = places[0], places[-1]
    if low != high:
        name = state.placement.everyone.name
        raise ExchangeError(
            f"nothing is saved: {name(first)} is at iteration {low} and {name(last)} is at "
            f"iteration {high}. Save where all have taken as many steps: by iterations and not by "
            "the clock, and after `gossip.join()` where data are uneven."
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the newest checkpoint that a team can load, and has intact."""

    state: WorkerState
    root: Path
    average: bool
    fills: bool
    """Whether a worker without a file in it need not have the list either."""

    def choose(self, iteration: int | None) -> CheckpointInfo | None:
        """Return it; None where this worker has no file in it. Collective."""
        state = self.state
        mine: dict[int, CheckpointInfo] = {}

        def list_mine() -> list[tuple[int, str, bool, list[int]]]:
            mine.update({info.iteration: info for info in checkpoints(self.root)})
            return [(k, info.digest, info.is_whole, info.workers) for k, info in mine.items()]

        told = together(state, "look for checkpoints", list_mine)
        found = [(rank, part, {k: digest for k, digest, _, _ in each}) for rank, part, each in told]
        parts = {part for _, part, _ in found}
        everyones = sorted({k for _, _, digests in found for k in digests})
        partial_ones = {k: who for _, _, each in told for k, _, whole, who in each if not whole}

        def is_common(k: int) -> bool:
            """Whether the processes of each part have the same list of it, those that need one."""
            away: set[int] = set()
            if self.fills and k in partial_ones:
                away = set(range(state.transport.num_workers)).difference(partial_ones[k])
            lists = {(part, digests.get(k)) for rank, part, digests in found if rank not in away}
            return len(lists) == len(parts) and all(digest for _, digest in lists)

        common = [k for k in everyones if (iteration is None or k <= iteration) and is_common(k)]
        usable = [k for k in common if self.average or self.fills or k not in partial_ones]
        if not usable or iteration not in (None, usable[-1]):
            which = "" if iteration is None else f" of iteration {iteration}"
            refused = [k for k in partial_ones if iteration in (None, k)]
            if refused:
                why = self._advise_on_partial(max(refused), partial_ones[max(refused)])
            else:
                why = self._missing([bool(each) for each in _counterparts(state, told)])
            raise DataError(f"{self.root} holds no complete checkpoint{which}{why}.")
        problem = ""
        for k in reversed(usable):
            told = together(state, "read its checkpoint", partial(self._verdict, mine.get(k)))
            verdict = next((found for _, _, found in told if found), "")
            if not verdict and not problem:
                return mine.get(k)
            if not verdict:
                chosen = self.root / _folder_name(usable[-1])
                raise DataError(
                    f"{problem} The one before, iteration {k}, is intact: ask for that iteration, "
                    f"or remove {chosen}."
                )
            problem = problem or verdict
        raise DataError(f"{problem} There is no intact one before it.")

    def _verdict(self, info: CheckpointInfo | None) -> str:
        """Say what is wrong with the files that this worker reads; empty if they are intact."""
        if info is None:  # it takes a neighbour's state
            return ""
        if info.left is not None and not self.average:
            return (
                f"{info.path} is of workers {', '.join(map(str, info.workers))} of a team that had "
                "changed since it started: average=True starts from the average of their models."
            )
        rank, names = self.state.rank, sorted(info.files)
        if self.average:
            names = names[rank :: self.state.transport.num_workers]  # each file is checked once
        else:
            names = [name for name in names if name == _file_name(rank)]
            if not names and not self.fills and rank < info.num_workers:
                return f"{info.path} has no file of worker {rank}."
        try:
            info.check(*names)
        except DataError as error:
            return str(error)
        return ""

    def _advise_on_partial(self, iteration: int, workers: list[int]) -> str:
        """Say why a partial checkpoint is not loaded, as the end of a sentence."""
        without = sorted(set(range(self.state.transport.num_workers)).difference(workers))
        who = ", ".join(f"worker {rank}" for rank in without) or "a worker"
        return (
            f": {who} was away when that of iteration {iteration} was written. A team that goes on "
            "without lost workers (on_loss='continue') can resume from it, and average=True starts "
            "from the average of the models that it has"
        )

    def _missing(self, has_any: list[bool]) -> str:
        """Name a worker that has no checkpoint, where others have some."""
        if all(has_any) or not any(has_any):
            return ""
        name = self.state.transport.name(has_any.index(False))
        return f" that every worker has; {name} has none"


def _folder_name(iteration: int) -> str:
    return f"iteration-{iteration:09d}"


def _file_name(rank: int) -> str:
    return f"worker-{rank:03d}.safetensors"


def _kinds(state: WorkerState) -> dict[str, str]:
    """Say on what it depends which state a worker has beside its model."""
    optimizers = [type(optimizer).__name__ for optimizer in state.optimizers]
    momentum, wire = state.momentum.spec.kind, state.plan.wire.name
    return {"optimizer": ", ".join(optimizers) or "none", "momentum": momentum, "wire": wire}


def _check_fit(state: WorkerState, info: CheckpointInfo, average: bool) -> None:
    own = state.state_dict()
    advice = "to start this team from the average of the saved models, ask for average=True."
    for kind, now in _kinds(state).items():
        saved = info.kinds.get(kind, now)
        if saved != now and (kind == "wire" or not average):
            instead = f"; {advice}" if kind != "wire" else f": resume with wire={saved!r}."
            raise InputError(
                f"the checkpoint in {info.path} was written with another {kind} ({saved}, and now "
                f"it is {now}){instead}"
            )
    if info.layout_digest != own["layout_digest"]:
        raise InputError(f"the checkpoint in {info.path} is of another model.")
    if info.num_workers != own["num_workers"] and not average:
        raise InputError(
            f"the checkpoint in {info.path} is of {info.num_workers} workers, but there are "
            f"{own['num_workers']}; {advice}"
        )
    if info.plan_digest != own["plan_digest"] and not average:
        raise InputError(f"the checkpoint in {info.path} is of another plan; {advice}")
