"""A small GPT on the characters of a text file, every worker on batches of its own.

torchrun --nproc-per-node=4 examples/train_nanogpt.py --text input.txt
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import matcha
from matcha.distributed import Gossip


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, then channels."""
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the token embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of every next token."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places(places))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--plan", type=Path, help="by default a ring, or a pair")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--save", type=Path, default=Path("gpt.pt"))
    options = parser.parse_args()

    text = options.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    train, test = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = GPT(len(letters), options.context, options.width, options.layers, heads=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    families = matcha.families
    topology = families.ring(options.workers) if options.workers > 2 else families.path(2)
    plan = matcha.Plan.load(options.plan) if options.plan else matcha.plan(topology, budget=0.5)
    gossip = Gossip(model, optimizer, plan, overlap=True)
    own = torch.Generator().manual_seed(gossip.rank)  # each worker draws its own batches

    def loss(part: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(part) - options.context, (options.batch,), generator=generator)
        rows = torch.stack([part[i : i + options.context + 1] for i in starts]).to(device)
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    for step in range(1, options.steps + 1):
        for group in optimizer.param_groups:  # warm up, then follow a cosine
            progress = step / options.steps
            group["lr"] = 1e-3 * min(1, step / 100, 0.5 * (1.05 + math.cos(math.pi * progress)))
        optimizer.zero_grad()
        loss(train, own).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # the round follows
        if step % options.evaluate_every == 0 or step == options.steps:
            with gossip.averaged(), torch.no_grad():  # on every worker: they meet here
                value = sum(loss(test, own).item() for _ in range(10)) / 10
            if gossip.rank == 0:
                print(f"step {step}  test loss of the average {value:.3f}", flush=True)

    state = gossip.averaged_state_dict()
    if gossip.rank == 0:
        torch.save(state, options.save)
    gossip.detach()


if __name__ == "__main__":
    main()
