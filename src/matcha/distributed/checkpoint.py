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
    root = state.placement.folder(directory)
    folder = root / _folder_name(state.iteration)
    name = _file_name(state.rank)
    new = folder / f"{name}{_NEW}"  # one of the same iteration stays whole until all are written

    def write_mine() -> Any:
        write_snapshot(new, state, extra or {}, generators or {})
        return name, new.stat().st_size, checksum(new)

    def take_back() -> None:
        with suppress(OSError):  # on a full disk what was written would stand in the way
            new.unlink(missing_ok=True)
            folder.rmdir()

    # Collective calls: the list is written once all files are there, and older checkpoints are
    # removed once all workers have the list. A worker that fails says so there: none waits for it.
    try:
        written = _together(state, "write its part of the checkpoint", write_mine, WriteError)
    except WriteError:
        take_back()
        raise
    files = {name: (size, crc) for name, size, crc in written}

    unnamed = [new]

    def write_list() -> tuple[str, list[tuple[int, bool]]]:
        older = [old for old in _complete(_manifests(root)) if old.path != folder]
        while unnamed:
            unnamed.pop().replace(folder / name)
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
        listed = dict(_together(state, "list a checkpoint's files", write_list, WriteError))
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
    fills = continues and not average
    info = _choose(state, state.placement.folder(directory), iteration, average, fills)
    if info is None:
        return None
    if identity is not None:
        check_identity(info.path, info.identity, identity)
    _check_fit(state, info, average)
    if fills and state.rank not in info.workers:
        return None
    state.forget()
    if average:
        extra = average_snapshots([info.path / name for name in sorted(info.files)], state)
    else:
        file = info.path / _file_name(state.rank)
        extra = restore_snapshot(file, state, generators or {})
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
    with suppress(OSError):
        for folder in root.glob("iteration-*"):
            for file in folder.glob(f".{name}*{_PARTIAL}"):
                file.unlink(missing_ok=True)
            if folder != newest and not (folder / _MANIFEST).exists():
                for file in (folder / name, folder / f"{name}{_NEW}"):
                    file.unlink(missing_ok=True)
                for file in folder.glob(f".{_MANIFEST}*{_PARTIAL}"):
                    file.unlink(missing_ok=True)
                with suppress(OSError):  # others have theirs in it
                    folder.rmdir()


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


def _together(
    state: WorkerState,
    what: str,
    work: Callable[[], Any],
    kind: type[MatchaError] = DataError,
    *,
    every_part: bool = False,
) -> list[Any]:
    """Do something on every process and tell all how it went.

    Returns:
        The results, which JSON must hold, of the counterparts: the processes that hold the same
        part of other workers; with `every_part` rank, part and result of all processes.

    Raises:
        kind: on every worker, when one of them failed.
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
    if every_part:
        return [(found["rank"], found["part"], found["result"]) for found in outcomes]
    return [found["result"] for found in outcomes if found["part"] == placement.part]


def _check_iteration(state: WorkerState) -> None:
    """Refuse to save at different iterations: training could not continue from that."""
    found = _together(state, "say its iteration", lambda: state.iteration, every_part=True)
    by_rank = {rank: iteration for rank, _, iteration in found}
    if len(set(by_rank.values())) > 1:
        ends = min(by_rank, key=by_rank.__getitem__), max(by_rank, key=by_rank.__getitem__)
        name = state.placement.everyone.name
        low, high = (f"{name(rank)} is at iteration {by_rank[rank]}" for rank in ends)
        raise ExchangeError(
            f"nothing is saved: {low} and {high}. Save where all have taken as many steps: "
            "by iterations and not by the clock, and after `gossip.join()` where data are uneven."
        )


def _choose(
    state: WorkerState, root: Path, iteration: int | None, average: bool, fills: bool
) -> CheckpointInfo | None:
    """Return the newest checkpoint that this team can load, and has intact.

    With `fills` a worker that has no file in it need not have the list either: then None.
    """
    mine: dict[int, CheckpointInfo] = {}

    def list_mine() -> list[tuple[int, str, bool, list[int]]]:
        found = checkpoints(root)
        mine.update({info.iteration: info for info in found})
        return [(info.iteration, info.digest, info.is_whole, info.workers) for info in found]

    answers = _together(state, "look for checkpoints", list_mine, every_part=True)
    found = [(rank, part, {entry[0]: entry for entry in listed}) for rank, part, listed in answers]
    counterparts = [listed for _, part, listed in found if part == state.placement.part]
    parts = {part for _, part, _ in found}
    partial_ones = {k: e[3] for _, _, listed in found for k, e in listed.items() if not e[2]}

    def is_common(k: int) -> bool:
        """Whether the processes of each part have the same list of it, those that need one."""
        skipped = set(range(state.transport.num_workers)) if fills else set()
        skipped -= set(partial_ones.get(k, skipped))
        needed = [(part, listed.get(k)) for rank, part, listed in found if rank not in skipped]
        digests = {(part, entry[1] if entry else None) for part, entry in needed}
        return len(digests) == len(parts) and all(digest for _, digest in digests)

    everyones = sorted({k for _, _, listed in found for k in listed})
    common = [k for k in everyones if iteration in (None, k) or (iteration and k < iteration)]
    common = [k for k in common if is_common(k)]
    usable = [k for k in common if average or fills or k not in partial_ones]
    if not usable or iteration not in (None, usable[-1]):
        which = "" if iteration is None else f" of iteration {iteration}"
        why = _missing(state, counterparts)
        if refused := [k for k in partial_ones if iteration in (None, k)]:
            why = _advise_on_partial(state, max(refused), partial_ones[max(refused)])
        raise DataError(f"{root} holds no complete checkpoint{which}{why}.")
    *earlier, chosen = usable
    look = partial(_verdict, state, mine.get(chosen), average, fills)
    for _, _, verdict in _together(state, "read its checkpoint", look, every_part=True):
        if verdict:
            before = [(k, mine.get(k)) for k in earlier]
            path = root / _folder_name(chosen)
            raise DataError(f"{verdict} {_offer(state, path, before, average, fills)}")
    return mine.get(chosen)


def _advise_on_partial(state: WorkerState, iteration: int, workers: list[int]) -> str:
    """Say why a partial checkpoint is not loaded, as the end of a sentence."""
    without = [rank for rank in range(state.transport.num_workers) if rank not in workers]
    who = ", ".join(f"worker {rank}" for rank in without) or "a worker"
    return (
        f": {who} was away when that of iteration {iteration} was written. A team that goes on "
        "without lost workers (on_loss='continue') can resume from it, and average=True starts "
        "from the average of the models that it has"
    )


def _missing(state: WorkerState, counterparts: list[dict[int, str]]) -> str:
    """Name a worker that has no checkpoint, where others have some."""
    without = [rank for rank, theirs in enumerate(counterparts) if not theirs]
    if not without or len(without) == len(counterparts):
        return ""
    return f" that every worker has; {state.transport.name(without[0])} has none"


def _verdict(state: WorkerState, info: CheckpointInfo | None, average: bool, fills: bool) -> str:
    """Say what is wrong with the files that this worker reads; empty if they are intact."""
    if info is None:  # it takes a neighbour's state
        return ""
    names = sorted(info.files)
    if info.left is not None and not average:
        return (
            f"{info.path} is of workers {', '.join(map(str, info.workers))} of a team that had "
            "changed since it started: average=True starts from the average of their models."
        )
    if average:
        names = names[state.rank :: state.transport.num_workers]  # each file is checked once
    else:
        own = _file_name(state.rank)
        names = [name for name in names if name == own]
        if not names and not fills and state.rank < info.num_workers:
            return f"{info.path} has no file of worker {state.rank}."
    try:
        info.check(*names)
    except DataError as error:
        return str(error)
    return ""


def _offer(
    state: WorkerState,
    chosen: Path,
    earlier: list[tuple[int, CheckpointInfo | None]],
    average: bool,
    fills: bool,
) -> str:
    for iteration, info in reversed(earlier):
        look = partial(_verdict, state, info, average, fills)
        found = _together(state, "read its checkpoint", look, every_part=True)
        if not any(verdict for _, _, verdict in found):
            return (
                f"The one before, iteration {iteration}, is intact: ask for that iteration, "
                f"or remove {chosen}."
            )
    return "There is no intact one before it."


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
