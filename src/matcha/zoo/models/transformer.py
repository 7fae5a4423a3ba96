"""A small transformer language model: blocks of attention to the tokens before."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from matcha.zoo.models.layers import embed, linear, normalize


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
        heads = linear(self.attend, normalize(self.norm1, x))
        heads = heads.view(-1, time, 3, self.num_heads, size // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self._drop(linear(self.project, seen.transpose(1, 2).reshape(*leading, time, size)))
        wide = functional.gelu(linear(self.widen, normalize(self.norm2, x)))
        return x + self._drop(linear(self.narrow, wide))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Transformer(nn.Module):
    """Embeddings of tokens and positions, blocks, and a decoder that shares the tokens' embedding.

    Inputs are token numbers; nothing is carried from one batch to the next, so the state is empty.

    Args:
        num_words: size of the vocabulary.
        size: of a token's vector.
        num_layers: number of blocks.
        num_heads: of attention in each block.
        length: the longest context.
        dropout: share of values dropped in training.
        batch_first: whether inputs have the batch before time, and not time first as for
            `LanguageModel`.

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
        x = self.drop(embed(self.embedding, tokens) + places)
        for block in self.blocks:
            x = block(x)
        scores = linear(self.decoder, normalize(self.norm, x))
        return (scores if self.batch_first else scores.transpose(-3, -2)), ()
