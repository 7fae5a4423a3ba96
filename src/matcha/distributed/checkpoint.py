"""Checkpoints: every worker's state in one safetensors file, complete or not at all.

A checkpoint is a folder `iteration-000001200` with one file a worker and, written last, a list of
them with their checksums: without that list the folder does not count. Nothing is pickled, so
loading one from somebody else cannot run their code.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from matcha.distributed.collectives import gather
from matcha.distributed.transports.transport import Transport
from matcha.documents import write_atomically
from matcha.errors import DataError, InputError

__all__ = ["CheckpointInfo", "checkpoints", "load_checkpoint", "save_checkpoint"]

SCHEMA = "matcha.checkpoint/2"
_MANIFEST = "complete.json"
Generators = Mapping[str, torch.Generator]


class Worker(Protocol):
    """What a checkpoint needs of a `Gossip`."""

    model: nn.Module
    transport: Transport
    deadline: float

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What steps the model."""

    @property
    def iteration(self) -> int:
        """Finished iterations."""

    @property
    def rank(self) -> int:
        """This worker's number."""

    def settle(self) -> None:
        """Finish an exchange that is under way."""

    def forget(self) -> None:
        """Drop what is known of rounds to come."""

    def seek(self, iteration: int) -> None:
        """Go on from an iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Position and digests."""


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

    def check(self, *contents: str) -> None:
        """Compare the sizes of all files, and the contents of some, with what was written.

        Raises:
            DataError: a file is missing, truncated or damaged.
        """
        for name, (size, checksum) in self.files.items():
            file = self.path / name
            if not file.exists():
                raise DataError(f"{file} is missing.")
            found = file.stat().st_size
            if found != size:
                raise DataError(f"{file} is truncated: {found} of {size} bytes are left.")
            if name in contents and _checksum(file) != checksum:
                raise DataError(f"{file} is damaged: its checksum does not match.")


def checkpoints(directory: str | Path) -> list[CheckpointInfo]:
    """The complete checkpoints in a directory, oldest first. Unfinished ones do not count."""
    found = []
    for folder in sorted(Path(directory).glob("iteration-*")):
        manifest = folder / _MANIFEST
        if manifest.exists():
            found.append(_read_manifest(folder, json.loads(manifest.read_text(encoding="utf-8"))))
    return found


def save_checkpoint(
    gossip: Worker,
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    generators: Generators | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of all workers: model, optimizer, position in the plan. Collective.

    Args:
        gossip: whose state to write.
        directory: shared by all workers, or one on each host that is gathered before resuming.
        extra: anything JSON can hold, a worker's own: learning-rate schedule, data position.
        generators: random generators whose state to keep, e.g. `torch.default_generator`.
        keep: how many checkpoints to leave; the one before stays until the new one is complete.

    Returns:
        The checkpoint's folder.
    """
    gossip.settle()
    root = Path(directory)
    folder = root / f"iteration-{gossip.iteration:09d}"
    folder.mkdir(parents=True, exist_ok=True)
    name = _file_name(gossip)
    tensors, document = _collect(gossip, extra or {}, generators or {})
    _write(folder / name, tensors, document)
    mine = (name, (folder / name).stat().st_size, _checksum(folder / name))
    # A round trip to everybody: the list is written only when all files are there, and older
    # checkpoints go only when the list is.
    written = gather(gossip.transport, json.dumps(mine).encode(), gossip.deadline)
    if gossip.rank == 0:
        files = {n: (size, crc) for n, size, crc in map(json.loads, written)}
        manifest = {"schema": SCHEMA, **gossip.state_dict(), "files": files}
        write_atomically(folder / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
        for old in checkpoints(root)[: -max(1, keep)]:
            (old.path / _MANIFEST).unlink()
            shutil.rmtree(old.path)
    gather(gossip.transport, b"done", gossip.deadline)
    return folder


def load_checkpoint(
    gossip: Worker,
    directory: str | Path,
    *,
    iteration: int | None = None,
    average: bool = False,
    generators: Generators | None = None,
) -> dict[str, Any]:
    """Continue from a checkpoint, to the same bits as an uninterrupted run on CPU. Collective.

    Args:
        gossip: of a model and optimizer like those that were saved.
        directory: where `save_checkpoint` wrote.
        iteration: which checkpoint; by default the newest complete one.
        average: start a new team from an old one: every worker takes the average of the saved
            models, with fresh optimizer state, and the count of iterations goes on. The number of
            workers and the plan may then differ.
        generators: random generators to set as they were.

    Returns:
        This worker's `extra`, or worker 0's when averaging.

    Raises:
        DataError: no checkpoint, or a damaged one; an intact earlier one is offered.
        InputError: the checkpoint is of another plan, model or number of workers.
    """
    info = _choose(gossip, Path(directory), iteration)
    _check_fit(gossip, info, average)
    gossip.forget()
    if average:
        document = _load_average(gossip, info)
    else:
        with _opened(info, _file_name(gossip)) as (file, document):
            _restore(gossip, file, document, generators or {})
    gossip.seek(info.iteration)
    extra: dict[str, Any] = document["extra"]
    return extra


# -- what is in a file -----------------------------------------------------------------------------


def _collect(
    gossip: Worker, extra: Mapping[str, Any], generators: Generators
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {f"model/{name}": tensor for name, tensor in _named(gossip).items()}
    state = gossip.optimizer.state_dict()
    optimizer = _flatten(state, "optimizer", tensors)
    tensors |= {f"generator/{name}": g.get_state() for name, g in generators.items()}
    # Parameters are views of buckets; the format wants tensors of their own.
    alone = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    document = {"state": gossip.state_dict(), "optimizer": optimizer, "extra": dict(extra)}
    return alone, document


def _restore(gossip: Worker, file: Any, document: dict[str, Any], generators: Generators) -> None:
    with torch.no_grad():
        for name, tensor in _named(gossip).items():
            tensor.copy_(file.get_tensor(f"model/{name}"))
    gossip.optimizer.load_state_dict(_unflatten(document["optimizer"], file))
    for name, generator in generators.items():
        generator.set_state(file.get_tensor(f"generator/{name}"))


def _load_average(gossip: Worker, info: CheckpointInfo) -> dict[str, Any]:
    gossip.optimizer.state.clear()
    targets = _named(gossip)
    sums = {
        name: torch.zeros(t.shape, dtype=torch.float64)
        for name, t in targets.items()
        if t.is_floating_point()
    }
    for name in sorted(info.files):
        with _opened(info, name) as (file, _):
            for key, total in sums.items():
                total += file.get_tensor(f"model/{key}")
    with torch.no_grad():
        for key, total in sums.items():
            targets[key].copy_(total / info.num_workers)
    with _opened(info, min(info.files)) as (_, document):
        return document


def _named(gossip: Worker) -> dict[str, torch.Tensor]:
    model = getattr(gossip.model, "_orig_mod", gossip.model)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON can hold it; tensors go to `tensors` and leave their key behind."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        items = [[key, _flatten(v, f"{path}/{key}", tensors)] for key, v in value.items()]
        return {"items": items}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"the optimizer's {path!r} is a {type(value).__name__}, which is not saved.")


def _unflatten(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "items":
        return {key: _unflatten(v, file) for key, v in content}
    parts = [_unflatten(v, file) for v in content]
    return parts if kind == "list" else tuple(parts)


# -- files -----------------------------------------------------------------------------------------


def _write(path: Path, tensors: dict[str, torch.Tensor], document: dict[str, Any]) -> None:
    # Imported where used: a worker that writes no checkpoint needs no safetensors.
    from safetensors.torch import save_file

    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"matcha": json.dumps(document)})
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def _opened(info: CheckpointInfo, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A worker's file: its tensors and its document."""
    from safetensors import SafetensorError, safe_open

    path = info.path / name
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file, json.loads(file.metadata()["matcha"])
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _read_manifest(folder: Path, document: dict[str, Any]) -> CheckpointInfo:
    if document.get("schema") != SCHEMA:
        raise DataError(f"{folder} is a checkpoint of another version: {document.get('schema')!r}.")
    return CheckpointInfo(
        path=folder,
        iteration=document["iteration"],
        num_workers=document["num_workers"],
        plan_digest=document["plan_digest"],
        layout_digest=document["layout_digest"],
        files={name: (size, crc) for name, (size, crc) in document["files"].items()},
    )


def _choose(gossip: Worker, root: Path, iteration: int | None) -> CheckpointInfo:
    found = checkpoints(root)
    if iteration is not None:
        found = [info for info in found if info.iteration <= iteration]
    if not found or iteration not in (None, found[-1].iteration):
        which = "" if iteration is None else f" of iteration {iteration}"
        raise DataError(f"{root} holds no complete checkpoint{which}.")
    *earlier, chosen = found
    # Each worker reads its own file; what one finds, all must hear, or some would go on alone.
    verdicts = gather(gossip.transport, _verdict(chosen, _file_name(gossip)), gossip.deadline)
    for verdict in verdicts:
        if verdict:
            raise DataError(f"{verdict.decode()} {_offer(earlier)}")
    return chosen


def _verdict(info: CheckpointInfo, *contents: str) -> bytes:
    try:
        info.check(*contents)
    except DataError as error:
        return str(error).encode()
    return b""


def _offer(earlier: list[CheckpointInfo]) -> str:
    for info in reversed(earlier):
        if not _verdict(info, *info.files):
            return f"The one before, iteration {info.iteration}, is intact: ask for that iteration."
    return "There is no intact one before it."


def _file_name(gossip: Worker) -> str:
    return f"worker-{gossip.rank:03d}.safetensors"


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


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc
