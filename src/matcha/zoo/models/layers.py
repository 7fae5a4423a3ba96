"""Layers that compute with parameters of one model or of several.

Where every parameter carries a leading axis of workers, so do inputs and scores, and each product
is one batched product for all workers. That is what `batching="stacked"` uses.
"""

from __future__ import annotations

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
