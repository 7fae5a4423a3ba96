"""The arithmetic of modulo messages where a GPU does it another way."""

from __future__ import annotations

import torch

from matcha.wires import modulo


def test_a_gpus_rotation_is_exact_under_autocast_and_with_short_mantissas(monkeypatch) -> None:
    """TF32 does not exist on a CPU: its rounding of what goes into a product is put in by hand."""
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3))
    rotation = modulo._whole_rotation(256, torch.float32, x.device)
    exact = x.double() @ rotation.double()
    product = torch.Tensor.matmul

    def in_tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product((a.view(torch.int32) & -(1 << 13)).view(torch.float32), b)

    monkeypatch.setattr(torch.Tensor, "matmul", in_tf32)
    with torch.autocast("cpu", torch.bfloat16):
        found = modulo.whole_product(x, rotation)
    one_part = in_tf32(x, rotation)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 2e-6
    assert float((one_part - exact).abs().max()) > 1e-4
