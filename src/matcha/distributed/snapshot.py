"""Snapshots: one worker's state as one safetensors file."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from matcha._io import replace_file
from matcha.distributed.exchange.buckets import local, shard_like
from matcha.distributed.transports.base import Buffer
from matcha.distributed.worker_state import WorkerState
from matcha.errors import DataError, InputError

_ADVICE = "checkpoints hold numbers, text, None, tensors, and dicts, lists and tuples of them."

Generators = Mapping[str, torch.Generator]
_PENDING = "gossip/overlap/"


def write_snapshot(
    path: Path, state: WorkerState, extra: Mapping[str, Any], generators: Generators
) -> None:
    """Write model, optimizer, position in the plan and `extra`, whole or not at all."""
    # Imported where used: a worker that writes no checkpoint needs no safetensors.
    from safetensors.torch import save_file

    tensors, document = _collect(state, extra, generators)
    if state.overlap is not None and (_remembers(state) or state.stepped):
        # In the middle of an iteration parameters have moved from where the exchange began.
        pending = enumerate(state.overlap.pending())
        tensors |= {f"{_PENDING}{k}": change.cpu().clone() for k, change in pending}
    with replace_file(path) as partial:
        save_file(tensors, partial, metadata={"matcha": json.dumps(document)})


def restore_snapshot(path: Path, state: WorkerState, generators: Generators) -> dict[str, Any]:
    """Set a worker to a saved state; returns its `extra`.

    Raises:
        DataError: the file cannot be read.
    """
    with _open(path) as (file, document):
        state.follow(document["state"])
        _restore(state, file, document, generators)
        pending = sum(name.startswith(_PENDING) for name in file.names)
        if state.overlap is not None and pending:
            state.overlap.restore([file.get_tensor(f"{_PENDING}{k}") for k in range(pending)])
        return _extra(document, file)


def dump_snapshot(state: WorkerState, extra: Mapping[str, Any]) -> bytes:
    """Return what `write_snapshot` writes, for another worker that has no state."""
    from safetensors.torch import save

    tensors, document = _collect(state, extra, {})
    content: bytes = save(tensors, metadata={"matcha": json.dumps(document)})
    return content


def load_snapshot(content: Buffer, state: WorkerState) -> dict[str, Any]:
    """Set a worker to another one's `dump_snapshot`, position included; returns its `extra`.

    Raises:
        InputError: it is of another plan, model or number of workers.
    """
    from safetensors.torch import load

    raw = bytes(content)
    size = int.from_bytes(raw[:8], "little")
    document = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["matcha"])
    state.load_state_dict(document["state"], from_neighbor=True)
    file = _Tensors(load(raw), document)
    _restore(state, file, document, {})
    return _extra(document, file)


class _Tensors:
    """A file's tensors, open or in memory; the format knows complex numbers of one size only.

    Args:
        file: by name; a dict, or what `safetensors` opens.
        document: of the file.
    """

    def __init__(self, file: Any, document: Mapping[str, Any]) -> None:
        self._read = file.__getitem__ if isinstance(file, dict) else file.get_tensor
        self._complex = set(document.get("complex", ()))
        self.names = set(file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._read(name)
        if name not in self._complex:
            return tensor
        return torch.view_as_complex(tensor.clone())  # in a file's memory it may be misaligned


def average_snapshots(paths: Sequence[Path], state: WorkerState) -> dict[str, Any]:
    """Give a worker the average of saved models and an empty optimizer; returns the first `extra`.

    Raises:
        DataError: a file cannot be read.
    """
    for optimizer in state.optimizers:
        optimizer.state.clear()
    targets = _named(state)
    means = {
        name: torch.zeros(t.shape, dtype=torch.complex128 if t.is_complex() else torch.float64)
        for name, t in targets.items()
        if t.is_floating_point() or t.is_complex()
    }
    # Variances are pooled: the mean square is averaged, and the average mean's square taken off.
    centres = {name: name.removesuffix("var") + "mean" for name in means if _is_variance(name)}
    for path in paths:
        with _open(path) as (file, _):
            share = _share(file) / len(paths)
            for key, total in means.items():
                total += share * file.get_tensor(f"model/{key}")
                if centres.get(key) in means:
                    total += share * file.get_tensor(f"model/{centres[key]}").double().square()
    with _open(paths[0]) as (file, document), torch.no_grad():
        for key, target in targets.items():
            value = means[key] if key in means else file.get_tensor(f"model/{key}")
            if centres.get(key) in means:
                value = value - means[centres[key]].square()
            target.copy_(value)
        extra = _extra(document, file)
    for part in (state.momentum, state.push_sum, state.exchange.relay):
        if part is not None:
            part.reset()
    return extra


def _is_variance(name: str) -> bool:
    return name.rpartition(".")[2] == "running_var"


def _share(file: Any) -> float:
    """Return a saved worker's ω, the weight of its parameters: 1, except with push-sum."""
    known = "gossip/push-sum/omega"
    return float(file.get_tensor(known)) if known in file.names else 1.0


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _collect(
    state: WorkerState, extra: Mapping[str, Any], generators: Generators
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {f"model/{name}": tensor for name, tensor in _named(state).items()}
    states = [optimizer.state_dict() for optimizer in state.optimizers]
    # One is written as it always was; several as a list.
    optimizer = _flatten(states[0] if len(states) == 1 else states, "optimizer", tensors)
    kept = _flatten(dict(extra), "extra", tensors)
    tensors |= {f"generator/{name}": g.get_state() for name, g in generators.items()}
    tensors |= {f"gossip/{name}": tensor for name, tensor in state.memory().items()}
    # Parameters are views of buckets; the format wants tensors of their own.
    alone = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    pairs = [n for n, t in alone.items() if t.is_complex() and t.dtype != torch.complex64]
    alone |= {name: torch.view_as_real(alone[name]) for name in pairs}
    document = {"state": state.state_dict(), "optimizer": optimizer, "kept": kept}
    document["complex"] = pairs
    return alone, document


def _restore(
    state: WorkerState, file: Any, document: dict[str, Any], generators: Generators
) -> None:
    with torch.no_grad():
        for name, tensor in _named(state).items():
            tensor.copy_(file.get_tensor(f"model/{name}"))
    found = _unflatten(document["optimizer"], file)
    states = found if isinstance(found, list) else [found]
    for optimizer, saved in zip(state.optimizers, states, strict=True):
        optimizer.load_state_dict(_shard_state(saved, optimizer))
    for name, generator in generators.items():
        generator.set_state(file.get_tensor(f"generator/{name}"))
    for name, tensor in state.memory().items():
        tensor.copy_(file.get_tensor(f"gossip/{name}"))


def _remembers(state: WorkerState) -> bool:
    """Whether an exchange changes more than the parameters."""
    return bool(state.exchange.state()) or state.clipping is not None


def _named(state: WorkerState) -> dict[str, torch.Tensor]:
    modules = getattr(state.modules, "_orig_mod", state.modules)
    named = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    return {name: local(tensor) for name, tensor in named.items()}


def _shard_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state with its shards spread over processes as the parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == local(parameter).shape:
                values[name] = shard_like(parameter, value)
    return state


def _extra(document: Mapping[str, Any], file: Any) -> dict[str, Any]:
    """What the script kept; 0.2 wrote it as plain JSON."""
    kept = _unflatten(document["kept"], file) if "kept" in document else document["extra"]
    found: dict[str, Any] = kept
    return found


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON can hold it; tensors go to `tensors` and leave their key behind."""
    if isinstance(value, torch.Tensor):
        while path in tensors:  # the key "a/b" and the key "b" below "a"
            path += "'"
        tensors[path] = local(value)
        return {"tensor": path}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, (bool, int, float, str, type(None))):
                raise InputError(f"{path!r} has the key {key!r}, a {type(key).__name__}: {_ADVICE}")
        items = [[key, _flatten(v, f"{path}/{key}", tensors)] for key, v in value.items()]
        return {"counts" if isinstance(value, Counter) else "items": items}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(f"{path!r} is a {type(value).__name__}: {_ADVICE}")


def _unflatten(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind in ("items", "counts"):
        found = {key: _unflatten(v, file) for key, v in content}
        return Counter(found) if kind == "counts" else found
    parts = [_unflatten(v, file) for v in content]
    return parts if kind == "list" else tuple(parts)


@contextmanager
def _open(path: Path) -> Iterator[tuple[_Tensors, dict[str, Any]]]:
    """A worker's file: its tensors and its document."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                document = json.loads(file.metadata()["matcha"])
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{path} was not written by Gossip.save().") from error
            yield _Tensors(file, document), document
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
