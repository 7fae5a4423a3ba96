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
    """A 3 × 3 convolution that keeps the size; of stacked models, channels are the last axis."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 4:
        return functional.conv2d(x, weight, bias, padding=1)
    assert bias is not None
    out: Tensor = _Convolution.apply(x, weight)  # type: ignore[no-untyped-call]
    return out + bias.to(out.dtype).view(len(bias), 1, 1, 1, -1)


def halve(x: Tensor) -> Tensor:
    """The largest of each 2 × 2 pixels; of stacked models, channels are the last axis."""
    if x.dim() == 4:
        return functional.max_pool2d(x, 2)
    m, batch, height, width, channels = x.shape
    return x.view(m, batch, height // 2, 2, width // 2, 2, channels).amax((3, 5))


class _Convolution(torch.autograd.Function):
    """Stacked 3 × 3 convolutions as batched products; channels are the last axis.

    Grouped convolutions say the same, and are several times slower in cuDNN. Weights are read, and
    their gradients written, as workers × output × height × width × input: where they are stored in
    this order (`Layout.channels_last`) neither is copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Each pixel's neighbours times the kernels."""
        patches, kernels = _patches(x), _even(_kernels(weight, x))
        ctx.save_for_backward(patches, weight)
        return torch.bmm(patches, kernels.transpose(1, 2)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        """What each of nine shifts of the input would get, and their sum shifted back."""
        patches, weight = ctx.saved_tensors
        m, out, into = weight.shape[:3]
        rows = grad.reshape(m, -1, out)
        by_weight = torch.bmm(rows.transpose(1, 2), patches)[..., : 9 * into]
        by_weight = by_weight.reshape(m, out, 3, 3, into).movedim(-1, 2).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, by_weight
        *leading, height, width, _ = grad.shape
        shifted = torch.bmm(rows, _kernels(weight, rows)).view(*leading, height, width, 9, into)
        padded = functional.pad(shifted, (0, 0, 0, 0, 1, 1, 1, 1))
        pieces = [
            padded[:, :, 2 - i : 2 - i + height, 2 - j : 2 - j + width, 3 * i + j]
            for i in range(3)
            for j in range(3)
        ]
        by_input = pieces[0]
        for piece in pieces[1:]:
            by_input = by_input + piece
        return by_input, by_weight


def _kernels(weight: Tensor, like: Tensor) -> Tensor:
    """Workers × output × (height × width × input)."""
    return weight.movedim(2, -1).flatten(2).to(like.dtype)


def _even(x: Tensor) -> Tensor:
    """Zeros beside rows of an uneven length: tensor cores want a multiple of 8 values."""
    missing = -x.shape[-1] % 8
    return functional.pad(x, (0, missing)) if missing else x


def _patches(x: Tensor) -> Tensor:
    """Each pixel's 3 × 3 neighbours: workers × pixels × (height × width × channels)."""
    windows = functional.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
    return _even(windows.movedim(4, -1).reshape(len(x), -1, 9 * x.shape[-1]))
