"""Coding: one worker's end of modulo messages, as bytes. The simulator's twin is `batched`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from matcha.wires import modulo
from matcha.wires.packing import pack, unpack
from matcha.wires.wire import Modulo

_CHECK = 4  # bytes
_CHUNK = 1 << 15  # values a pass on a CPU: eight operations over them stay in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """What one end knows of a message it has sent."""

    residues: Tensor
    """Whole numbers modulo 2^b, a byte each; blocks are rows."""
    checks: Tensor
    """Their weighted sums modulo 2^32."""


class Coder:
    """A worker's scales for some blocks of values, and messages made with them.

    Args:
        wire: how many bits.
        blocks: the first values; blocks are rows.
    """

    def __init__(self, wire: Modulo, blocks: Tensor) -> None:
        self.wire, self.block = wire, blocks.shape[-1]
        self.dtype, self.device = blocks.dtype, blocks.device
        self.scales = modulo.first_scales(blocks)
        self._sent = self.scales.to(torch.bfloat16)
        self._seen, self._finest = torch.zeros_like(self.scales), torch.zeros_like(self.scales)

    def __len__(self) -> int:
        return len(self.scales)

    def begin(self) -> Tensor:
        """A round begins: the scales as they travel, two bytes a block."""
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
        self, values: Tensor, start: int, common: Tensor, message: Tensor, *, lower: bool
    ) -> Coded:
        """Write blocks of values into a message.

        Args:
            values: blocks as rows, left alone.
            start: the first one's number.
            common: the link's scales of all blocks.
            message: `message_bytes` bytes, where the values are.
            lower: whether this worker is the lower end of the link.

        Returns:
            What `decode` needs to know of it.
        """
        wire, number = self.wire, len(values)
        residues = torch.empty(values.shape, dtype=torch.uint8, device=self.device)
        checks = torch.empty(number, dtype=torch.int32, device=self.device)
        body, tail = self._split(message, number)
        weights = modulo.weights(self.block, torch.int32, self.device)
        for part in self._chunks(number):
            here = slice(start + part.start, start + part.stop)
            y = modulo.rotate(values[part])
            finest = modulo.finest_scales(y, wire)
            torch.maximum(self._finest[here], finest, out=self._finest[here])
            step = modulo.grid(common[here], wire)
            n = modulo.levels(y, step, 0.0 if lower else wire.shift).to(torch.int32)
            checks[part] = (n * weights).sum(-1, dtype=torch.int32)
            residues[part] = n.bitwise_and_(2 * wire.half - 1)
        # Laid over one another as a whole: long operations, few of them.
        body.copy_(pack(residues.flatten(), wire.bits))
        tail.copy_(checks.view(torch.uint8))
        return Coded(residues=residues, checks=checks)

    def decode(
        self, mine: Coded, arrived: Tensor, start: int, common: Tensor, *, lower: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """The link's difference, upper minus lower end, from both messages, part by part.

        Both ends work out the same numbers from the same bytes, whatever was sent.

        Args:
            mine: what `encode` returned.
            arrived: the partner's message.
            start: the first block's number.
            common: the link's scales of all blocks.
            lower: whether this worker is the lower end of the link.

        Yields:
            Which of the message's blocks, and the difference there.
        """
        wire, number = self.wire, len(mine.checks)
        body, tail = self._split(arrived.to(self.device), number)
        checks = tail.clone().view(torch.int32)
        weights = modulo.weights(self.block, self.dtype, self.device)
        apart = checks - mine.checks if lower else mine.checks - checks
        arrived = unpack(body, wire.bits).view(number, self.block)
        for part in self._chunks(number):
            theirs, own = arrived[part], mine.residues[part]
            ends = theirs - own if lower else own - theirs
            k = ends.add_(wire.half).bitwise_and_(2 * wire.half - 1).to(self.dtype).sub_(wire.half)
            ok = apart[part] == k.mv(weights).to(torch.int32)
            k.add_(wire.shift).mul_(ok.unsqueeze(-1))
            here = slice(start + part.start, start + part.stop)
            seen = modulo.seen_scales(k, ok, apart[part], common[here], wire)
            torch.maximum(self._seen[here], seen, out=self._seen[here])
            step = modulo.grid(common[here], wire)
            yield part, modulo.unrotate(k.mul_(step.unsqueeze(-1)))

    def end(self) -> None:
        """A round in which this worker met somebody has ended."""
        self.scales.copy_(modulo.next_scales(self.scales, self._seen, self._finest))

    def _split(self, message: Tensor, number: int) -> tuple[Tensor, Tensor]:
        size = number * self.block * self.wire.bits // 8
        return message[:size], message[size : size + _CHECK * number]

    def _chunks(self, number: int) -> Iterator[slice]:
        each = number if self.device.type == "cuda" else max(1, _CHUNK // self.block)
        for start in range(0, number, each):
            yield slice(start, min(start + each, number))
