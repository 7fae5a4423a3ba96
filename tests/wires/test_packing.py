from __future__ import annotations

import pytest
import torch

from matcha.wires.modulo import pack, unpack


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_is_packed_is_unpacked(bits) -> None:
    numbers = torch.randint(0, 1 << bits, (512,), dtype=torch.uint8) << (8 - bits)
    packed = torch.empty(512 * bits // 8, dtype=torch.uint8)
    pack(numbers, bits, packed)
    assert unpack(packed, bits, torch.empty_like(numbers)).equal(numbers)
