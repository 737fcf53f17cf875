"""A small convolutional network for examples and tests.

    image ─► conv 32 ─► conv 64, stride 2 ─► conv 128, stride 2 ─► global average pool ─► 128 features ─► linear ─►
    logits

Each convolution is 3x3 and followed by a normalisation and a ReLU. About 94,000 parameters, or fewer with a smaller
`width`; intended for the 8x8 digits of scikit-learn and the 28x28 images of (Fashion-)MNIST, but accepts images of any
size. It has no max-pool and no dropout, so that results are reproducible on all devices. With `norm="group"` the output
of a sample does not depend on its batch, so two processes with half a batch each compute the same as one process.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Literal

from torch import nn

from fedlas.errors import UserError
from fedlas.models.base import AbstractNetwork

GROUPS = 8


class SmallCNN(AbstractNetwork):
    """Three convolutions and a linear layer, for small greyscale images; trains in seconds on a CPU.

    Args:
        num_classes: number of logits.
        norm: "batch" for BatchNorm, "group" for GroupNorm.
        in_channels: number of channels of an image.
        width: channels of the first convolution, a multiple of 8; the others have twice and four times as many.
        pretrained: see `AbstractNetwork`.
    """

    name = "small_cnn"
    citation = "No paper; part of this package."

    def __init__(
        self,
        num_classes: int,
        *,
        norm: Literal["batch", "group"] = "batch",
        in_channels: int = 1,
        width: int = 32,
        pretrained: bool | str | Path = False,
    ) -> None:
        super().__init__(num_classes, in_channels=in_channels, pretrained=pretrained)
        if norm not in {"batch", "group"}:
            raise UserError(f'norm is {norm!r}; expected "batch" or "group"')
        if width < 1 or width % GROUPS:
            raise UserError(f"width is {width!r}; expected a multiple of {GROUPS}, such as 32")
        self.norm, self.width = norm, width

    def random_init(self) -> nn.Module:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        channels = self.in_channels
        for n, width in enumerate((self.width, 2 * self.width, 4 * self.width), start=1):
            parts[f"conv{n}"] = nn.Conv2d(channels, width, 3, stride=1 if n == 1 else 2, padding=1, bias=False)
            parts[f"norm{n}"] = nn.BatchNorm2d(width) if self.norm == "batch" else nn.GroupNorm(GROUPS, width)
            parts[f"relu{n}"] = nn.ReLU(inplace=True)
            channels = width
        parts["pool"] = nn.AdaptiveAvgPool2d(1)
        parts["flatten"] = nn.Flatten()
        parts["fc"] = nn.Linear(channels, self.num_classes)
        return nn.Sequential(parts)
