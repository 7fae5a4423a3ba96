"""Language models: the paper's LSTM with tied embeddings (Press and Wolf); a transformer."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# -- layers of one model or of several: where parameters carry a leading axis of workers, so do
# inputs and scores, and each product is one batched product (`batching="stacked"`)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer of one model, or of several stacked ones."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 2:
        return functional.linear(x, weight, bias)
    product = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, -2), weight.transpose(1, 2))
    return product.view(*x.shape[:-1], -1)


def _normalize(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    """A LayerNorm of one model, or of several stacked ones."""
    weight, bias = layer.weight, layer.bias
    if weight.dim() == 1:
        return functional.layer_norm(x, weight.shape, weight, bias, layer.eps)
    shape = (len(weight), *(1,) * (x.dim() - 2), -1)
    normal = functional.layer_norm(x, weight.shape[1:], eps=layer.eps)
    return normal * weight.view(shape) + bias.view(shape)


def _embed(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """The vectors of tokens, of one model or of several stacked ones."""
    weight = layer.weight
    if weight.dim() == 2:
        return functional.embedding(tokens, weight)
    m, num_tokens, _ = weight.shape
    first = torch.arange(m, device=tokens.device) * num_tokens
    return functional.embedding(tokens + first.view(m, 1, 1), weight.flatten(0, 1))


# -- the LSTM


@functools.cache
def _fused() -> bool:
    """Whether PyTorch's fused CUDA kernels of an LSTM step are there and agree with ours."""
    if not torch.cuda.is_available():
        return False
    host = [torch.linspace(-1, 1, n).reshape(2, -1) for n in (16, 16, 4)]
    try:
        ours = _cell(*host)
        theirs = torch.ops.aten._thnn_fused_lstm_cell(*(tensor.cuda() for tensor in host))
        grads = [torch.ones(2, 2), torch.ones(2, 2), host[2], ours[1], ours[2]]
        back = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(
            *(tensor.cuda() for tensor in grads), False
        )
        pairs = zip((*ours, *_cell_backward(*grads)), (*theirs, *back[:2]), strict=True)
        return all(torch.allclose(a, b.cpu(), atol=1e-5) for a, b in pairs)
    except (RuntimeError, AttributeError):
        return False


def _cell(inside: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM: new output, new cell, and the four activated gates."""
    if inside.is_cuda and _fused():
        output, new, gates = torch.ops.aten._thnn_fused_lstm_cell(inside, hidden, cell)
        return output, new, gates
    i, f, g, o = (inside + hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def _cell_backward(
    grad_output: Tensor, grad_new: Tensor, cell: Tensor, new: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by the gates before activation, and by the cell before the step."""
    if gates.is_cuda and _fused():
        fused = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        grad_gates, grad_cell, _ = fused(grad_output, grad_new, cell, new, gates, False)
        return grad_gates, grad_cell
    i, f, g, o = gates.chunk(4, 1)
    squashed = new.tanh()
    grad_new = grad_new + grad_output * o * (1 - squashed * squashed)
    parts = [
        grad_new * g * i * (1 - i),
        grad_new * cell * f * (1 - f),
        grad_new * i * (1 - g * g),
        grad_output * squashed * o * (1 - o),
    ]
    return torch.cat(parts, 1), grad_new * f


class _Recurrence(torch.autograd.Function):
    """The part of an LSTM layer that must go step by step.

    Written out because gradients by the recurrent weights are then one product over all steps
    instead of one per step, each added to a matrix of 36 MB; and because, unlike cuDNN's layer, it
    takes weights wherever they lie, computes in bfloat16 and is captured in CUDA graphs.
    """

    @staticmethod
    def forward(
        ctx: Any, inside: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, cells, gates = [hidden], [cell], []
        for step in inside.unbind(0):
            output, new, active = _cell(step, outputs[-1] @ weight.t(), cells[-1])
            outputs.append(output)
            cells.append(new)
            gates.append(active)
        ctx.save_for_backward(weight, *outputs[:-1], *cells, *gates)
        return torch.stack(outputs[1:]), cells[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_outputs, _ = grads  # the carried cell is detached: nothing flows into it
        weight, *kept = ctx.saved_tensors
        steps = len(grad_outputs)
        before, cells, gates = kept[:steps], kept[steps : 2 * steps + 1], kept[2 * steps + 1 :]
        grad_gates: list[Tensor] = []
        grad_output, grad_cell = grad_outputs[-1], torch.zeros_like(cells[0])
        for t in reversed(range(steps)):
            grad, grad_cell = _cell_backward(
                grad_output, grad_cell, cells[t], cells[t + 1], gates[t]
            )
            grad_gates.append(grad)
            if t:
                grad_output = torch.addmm(grad_outputs[t - 1], grad, weight)
        inside = torch.stack(grad_gates[::-1])
        recurrent = inside.flatten(0, 1).t() @ torch.stack(before).flatten(0, 1)
        return inside, recurrent, None, None


class LSTMLayer(nn.Module):
    """One LSTM layer, time first; gates in PyTorch's order, initialised as ``nn.LSTM``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(size)
        self.weight_inputs = nn.Parameter(torch.empty(4 * size, size).uniform_(-bound, bound))
        self.weight_hidden = nn.Parameter(torch.empty(4 * size, size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * size).uniform_(-bound, bound))

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The output at every step, and the cell after the last; the first state is a constant."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        with torch.autocast(kind, enabled=False):
            inputs, recurrent, bias, x = (
                tensor.to(dtype)
                for tensor in (self.weight_inputs, self.weight_hidden, self.bias, x)
            )
            inside = nn.functional.linear(x, inputs, bias)
            state = hidden.detach().to(dtype), cell.detach().to(dtype)
            outputs, last = _Recurrence.apply(inside, recurrent, *state)  # type: ignore[no-untyped-call]
        return outputs, last


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and a decoder that shares the embedding's weights.

    Inputs are word numbers, time first; the state is an output and a cell tensor for each layer.
    """

    def __init__(
        self, num_words: int = 10_000, size: int = 1500, num_layers: int = 2, dropout: float = 0.65
    ) -> None:
        super().__init__()
        self.size, self.num_layers = size, num_layers
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(num_words, size)
        self.layers = nn.ModuleList(LSTMLayer(size) for _ in range(num_layers))
        self.decoder = nn.Linear(size, num_words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.embedding.weight

    def state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The state before the first word."""
        return tuple(torch.zeros(batch_size, self.size) for _ in range(2 * self.num_layers))

    def forward(self, words: Tensor, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores of the next word at every position, and the state after the last."""
        x = self.drop(self.embedding(words))
        after: list[Tensor] = []
        for k, layer in enumerate(self.layers):
            x, cell = layer(x, *state[2 * k : 2 * k + 2])
            after += [x[-1], cell]
            x = self.drop(x)
        return self.decoder(x), tuple(after)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what goes in."""

    def __init__(self, size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attend = nn.Linear(size, 3 * size)
        self.project = nn.Linear(size, size)
        self.widen, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output; time is the last axis but one."""
        *leading, time, size = x.shape
        heads = _linear(self.attend, _normalize(self.norm1, x))
        heads = heads.view(-1, time, 3, self.num_heads, size // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self._drop(
            _linear(self.project, seen.transpose(1, 2).reshape(*leading, time, size))
        )
        wide = functional.gelu(_linear(self.widen, _normalize(self.norm2, x)))
        return x + self._drop(_linear(self.narrow, wide))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks, and a decoder that shares the tokens' embedding.

    Inputs are token numbers; nothing is carried from one batch to the next, so the state is empty.
    A token's vector has ``size`` numbers, a context at most ``length`` tokens. With ``batch_first``
    inputs have the batch before time, and not time first as for `LanguageModel`.

    >>> sum(p.numel() for p in Transformer(10_000).parameters())
    10649360
    """

    stacks = True
    """Whether parameters may carry a leading axis of workers."""

    def __init__(
        self,
        num_words: int,
        size: int = 320,
        num_layers: int = 6,
        num_heads: int = 5,
        length: int = 128,
        dropout: float = 0.2,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(num_words, size)
        self.places = nn.Embedding(length, size)
        self.blocks = nn.Sequential(*(Block(size, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(size)
        self.decoder = nn.Linear(size, num_words)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.project, block.narrow):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * num_layers))
        self.decoder.weight = self.embedding.weight

    def state(self, batch_size: int) -> tuple[Tensor, ...]:
        """Nothing is carried over."""
        return ()

    def forward(self, words: Tensor, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores of the next token at every position."""
        tokens = words if self.batch_first else words.transpose(-1, -2)
        time = tokens.shape[-1]
        places = self.places.weight.narrow(-2, 0, time).unsqueeze(-3)
        x = self.drop(_embed(self.embedding, tokens) + places)
        for block in self.blocks:
            x = block(x)
        scores = _linear(self.decoder, _normalize(self.norm, x))
        return (scores if self.batch_first else scores.transpose(-3, -2)), ()
