"""Buckets: a model's parameters side by side in a few flat, aligned tensors.

An exchange is then a few large messages and the mixing a few passes over contiguous memory; nothing
is packed, unpacked or pickled. The parameters keep their identity, shape and strides, so that
optimizers, compiled models and references held elsewhere go on working.

To all other code each parameter is an ordinary tensor with a storage of its own, exactly its size:
code that saves models (safetensors, Accelerate, torch.save) takes tensors of one storage for
copies of one another, or writes the whole storage for each. Only we know that they are neighbours.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from matcha.errors import InputError

_Place = tuple[int, tuple[int, ...]]  # address and shape: where a tensor's values are
_Tied = list[tuple[str, torch.Tensor]]  # names and tensors that share one place
_ALIGNMENT = 64  # bytes: a cache line, and what vector units like


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's (or buffer's) place in a bucket."""

    name: str
    tensor: torch.Tensor
    offset: int
    """In elements."""
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    """Shape, dtype and stride are those that it had when it came: where values lie in the bucket is
    the same on all workers, whatever becomes of the tensor on one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat tensor of one dtype on one device, and the tensors that live in it.

    Shards of tensors that are spread over several processes stay where their owner (FSDP, tensor
    parallelism) has them: such a bucket is a copy, to be packed before use and unpacked after.
    """

    data: torch.Tensor
    slots: tuple[Slot, ...]
    volatile: bool
    """Whether the values change during the forward pass, as BatchNorm's statistics do."""
    is_copy: bool = False

    def pack(self) -> None:
        """Bring in the values of the tensors, where they do not live here."""
        for slot in self.slots if self.is_copy else ():
            with torch.no_grad():
                self._place(slot).copy_(local(slot.tensor))

    def unpack(self) -> None:
        """Bring the values back to the tensors, where they do not live here."""
        for slot in self.slots if self.is_copy else ():
            with torch.no_grad():
                local(slot.tensor).copy_(self._place(slot))

    def part(self, slot: Slot, data: torch.Tensor | None = None) -> torch.Tensor:
        """A slot's flat part of the bucket, or of `data` that is laid out like it."""
        size = slot.shape.numel() * slot.dtype.itemsize // self.data.element_size()
        return (self.data if data is None else data)[slot.offset : slot.offset + size]

    def _place(self, slot: Slot) -> torch.Tensor:
        return self.part(slot).view(slot.dtype).view(slot.shape)

    def take_back(self) -> str | None:
        """Bring back the values of tensors that were given others (`parameter.data = ...`).

        Returns the name of one that cannot come back, since its shape, dtype or device is another.
        """
        for slot in self.moved():
            tensor = slot.tensor
            now = tensor.shape, tensor.dtype, tensor.device
            if now != (slot.shape, slot.dtype, self.data.device):
                return slot.name
            _move(slot, self.data)
        return None

    def moved(self) -> Iterator[Slot]:
        """The slots whose tensors no longer live in this bucket."""
        if self.is_copy:
            return
        base, size = self.data.data_ptr(), self.data.element_size()
        for slot in self.slots:
            tensor = slot.tensor
            if tensor.data_ptr() != base + slot.offset * size or tensor.stride() != slot.stride:
                yield slot


def fill_buckets(
    model: nn.Module,
    *,
    bucket_bytes: int,
    buffers: bool,
    sharded: bool = False,
    alignment: int = 1,
) -> tuple[Bucket, ...]:
    """Move a model's trainable parameters into buckets, grouped by dtype and device.

    Tied parameters get one place. Frozen parameters stay where they are: they start equal on all
    workers and stay so. A parameter larger than `bucket_bytes` gets a bucket of its own. With
    `buffers`, floating-point buffers (BatchNorm's statistics) move in as well. Where a worker is
    several processes, its parameters may be `sharded` over them: local shards are taken, and empty
    ones left out. Each parameter begins at a multiple of `alignment` values, as a wire's blocks
    want.

    Raises:
        InputError: a parameter cannot be flattened (sharded, sparse or not yet initialised), or
            nothing is trainable.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("the model has no trainable parameters, so there is nothing to exchange.")
    filled = _fill(parameters, bucket_bytes, alignment, volatile=False, sharded=sharded)
    if buffers:
        averaged = {n: b for n, b in model.named_buffers() if b.dtype.to_real().is_floating_point}
        filled += _fill(averaged, bucket_bytes, 1, volatile=True, sharded=sharded)
    # A process whose shards are all empty comes to its meetings all the same.
    nothing = Bucket(data=torch.zeros(_ALIGNMENT), slots=(), volatile=False)
    return tuple(filled) or (nothing,)


def _fill(
    tensors: Mapping[str, torch.Tensor],
    limit: int,
    alignment: int,
    *,
    volatile: bool,
    sharded: bool,
) -> list[Bucket]:
    groups: dict[tuple[torch.dtype, torch.device, bool], dict[_Place, _Tied]] = {}
    for name, tensor in tensors.items():
        _check_flattenable(name, tensor, sharded)
        part = local(tensor)
        if part.numel() == 0:
            continue
        # Complex values are mixed, averaged and sent as what they are: two real ones.
        kind = part.dtype.to_real(), part.device, is_sharded(tensor)
        group = groups.setdefault(kind, {})
        group.setdefault((part.data_ptr(), tuple(part.shape)), []).append((name, tensor))
    return [
        _bucket(batch, alignment, volatile=volatile, is_copy=is_copy)
        for (_, _, is_copy), group in groups.items()
        for batch in _batches(group.values(), limit)
    ]


def _batches(group: Iterable[_Tied], limit: int) -> Iterator[list[_Tied]]:
    batch: list[_Tied] = []
    size = 0
    for tied in group:
        nbytes = local(tied[0][1]).nbytes
        if batch and size + nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(tied)
        size += nbytes
    if batch:
        yield batch


def _bucket(batch: list[_Tied], alignment: int, *, volatile: bool, is_copy: bool) -> Bucket:
    first = local(batch[0][0][1])
    dtype = first.dtype.to_real()
    step = max(alignment, _ALIGNMENT // dtype.itemsize)
    slots: list[Slot] = []
    end = 0
    for tied in batch:
        part = local(tied[0][1])
        for name, tensor in tied:
            stride = part.stride() if is_copy else _dense_stride(tensor)
            slots.append(Slot(name, tensor, end, part.shape, part.dtype, stride))
        end += -(-part.nbytes // dtype.itemsize // step) * step
    data = torch.zeros(end, dtype=dtype, device=first.device)
    for slot in slots if not is_copy else ():
        _move(slot, data)
    return Bucket(data=data, slots=tuple(slots), volatile=volatile, is_copy=is_copy)


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dense strides (channels_last too) survive; an expanded or gappy view becomes contiguous."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format).stride()


def _move(slot: Slot, data: torch.Tensor) -> None:
    """Let a tensor live in a bucket.

    In a storage that begins and ends with it, made of the same memory, which it keeps alive;
    through bytes, since DLPack does not know every dtype.
    """
    tensor = slot.tensor
    place = data[slot.offset : slot.offset + tensor.nbytes // data.element_size()]
    own = from_dlpack(place.view(torch.uint8)).view(slot.dtype)
    view = own.as_strided(slot.shape, slot.stride)
    with torch.no_grad():
        view.copy_(tensor)
    tensor.data = view


def _check_flattenable(name: str, tensor: torch.Tensor, sharded: bool) -> None:
    if nn.parameter.is_lazy(tensor):
        raise InputError(f"parameter {name!r} has no shape yet: run one batch before Gossip.")
    if is_sharded(tensor) and not sharded:
        raise InputError(
            f"parameter {name!r} is spread over several processes (DTensor), which are then one "
            "worker together: say which by mesh=, for example Gossip(..., mesh=mesh['node'])."
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise InputError(
            f"parameter {name!r} ({tensor.layout}, {tensor.device}) holds no dense values: "
            "materialise it before Gossip."
        )


def copy_values(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with as many others."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def describe_layout(buckets: Iterable[Bucket]) -> list[str]:
    """Say of each parameter what must be the same on all workers, for people."""
    return [
        f"{slot.name}, {str(slot.dtype).removeprefix('torch.')} {tuple(slot.shape)}, "
        f"stride {slot.stride}"
        for bucket in buckets
        for slot in bucket.slots
    ]


def layout_digest(buckets: Iterable[Bucket]) -> str:
    """A digest of what lies where: equal on two workers only if their messages fit each other."""
    digest = hashlib.sha256()
    for bucket in buckets:
        digest.update(f"{bucket.data.dtype} {bucket.data.numel()}\n".encode())
        for slot in bucket.slots:
            shape = tuple(slot.shape)
            digest.update(f"{slot.name} {slot.offset} {shape} {slot.stride}\n".encode())
    return digest.hexdigest()


def _as_dtensor(tensor: torch.Tensor) -> Any:
    """The tensor, where it is a DTensor; else None.

    Checked via sys.modules: importing them takes as long as half of torch.
    """
    for home in ("torch.distributed.tensor", "torch.distributed._tensor"):  # the latter in 2.4
        kind = getattr(sys.modules.get(home), "DTensor", None)
        if kind is not None:
            return tensor if isinstance(tensor, kind) else None
    return None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other processes of the same worker may hold the rest of it."""
    return _as_dtensor(tensor) is not None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; an ordinary tensor is its own.

    >>> part = torch.ones(3)
    >>> local(part) is part
    True
    """
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return tensor
    with torch.no_grad():
        part: torch.Tensor = dtensor.to_local()
    return part


def gather_shards(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, copied to the CPU. A collective call."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return tensor
    whole: torch.Tensor = dtensor.full_tensor().detach().to("cpu", copy=True)
    return whole


def shard_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A part as a tensor that is spread over processes as another one is."""
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return part
    place = part.to(tensor.device), dtensor.device_mesh, dtensor.placements
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    whole: torch.Tensor = dtensor.from_local(*place, run_check=False, **size)
    return whole


def part_weight(tensor: torch.Tensor, num_parts: int) -> float:
    """What one process's part counts for when all of a worker's processes add theirs up.

    Copies count once altogether: a part that k of the `num_parts` processes hold counts 1/k.

    >>> part_weight(torch.ones(3), 4)
    0.25
    """
    dtensor = _as_dtensor(tensor)
    if dtensor is None:
        return 1 / num_parts
    placed = zip(dtensor.device_mesh.shape, dtensor.placements, strict=True)
    distinct: int = math.prod(n for n, place in placed if not place.is_replicate())
    return distinct / num_parts
