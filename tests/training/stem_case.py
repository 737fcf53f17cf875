"""Compare the kernels of the first layer with torch's layers; a script for TRITON_INTERPRET=1 or a GPU.

    python tests/training/stem_case.py cpu

Prints one line of JSON: errors of the kernels in float32 relative to float64 for some shapes, the layers and images
that they support, their errors in low precision, and the error of a step of a network with and without them.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from resnet_case import (
    affine_and_counter,
    distance,
    error,
    errors,
    in_float64,
    in_low_precision,
    network,
    outcome,
    smaller,
)
from torch import nn
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, stem
from fedlas.training.accelerators.resnet import fuse

FEW = {"FORWARD": stem.FORWARD._replace(programs=4), "BACKWARD": stem.BACKWARD._replace(programs=4)}
SHAPES = {"part of a tile": (3, 5, 7, 64), "more tiles than programs": (3, 11, 13, 128), "one pixel": (9, 1, 1, 64)}


def layer(shape: tuple[int, int, int, int], device: str, mean: float = 1.0) -> dict[str, torch.Tensor]:
    """Return images of a size, filters and a norm, and gradients of both uses of the output."""
    count, height, width, channels = shape
    torch.manual_seed(0)
    many = {
        "images": mean + torch.randn(count, 3, height, width),
        "filters": torch.randn(channels, 3, 3, 3) / 5,
        "first": torch.randn(count, channels, height, width),
        "second": torch.randn(count, channels, height, width),
    }
    many = {name: value.to(device, memory_format=torch.channels_last) for name, value in many.items()}
    few = {"weight": 0.5 + torch.rand(channels), "bias": torch.rand(channels) - 0.5}
    few |= {"running_mean": torch.randn(channels), "running_var": 0.5 + torch.rand(channels)}
    return many | {name: value.to(device) for name, value in few.items()}


def by_torch(
    tensors: dict[str, torch.Tensor], *, twice: bool, narrow: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Compute forward and backward pass with torch's layers, in the type of the inputs.

    If y is stored in low precision, it is rounded here too: otherwise the ReLU would differ.
    """
    tensors = {name: value.clone() for name, value in tensors.items()}
    learned = [tensors[name].requires_grad_() for name in ("filters", "weight", "bias")]
    y = functional.conv2d(tensors["images"], tensors["filters"], padding=1)
    if narrow is not None:
        y = y + (y.to(narrow).to(y.dtype) - y).detach()
    statistics = tensors["running_mean"], tensors["running_var"]
    z = functional.batch_norm(y, *statistics, tensors["weight"], tensors["bias"], training=True).relu()
    of_z = tensors["first"] + tensors["second"] if twice else tensors["first"]
    gradients = dict(zip(("of filters", "of weight", "of bias"), torch.autograd.grad(z, learned, of_z), strict=True))
    return {"y": y.detach(), "z": z.detach(), "running mean": statistics[0], "running var": statistics[1]} | gradients


def by_kernels(tensors: dict[str, torch.Tensor], *, twice: bool) -> dict[str, torch.Tensor]:
    """Compute forward and backward pass with the kernels."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    norm, counter = affine_and_counter(tensors)
    y, statistics = stem.convolve(tensors["images"], tensors["filters"], norm, counter)
    z, bits = batch_norm.activation(y, statistics, None, None)
    second = tensors["second"] if twice else None
    sums = batch_norm.gradient_sums(tensors["first"], second, y, bits, statistics, counter)
    of_filters = stem.gradient_of_filters(tensors["images"], tensors["filters"], y, statistics, sums)
    assert of_filters.stride() == tensors["filters"].stride()
    assert not counter.any()
    gradients = {"of filters": of_filters, "of weight": sums.weight, "of bias": sums.bias}
    return {"y": y, "z": z, "running mean": norm.running_mean, "running var": norm.running_var} | gradients


def compared(shape: tuple[int, int, int, int], device: str, *, twice: bool, mean: float = 1.0) -> dict[str, Any]:
    """Return the errors of torch and of the kernels in float32 relative to float64."""
    tensors = layer(shape, device, mean)
    with patch.multiple(stem, **FEW):
        ours = by_kernels(tensors, twice=twice)
    return errors(ours, by_torch(tensors, twice=twice), by_torch(in_float64(tensors), twice=twice))


def lost_statistics(device: str) -> bool:
    """Return whether a NaN running mean affects nothing but itself."""
    tensors = layer(SHAPES["part of a tile"], device)
    expected = by_torch(tensors, twice=False)
    tensors["running_mean"][::2] = torch.nan
    tensors["running_mean"][1::4] = torch.inf
    return error(by_kernels(tensors, twice=False)["z"], expected["z"]) < 1e-5


def used(device: str) -> dict[str, bool]:
    """Return for which layers and images the kernels are used; each of them is trained."""

    def with_a_stride(model: Any) -> None:
        model.conv1.stride = (2, 2)

    def of_grey_images(model: Any) -> None:
        model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False).to(device, memory_format=torch.channels_last)

    def wide(model: Any) -> None:
        model.conv1 = nn.Conv2d(3, 64, 5, padding=1, bias=False).to(device, memory_format=torch.channels_last)

    def channels_first(model: Any) -> None:
        model.conv1.weight = nn.Parameter(model.conv1.weight.detach().contiguous())

    def frozen(model: Any) -> None:
        model.conv1.weight.requires_grad_(False)

    def all_frozen(model: Any) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() != 4)

    def with_pooling(model: Any) -> None:
        model.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

    def asked(
        change: Callable[[Any], None] = lambda _: None, dtype: torch.dtype = torch.bfloat16, **about: Any
    ) -> bool:
        model: Any = network("basic")
        model.layer1, model.layer2, model.fc = nn.Sequential(), nn.Sequential(), nn.Linear(64, 5)
        model = model.to(device, memory_format=torch.channels_last).train()
        change(model)
        model = fuse(model)
        layout = about.get("layout", torch.channels_last)
        images = torch.randn(2, model.conv1.in_channels, 4, 3, device=device).contiguous(memory_format=layout)
        images.requires_grad_(about.get("learns", False))
        with (
            patch.object(stem, "convolve", wraps=stem.convolve) as watched,
            torch.autocast(device, dtype, enabled=dtype != torch.float32),
        ):
            model(images).float().square().sum().backward()
        assert all((value.grad is not None) is value.requires_grad for value in (*model.parameters(), images))
        return watched.called

    return {
        "usual": asked(),
        "frozen": asked(frozen),
        "all frozen": asked(all_frozen),
        "pooling": asked(with_pooling),
        "float16": asked(dtype=torch.float16),
        "float32": asked(dtype=torch.float32),
        "images that learn": asked(learns=True),
        "images with channels first": asked(layout=torch.contiguous_format),
        "filters with channels first": asked(channels_first),
        "a stride": asked(with_a_stride),
        "one channel": asked(of_grey_images),
        "5 x 5": asked(wide),
    }


def narrowed(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of the kernels in low precision relative to torch's layers in float64."""
    tensors = in_low_precision(layer(SHAPES["more tiles than programs"], device), dtype)
    expected = by_torch(in_float64(tensors), twice=True, narrow=dtype)
    with patch.multiple(stem, **FEW):
        ours = by_kernels(tensors, twice=True)
    return {part: error(ours[part], expected[part]) for part in expected}


def step(device: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the errors of a step of a network in low precision relative to float64, with and without the kernels."""
    plain, images, labels, right = smaller("basic", device, (5, 3, 5, 5))
    with torch.autocast(device, dtype):
        ours = outcome(copy.deepcopy(plain), images, labels)
        with patch.object(stem, "fits", lambda *_: False):
            usual = outcome(plain, images, labels)
    return {part: [distance(result[part], right[part]) for result in (ours, usual)] for part in right}


if __name__ == "__main__":
    where = sys.argv[1]
    narrow = torch.float16  # not bfloat16: Triton's interpreter multiplies its bits as if they were integers
    shapes = {
        f"{name}, {uses}": compared(shape, where, twice=uses == "twice")
        for name, shape in SHAPES.items()
        for uses in ("once", "twice")
    }
    shapes["far from zero"] = compared((3, 5, 7, 64), where, twice=False, mean=20.0)
    about = {"used": used(where), "step": step(where, narrow), "narrow": narrowed(where, narrow)}
    print(json.dumps({"shapes": shapes, "lost statistics": lost_statistics(where)} | about))
