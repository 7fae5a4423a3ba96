"""Handwritten digits with Gossip under Ray Train, which starts the workers and the process group.

python examples/train_ray.py --workers 2
"""

import argparse
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from sklearn.datasets import load_digits
from torch import nn

import matcha.distributed


def train(config: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    mine = slice(rank, 1500, size)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = matcha.plan(matcha.families.path(size), budget=0.5)
    with matcha.distributed.Gossip(model, optimizer, plan) as gossip:
        for _ in range(config["epochs"]):
            for inputs, targets in zip(images[mine].split(50), labels[mine].split(50), strict=True):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            with torch.no_grad(), gossip.averaged():
                hits = model(images[1500:]).argmax(1) == labels[1500:]
            ray.train.report({"accuracy": hits.float().mean().item()})
    if rank == 0:
        print(f"test accuracy {hits.float().mean().item():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers),
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
