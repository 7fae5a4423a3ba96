"""Segments: where parameters lie in a flat row, so that a wire's blocks begin with them."""

from __future__ import annotations

from dataclasses import dataclass

from matcha.wires.wire import matrix_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A parameter's place in a flat row; places start at multiples of `BLOCK`."""

    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values it has."""
        rows, columns = matrix_shape(self.shape)
        return rows * columns
