"""Checkpoints: every worker's state in one safetensors file, complete or not at all.

A checkpoint is a folder `iteration-000001200` with one file a worker and, written last, a list of
them with their checksums: without that list the folder does not count. The folder may be shared by
all workers, or be one on each host: every worker writes the list where it wrote its file. Nothing
is pickled, so loading one from somebody else cannot run their code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matcha._io import fingerprint, write_atomically
from matcha.distributed.collectives import gather
from matcha.distributed.saving.snapshots import (
    Generators,
    Worker,
    average_snapshots,
    checksum,
    restore_snapshot,
    write_snapshot,
)
from matcha.errors import DataError, InputError, MatchaError, WriteError
from matcha.training.progress import check_identity, check_schema

__all__ = ["CheckpointInfo", "checkpoints", "load_checkpoint", "save_checkpoint"]

SCHEMA = "matcha.checkpoint/2"
_MANIFEST = "complete.json"


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
    identity: dict[str, Any] | None
    """What was trained, where a task of ours was."""
    digest: str
    """Of the whole list: hosts whose lists differ do not have the same checkpoint."""

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
    """The complete checkpoints in a directory, oldest first.

    Those without a whole list of their files do not count: they were never finished.

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
    gossip: Worker,
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: Generators | None = None,
    keep: int = 2,
    identity: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of all workers: model, optimizer, position in the plan. Collective.

    Args:
        gossip: whose state to write.
        directory: shared by all workers, or one on each host.
        extra: anything JSON can hold, a worker's own: learning-rate schedule, data position.
        generators: random generators whose state to keep, e.g. `torch.default_generator`.
        keep: how many checkpoints to leave; the one before stays until the new one is complete.
        identity: what is trained, from `matcha.training.progress`; only the same can go on from it.

    Returns:
        The checkpoint's folder.

    Raises:
        WriteError: on every worker, when one could not write.
    """
    gossip.settle()
    root = Path(directory)
    folder = root / _folder_name(gossip.iteration)
    name = _file_name(gossip.rank)

    def write_mine() -> Any:
        write_snapshot(folder / name, gossip, extra or {}, generators or {})
        return name, (folder / name).stat().st_size, checksum(folder / name)

    # A round trip to everybody: the list is written only when all files are there, and older
    # checkpoints go only when all have the list. Who fails says so there: the others must not wait.
    written = _together(gossip, "write its part of the checkpoint", write_mine, WriteError)
    files = {name: (size, crc) for name, size, crc in written}
    manifest = {"schema": SCHEMA, **gossip.state_dict(), "files": files, "identity": identity}
    text = json.dumps(manifest, indent=1) + "\n"

    def write_list() -> list[int]:
        older = [old.iteration for old in _complete(_manifests(root)) if old.path != folder]
        write_atomically(folder / _MANIFEST, text)
        return older

    # Whether a folder is shared or not: what anybody has too many of, everybody removes.
    known = sorted(
        set().union(*_together(gossip, "list a checkpoint's files", write_list, WriteError))
    )
    for iteration in known[: max(0, len(known) + 1 - max(1, keep))]:
        _remove(root / _folder_name(iteration), gossip)
    return folder


def load_checkpoint(
    gossip: Worker,
    directory: str | Path,
    *,
    iteration: int | None = None,
    average: bool = False,
    generators: Generators | None = None,
    identity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Continue from a checkpoint, to the same bits as an uninterrupted run on CPU. Collective.

    Args:
        gossip: of a model and optimizer like those that were saved.
        directory: where `save_checkpoint` wrote.
        iteration: which checkpoint; by default the newest that all workers have.
        average: start a new team from an old one: every worker takes the average of the saved
            models, with fresh optimizer state, and the count of iterations goes on. The number of
            workers and the plan may then differ.
        generators: random generators to set as they were.
        identity: what is trained now, where that was kept.

    Returns:
        This worker's `extra`, or worker 0's when averaging.

    Raises:
        DataError: no checkpoint, or a damaged one; an intact earlier one is offered.
        InputError: the checkpoint is of another plan, model or number of workers.
    """
    info = _choose(gossip, Path(directory), iteration, average)
    if identity is not None:
        check_identity(info.path, info.identity, identity)
    _check_fit(gossip, info, average)
    gossip.forget()
    if average:
        extra = average_snapshots([info.path / name for name in sorted(info.files)], gossip)
    else:
        file = info.path / _file_name(gossip.rank)
        extra = restore_snapshot(file, gossip, generators or {})
    gossip.seek(info.iteration)
    return extra


# -- files -----------------------------------------------------------------------------------------


def _remove(folder: Path, gossip: Worker) -> None:
    """Remove this worker's file; whoever is last on a host takes the folder with it."""
    team = range(gossip.transport.num_workers)
    names = {_file_name(gossip.rank)}
    # Others may be done already, and what cannot be removed is no reason to stop training.
    with suppress(OSError):
        (folder / _MANIFEST).unlink(missing_ok=True)  # first: without it the rest does not count
        if gossip.rank == 0:  # of a larger team that was here before
            present = {file.name for file in folder.iterdir() if file.suffix == ".safetensors"}
            names |= present - {_file_name(rank) for rank in team}
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _manifests(root: Path) -> dict[Path, dict[str, Any]]:
    """The lists of files that can be read, by folder, oldest first."""
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
    """The checkpoints of this version among them; what lacks a field was damaged."""
    found = []
    for folder, document in documents.items():
        if document.get("schema") == SCHEMA:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                found.append(_info(folder, document))
    return found


def _info(folder: Path, document: dict[str, Any]) -> CheckpointInfo:
    return CheckpointInfo(
        path=folder,
        iteration=document["iteration"],
        num_workers=document["num_workers"],
        plan_digest=document["plan_digest"],
        layout_digest=document["layout_digest"],
        files={name: (size, crc) for name, (size, crc) in document["files"].items()},
        identity=document.get("identity"),
        digest=fingerprint(document),
    )


# -- what all workers do together ------------------------------------------------------------------


def _together(
    gossip: Worker,
    deed: str,
    work: Callable[[], Any],
    kind: type[MatchaError] = DataError,
) -> list[Any]:
    """Do something on every worker and tell everybody how it went.

    Returns:
        Everybody's result, which JSON must hold.

    Raises:
        kind: on every worker, when one of them failed.
    """
    cause: Exception | None = None
    try:
        outcome = {"result": work()}
    except Exception as error:  # whatever it is: the others must not wait for this worker
        cause, outcome = error, {"error": str(error)}
    answers = gather(gossip.transport, json.dumps(outcome).encode(), gossip.deadline)
    outcomes = [json.loads(answer) for answer in answers]
    for rank, found in enumerate(outcomes):
        if "error" in found:
            name = gossip.transport.name(rank)
            raise kind(f"{name} could not {deed}: {found['error']}") from cause
    return [found["result"] for found in outcomes]


def _choose(gossip: Worker, root: Path, iteration: int | None, average: bool) -> CheckpointInfo:
    """The newest checkpoint that all workers have, intact; whatever one finds, all hear."""
    mine: dict[str, CheckpointInfo] = {}

    def list_mine() -> list[str]:
        mine.update({info.digest: info for info in checkpoints(root)})
        return list(mine)

    everybodys = _together(gossip, "look for checkpoints", list_mine)
    common = [mine[d] for d in everybodys[0] if all(d in others for others in everybodys)]
    if iteration is not None:
        common = [info for info in common if info.iteration <= iteration]
    if not common or iteration not in (None, common[-1].iteration):
        which = "" if iteration is None else f" of iteration {iteration}"
        raise DataError(
            f"{root} holds no complete checkpoint{which}{_missing(gossip, everybodys)}."
        )
    *earlier, chosen = common
    look = partial(_verdict, gossip, chosen, average)
    for verdict in _together(gossip, "read its checkpoint", look):
        if verdict:
            raise DataError(f"{verdict} {_offer(gossip, chosen, earlier, average)}")
    return chosen


def _missing(gossip: Worker, everybodys: list[list[str]]) -> str:
    """Who has none, where others have some."""
    without = [rank for rank, theirs in enumerate(everybodys) if not theirs]
    if not without or len(without) == len(everybodys):
        return ""
    return f" that every worker has; {gossip.transport.name(without[0])} has none"


def _verdict(gossip: Worker, info: CheckpointInfo, average: bool) -> str:
    """What is wrong with the files that this worker reads; nothing, where they are intact."""
    names = sorted(info.files)
    if average:
        names = names[gossip.rank :: gossip.transport.num_workers]  # each is read by everybody
    else:
        names = [name for name in names if name == _file_name(gossip.rank)]
    try:
        info.check(*names)
    except DataError as error:
        return str(error)
    return ""


def _offer(
    gossip: Worker, chosen: CheckpointInfo, earlier: list[CheckpointInfo], average: bool
) -> str:
    for info in reversed(earlier):
        look = partial(_verdict, gossip, info, average)
        if not any(_together(gossip, "read its checkpoint", look)):
            return (
                f"The one before, iteration {info.iteration}, is intact: ask for that iteration, "
                f"or remove {chosen.path}."
            )
    return "There is no intact one before it."


def _folder_name(iteration: int) -> str:
    return f"iteration-{iteration:09d}"


def _file_name(rank: int) -> str:
    return f"worker-{rank:03d}.safetensors"


def _check_fit(gossip: Worker, info: CheckpointInfo, average: bool) -> None:
    state = gossip.state_dict()
    advice = "to start this team from the average of the saved models, ask for average=True."
    if info.layout_digest != state["layout_digest"]:
        raise InputError(f"the checkpoint in {info.path} is of another model.")
    if info.num_workers != state["num_workers"] and not average:
        raise InputError(
            f"the checkpoint in {info.path} is of {info.num_workers} workers, but there are "
            f"{state['num_workers']}; {advice}"
        )
    if info.plan_digest != state["plan_digest"] and not average:
        raise InputError(f"the checkpoint in {info.path} is of another plan; {advice}")
