"""Compare the kernels of the first layer with torch's layers; a script for TRITON_INTERPRET=1 or a GPU.

    python tests/training/stem_case.py cpu

Prints one line of JSON: errors of the kernels in float32 relative to float64 for some shapes, the layers and images
that they support, their errors in low precision, and the error of a step of a network with and without them.
"""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from resnet_case import (
    Tensors,
    affine_and_counter,
    error,
    errors,
    forward_and_backward,
    ignores_lost_statistics,
    in_float64,
    in_low_precision,
    network,
    random_norm,
    small_case,
    step_errors,
)
from torch import nn
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, stem
from fedlas.training.accelerators.resnet import fuse

FEW = {"FORWARD": stem.FORWARD._replace(programs=4), "BACKWARD": stem.BACKWARD._replace(programs=4)}
SHAPES = {"part of a tile": (3, 5, 7, 64), "more tiles than programs": (3, 11, 13, 128), "one pixel": (9, 1, 1, 64)}


def layer(shape: tuple[int, int, int, int], device: str, mean: float = 1.0) -> Tensors:
    """Return images of a size, filters and a norm, and gradients of both uses of the output."""
    count, height, width, channels = shape
    torch.manual_seed(0)
    tensors = {
        "images": mean + torch.randn(count, 3, height, width),
        "filters": torch.randn(channels, 3, 3, 3) / 5,
        "first": torch.randn(count, channels, height, width),
        "second": torch.randn(count, channels, height, width),
    }
    tensors = {name: value.to(device, memory_format=torch.channels_last) for name, value in tensors.items()}
    return tensors | {name: value.to(device) for name, value in random_norm(channels).items()}


def by_torch(tensors: Tensors, *, twice: bool, y_dtype: torch.dtype | None = None) -> Tensors:
    """Compute forward and backward pass with torch's layers, in the type of the inputs.

    If y is stored in low precision, it is rounded here too: otherwise the ReLU would differ.
    """
    tensors = {name: value.clone() for name, value in tensors.items()}
    parameters = [tensors[name].requires_grad_() for name in ("filters", "weight", "bias")]
    y = functional.conv2d(tensors["images"], tensors["filters"], padding=1)
    if y_dtype is not None:
        y = y + (y.to(y_dtype).to(y.dtype) - y).detach()
    statistics = tensors["running_mean"], tensors["running_var"]
    z = functional.batch_norm(y, *statistics, tensors["weight"], tensors["bias"], training=True).relu()
    gradient_of_z = tensors["first"] + tensors["second"] if twice else tensors["first"]
    gradients = dict(
        zip(("of filters", "of weight", "of bias"), torch.autograd.grad(z, parameters, gradient_of_z), strict=True)
    )
    return {"y": y.detach(), "z": z.detach(), "running mean": statistics[0], "running var": statistics[1]} | gradients


def by_kernels(tensors: Tensors, *, twice: bool) -> Tensors:
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


def compare(shape: tuple[int, int, int, int], device: str, *, twice: bool, mean: float = 1.0) -> dict[str, Any]:
    """Return the errors of torch and of the kernels in float32 relative to float64."""
    tensors = layer(shape, device, mean)
    with patch.multiple(stem, **FEW):
        outputs = by_kernels(tensors, twice=twice)
    return errors(outputs, by_torch(tensors, twice=twice), by_torch(in_float64(tensors), twice=twice))


def used(device: str) -> dict[str, bool]:
    """Return for which layers and images the kernels are used; each of them is trained."""

    def convolution(channels: int, size: int) -> nn.Conv2d:
        layer = nn.Conv2d(channels, 64, size, padding=1, bias=False)
        return layer.to(device, memory_format=torch.channels_last)

    def is_used(
        change: Callable[[Any], None] = lambda _: None, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> bool:
        model: Any = network("basic")
        model.layer1, model.layer2, model.fc = nn.Sequential(), nn.Sequential(), nn.Linear(64, 5)
        model = model.to(device, memory_format=torch.channels_last).train()
        change(model)
        model = fuse(model)
        layout = options.get("layout", torch.channels_last)
        images = torch.randn(2, model.conv1.in_channels, 4, 3, device=device).contiguous(memory_format=layout)
        images.requires_grad_(options.get("image_gradients", False))
        with (
            patch.object(stem, "convolve", wraps=stem.convolve) as convolve,
            torch.autocast(device, dtype, enabled=dtype != torch.float32),
        ):
            model(images).float().square().sum().backward()
        assert all((value.grad is not None) is value.requires_grad for value in (*model.parameters(), images))
        return convolve.called

    changes: dict[str, Callable[[Any], object]] = {
        "usual": lambda _: None,
        "frozen": lambda model: model.conv1.weight.requires_grad_(False),
        "all frozen": lambda model: [weight.requires_grad_(weight.dim() != 4) for weight in model.parameters()],
        "pooling": lambda model: setattr(model, "maxpool", nn.MaxPool2d(3, stride=2, padding=1)),
        "filters with channels first": lambda model: setattr(
            model.conv1.weight, "data", model.conv1.weight.detach().contiguous()
        ),
        "a stride": lambda model: setattr(model.conv1, "stride", (2, 2)),
        "one channel": lambda model: setattr(model, "conv1", convolution(1, 3)),
        "5 x 5": lambda model: setattr(model, "conv1", convolution(3, 5)),
    }
    return {name: is_used(change) for name, change in changes.items()} | {
        "float16": is_used(dtype=torch.float16),
        "float32": is_used(dtype=torch.float32),
        "images that learn": is_used(image_gradients=True),
        "images with channels first": is_used(layout=torch.contiguous_format),
    }


def low_precision_errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of the kernels in low precision relative to torch's layers in float64."""
    tensors = in_low_precision(layer(SHAPES["more tiles than programs"], device), dtype)
    expected = by_torch(in_float64(tensors), twice=True, y_dtype=dtype)
    with patch.multiple(stem, **FEW):
        outputs = by_kernels(tensors, twice=True)
    return {part: error(outputs[part], expected[part]) for part in expected}


def step(device: str, dtype: torch.dtype) -> dict[str, list[float]]:
    """Return the errors of a step of a network in low precision relative to float64, with and without the kernels."""
    model, images, labels, expected = small_case("basic", device, (5, 3, 5, 5))
    with torch.autocast(device, dtype):
        with_kernels = forward_and_backward(copy.deepcopy(model), images, labels)
        with patch.object(stem, "fits", lambda *_: False):
            without_kernels = forward_and_backward(model, images, labels)
    return step_errors(with_kernels, without_kernels, expected)


if __name__ == "__main__":
    target = sys.argv[1]
    low_precision = torch.float16  # not bfloat16: Triton's interpreter multiplies its bits as if they were integers
    shapes = {
        f"{name}, {uses}": compare(shape, target, twice=uses == "twice")
        for name, shape in SHAPES.items()
        for uses in ("once", "twice")
    }
    shapes["far from zero"] = compare((3, 5, 7, 64), target, twice=False, mean=20.0)
    results = {
        "shapes": shapes,
        "lost statistics": ignores_lost_statistics(
            layer(SHAPES["part of a tile"], target), partial(by_torch, twice=False), partial(by_kernels, twice=False)
        ),
        "used": used(target),
        "step": step(target, low_precision),
        "low precision": low_precision_errors(target, low_precision),
    }
    print(json.dumps(results))
