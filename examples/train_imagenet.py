"""ImageNet, or any folder with one subfolder a class, on groups of GPUs or single ones.

torchrun --nproc-per-node=8 examples/train_imagenet.py /data/imagenet --plan plan.json
A node of 8 GPUs as one worker, DDP inside: the same on several nodes, with --group 8.
"""

import argparse
import os
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import matcha
from matcha.distributed import Gossip


class Images(Dataset):
    """A folder of folders, one a class; or take torchvision's ImageFolder and transforms."""

    def __init__(self, folder: Path, size: int, train: bool) -> None:
        self.size, self.train = size, train
        self.files = sorted(folder.glob("*/*"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple:
        image = Image.open(self.files[index]).convert("RGB")
        side = (random.uniform(0.3, 1) if self.train else 0.875) * min(image.size)
        left, top = ((n - side) * (random.random() if self.train else 0.5) for n in image.size)
        image = image.resize((self.size, self.size), box=(left, top, left + side, top + side))
        x = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.45) / 0.225
        label = self.classes.index(self.files[index].parent.name)
        return x.flip(2) if self.train and random.random() < 0.5 else x, label


def make(name: str, classes: int) -> nn.Module:
    """A model of torchvision's by its name; with timm: timm.create_model(name, num_classes=...)."""
    if name == "small":  # for a trial without it
        body = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, classes))
    from torchvision import models

    return models.get_model(name, num_classes=classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--group", type=int, default=1, help="processes that are one worker")
    parser.add_argument("--model", default="resnet50", help="of torchvision, or small")
    for name, number in {"--epochs": 90, "--batch": 64, "--size": 224, "--loaders": 4}.items():
        parser.add_argument(name, type=int, default=number)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    train, test = (Images(options.folder / n, options.size, n == "train") for n in ("train", "val"))
    sampler = DistributedSampler(train)
    loaded = {"batch_size": options.batch, "num_workers": options.loaders}
    batches = DataLoader(train, sampler=sampler, drop_last=True, **loaded)
    tests = DataLoader(test, sampler=DistributedSampler(test, shuffle=False), **loaded)

    model = net = make(options.model, len(train.classes)).to(device)
    node = None
    if options.group > 1:  # DDP inside a node, gossip between nodes
        shape = (dist.get_world_size() // options.group, options.group)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "gpu"))
        node = mesh["node"]
        net = DistributedDataParallel(model, process_group=mesh["gpu"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    gossip = Gossip(model, optimizer, matcha.Plan.load(options.plan), mesh=node)
    cast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for images, labels in batches:
            optimizer.zero_grad()
            with cast:
                loss = nn.functional.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()  # the round follows
        schedule.step()
        counts = torch.zeros(2, device=device)
        with gossip.averaged() as average, torch.no_grad(), cast:
            average.eval()
            for images, labels in tests:
                right = average(images.to(device)).argmax(1) == labels.to(device)
                counts += torch.tensor([right.sum(), len(right)], device=device)
        dist.all_reduce(counts)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}  accuracy {counts[0] / counts[1]:.1%}", flush=True)
        gossip.save(options.checkpoints, extra={"schedule": schedule.state_dict(), "epoch": epoch})

    state = gossip.averaged_state_dict()
    if dist.get_rank() == 0:
        torch.save(state, options.checkpoints / "average.pt")
    gossip.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
