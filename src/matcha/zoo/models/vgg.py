"""VGG-16 with BatchNorm for 32 × 32 images (Simonyan and Zisserman, 2014)."""

from __future__ import annotations

from torch import Tensor, nn

from matcha.zoo.models.resnet import initialise

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Thirteen convolutions in five groups, each followed by pooling, and a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        into = 3
        for group in _WIDTHS:
            for out in group:
                layers += [
                    nn.Conv2d(into, out, 3, padding=1, bias=False),
                    nn.BatchNorm2d(out),
                    nn.ReLU(inplace=True),
                ]
                into = out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(into, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.features(x).flatten(1))
        return scores
