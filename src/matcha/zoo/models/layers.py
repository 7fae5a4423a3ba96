"""Layers that compute with parameters of one model or of several.

Where every parameter carries a leading axis of workers, so do inputs and scores, and each product
is one batched product for all workers. That is what `batching="stacked"` uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer of one model, or of several stacked ones."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 2:
        return functional.linear(x, weight, bias)
    product = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, -2), weight.transpose(1, 2))
    return product.view(*x.shape[:-1], -1)


def normalize(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """A LayerNorm of one model, or of several stacked ones."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, layer.eps)
    shape = (len(weight), *(1,) * (x.dim() - 2), -1)
    normal = functional.layer_norm(x, weight.shape[1:], eps=layer.eps)
    return normal * weight.view(shape) + bias.view(shape)


def embed(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """The vectors of tokens, of one model or of several stacked ones."""
    weight = layer.weight
    if weight.dim() == 2:
        return functional.embedding(tokens, weight)
    m, num_tokens, _ = weight.shape
    first = torch.arange(m, device=tokens.device) * num_tokens
    return functional.embedding(tokens + first.view(m, 1, 1), weight.flatten(0, 1))


def convolve(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """A 3 × 3 convolution that keeps the size, of one model or of several stacked ones."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 4:
        return functional.conv2d(x, weight, bias, padding=1)
    assert bias is not None
    out: Tensor = _Convolution.apply(x.movedim(-3, -1), weight, bias)  # type: ignore[no-untyped-call]
    return out.movedim(-1, -3)


def halve(x: Tensor) -> Tensor:
    """The largest of each 2 × 2 pixels, whatever axes lead."""
    pooled = functional.max_pool2d(x.flatten(0, -4), 2)
    return pooled.view(*x.shape[:-3], *pooled.shape[1:])


class _Convolution(torch.autograd.Function):
    """Stacked 3 × 3 convolutions as batched products over patches; channels are the last axis.

    Grouped convolutions say the same, and are several times slower in cuDNN.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Patches × kernels, workers × batch × height × width × channels."""
        patches = _patches(x)
        kernels = weight.permute(0, 3, 4, 2, 1).flatten(1, 3).to(x.dtype)
        kernels = functional.pad(kernels, (0, 0, 0, patches.shape[-1] - kernels.shape[1]))
        ctx.save_for_backward(patches, weight, bias)
        out = torch.baddbmm(bias.to(x.dtype).unsqueeze(1), patches, kernels)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """The gradient of the input is a convolution with the kernels turned by half a turn."""
        patches, weight, bias = ctx.saved_tensors
        m, out, into = weight.shape[:3]
        rows = grad.reshape(m, -1, out)
        by_weight = torch.bmm(patches.transpose(1, 2), rows)[:, : 9 * into]
        by_weight = by_weight.view(m, 3, 3, into, out).permute(0, 4, 3, 1, 2).to(weight.dtype)
        by_bias = rows.sum(1).to(bias.dtype)
        if not ctx.needs_input_grad[0]:
            return None, by_weight, by_bias
        turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3).to(grad.dtype)
        by_input = torch.bmm(_patches(grad), turned)
        return by_input.view(*grad.shape[:-1], into), by_weight, by_bias


def _patches(x: Tensor) -> Tensor:
    """Each pixel's 3 × 3 neighbours, workers × pixels × values; zeros make their number even.

    Tensor cores want rows of a multiple of 8 values.
    """
    *leading, height, width, channels = x.shape
    padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
    shifted = [padded[..., i : i + height, j : j + width, :] for i in range(3) for j in range(3)]
    if missing := -9 * channels % 8:
        shifted.append(x.new_zeros(1).expand(*leading, height, width, missing))
    return torch.cat(shifted, -1).view(len(x), -1, 9 * channels + missing)
