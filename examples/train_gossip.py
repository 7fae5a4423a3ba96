"""Handwritten digits with Gossip: a step waits for a few neighbours at most, often for none.

torchrun --nproc-per-node=4 examples/train_gossip.py
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import matcha.distributed


def train_epoch(model, optimizer, loader) -> float:
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gossip = matcha.distributed.Gossip(model, optimizer, matcha.plan(matcha.families.ring(4)))

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, optimizer, loader)
        if rank == 0:
            print(f"epoch {epoch + 1}  loss {loss:.4f}", flush=True)

    with torch.no_grad(), gossip.averaged():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    if rank == 0:
        print(f"test accuracy {accuracy:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
