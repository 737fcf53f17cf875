"""Networks of torchvision: any classifier by its name."""

from collections.abc import Collection
from typing import Any

from torch import nn

from fedlas.extras import optional_module
from fedlas.models.base import AbstractLibrary, Source


class Torchvision(AbstractLibrary):
    """Any network of torchvision, by the name "torchvision:NAME"."""

    name = "torchvision"
    citation = "TorchVision maintainers and contributors, TorchVision, 2016."

    @classmethod
    def networks(cls) -> Collection[str]:
        models = optional_module("torchvision.models", "train")
        names: list[str] = models.list_models(module=models)  # classifiers only
        return names

    def random_init(self) -> nn.Module:
        models = optional_module("torchvision.models", "train")
        model: nn.Module = models.get_model(self.network, num_classes=self.num_classes, **self.settings)
        if self.in_channels != 3:
            _take_channels(model, self.in_channels)
        return model

    def source(self) -> Source:
        return Source.of_torchvision(self.network)


def _take_channels(model: nn.Module, in_channels: int) -> None:
    """Replace the first convolution by one for another number of input channels."""
    path, first = next((path, part) for path, part in model.named_modules() if isinstance(part, nn.Conv2d))
    sizes: dict[str, Any] = {name: getattr(first, name) for name in ("kernel_size", "stride", "padding", "dilation")}
    parent, _, name = path.rpartition(".")
    other = nn.Conv2d(in_channels, first.out_channels, bias=first.bias is not None, **sizes)
    setattr(model.get_submodule(parent), name, other)
