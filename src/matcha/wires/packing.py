"""Packing: small whole numbers side by side in bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(residues: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits, a multiple of eight of them, as bytes: bits/8 of one a number.

    The vector is cut into parts that are laid over one another, so every operation runs over
    neighbouring bytes.

    >>> pack(torch.arange(16, dtype=torch.uint8), 4).tolist()
    [128, 145, 162, 179, 196, 213, 230, 247]
    """
    if bits == 8:
        return residues
    if bits == 3:
        return _pack3(residues)
    part = _parts(residues, 8 // bits)
    packed = part[0]
    for number, other in enumerate(part[1:], start=1):
        packed = packed | (other << (bits * number))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The numbers that `pack` was given.

    >>> unpack(pack(torch.arange(8, dtype=torch.uint8), 3), 3).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if bits == 8:
        return packed
    if bits == 3:
        return _unpack3(packed)
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)])


def _parts(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return x.view(count, -1).unbind(0)


def _pack3(residues: Tensor) -> Tensor:
    """Eight numbers of three bits in three bytes."""
    r = _parts(residues, 8)
    first = r[0] | (r[1] << 3) | (r[2] << 6)
    second = (r[2] >> 2) | (r[3] << 1) | (r[4] << 4) | (r[5] << 7)
    third = (r[5] >> 1) | (r[6] << 2) | (r[7] << 5)
    return torch.cat([first, second, third])


def _unpack3(packed: Tensor) -> Tensor:
    first, second, third = _parts(packed, 3)
    return torch.cat(
        [
            first & 7,
            (first >> 3).bitwise_and_(7),
            (first >> 6).bitwise_or_((second & 1) << 2),
            (second >> 1).bitwise_and_(7),
            (second >> 4).bitwise_and_(7),
            (second >> 7).bitwise_or_((third & 3) << 1),
            (third >> 2).bitwise_and_(7),
            third >> 5,
        ]
    )
