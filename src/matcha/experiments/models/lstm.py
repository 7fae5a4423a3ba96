"""The paper's language model: two LSTM layers of 1500 with tied embeddings (Press and Wolf)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and a decoder that shares the embedding's weights.

    Inputs are word numbers, time first; the state is a hidden and a cell tensor for each layer.
    The layers are separate modules with dropout between them, since cuDNN's own dropout cannot be
    captured in a graph.
    """

    def __init__(
        self, num_words: int = 10_000, size: int = 1500, num_layers: int = 2, dropout: float = 0.65
    ) -> None:
        super().__init__()
        self.size, self.num_layers = size, num_layers
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(num_words, size)
        self.layers = nn.ModuleList(nn.LSTM(size, size) for _ in range(num_layers))
        self.decoder = nn.Linear(size, num_words)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.embedding.weight

    def state(self, batch_size: int) -> tuple[Tensor, ...]:
        """The state before the first word."""
        return tuple(torch.zeros(1, batch_size, self.size) for _ in range(2 * self.num_layers))

    def forward(self, words: Tensor, *state: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Scores of the next word at every position, and the state after the last."""
        x = self.drop(self.embedding(words))
        after: list[Tensor] = []
        for k, layer in enumerate(self.layers):
            hidden, cell = (tensor.to(x.dtype) for tensor in state[2 * k : 2 * k + 2])
            x, (hidden, cell) = layer(x, (hidden, cell))
            after += [hidden, cell]
            x = self.drop(x)
        return self.decoder(x), tuple(after)
