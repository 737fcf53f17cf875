"""ResNets in three variants used in calibration papers: for CIFAR, Tiny-ImageNet and ImageNet-sized images.

    image ─► stem ─► four stages of blocks ─► average pool ─► features ─► linear ─► logits

                 stem                      images   pool          features (18, 34 | 50, 101)
    _cifar       3x3, stride 1             32x32    4x4 -> 1x1    512 | 2048
    _tiny        3x3, stride 1             64x64    8x8 -> 2x2    2048 | 8192, channel by channel
    (plain)      7x7, stride 2, max-pool   224x224  7x7 -> 1x1    2048

The blocks are torchvision's, with the stride on the 3x3 convolution. Weights are initialised as in the official code:
the CIFAR variant uses the defaults of torch; the others draw convolutions from normal(0, sqrt(2 / (k² · out))), as in
torchvision.

Source: He et al., CVPR 2016; stems, heads and initialisation from the official code of FeDLaS, dropout from the
official code of MbLS. Difference from the official code: weights are named as in torchvision.
"""

from typing import Any, ClassVar, Unpack

from torch import nn

from fedlas.extras import optional_module
from fedlas.models.base import AbstractNetwork, Common, Head, Source

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class AbstractResNet(AbstractNetwork):
    """Base class: the ResNet of torchvision of a given depth."""

    citation = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016."
    depth: ClassVar[int]

    def _torchvision(self) -> Any:
        resnet = optional_module("torchvision.models.resnet", "train")
        block = resnet.Bottleneck if self.depth >= 50 else resnet.BasicBlock
        model = resnet.ResNet(block, BLOCKS[self.depth], num_classes=self.num_classes)
        if self.in_channels != 3:
            model.conv1 = nn.Conv2d(self.in_channels, 64, 7, stride=2, padding=3, bias=False)
            _init_convolution(model.conv1)
        return model


class AbstractResNetCIFAR(AbstractResNet):
    """A ResNet whose stem keeps the size of small images."""

    image_size = 32

    def random_init(self) -> nn.Module:
        model = self._torchvision()
        _replace_stem(model, self.in_channels)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d):
                layer.reset_parameters()
        return model  # type: ignore[no-any-return]


class AbstractResNetTiny(AbstractResNet):
    """A ResNet whose stem keeps the size of small images, with 2x2 average pooling before the last layer."""

    image_size = 64

    def random_init(self) -> nn.Module:
        model = self._torchvision()
        _replace_stem(model, self.in_channels)
        _init_convolution(model.conv1)
        # A fixed kernel size: the gradient of adaptive pooling to 2x2 is not deterministic on a GPU.
        model.avgpool = nn.AvgPool2d(4)
        model.fc = nn.Linear(4 * model.fc.in_features, self.num_classes)
        return model  # type: ignore[no-any-return]


class AbstractResNetImageNet(AbstractResNet):
    """The ResNet of torchvision, with a dropout before the last layer if the official code has one.

    Args:
        num_classes: number of logits.
        dropout: dropout probability; None for the official value. Features are taken before the dropout.
        tag: tag of the torchvision weights for `pretrained=True`.
        common: see `AbstractNetwork`.
    """

    image_size = 224
    official_dropout: ClassVar[float] = 0.0

    def __init__(
        self,
        num_classes: int,
        *,
        dropout: float | None = None,
        tag: str = "IMAGENET1K_V1",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_classes, **common)
        self.dropout = self.official_dropout if dropout is None else dropout
        self.tag = tag

    def random_init(self) -> nn.Module:
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
    """ResNet-50 for natural images of 224x224 pixels, optionally with ImageNet weights, with 2048 features."""

    name = "resnet50"
    depth = 50


class ResNet101(AbstractResNetImageNet):
    """ResNet-101 for natural images of 224x224 pixels, optionally with ImageNet weights; 2048 features, dropout."""

    name = "resnet101"
    depth = 101
    official_dropout = 0.5


def _replace_stem(model: Any, in_channels: int) -> None:
    """Replace the stem by a 3x3 convolution that keeps the size of the image."""
    model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()


def _init_convolution(convolution: nn.Conv2d) -> None:
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
