"""Top-k messages: the largest of what each worker moved by, for averages of all workers.

A row is one worker's parameters, cut into chunks of 4,096 values, parameter by parameter. Of each
chunk a message holds the places of its largest values (12 bits each) and the values in two bits:
sign, and above or below their mean magnitude, with the mean of either kind in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from matcha.wires.wire import CHUNK, Segment, TopK

_COLUMN = 16
"""Values of a chunk that are compared before others."""


class Chosen(NamedTuple):
    """What messages hold of one parameter: rows × chunks × values."""

    places: Tensor
    """Within the chunk, below 4,096."""
    codes: Tensor
    """1: of the larger kind; 2: negative."""
    levels: Tensor
    """The magnitude of either kind, in bfloat16."""

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values that are sent."""
        magnitudes = self.levels.to(dtype).gather(-1, (self.codes & 1).long())
        return torch.where(self.codes >= 2, -magnitudes, magnitudes)


def choose(values: Tensor, wire: TopK) -> Chosen:
    """The largest values of each chunk of rows."""
    chunks = _chunks(values)
    places = largest(chunks, wire.kept_of(values.shape[1]))
    exact = chunks.gather(-1, places).abs().double()
    large = exact > exact.mean(-1, keepdim=True)
    small = ~large & (exact > 0)
    levels = [(exact * kind).sum(-1) / kind.sum(-1).clamp(min=1) for kind in (small, large)]
    negative = chunks.gather(-1, places) < 0
    codes = large.to(torch.uint8) + 2 * negative.to(torch.uint8)
    return Chosen(places, codes, torch.stack(levels, dim=-1).to(torch.bfloat16))


def largest(chunks: Tensor, number: int) -> Tensor:
    """Where the largest values of each chunk are, by magnitude, the largest first.

    Each is the largest of its column of 16, or in the column of another one: looking for columns
    first spares a GPU nine tenths of the time.

    >>> largest(torch.tensor([[[3.0, -7.0] + [0.0] * 4094]]), 2).tolist()
    [[[1, 0]]]
    """
    columns = CHUNK // _COLUMN
    if 2 * number > columns:
        return chunks.abs().topk(number, dim=-1).indices
    table = chunks.view(*chunks.shape[:-1], _COLUMN, columns)
    found = torch.linalg.vector_norm(table, ord=torch.inf, dim=-2).topk(number, dim=-1).indices
    found = found.unsqueeze(-2).expand(*table.shape[:-1], number)
    inside = table.gather(-1, found).flatten(-2).abs().topk(number, dim=-1).indices
    rows = torch.arange(_COLUMN, device=chunks.device).unsqueeze(-1)
    places: Tensor = (found + rows * columns).flatten(-2).gather(-1, inside)
    return places


def _chunks(values: Tensor) -> Tensor:
    missing = -values.shape[1] % CHUNK
    padded = functional.pad(values, (0, missing)) if missing else values
    return padded.view(len(values), -1, CHUNK)


def spread(chosen: Chosen, size: int, dtype: torch.dtype) -> Tensor:
    """The values that are sent, where they belong; zeros elsewhere."""
    rows, chunks, _ = chosen.places.shape
    found = torch.zeros(rows, chunks, CHUNK, dtype=dtype, device=chosen.places.device)
    found.scatter_(-1, chosen.places, chosen.values(dtype))
    return found.view(rows, -1)[:, :size]


class TopKRows:
    """Error feedback for rows of parameters: what they moved by, and what was not sent of it."""

    def __init__(self, wire: TopK, segments: Sequence[Segment], x: Tensor) -> None:
        self.wire, self._segments = wire, segments
        self.anchor, self.error = x.clone(), torch.zeros_like(x)

    def reset(self, x: Tensor) -> None:
        """Start again at these values."""
        self.anchor.copy_(x)
        self.error.zero_()

    def parts(self, row: Tensor) -> Iterator[Tensor]:
        """Each parameter's values, as a view."""
        for segment in self._segments:
            yield row.narrow(1, segment.offset, segment.size)

    def send(self, x: Tensor) -> Iterator[Chosen]:
        """Add x − anchor to the error, take away what is sent of it, and set x to the anchor.

        One parameter after another: the caller adds the mean of what all sent to x.
        """
        torch.add(x, self.error, alpha=self.wire.memory, out=self.error).sub_(self.anchor)
        x.copy_(self.anchor)
        for part in self.parts(self.error):
            chosen = choose(part, self.wire)
            if part.shape[1] % CHUNK:
                part.sub_(spread(chosen, part.shape[1], part.dtype))
            else:  # in place: the row is as long as the model
                _chunks(part).scatter_add_(-1, chosen.places, -chosen.values(part.dtype))
            yield chosen

    def settle(self, x: Tensor) -> None:
        """Go on from the average, which x holds now."""
        self.anchor.copy_(x)


def pack_chosen(chosen: Chosen) -> Tensor:
    """A row's message of one parameter, as bytes."""
    places, codes, levels = (part[0].reshape(-1) for part in chosen)
    low, high = places.view(-1, 2).unbind(1)
    packed = torch.stack([low & 255, (low >> 8) | ((high & 15) << 4), high >> 4], dim=1)
    quads = codes.view(-1, 4)
    bits = quads[:, 0] | (quads[:, 1] << 2) | (quads[:, 2] << 4) | (quads[:, 3] << 6)
    return torch.cat([packed.to(torch.uint8).view(-1), bits, levels.view(torch.uint8)])


def unpack_chosen(message: Tensor, size: int, wire: TopK) -> Chosen:
    """What `pack_chosen` was given, of a parameter of a size."""
    chunks, kept = -(-size // CHUNK), wire.kept_of(size)
    number = chunks * kept
    packed, bits, levels = torch.split(message, [number * 3 // 2, number // 4, 4 * chunks])
    first, middle, last = packed.view(-1, 3).long().unbind(1)
    places = torch.stack([first | ((middle & 15) << 8), (middle >> 4) | (last << 4)], dim=1)
    codes = torch.stack([(bits >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    shape = (1, chunks, kept)
    found = levels.clone().view(torch.bfloat16).view(1, chunks, 2)
    return Chosen(places.view(shape), codes.view(shape), found)
