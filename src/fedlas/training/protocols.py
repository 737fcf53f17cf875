"""Predefined recipes: hyperparameters of the paper, of its official code, and of protocols for shorter runs.

    "paper"      the settings of the paper; model selection on a held-out part of the training data
    "official"   the same, with the deviations of the official code (docs/decisions.md)
    "fast"       20 epochs of ResNet-18 on small images: batch 512, one cycle, Nesterov
    "small"      a few epochs for digits and the like, on a CPU
    "standard"   100 epochs of ResNet-18 on small images, batch 128; half of the validation split for feedback alone

Sources: the section on implementation of the paper, and the configuration files of its official code; where they
differ, "paper" follows the paper and "official" the code. Tiny-ImageNet has 100 epochs in both: the 10 epochs of the
official configuration end before its first milestone. Where the official code selects on the test split, a loss that
learns from validation data would learn from test labels; such a loss uses held-out images in "official" too.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fedlas.catalog import keywords, one_of
from fedlas.data import CATALOG as DATA
from fedlas.errors import UserError
from fedlas.losses import CATALOG as LOSSES
from fedlas.models import CATALOG as MODELS
from fedlas.models import AbstractNetwork
from fedlas.training.recipe import Recipe
from fedlas.training.recipe_text import Plain

Values = dict[str, Plain]

SMALL_IMAGES = ("cifar10", "cifar100")
NATURAL_IMAGES = ("cub200", "aircraft")
TINY = "tiny_imagenet"
# Precision and layout of ResNets for small images; not specified in the paper (docs/decisions.md).
FAST_NUMERICS: Values = {"precision": "bf16", "channels_last": True}


@dataclass(frozen=True)
class Protocol:
    """Training settings that do not depend on the loss.

    Args:
        name: value for `recipe_for(protocol=...)`.
        summary: description in one sentence.
        models: returns the networks of the protocol for a data set; the first one is the default.
        values: returns the recipe fields for a data set and a network.
        paper_data_only: whether the settings are defined only for the data sets of the paper.
    """

    name: str
    summary: str
    models: Callable[[str], tuple[str, ...]]
    values: Callable[[str, str], Values]
    paper_data_only: bool = False


def paper_models(data: str) -> tuple[str, ...]:
    """Return the networks that the paper trains on a data set."""
    if data in SMALL_IMAGES:
        return "resnet50_cifar", "resnet101_cifar"
    if data == TINY:
        return "resnet50_tiny", "resnet101_tiny"
    return ("vit_base_patch16_384", "resnet101") if data in NATURAL_IMAGES else ()


def paper_values(data: str, model: str) -> Values:
    """Return the recipe fields of the paper."""
    sgd: Values = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "clip": 2.0}
    steps: Values = {"schedule": "multi_step", "decay": 0.1, "precision": "fp32"}
    steps |= FAST_NUMERICS if model.startswith("resnet") and data not in NATURAL_IMAGES else {}
    if data in SMALL_IMAGES:
        # 45,000 samples in batches of 128 leave 72 samples, which the official code drops on CIFAR-10 only.
        drop = {"drop_last": data == "cifar10"}
        return sgd | steps | drop | {"epochs": 350, "milestones": (150, 250), "batch_size": 128}
    if data == TINY:
        return sgd | steps | {"epochs": 100, "milestones": (40, 60), "batch_size": 64}
    vit = model.removeprefix("timm:").startswith("vit")
    # For ResNet-101 only data, batch size and a general learning rate are known, from an earlier version of the code.
    optimizer: Values = {"optimizer": "adamw", "lr": 1e-4} if vit else {}
    weights: Values = {"model_options": {"pretrained": True}} if _has_weights(model) else {}
    sizes: Values = {"batch_size": 16 if vit else 32, "eval_batch_size": 64, "drop_last": True}
    images: Values = {"data_options": {"image_size": _image_size(model)}}
    return sgd | steps | optimizer | sizes | images | weights | {"epochs": 200, "milestones": (80, 160)}


def _image_size(model: str) -> int:
    """Return the image size of a network for natural images, which many names end with."""
    network, match = MODELS.entries.get(model), re.search(r"_(\d{3})(?:\.|$)", model)
    return (network and network.image_size) or (int(match[1]) if match else 224)


def _has_weights(model: str) -> bool:
    """Return whether pretrained weights of a network exist; assume so for networks of libraries."""
    network = MODELS.entries.get(model)
    return network is None or network.source is not AbstractNetwork.source


def official_values(data: str, model: str) -> Values:
    """Return the recipe fields of the official code."""
    values = paper_values(data, model) | {"precision": "fp32", "channels_last": False}
    return values | {"data_options": {**values.get("data_options", {}), **DATA.find(data).official_options}}


def official_preprocessing_differs(data: str, options: Mapping[str, Plain] | None = None) -> bool:
    """Return whether the official code preprocesses the test images differently from these options."""
    return any((options or {}).get(name) != value for name, value in DATA.find(data).official_options.items())


def fast_models(data: str) -> tuple[str, ...]:
    """Return the network of the fast protocol."""
    if data == TINY:
        return ("resnet18_tiny",)
    return ("resnet18_cifar",) if data in (*SMALL_IMAGES, "svhn") else ()


def fast_values(data: str, _model: str) -> Values:
    """Return the recipe fields for many short runs on a GPU."""
    tuned: Values = {"lr": 0.2, "weight_decay": 2e-3 if data == "cifar100" else 1e-3}  # for validation accuracy
    step: Values = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "batch_size": 512} | tuned
    cycle: Values = {"epochs": 20, "schedule": "one_cycle", "peak_at": 0.25, "start_factor": 0.1, "drop_last": True}
    return step | cycle | FAST_NUMERICS | {"eval_batch_size": 2500}


def small_models(data: str) -> tuple[str, ...]:
    """Return the network for small grey images."""
    return ("small_cnn",) if _channels(data) == 1 else ()


def small_values(_data: str, _model: str) -> Values:
    """Return the recipe fields for a CPU."""
    step: Values = {"batch_size": 64, "lr": 0.1, "nesterov": True, "clip": 2.0}
    return step | {"epochs": 15, "schedule": "one_cycle"}


def standard_models(data: str) -> tuple[str, ...]:
    """Return the network of the standard protocol."""
    return ("resnet18_cifar",) if data in (*SMALL_IMAGES, "fashion_mnist") else ()


def standard_values(_data: str, _model: str) -> Values:
    """Return the recipe fields for the evaluation of `closed_loop` (docs/closed_loop_design.md)."""
    sgd: Values = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "clip": 2.0, "batch_size": 128}
    steps: Values = {"epochs": 100, "schedule": "multi_step", "milestones": (50, 75), "decay": 0.1}
    return sgd | steps | FAST_NUMERICS | {"halve_validation": True, "evaluated": "last", "eval_batch_size": 2500}


PROTOCOLS = (
    Protocol("paper", "the settings of the paper", paper_models, paper_values, paper_data_only=True),
    Protocol("official", "the settings of the official code", paper_models, official_values, paper_data_only=True),
    Protocol("fast", "20 epochs of a ResNet-18, batch 512, one cycle", fast_models, fast_values),
    Protocol("small", "15 epochs of a small network, for a CPU", small_models, small_values),
    Protocol("standard", "100 epochs of a ResNet-18, batch 128, steps", standard_models, standard_values),
)
DEFAULT = "small"  # for data sets that no protocol is made for


def recipe_for(
    data: str, model: str | None = None, loss: str = "ce", *, protocol: str | None = None, **changes: Plain
) -> Recipe:
    """Return the predefined recipe for a data set, a network and a loss.

    Args:
        data: name of the data set.
        model: name of the network; by default that of the protocol.
        loss: name of the loss.
        protocol: "paper", "official", "fast", "small" or "standard"; by default the first one for the data set.
        changes: recipe fields to change; entries of `..._options` are added to those of the protocol.
    """
    DATA.find(data)
    LOSSES.find(loss)
    chosen = _protocol(data, model, protocol)
    model = model or _default_model(chosen, data)
    values = chosen.values(data, model)
    data_options = values.get("data_options", {})
    if data_options.get("selection") == "official" and LOSSES.find(loss).needs_validation:
        values["data_options"] = {name: value for name, value in data_options.items() if name != "selection"}
    values["loss_options"] = loss_options(loss, data, official=chosen.name == "official")
    values["model_options"] = {**_channel_options(data, model), **values.get("model_options", {})}
    merged = {n: {**values.get(n, {}), **v} if n.endswith("_options") else v for n, v in changes.items()}
    return Recipe(data=data, model=model, loss=loss).replace(**values).replace(**merged)


def loss_options(loss: str, data: str, *, official: bool = False) -> Values:
    """Return the hyperparameters that the paper gives a loss on a data set where they differ from its defaults."""
    small, base, is_fedlas = data in SMALL_IMAGES, loss.removeprefix("fedlas_"), loss.startswith("fedlas_")
    has_values = data in (*SMALL_IMAGES, TINY) or data in NATURAL_IMAGES
    if not has_values:
        return {}
    values: Values = {}
    if base == "ls":
        values["alpha"] = 0.1 if data == "cifar100" else 0.05
    if base in ("mbls", "acls"):
        # The official configurations of the two baselines have 0.1 everywhere, the paper has 0.05 for large images.
        values |= {"margin": 6.0 if small else 10.0, "lambda_": 0.1 if small or (official and not is_fedlas) else 0.05}
    if is_fedlas:
        values["beta"] = 4.0 if base == "ls" else (1.0 if data == "cifar100" else 0.5)
        values["theta"] = 0.95 if data == "cifar10" else 0.5
        if official:
            values["preset"] = "official"
            # The paper refers to its settings for Tiny-ImageNet, the official configurations have this value.
            values["theta"] = 0.001 if data in NATURAL_IMAGES else values["theta"]
    if loss == "dual_focal":
        values["gamma"] = 5.0 if small else 2.3
    return values


def list_recipes(losses: list[str] | None = None) -> Iterator[tuple[str, Recipe]]:
    """Iterate over the names of the protocols and their predefined recipes."""
    for protocol in PROTOCOLS:
        for data in DATA.entries:
            for model in protocol.models(data):
                for loss in LOSSES.entries if losses is None else losses:
                    yield protocol.name, recipe_for(data, model, loss, protocol=protocol.name)


def compared_losses() -> dict[str, str]:
    """Return the display names of cross-entropy and of each FeDLaS loss, which follows its base loss."""
    fedlas_losses = [name for name in LOSSES.entries if name.startswith("fedlas_")]
    names = ["ce", *(name_in_pair for name in fedlas_losses for name_in_pair in (name.removeprefix("fedlas_"), name))]
    return {name: LOSSES.find(name).__name__.replace("FeDLaS", "FeDLaS-") for name in names}


def protocol_named(name: str) -> Protocol:
    """Return the protocol with a name."""
    by_name = {protocol.name: protocol for protocol in PROTOCOLS}
    return by_name[one_of("protocol", name, list(by_name))]


def _protocol(data: str, model: str | None, name: str | None) -> Protocol:
    if name is not None:
        chosen = protocol_named(name)
        if chosen.paper_data_only and not chosen.models(data):
            alternatives = [
                protocol.name + ("" if model or protocol.models(data) else " (with --model)")
                for protocol in PROTOCOLS
                if not protocol.paper_data_only
            ]
            raise UserError(f"the protocol {name!r} does not define {data!r}; use one of: {', '.join(alternatives)}")
        return chosen
    # First a protocol for this network, then one for this data set, then the smallest.
    for protocol in PROTOCOLS:
        if model is not None and model in protocol.models(data):
            return protocol
    return next((protocol for protocol in PROTOCOLS if protocol.models(data)), protocol_named(DEFAULT))


def _default_model(protocol: Protocol, data: str) -> str:
    models = protocol.models(data)
    if protocol.name == DEFAULT and not any(other.models(data) for other in PROTOCOLS):
        raise UserError(
            f"the default protocol, {protocol.name!r}, has no network for {data!r}, and no other is made for it; name "
            "one (--model NAME, or model=..., see: fedlas list models), and set epochs, lr and, for fine-tuning, "
            "model_options.pretrained=true"
        )
    if not models:
        raise UserError(
            f"the protocol {protocol.name!r} has no network for {data!r}; name one: --model NAME, "
            "or model=..., such as those of: fedlas list models"
        )
    return models[0]


def _channel_options(data: str, model: str) -> Values:
    """Return the network option for the number of image channels, if it differs from the default."""
    network, channels = MODELS.entries.get(model), _channels(data)
    default = 1 if model == "small_cnn" else 3
    if channels == default or (network is not None and "in_channels" not in keywords(network)):
        return {}
    return {"in_channels": channels}


def _channels(data: str) -> int:
    """Return the number of channels of the images; 3 if it depends on the options of the data set."""
    channels: int = getattr(getattr(DATA.find(data), "transform", None), "channels", 3)
    return channels
