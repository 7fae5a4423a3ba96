"""Coding: one worker's end of modulo messages, as bytes. The simulator's twin is `batched`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from matcha.wires import kernels, modulo
from matcha.wires.wire import Modulo

_CHECK = 4  # bytes
_CHUNK = 1 << 16  # values per pass on a CPU: a dozen operations over them stay in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """What one end knows of a message it has sent."""

    residues: Tensor
    """Whole numbers modulo 2^b, in the upper bits of a byte each; blocks are rows."""
    checks: Tensor
    """Their weighted sums modulo 2^32."""


class Coder:
    """A worker's scales for some blocks of values, and messages made with them."""

    def __init__(self, wire: Modulo, blocks: Tensor) -> None:
        self.wire, self.block = wire, blocks.shape[-1]
        self.dtype, self.device = blocks.dtype, blocks.device
        self.compiled = kernels.serve(blocks)
        """Whether compiled kernels do it; a partner need not know."""
        self.scales = modulo.first_scales(blocks)
        self._sent = self.scales.to(torch.bfloat16)
        self._seen, self._finest = torch.zeros_like(self.scales), torch.zeros_like(self.scales)
        self._unpacked = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._memory = torch.empty(2, 0, self.block, dtype=self.dtype, device=self.device)

    def __len__(self) -> int:
        return len(self.scales)

    @property
    def spare_bytes(self) -> int:
        """Memory to work in that is kept."""
        return self._memory.nbytes + self._unpacked.nbytes

    def begin(self) -> Tensor:
        """A round begins: the scales as they travel, two bytes per block."""
        self._sent = self.scales.to(torch.bfloat16)
        self._seen.zero_()
        self._finest.zero_()
        return self._sent.view(torch.uint8)

    def common(self, theirs: Tensor) -> Tensor:
        """The scales of a link, the larger of both ends', from what the partner sent."""
        arrived = theirs.to(self.device).view(torch.bfloat16)
        return torch.maximum(self._sent, arrived).to(self.dtype)

    def message_bytes(self, num_blocks: int) -> int:
        """The length of a message of so many blocks."""
        return num_blocks * (self.block * self.wire.bits // 8 + _CHECK)

    def encode(
        self,
        values: Tensor,
        start: int,
        common: Tensor,
        message: Tensor,
        *,
        lower: bool,
        kept: Tensor | None = None,
    ) -> Coded:
        """Write blocks of values into a message.

        Args:
            values: blocks as rows, left alone.
            start: the first one's number.
            common: the link's scales of all blocks.
            message: `message_bytes` bytes, where the values are.
            lower: whether this worker is the lower end of the link.
            kept: bytes, one per value, for what must be kept of it until then.

        Returns:
            What `decode` needs to know of it.
        """
        wire, number = self.wire, len(values)
        if kept is None:
            kept = torch.empty(values.numel(), dtype=torch.uint8, device=self.device)
        residues = kept[: values.numel()].view(values.shape)
        checks = torch.empty(number, dtype=torch.int32, device=self.device)
        body, tail = self._split(message, number)
        here = slice(start, start + number)
        scales = common[here].contiguous()
        finest, coded = self._finest[here], (residues, body, checks)
        if fused := self._fused(values):
            fused.encode(wire, values, scales, *coded, finest, lower=lower)
        else:
            if self.compiled and values.is_contiguous():
                lengths = kernels.encode(values, scales, wire, *coded, lower=lower)
            else:
                lengths = torch.linalg.vector_norm(values, dim=-1)
                self._encode(values, scales, lengths, residues, checks, lower=lower)
                pack(residues.view(-1), wire.bits, body)
            torch.maximum(finest, modulo.finest_scales(lengths, wire, self.block), out=finest)
        tail.copy_(checks.view(torch.uint8))
        return Coded(residues=residues, checks=checks)

    def _encode(
        self,
        values: Tensor,
        common: Tensor,
        lengths: Tensor,
        residues: Tensor,
        checks: Tensor,
        *,
        lower: bool,
    ) -> None:
        """What `kernels.encode` does, with torch, but for packing."""
        # What there is one of a block is worked out for all blocks at once: long operations.
        wire, step = self.wire, modulo.grid(common, self.wire)
        small = modulo.are_small(lengths, step)
        weights = modulo.weights(self.block, torch.int32, self.device)
        order = modulo.orders(common)
        shift = 0.0 if lower else wire.shift
        for part, memory, spare in self._chunks(len(values)):
            y = modulo.rotate(values[part], memory, spare)
            n = modulo.whole_numbers(y, step[part], shift, small=small)
            residues[part] = n
            counts = spare.view(torch.int32).view(-1)[: n.numel()].view(n.shape)
            torch.index_select(weights, 0, order[part], out=counts)
            torch.sum(n.mul_(counts), -1, dtype=torch.int32, out=checks[part])
            if not small:  # `y` holds the numbers: a check of what is none must not hold
                lost = (y.abs() < 2.0**31).all(-1).logical_not_()
                checks[part].add_(lost, alpha=1 if lower else 2)
        residues.bitwise_left_shift_(8 - wire.bits)

    def decode(
        self, mine: Coded, arrived: Tensor, start: int, common: Tensor, *, lower: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """The link's difference, upper minus lower end, from both messages, part by part.

        Both ends work out the same numbers from the same bytes, whatever was sent.

        Yields:
            Which of the message's blocks, and the difference there, in memory that is used again.
        """
        raised, step = self._compare(mine, arrived, start, common, lower=lower)
        for part, k, spare in self._chunks(len(raised)):
            k.copy_(raised[part])
            if self.wire.shift:
                k.add_(self.wire.shift / self._unit)
            # Rotated before it is scaled: whole numbers this small add up exactly in any order.
            yield part, modulo.unrotate(k, spare).mul_(step[part].unsqueeze(-1))

    def move(
        self,
        values: Tensor,
        mine: Coded,
        arrived: Tensor,
        start: int,
        common: Tensor,
        *,
        lower: bool,
        weight: float,
    ) -> None:
        """Add the weight times the difference, upper minus lower end, that `decode` finds."""
        if fused := self._fused(values):
            number = len(mine.checks)
            body, tail = self._split(arrived.to(self.device), number)
            here = slice(start, start + number)
            known = mine.residues, tail.clone().view(torch.int32), mine.checks
            scales, seen = common[here].contiguous(), self._seen[here]
            ends = {"lower": lower, "weight": weight}
            fused.move(self.wire, values, body.contiguous(), *known, scales, seen, **ends)
            return
        if self.compiled and values.is_contiguous():
            raised, step = self._compare(mine, arrived, start, common, lower=lower)
            kernels.move(values, raised, step, self.wire, weight)
            return
        for part, difference in self.decode(mine, arrived, start, common, lower=lower):
            values[part].add_(difference, alpha=weight)

    def _fused(self, values: Tensor) -> ModuleType | None:
        """The kernels of one pass each, where there are some for these values."""
        if not (self.compiled and values.is_cuda and values.is_contiguous()):
            return None
        return kernels.on_gpu(values.device)

    @property
    def _unit(self) -> float:
        """Steps per number in the upper bits of a byte."""
        return 2.0 ** (self.wire.bits - 8)

    def _compare(
        self, mine: Coded, arrived: Tensor, start: int, common: Tensor, *, lower: bool
    ) -> tuple[Tensor, Tensor]:
        """The difference in the upper bits of bytes, and what each block's is to be times."""
        wire, number = self.wire, len(mine.checks)
        body, tail = self._split(arrived.to(self.device), number)
        checks = tail.clone().view(torch.int32)
        apart = checks - mine.checks if lower else mine.checks - checks
        if len(self._unpacked) < number * self.block:
            self._unpacked = torch.empty(number * self.block, dtype=torch.uint8, device=self.device)
        raised = self._unpacked[: number * self.block].view(number, self.block)
        here = slice(start, start + number)
        scales = common[here].contiguous()
        if self.compiled and body.is_contiguous() and not body.is_cuda:
            whole, lengths = kernels.compare(body, mine.residues, scales, wire, raised, lower=lower)
            sums = whole.to(self.dtype).mul_(self._unit)
            lengths.mul_(self._unit)
            raised = raised.view(torch.int8)
        else:
            theirs = unpack(body, wire.bits, raised.view(-1)).view(raised.shape)
            ends = (theirs, mine.residues) if lower else (mine.residues, theirs)
            raised = torch.sub(*ends, out=theirs).view(torch.int8)
            sums, lengths = self._measure(raised, modulo.orders(scales))
        ok = apart == sums.to(torch.int32)
        seen = modulo.seen_scales(lengths, ok, apart, scales, wire, self.block)
        torch.maximum(self._seen[here], seen, out=self._seen[here])
        step = modulo.grid(scales, wire).mul_(ok).mul_(self._unit)
        return raised, step.mul_(modulo.shrinkage(lengths, wire, self.block))

    def _measure(self, raised: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        """Of differences, in units of `_unit` steps: what their checks differ by, their lengths."""
        sums, lengths = torch.empty(2, len(raised), dtype=self.dtype, device=self.device)
        for part, k, spare in self._chunks(len(raised)):
            k.copy_(raised[part])
            sums[part] = modulo.checks(k, order[part], spare)
            if self.wire.shift:
                k.add_(self.wire.shift / self._unit)
            torch.linalg.vector_norm(k, dim=-1, out=lengths[part])
        return sums.mul_(self._unit), lengths.mul_(self._unit)

    def end(self) -> None:
        """End a round in which this worker had a meeting."""
        self.scales.copy_(modulo.next_scales(self.scales, self._seen, self._finest))

    def _split(self, message: Tensor, number: int) -> tuple[Tensor, Tensor]:
        size = number * self.block * self.wire.bits // 8
        return message[:size], message[size : size + _CHECK * number]

    def _chunks(self, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Parts of so many blocks, and twice the memory for one to work in."""
        each = number if self.device.type == "cuda" else max(1, _CHUNK // self.block)
        if self._memory.shape[1] < min(each, number):
            size = 2, min(each, number), self.block
            self._memory = torch.empty(size, dtype=self.dtype, device=self.device)
        for start in range(0, number, each):
            part = slice(start, min(start + each, number))
            first, second = self._memory[:, : part.stop - start]
            yield part, first, second


# -- packing: small whole numbers side by side in bytes -------------------------------------------
# A number of b bits stands in the *upper* bits of its byte: the difference of two such bytes, as a
# signed one, is the difference of the numbers wrapped to [−2^(b−1), 2^(b−1)), in units of 2^(8−b).


def pack(raised: Tensor, bits: int, out: Tensor) -> None:
    """Lay numbers, a multiple of eight, side by side: bits/8 of a byte each.

    The vector is cut into parts that are laid over one another, so every operation runs over
    neighbouring bytes.

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
