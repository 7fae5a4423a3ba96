"""Handwritten digits with a Recorder: records, a target, checkpoints to go on from, a report.

torchrun --nproc-per-node=4 examples/train_recorded.py runs/recorded
torchrun --nproc-per-node=4 examples/train_recorded.py runs/recorded --resume   # after Ctrl-C
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
    parser.add_argument("output")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=20)
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

    recording = {"checkpoint_every": 1, "target_loss": 0.1, "resume": options.resume}
    with matcha.distributed.Recorder(gossip, options.output, **recording) as log:
        for epoch in log.epochs(options.epochs):
            sampler.set_epoch(epoch)
            loss = train_epoch(model, optimizer, loader)
            with torch.no_grad(), gossip.averaged():
                found = nn.functional.cross_entropy(model(images[:1500]), labels[:1500])
            log(loss=loss, train_loss=found)

    with torch.no_grad(), gossip.averaged():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    if rank == 0:
        print(f"test accuracy {accuracy:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
