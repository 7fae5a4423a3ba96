"""Wide residual networks (Zagoruyko and Komodakis, 2016): the paper's CIFAR-100 model."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import InputError
from matcha.zoo.models.resnet import initialise


class WideBlock(nn.Module):
    """Normalise, rectify, convolve, twice; the shortcut starts after the first rectifier."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(into)
        self.conv1 = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        same = into == out and stride == 1
        self.shortcut = None if same else nn.Conv2d(into, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        active = functional.relu(self.norm1(x), inplace=True)
        out = functional.relu(self.norm2(self.conv1(active)), inplace=True)
        short: Tensor = x if self.shortcut is None else self.shortcut(active)
        total: Tensor = self.conv2(out) + short
        return total


class WideResNet(nn.Module):
    """WideResNet-``depth``-``widening``; 28-10 has 36.5 million parameters."""

    compiled_blocks = (WideBlock,)

    def __init__(self, depth: int, widening: int, num_classes: int) -> None:
        super().__init__()
        n, rest = divmod(depth - 4, 6)
        if rest or n < 1:
            raise InputError(f"a WideResNet's depth must be 6n + 4 (10, 16, 22, 28), not {depth}")
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        into = 16
        for stage in range(3):
            out = 16 * widening << stage
            for k in range(n):
                blocks.append(WideBlock(into, out, 2 if stage and not k else 1))
                into = out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(into)
        self.head = nn.Linear(into, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.blocks(self.stem(x))
        x = functional.relu(self.norm(x), inplace=True).mean((2, 3))
        scores: Tensor = self.head(x)
        return scores
