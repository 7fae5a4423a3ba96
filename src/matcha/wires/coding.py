"""Coding: one worker's end of modulo messages, as bytes. The simulator's twin is `batched`."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from matcha.wires import kernels, modulo
from matcha.wires.wire import Modulo

_CHECK = 4  # bytes


class Sent(NamedTuple):
    """What one end knows of a message it has sent."""

    residues: Tensor
    """Whole numbers modulo 2^b, in the upper bits of a byte each; blocks are rows."""
    checks: Tensor
    """Their weighted sums modulo 2^32."""
    common: Tensor
    """The link's scales of these blocks."""
    here: slice
    """Which of the coder's blocks they are."""
    lower: bool
    """Whether this worker is the lower end of the link."""


class Coder(modulo.Scales):
    """A worker's scales for some blocks of values, and messages made with them."""

    def __init__(self, wire: Modulo, blocks: Tensor) -> None:
        super().__init__(wire, blocks)
        self.dtype, self.device = blocks.dtype, blocks.device
        served = kernels.serving(blocks) if blocks.dtype == torch.float32 else None
        self.kernels: ModuleType = served or modulo
        """Whose `encode` and `move` it calls; a partner need not know."""

    def __len__(self) -> int:
        return len(self.scales)

    def told(self) -> Tensor:
        """The scales as they travel in this round, two bytes per block."""
        return self.sent.to(torch.bfloat16).view(torch.uint8)

    def common(self, theirs: Tensor) -> Tensor:
        """The scales of a link, the larger of both ends', from what the partner `told`."""
        arrived = theirs.to(self.device).view(torch.bfloat16)
        return torch.maximum(self.sent, arrived.to(self.dtype))

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
    ) -> Sent:
        """Write blocks of values, of which the first is number `start`, into a message.

        `common` are the link's scales of all blocks; `kept` is memory of a byte per value for what
        `move` needs to know of the message.
        """
        if kept is None:
            kept = torch.empty(values.numel(), dtype=torch.uint8, device=self.device)
        residues = kept[: values.numel()].view(values.shape)
        checks = torch.empty(len(values), dtype=torch.int32, device=self.device)
        body, tail = self._split(message, len(values))
        here = slice(start, start + len(values))
        coded = modulo.Coded(residues, body, checks, self.finest[here])
        self.kernels.encode(self.wire, values, common[here], coded, lower=lower)
        tail.copy_(checks.view(torch.uint8))
        return Sent(residues, checks, common[here], here, lower)

    def difference(self, sent: Sent, arrived: Tensor) -> Tensor:
        """The link's difference, upper minus lower end, from both messages."""
        return modulo.difference(self.wire, self._arrived(sent, arrived), lower=sent.lower)

    def move(self, values: Tensor, sent: Sent, arrived: Tensor, *, weight: float) -> None:
        """Add the weight times the link's difference to the values."""
        known = self._arrived(sent, arrived)
        self.kernels.move(self.wire, values, known, lower=sent.lower, weight=weight)

    def _arrived(self, sent: Sent, message: Tensor) -> modulo.Arrived:
        body, tail = self._split(message.to(self.device), len(sent.checks))
        checks = tail.clone().view(torch.int32)  # numbers of four bytes must be aligned
        apart = checks - sent.checks if sent.lower else sent.checks - checks
        return modulo.Arrived(body, sent.residues, apart, sent.common, self.seen[sent.here])

    def _split(self, message: Tensor, number: int) -> tuple[Tensor, Tensor]:
        size = number * self.block * self.wire.bits // 8
        return message[:size], message[size : size + _CHECK * number]
