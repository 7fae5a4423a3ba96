"""Packing: small whole numbers side by side in bytes.

A number of b bits stands in the *upper* bits of its byte: the difference of two such bytes, as a
signed one, is the difference of the numbers wrapped to [−2^(b−1), 2^(b−1)), in units of 2^(8−b).
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(raised: Tensor, bits: int, out: Tensor) -> None:
    """Lay numbers side by side, bits/8 of a byte each.

    The vector is cut into parts that are laid over one another, so every operation runs over
    neighbouring bytes.

    Args:
        raised: a multiple of eight numbers, in the upper bits of bytes.
        bits: how many.
        out: where to.

    >>> packed = torch.empty(2, dtype=torch.uint8)
    >>> pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8) << 4, 4, packed)
    >>> [hex(byte) for byte in packed]
    ['0x13', '0x24']
    """
    if bits == 8:
        out.copy_(raised)
    elif bits == 3:
        _pack3(raised.view(8, -1), out.view(3, -1))
    else:
        first, *others = raised.view(8 // bits, -1)
        out.copy_(first)
        for number, other in enumerate(others, start=1):
            out.bitwise_or_(other >> (bits * number))


def unpack(packed: Tensor, bits: int, out: Tensor) -> Tensor:
    """The numbers that `pack` was given, in the upper bits of bytes.

    >>> numbers = torch.empty(4, dtype=torch.uint8)
    >>> (unpack(torch.tensor([0x13, 0x24], dtype=torch.uint8), 4, numbers) >> 4).tolist()
    [1, 2, 3, 4]
    """
    if bits == 8:
        return out.copy_(packed)
    if bits == 3:
        _unpack3(packed.view(3, -1), out.view(8, -1))
    else:
        for number, part in enumerate(out.view(8 // bits, -1)):
            torch.bitwise_left_shift(packed, bits * number, out=part)
    return out.bitwise_and_(0x100 - (1 << (8 - bits)))


# Each of three bytes holds two numbers; the two bits left hold the upper bits of numbers 2 and 5 in
# the first two bytes, and in the third the lowest bits of both.


def _pack3(r: Tensor, out: Tensor) -> None:
    """Eight numbers of three bits in three bytes."""
    torch.bitwise_or(r[0::3], r[1::3] >> 3, out=out)
    out[:2].bitwise_or_(r[2::3] >> 6)
    out[2].bitwise_or_((r[2] & 0x20) >> 4).bitwise_or_((r[5] & 0x20) >> 5)


def _unpack3(packed: Tensor, r: Tensor) -> None:
    """Bits below a number's own are left for `unpack` to clear."""
    r[0::3].copy_(packed)
    r[1::3].copy_(packed << 3)
    r[2::3].copy_(packed[:2] << 6)
    third = packed[2]
    r[2].bitwise_or_((third << 4).bitwise_and_(0x20))
    r[5].bitwise_or_((third << 5).bitwise_and_(0x20))
