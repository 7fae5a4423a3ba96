"""Collectives on top of any transport, for the rare moments when all workers meet.

None of these is in the hot path: agreement, the first broadcast, checkpoints, the average model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from matcha.distributed.transports.transport import Message, Transport

__all__ = ["barrier", "broadcast", "gather", "mean_"]

# Tags of the exchange count from 0 upwards within a round; these stay clear of them.
_BROADCAST, _REDUCE, _GATHER = 1 << 20, (1 << 20) + 1, (1 << 20) + 2


def broadcast(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> None:
    """Overwrite every worker's tensors with worker 0's, along a binomial tree."""
    parent, children = _tree(transport.rank, transport.num_workers)
    for tensor in tensors:
        moved = _movable(transport, tensor)
        if parent is not None:
            transport.post([Message(peer=parent, tag=_BROADCAST, incoming=moved)]).wait(timeout)
        sends = [Message(peer=child, tag=_BROADCAST, outgoing=moved) for child in children]
        if sends:
            transport.post(sends).wait(timeout)
        if moved is not tensor:
            tensor.copy_(moved)


def mean_(transport: Transport, tensors: list[torch.Tensor], timeout: float) -> None:
    """Overwrite every worker's tensors with their mean over the workers.

    The sum runs up a fixed tree and the result comes back down it, so all workers hold the same
    bits, run after run.
    """
    parent, children = _tree(transport.rank, transport.num_workers)
    for tensor in tensors:
        total = _movable(transport, tensor)
        arriving = torch.empty_like(total)
        # Largest subtree last in `children` order: small subtrees are ready first.
        for child in reversed(children):
            transport.post([Message(peer=child, tag=_REDUCE, incoming=arriving)]).wait(timeout)
            total.add_(arriving)
        if parent is not None:
            transport.post([Message(peer=parent, tag=_REDUCE, outgoing=total)]).wait(timeout)
        elif total.is_floating_point() or total.is_complex():
            total.div_(transport.num_workers)
        if total is not tensor:
            tensor.copy_(total)
    broadcast(transport, tensors, timeout)


def gather(transport: Transport, value: bytes, timeout: float) -> list[bytes]:
    """Every worker's value, on every worker, in the order of ranks."""
    values = [value] * transport.num_workers
    if transport.rank == 0:
        for peer in range(1, transport.num_workers):
            values[peer] = _receive_bytes(transport, peer, timeout)
    else:
        _send_bytes(transport, 0, value, timeout)
    sizes = torch.tensor([len(v) for v in values], dtype=torch.int64)
    broadcast(transport, [sizes], timeout)
    joined = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    if transport.rank == 0:
        joined.copy_(torch.tensor(list(b"".join(values)), dtype=torch.uint8))
    broadcast(transport, [joined], timeout)
    return [bytes(part.tolist()) for part in torch.split(joined, sizes.tolist())]


def barrier(transport: Transport, timeout: float) -> None:
    """Return once every worker has called this."""
    gather(transport, b".", timeout)


def _tree(rank: int, size: int) -> tuple[int | None, list[int]]:
    # Binomial tree: the parent clears the lowest set bit, children set lower bits, largest first.
    low = rank & -rank if rank else 1 << (size - 1).bit_length()
    parent = rank - low if rank else None
    children = [rank + bit for bit in _bits_below(low) if rank + bit < size]
    return parent, children


def _bits_below(low: int) -> Iterator[int]:
    bit = low >> 1
    while bit:
        yield bit
        bit >>= 1


def _movable(transport: Transport, tensor: torch.Tensor) -> torch.Tensor:
    if transport.device is None or tensor.device == transport.device:
        return tensor
    return tensor.to(transport.device)


def _send_bytes(transport: Transport, peer: int, value: bytes, timeout: float) -> None:
    for data in (torch.tensor([len(value)]), torch.tensor(list(value), dtype=torch.uint8)):
        moved = _movable(transport, data)
        transport.post([Message(peer=peer, tag=_GATHER, outgoing=moved)]).wait(timeout)


def _receive_bytes(transport: Transport, peer: int, timeout: float) -> bytes:
    def receive(buffer: torch.Tensor) -> list[int]:
        moved = _movable(transport, buffer)
        transport.post([Message(peer=peer, tag=_GATHER, incoming=moved)]).wait(timeout)
        values: list[int] = moved.tolist()
        return values

    (size,) = receive(torch.zeros(1, dtype=torch.int64))
    return bytes(receive(torch.empty(size, dtype=torch.uint8)))
