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
    scales = [coder.begin().clone() for coder in coders]
    common = [coder.common(scales[1 - e]) for e, coder in enumerate(coders)]
    size = coders[0].message_bytes(len(ends[0]))
    messages = [torch.empty(size, dtype=torch.uint8) for _ in ends]
    coded = [coders[e].encode(ends[e], 0, common[e], messages[e], lower=e == 0) for e in range(2)]
    found = []
    for e, coder in enumerate(coders):
        whole = torch.empty_like(ends[e])
        for part, d in coder.decode(coded[e], messages[1 - e], 0, common[e], lower=e == 0):
            whole[part] = d
        coder.end()
        found.append(whole)
    return found


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("apart", [1e-3, 1.0])  # 1: beyond any window
def test_two_ends_in_float32_find_what_the_definition_says(bits, apart) -> None:
    wire, random = Modulo(bits=bits), np.random.default_rng(bits)
    lower = random.normal(size=(300, 256)).astype(np.float32)  # more than one pass
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


def test_numbers_too_large_for_the_short_way_take_the_long_one() -> None:
    """Values that have agreed for long have a grid as fine as their last digits."""
    wire = Modulo(bits=8)
    same = torch.full((1, 256), 3.0)  # rotated, some values are much larger than the others
    same[0, 0] = 100.0
    coders = [Coder(wire, same) for _ in range(2)]
    for coder in coders:
        coder.scales.fill_(2.0**-22)
    step = modulo.grid(coders[0].scales, wire)
    assert not modulo.are_small(torch.linalg.vector_norm(same, dim=-1), step)
    moved = same.clone()
    moved[0, 7] += 2.0**-16
    first, second = meet(coders, [same, moved])
    assert first.equal(second)
    assert abs(float(first[0, 7]) - 2.0**-16) < 2.0**-18


@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_the_short_way_to_whole_numbers_keeps_their_bits_and_checks(block, shift) -> None:
    y = 1e5 * torch.randn(50, block, generator=torch.Generator().manual_seed(0))
    y[0] = torch.arange(block) + 0.5  # halves go to even numbers both ways
    step, (weights, *_) = torch.rand(50) + 0.5, modulo.weights(block, torch.int32, y.device)
    step[0] = 1.0
    long, short = (
        modulo.whole_numbers(y.clone(), step, shift, small=small) for small in (False, True)
    )
    assert (long & 0xFF).equal(short & 0xFF)
    sums = [(n * weights).sum(-1, dtype=torch.int32) for n in (long, short)]
    assert sums[0].equal(sums[1])
