"""One worker's end of modulo messages: what is quick in float32 is what the definition says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.wires.definition import Scales, modulo_difference

from matcha.wires import Modulo, modulo
from matcha.wires.coding import Coder


def meet(coders: list[Coder], ends: list[torch.Tensor]) -> list[torch.Tensor]:
    """What two workers find their difference to be, at each end."""
    for coder in coders:
        coder.begin()
    common = [coder.common(coders[1 - e].told()) for e, coder in enumerate(coders)]
    size = coders[0].message_bytes(len(ends[0]))
    messages = [torch.empty(size, dtype=torch.uint8) for _ in ends]
    coded = [coders[e].encode(ends[e], 0, common[e], messages[e], lower=e == 0) for e in range(2)]
    found = []
    for e, coder in enumerate(coders):
        whole = torch.zeros_like(ends[e])
        coder.move(whole, coded[e], messages[1 - e], weight=1.0)
        coder.end()
        found.append(whole)
        assert whole.equal(coder.difference(coded[e], messages[1 - e]))
    return found


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("apart", [1e-3, 1.0])  # 1: beyond any window
def test_two_ends_in_float32_find_what_the_definition_says(bits, apart) -> None:
    wire, random = Modulo(bits=bits), np.random.default_rng(bits)
    lower = random.normal(size=(300, 256)).astype(np.float32)  # more than one pass of a kernel
    upper = (lower + apart * random.normal(size=lower.shape)).astype(np.float32)
    ends = [torch.from_numpy(lower), torch.from_numpy(upper)]
    first, second = meet([Coder(wire, end) for end in ends], ends)
    assert first.equal(second)
    scales = Scales(lower, wire), Scales(upper, wire)
    said = modulo_difference(wire, lower, upper, scales)
    step = scales[0].sent * wire.clip_range / wire.half
    # A value between two points of the grid may be rounded either way, in one of many thousands.
    close = np.abs(first.numpy() - said).max(-1) <= 1e-5 * step
    assert close.mean() > 0.9
    assert np.abs(first.numpy() - said).max() <= 2 * step.max()


def test_numbers_beyond_what_a_check_adds_exactly_come_through() -> None:
    """Values that have agreed for long have a grid as fine as their last digits."""
    wire = Modulo(bits=8)
    same = torch.full((1, 256), 3.0)  # rotated, some values are much larger than the others
    same[0, 0] = 100.0
    coders = [Coder(wire, same) for _ in range(2)]
    for coder in coders:
        coder.scales.fill_(2.0**-22)
    levels = modulo.rotate(same) / modulo.grid(coders[0].scales, wire)
    assert levels.abs().max() > 2**24
    moved = same.clone()
    moved[0, 7] += 2.0**-16
    first, second = meet(coders, [same, moved])
    assert first.equal(second)
    assert abs(float(first[0, 7]) - 2.0**-16) < 2.0**-18
