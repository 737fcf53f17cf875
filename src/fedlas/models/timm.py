"""Networks through timm: the vision transformer of the fine-grained tables, and any other one by its name.

A transformer gives the CLS token after its final LayerNorm to the last layer, and these are the published features.
The norm leaves them nearly one length; `pre_norm=True` takes the features before it, where length still says something.

Source: Dosovitskiy et al., ICLR 2021; timm's network and weights as released with FeDLaS. Departs from the published
code in: nothing. (Its text says that the weights come from ImageNet-1k; they have seen ImageNet-21k first.)
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from fedlas.extras import optional_module
from fedlas.models.base import AbstractLibrary, AbstractNetwork, Common, Head, Source, without_weights


class ViTBasePatch16At384(AbstractNetwork):
    """Vision transformer ViT-B/16 for photographs of 384x384 pixels, on request with ImageNet weights; 768 features.

    Args:
        num_classes: number of logits.
        pre_norm: take the features before the final LayerNorm instead of after it.
        tag: which of timm's weights `pretrained=True` loads; "augreg_in1k" has seen ImageNet-1k only.
        settings: passed on to timm, such as `drop_path_rate` or `img_size`.
        common: see `AbstractNetwork`.
    """

    name = "vit_base_patch16_384"
    citation = "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021."
    image_size = 384

    def __init__(
        self,
        num_classes: int,
        *,
        pre_norm: bool = False,
        tag: str = "augreg_in21k_ft_in1k",
        settings: Mapping[str, Any] | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(num_classes, **common)
        self.pre_norm, self.tag, self.settings = pre_norm, tag, without_weights(settings)

    def drawn(self) -> nn.Module:
        model = _drawn(self.name, self.num_classes, self.in_channels, self.settings)
        if self.pre_norm:
            # The norm looks at each token alone, so the head can as well apply it to the only one that it gets.
            head = Head(model.head.in_features, self.num_classes, before=model.norm)
            head.weight, head.bias = model.head.weight, model.head.bias
            model.head, model.norm = head, nn.Identity()
        return model  # type: ignore[no-any-return]

    def source(self) -> Source:
        return Source.of_timm(f"{self.name}.{self.tag}")

    def converted(self, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        converted = _converted(weights, model)
        if self.pre_norm:
            moved = {f"norm.{part}": f"head.before.{part}" for part in ("weight", "bias")}
            converted = {moved.get(name, name): value for name, value in converted.items()}
        return converted


class Timm(AbstractLibrary):
    """Any network of timm, as "timm:NAME"."""

    name = "timm"
    citation = "Wightman, PyTorch Image Models, 2019."

    @classmethod
    def networks(cls) -> Collection[str]:
        names: list[str] = optional_module("timm", "train").list_models()
        return names

    @classmethod
    def has(cls, network: str) -> bool:
        return bool(optional_module("timm", "train").is_model(network))  # understands the tag in NAME.TAG too

    def drawn(self) -> nn.Module:
        model: nn.Module = _drawn(self.network, self.num_classes, self.in_channels, self.settings)
        return model

    def source(self) -> Source:
        return Source.of_timm(self.network)

    def converted(self, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        return _converted(weights, model)


def _drawn(network: str, num_classes: int, in_channels: int, settings: Mapping[str, Any]) -> Any:
    channels = {} if in_channels == 3 else {"in_chans": in_channels}  # not every network takes it
    return optional_module("timm", "train").create_model(network, num_classes=num_classes, **channels, **settings)


def _converted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Let timm bring older or resized weights into the form that its network has now."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return dict(convert(weights, model)) if callable(convert) else weights
