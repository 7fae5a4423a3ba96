"""A small transformer language model: blocks of attention to the words before."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        """The block's output; places first, then time."""
        places, time, size = x.shape
        heads = self.attend(self.norm1(x)).view(places, time, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self._drop(self.project(seen.transpose(1, 2).reshape(places, time, size)))
        wide = functional.gelu(self.widen(self.norm2(x)))
        return x + self._drop(self.narrow(wide))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """Embeddings of words and places, blocks, and a decoder that shares the words' embedding.

    Inputs are word numbers, time first, as for `LanguageModel`; nothing is carried from one batch
    to the next, so the state is empty.

    >>> sum(p.numel() for p in Transformer(10_000).parameters())
    10649360
    """

    def __init__(
        self,
        num_words: int,
        size: int = 320,
        num_layers: int = 6,
        num_heads: int = 5,
        length: int = 128,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
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
        """Scores of the next word at every position."""
        time = torch.arange(len(words), device=words.device)
        x = self.drop(self.embedding(words.t()) + self.places(time))
        scores: Tensor = self.decoder(self.norm(self.blocks(x)))
        return scores.transpose(0, 1), ()
