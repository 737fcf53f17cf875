"""ResNets in the three shapes that calibration papers train: for CIFAR, for Tiny-ImageNet and for large photographs.

    image ─► stem ─► four stages of blocks ─► average pool ─► features ─► linear ─► logits

                 stem                      images   pool          features (18, 34 | 50, 101)
    _cifar       3x3, stride 1             32x32    4x4 -> 1x1    512 | 2048
    _tiny        3x3, stride 1             64x64    8x8 -> 2x2    2048 | 8192, those of a channel side by side
    (plain)      7x7, stride 2, max-pool   224x224  7x7 -> 1x1    2048

The blocks are torchvision's, with the stride on the 3x3 convolution. Weights are drawn as in the published code: on
CIFAR as torch draws them by default, on Tiny-ImageNet convolutions from normal(0, sqrt(2 / (k² · out))), which is also
what torchvision does.

Source: He et al., CVPR 2016; stems, heads and initialisation as released with FeDLaS, dropout as released with MbLS.
Departs from the published code in: the names of the weights, which are torchvision's.
"""

from typing import Any, ClassVar, Unpack

from torch import nn

from fedlas.extras import optional_module
from fedlas.models.base import AbstractNetwork, Common, Head, Source

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class AbstractResNet(AbstractNetwork):
    """Any of them: torchvision's ResNet of a depth."""

    citation = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016."
    depth: ClassVar[int]

    def _torchvision(self) -> Any:
        resnet = optional_module("torchvision.models.resnet", "train")
        block = resnet.Bottleneck if self.depth >= 50 else resnet.BasicBlock
        model = resnet.ResNet(block, BLOCKS[self.depth], num_classes=self.num_classes)
        if self.in_channels != 3:
            model.conv1 = nn.Conv2d(self.in_channels, 64, 7, stride=2, padding=3, bias=False)
            _as_in_tiny(model.conv1)
        return model


class AbstractResNetCIFAR(AbstractResNet):
    """A ResNet that begins gently, because its images are small."""

    image_size = 32

    def drawn(self) -> nn.Module:
        model = self._torchvision()
        _begin_gently(model, self.in_channels)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.reset_parameters()
        return model  # type: ignore[no-any-return]


class AbstractResNetTiny(AbstractResNet):
    """A ResNet that begins gently and keeps four places of the last map apart."""

    image_size = 64

    def drawn(self) -> nn.Module:
        model = self._torchvision()
        _begin_gently(model, self.in_channels)
        _as_in_tiny(model.conv1)
        # Fixed windows: the gradient of adaptive pooling to 2x2 is not deterministic on a GPU.
        model.avgpool = nn.AvgPool2d(4)
        model.fc = nn.Linear(4 * model.fc.in_features, self.num_classes)
        return model  # type: ignore[no-any-return]


class AbstractResNetImageNet(AbstractResNet):
    """A ResNet as torchvision has it, with a dropout before the last layer where the published networks have one.

    Args:
        num_classes: number of logits.
        dropout: probability; None for the published one. Features are taken before it.
        tag: which of torchvision's weights `pretrained=True` loads.
        common: see `AbstractNetwork`.
    """

    image_size = 224
    published_dropout: ClassVar[float] = 0.0

    def __init__(
        self,
        num_classes: int,
        *,
        dropout: float | None = None,
        tag: str = "IMAGENET1K_V1",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_classes, **common)
        self.dropout = self.published_dropout if dropout is None else dropout
        self.tag = tag

    def drawn(self) -> nn.Module:
        model = self._torchvision()
        if self.dropout:
            model.fc = Head(model.fc.in_features, self.num_classes, nn.Dropout(self.dropout))
        return model  # type: ignore[no-any-return]

    def source(self) -> Source:
        return Source.of_torchvision(f"resnet{self.depth}", self.tag)


class ResNet18CIFAR(AbstractResNetCIFAR):
    """ResNet-18 for images of 32x32 pixels, with 512 features."""

    name = "resnet18_cifar"
    depth = 18


class ResNet34CIFAR(AbstractResNetCIFAR):
    """ResNet-34 for images of 32x32 pixels, with 512 features."""

    name = "resnet34_cifar"
    depth = 34


class ResNet50CIFAR(AbstractResNetCIFAR):
    """ResNet-50 for images of 32x32 pixels, with 2048 features."""

    name = "resnet50_cifar"
    depth = 50


class ResNet101CIFAR(AbstractResNetCIFAR):
    """ResNet-101 for images of 32x32 pixels, with 2048 features."""

    name = "resnet101_cifar"
    depth = 101


class ResNet18Tiny(AbstractResNetTiny):
    """ResNet-18 for images of 64x64 pixels, with 2048 features."""

    name = "resnet18_tiny"
    depth = 18


class ResNet34Tiny(AbstractResNetTiny):
    """ResNet-34 for images of 64x64 pixels, with 2048 features."""

    name = "resnet34_tiny"
    depth = 34


class ResNet50Tiny(AbstractResNetTiny):
    """ResNet-50 for images of 64x64 pixels, with 8192 features."""

    name = "resnet50_tiny"
    depth = 50


class ResNet101Tiny(AbstractResNetTiny):
    """ResNet-101 for images of 64x64 pixels, with 8192 features."""

    name = "resnet101_tiny"
    depth = 101


class ResNet50(AbstractResNetImageNet):
    """ResNet-50 for photographs, on request with ImageNet weights, with 2048 features."""

    name = "resnet50"
    depth = 50


class ResNet101(AbstractResNetImageNet):
    """ResNet-101 for photographs, on request with ImageNet weights, with 2048 features and a dropout after them."""

    name = "resnet101"
    depth = 101
    published_dropout = 0.5


def _begin_gently(model: Any, in_channels: int) -> None:
    """Replace the stem by one that keeps the size of the image."""
    model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()


def _as_in_tiny(convolution: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
