"""Networks of timm: the vision transformer of the fine-grained tables, and any other network by its name.

The paper uses the CLS token after the final LayerNorm as features; the LayerNorm makes their norms nearly equal.
`pre_norm=True` takes the features before the LayerNorm, where norms are informative.

Source: Dosovitskiy et al., ICLR 2021; network and weights of timm as in the official code of FeDLaS. (The paper states
that the weights come from ImageNet-1k; they were pre-trained on ImageNet-21k first.)
"""

import sys
from collections.abc import Collection, Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from fedlas.extras import optional_module
from fedlas.models.base import AbstractLibrary, AbstractNetwork, Common, Head, Source, without_weights


class ViTBasePatch16At384(AbstractNetwork):
    """Vision transformer ViT-B/16 for natural images of 384x384 pixels, optionally with ImageNet weights; 768 features.

    Args:
        num_classes: number of logits.
        pre_norm: take the features before the final LayerNorm instead of after it.
        tag: tag of the timm weights for `pretrained=True`; "augreg_in1k" was trained on ImageNet-1k only.
        settings: options of timm, such as `drop_path_rate` or `img_size`.
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

    def random_init(self) -> nn.Module:
        model = _create_model(self.name, self.num_classes, self.in_channels, self.settings)
        if self.pre_norm:
            # The norm acts on each token separately, so the head can apply it to its only token.
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
    """Any network of timm, by the name "timm:NAME"."""

    name = "timm"
    citation = "Wightman, PyTorch Image Models, 2019."

    @classmethod
    def networks(cls) -> Collection[str]:
        names: list[str] = optional_module("timm", "train").list_models()
        return names

    @classmethod
    def has(cls, network: str) -> bool:
        return bool(optional_module("timm", "train").is_model(network))  # accepts NAME.TAG too

    def random_init(self) -> nn.Module:
        model: nn.Module = _create_model(self.network, self.num_classes, self.in_channels, self.settings)
        return model

    def source(self) -> Source:
        return Source.of_timm(self.network)

    def converted(self, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        return _converted(weights, model)


def _create_model(network: str, num_classes: int, in_channels: int, settings: Mapping[str, Any]) -> Any:
    channels = {} if in_channels == 3 else {"in_chans": in_channels}  # not all networks have this option
    return optional_module("timm", "train").create_model(network, num_classes=num_classes, **channels, **settings)


def _converted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert older or resized weights with the filter of timm, if the network has one."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    return dict(convert(weights, model)) if callable(convert) else weights
