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

# safetensors is imported where used: a worker that writes no checkpoint needs none.

_ADVICE = "checkpoints hold numbers, text, None, tensors, and dicts, lists and tuples of them."

Generators = Mapping[str, torch.Generator]
_PENDING = "gossip/overlap/"


def write_snapshot(
    path: Path, state: WorkerState, extra: Mapping[str, Any], generators: Generators
) -> None:
    """Write model, optimizer, position in the plan and `extra`, whole or not at all."""
    from safetensors.torch import save_file

    tensors, metadata = _collect(state, extra, generators)
    remembers = bool(state.exchange.state()) or state.clipping is not None
    if state.overlap is not None and (remembers or state.stepped):
        # In the middle of an iteration parameters have moved from where the exchange began.
        pending = enumerate(state.overlap.pending())
        tensors |= {f"{_PENDING}{k}": change.cpu().clone() for k, change in pending}
    with replace_file(path) as partial:
        save_file(tensors, partial, metadata=metadata)


def restore_snapshot(path: Path, state: WorkerState, generators: Generators) -> dict[str, Any]:
    """Set a worker to a saved state; returns its `extra`."""
    with _open(path) as saved:
        state.follow(saved.document["state"])
        _restore(state, saved, generators)
        pending = sum(name.startswith(_PENDING) for name in saved.names)
        if state.overlap is not None and pending:
            state.overlap.restore([saved.tensor(f"{_PENDING}{k}") for k in range(pending)])
        return saved.extra


def dump_snapshot(state: WorkerState, extra: Mapping[str, Any]) -> bytes:
    """Return what `write_snapshot` writes, for another worker that has no state."""
    from safetensors.torch import save

    tensors, metadata = _collect(state, extra, {})
    content: bytes = save(tensors, metadata=metadata)
    return content


def load_snapshot(content: Buffer, state: WorkerState) -> dict[str, Any]:
    """Set a worker to another one's `dump_snapshot`, position included; returns its `extra`."""
    from safetensors.torch import load

    raw = bytes(content)
    size = int.from_bytes(raw[:8], "little")
    document = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["matcha"])
    state.load_state_dict(document["state"], from_neighbor=True)
    saved = _Saved(load(raw), document)
    _restore(state, saved, {})
    return saved.extra


def average_snapshots(paths: Sequence[Path], state: WorkerState) -> dict[str, Any]:
    """Give a worker the average of saved models, no optimizer state; returns the first `extra`."""
    for optimizer in state.optimizers:
        optimizer.state.clear()
    targets = _named(state)
    means = {
        name: torch.zeros(t.shape, dtype=torch.complex128 if t.is_complex() else torch.float64)
        for name, t in targets.items()
        if t.is_floating_point() or t.is_complex()
    }
    # Variances are pooled: the mean square is averaged, and the average mean's square taken off.
    centres = {
        name: name.removesuffix("var") + "mean"
        for name in means
        if name.rpartition(".")[2] == "running_var"
    }
    for path in paths:
        with _open(path) as saved:
            # A worker's ω, the weight of its parameters: 1, except with push-sum.
            omega = "gossip/push-sum/omega"
            share = (float(saved.tensor(omega)) if omega in saved.names else 1.0) / len(paths)
            for key, total in means.items():
                total += share * saved.tensor(f"model/{key}")
                if centres.get(key) in means:
                    total += share * saved.tensor(f"model/{centres[key]}").double().square()
    with _open(paths[0]) as saved, torch.no_grad():
        for key, target in targets.items():
            value = means[key] if key in means else saved.tensor(f"model/{key}")
            if centres.get(key) in means:
                value = value - means[centres[key]].square()
            target.copy_(value)
        extra = saved.extra
    for part in (state.momentum, state.push_sum, state.exchange.relay):
        if part is not None:
            part.reset()
    return extra


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


# -- what is saved ---------------------------------------------------------------------------------


def _collect(
    state: WorkerState, extra: Mapping[str, Any], generators: Generators
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors, by name, and the file's metadata."""
    tensors = {f"model/{name}": tensor for name, tensor in _named(state).items()}
    states = [optimizer.state_dict() for optimizer in state.optimizers]
    # One is written as it always was; several as a list.
    optimizer = _flatten(states[0] if len(states) == 1 else states, "optimizer", tensors)
    kept = _flatten(dict(extra), "extra", tensors)
    tensors |= {f"generator/{name}": g.get_state() for name, g in generators.items()}
    tensors |= {f"gossip/{name}": tensor for name, tensor in state.memory().items()}
    # Parameters are views of buckets; the format wants tensors of their own, and knows complex
    # numbers of one size only.
    alone = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    pairs = [n for n, t in alone.items() if t.is_complex() and t.dtype != torch.complex64]
    alone |= {name: torch.view_as_real(alone[name]) for name in pairs}
    document = {
        "state": state.state_dict(),
        "optimizer": optimizer,
        "kept": kept,
        "complex": pairs,
    }
    return alone, {"matcha": json.dumps(document)}


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


def _named(state: WorkerState) -> dict[str, torch.Tensor]:
    modules = getattr(state.modules, "_orig_mod", state.modules)
    named = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    return {name: local(tensor) for name, tensor in named.items()}


# -- what is read ----------------------------------------------------------------------------------


class _Saved:
    """A snapshot: its document, and its tensors by name, in a file that is open or in memory."""

    def __init__(self, file: Any, document: Mapping[str, Any]) -> None:
        self.document, self.names = document, set(file.keys())
        self._read = file.__getitem__ if isinstance(file, dict) else file.get_tensor

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._read(name)
        if name not in self.document.get("complex", ()):
            return found
        return torch.view_as_complex(found.clone())  # in a file's memory it may be misaligned

    def value(self, kept: Any) -> Any:
        """What `_flatten` was given."""
        if not isinstance(kept, dict):
            return kept
        ((kind, content),) = kept.items()
        if kind == "tensor":
            return self.tensor(content)
        if kind in ("items", "counts"):
            found = {key: self.value(v) for key, v in content}
            return Counter(found) if kind == "counts" else found
        parts = [self.value(v) for v in content]
        return parts if kind == "list" else tuple(parts)

    @property
    def extra(self) -> dict[str, Any]:
        """What the script kept; 0.2 wrote it as plain JSON."""
        known = "kept" in self.document
        found: dict[str, Any] = (
            self.value(self.document["kept"]) if known else self.document["extra"]
        )
        return found


@contextmanager
def _open(path: Path) -> Iterator[_Saved]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            try:
                document = json.loads(file.metadata()["matcha"])
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{path} was not written by Gossip.save().") from error
            yield _Saved(file, document)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _restore(state: WorkerState, saved: _Saved, generators: Generators) -> None:
    with torch.no_grad():
        for name, tensor in _named(state).items():
            tensor.copy_(saved.tensor(f"model/{name}"))
    found = saved.value(saved.document["optimizer"])
    states = found if isinstance(found, list) else [found]
    for optimizer, theirs in zip(state.optimizers, states, strict=True):
        optimizer.load_state_dict(_shard_state(theirs, optimizer))
    for name, generator in generators.items():
        generator.set_state(saved.tensor(f"generator/{name}"))
    for name, tensor in state.memory().items():
        tensor.copy_(saved.tensor(f"gossip/{name}"))


def _shard_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state with its shards spread over processes as the parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == local(parameter).shape:
                values[name] = shard_like(parameter, value)
    return state
