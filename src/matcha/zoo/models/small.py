"""Models small enough for many workers on two CPU cores."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class SmallCNN(nn.Module):
    """Three 3 × 3 convolutions and a linear head for 8 × 8 digits.

    With ``groups``, GroupNorm instead of BatchNorm, for workers whose data differ.

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
        """Class scores."""
        x = functional.relu(self.conv1(x), inplace=True)
        x = functional.relu(self.norm(self.conv2(x)), inplace=True)
        x = functional.relu(self.conv3(x), inplace=True)
        scores: Tensor = self.head(x.flatten(1))
        return scores
