"""Image classifiers: residual networks, VGGs and a small CNN, for images of 32 × 32 or 8 × 8."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from matcha.errors import InputError

# -- residual networks (He et al., 2015), in the variants the paper trained


def initialize(module: nn.Module) -> None:
    """He initialization of convolutions; normalization is made as the identity."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


Norm = nn.BatchNorm2d | nn.GroupNorm


def normalization(width: int, groups: int) -> Norm:
    """BatchNorm, or GroupNorm in that many groups, which does not depend on the batch."""
    return nn.GroupNorm(min(groups, width // 4), width) if groups else nn.BatchNorm2d(width)


def _conv(into: int, out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(into, out, size, stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, into: int, width: int, stride: int, groups: int = 0) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(into, width, 3, stride), normalization(width, groups)
        self.conv2, self.norm2 = _conv(width, width, 3), normalization(width, groups)
        self.shortcut = _shortcut(into, width, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        return functional.relu(out + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut; four times as wide outside."""

    expansion = 4

    def __init__(self, into: int, width: int, stride: int, groups: int = 0) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1, self.norm1 = _conv(into, width, 1), normalization(width, groups)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), normalization(width, groups)
        self.conv3, self.norm3 = _conv(width, out, 1), normalization(out, groups)
        self.shortcut = _shortcut(into, out, stride, groups)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        out = functional.relu(self.norm2(self.conv2(out)), inplace=True)
        out = self.norm3(self.conv3(out))
        return functional.relu(out + self.shortcut(x), inplace=True)


def _shortcut(into: int, out: int, stride: int, groups: int) -> nn.Module:
    if into == out and stride == 1:
        return nn.Identity()
    return nn.Sequential(_conv(into, out, 1, stride), normalization(out, groups))


class ResNet(nn.Module):
    """A 3 × 3 stem, stages of blocks that halve the image and double the width, a linear head."""

    compiled_blocks = (BasicBlock, Bottleneck)

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        width: int,
        num_classes: int,
        groups: int = 0,
    ) -> None:
        super().__init__()
        self.stem, self.norm = _conv(3, width, 3), normalization(width, groups)
        blocks: list[nn.Module] = []
        into = width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                stride = 2 if stage and not k else 1
                blocks.append(block(into, width << stage, stride, groups))
                into = (width << stage) * block.expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(into, num_classes)
        initialize(self)
        # Each block starts as its shortcut (Goyal et al., 2017). Without this the paper's 24
        # bottlenecks add up to features so large that the first steps overshoot at any usual rate.
        for module in blocks:
            last = "norm3" if block is Bottleneck else "norm2"
            nn.init.zeros_(module.get_parameter(f"{last}.weight"))

    @classmethod
    def resnet18(cls, num_classes: int) -> ResNet:
        """ResNet-18 for small images: four stages of two basic blocks, 11 million parameters."""
        return cls(BasicBlock, (2, 2, 2, 2), 64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)), inplace=True)
        x = self.blocks(x).mean((2, 3))
        scores: Tensor = self.head(x)
        return scores


def resnet(depth: int, num_classes: int, width: int = 16, groups: int = 0) -> ResNet:
    """The CIFAR family of depth 6n + 2; from depth 44 on with bottlenecks.

    With ``groups`` its layers are normalised in groups of channels (GroupNorm) and not over the
    batch, which is what workers with different data want.

    ``resnet(50, ...)`` is the paper's ResNet-50: n = 8 bottlenecks in each of three stages, 0.76
    million parameters, not the ImageNet network of that name.
    """
    n, rest = divmod(depth - 2, 6)
    if rest or n < 1:
        raise InputError(f"a CIFAR ResNet's depth must be 6n + 2 (8, 14, 20, ...), not {depth}")
    block = Bottleneck if depth >= 44 else BasicBlock
    return ResNet(block, (n, n, n), width, num_classes, groups)


# -- wide residual networks (Zagoruyko and Komodakis, 2016): the paper's CIFAR-100 model


class WideBlock(nn.Module):
    """Normalize, rectify, convolve, twice; the shortcut starts after the first rectifier."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(into), _conv(into, out, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(out), _conv(out, out, 3)
        same = into == out and stride == 1
        self.shortcut = None if same else _conv(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
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
        self.stem = _conv(3, 16, 3)
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
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = functional.relu(self.norm(x), inplace=True).mean((2, 3))
        scores: Tensor = self.head(x)
        return scores


# -- VGGs (Simonyan and Zisserman, 2014): 16 with BatchNorm, 11 without normalization

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Thirteen convolutions in five groups, each followed by pooling, and a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = 3
        for group in _WIDTHS:
            for out in group:
                layers += [_conv(into, out, 3), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
                into = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(into, num_classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x).flatten(1))
        return scores


class VGG11(nn.Module):
    """Eight convolutions without normalization and three linear layers, for RelaySGD's Table 2.

    What is pooled is rectified after and not before, which is the same on a quarter of the values.

    >>> sum(p.numel() for p in VGG11(10).parameters())
    9750922
    """

    pooled: tuple[int, ...] = (0, 1, 3, 5, 7)
    """The convolutions that end a group."""

    def __init__(self, num_classes: int, dropout: float = 0.5, width: int = 64) -> None:
        super().__init__()
        widths = (3, *(times * width for times in (1, 2, 4, 4, 8, 8, 8, 8)))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(into, out, 3, padding=1) for into, out in pairwise(widths)
        )
        last = widths[-1]
        self.hidden = nn.ModuleList((nn.Linear(last, last), nn.Linear(last, last)))
        self.head = nn.Linear(last, num_classes)
        self.dropout = nn.Dropout(dropout)
        initialize(self)
        for name, bias in self.convolutions.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.convolutions):
            x = layer(x)
            x = functional.relu(functional.max_pool2d(x, 2) if k in self.pooled else x)
        x = x.flatten(-3)
        for layer in self.hidden:
            x = functional.relu(layer(self.dropout(x)), inplace=True)
        scores: Tensor = self.head(x)
        return scores


# -- for many workers on two CPU cores


def perceptron(num_classes: int, width: int = 512) -> nn.Sequential:
    """Two hidden layers for 8 × 8 digits: many bytes for little computing.

    >>> sum(p.numel() for p in perceptron(10).parameters())
    301066
    """
    hidden = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, num_classes))


class SmallCNN(nn.Module):
    """Three 3 × 3 convolutions and a linear head for 8 × 8 digits.

    With ``groups``, GroupNorm instead of BatchNorm, for heterogeneous data.

    >>> sum(p.numel() for p in SmallCNN(10).parameters())
    6170
    """

    def __init__(self, num_classes: int, groups: int = 0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(groups, 16) if groups else nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16 * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x), inplace=True)
        x = functional.relu(self.norm(self.conv2(x)), inplace=True)
        x = functional.relu(self.conv3(x), inplace=True)
        scores: Tensor = self.head(x.flatten(1))
        return scores
