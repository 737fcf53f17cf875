"""Kernels of the first layer against torch's layers."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from devices import interpreted, on_cuda
from torch import nn
from torch.nn import functional

pytest.importorskip("triton")
from kernel_cases import (
    Tensors,
    affine_and_counter,
    compare_step,
    in_float64,
    in_low_precision,
    network,
    random_norm,
    reproducible_errors,
)

from fedlas.training.accelerators import batch_norm, stem
from fedlas.training.accelerators.resnet import FusedResNet

SMALL = (3, 5, 7, 64)  # images, height, width and channels: a part of a tile
MORE_TILES = (3, 11, 13, 128)  # than programs
ONE_PIXEL = (9, 1, 1, 64)
LARGE = SMALL, (64, 32, 32, 64), (40, 31, 33, 128)
# On a GPU alone: Triton's interpreter multiplies bits of bfloat16 as if they were integers.
LOW_PRECISION = torch.bfloat16, torch.float16


def layer(device: str, shape: tuple[int, ...], mean: float = 1.0) -> Tensors:
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


def errors(
    device: str, shape: tuple[int, ...], twice: bool, dtype: torch.dtype = torch.float32, mean: float = 1.0
) -> dict[str, float]:
    """Return the errors of the kernels relative to torch's layers in float64."""
    tensors = in_low_precision(layer(device, shape, mean), dtype)
    expected = by_torch(in_float64(tensors), twice=twice, y_dtype=dtype)
    return reproducible_errors(partial(by_kernels, tensors, twice=twice), expected)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("device", "shape", "dtype"),
    [
        *(interpreted(shape, torch.float32) for shape in (SMALL, MORE_TILES, ONE_PIXEL)),
        interpreted(MORE_TILES, torch.float16),
        *(on_cuda(shape, dtype) for shape in LARGE for dtype in LOW_PRECISION),
    ],
    indirect=["device"],
    ids=str,
)
def test_the_stem_is_as_exact_as_its_type_and_reproducible(device, shape, dtype, twice):
    # Some bits of low precision, and where the ReLU cuts off.
    bound = 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for part, error in device.call(errors, shape, twice, dtype).items():
        assert error < bound, part


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_a_mean_far_from_zero_loses_few_digits(device):
    for part, error in device.call(errors, SMALL, False, torch.float32, 20.0).items():
        assert error < 1e-5, part


def compare_step_of_network(device: str, count: int, dtype: torch.dtype) -> dict[str, Any]:
    return compare_step(device, "basic", count, dtype, work={"convolve": (stem, "convolve")}, fits=[(stem, "fits")])


@pytest.mark.parametrize(
    ("device", "count", "dtype"),
    [interpreted(5, torch.float16), *(on_cuda(count, torch.bfloat16) for count in (3, 128, 512))],
    indirect=["device"],
    ids=str,
)
def test_a_step_with_the_kernels_is_as_exact_as_without(device, count, dtype):
    result = device.call(compare_step_of_network, count, dtype)
    for part, (error_with, error_without) in result["errors"].items():
        assert error_with < 1.3 * error_without, part
    assert result["calls"] == {"convolve": ["bn1"]}
    assert result["calls without"] == {"convolve": []}


def uses_kernels(
    device: str,
    change: str = "",
    dtype: torch.dtype = torch.bfloat16,
    layout: torch.memory_format = torch.channels_last,
) -> bool:
    """Return whether a changed network uses the kernels; it is trained in any case."""

    def convolution(channels: int, size: int) -> nn.Conv2d:
        return nn.Conv2d(channels, 64, size, padding=1, bias=False).to(memory_format=torch.channels_last)

    changes: dict[str, Callable[[Any], object]] = {
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
    model: Any = network("basic").to(memory_format=torch.channels_last)
    model.layer1, model.layer2, model.fc = nn.Sequential(), nn.Sequential(), nn.Linear(64, 5)
    changes.get(change, nn.Module.train)(model)
    model = FusedResNet(model).to(device).train()
    images = torch.randn(2, model.conv1.in_channels, 4, 3, device=device).contiguous(memory_format=layout)
    images.requires_grad_(change == "images that learn")
    with (
        patch.object(stem, "convolve", wraps=stem.convolve) as convolve,
        torch.autocast(device, dtype, enabled=dtype != torch.float32),
    ):
        model(images).float().square().sum().backward()
    assert all((value.grad is not None) is value.requires_grad for value in (*model.parameters(), images))
    return convolve.called


@pytest.mark.parametrize(
    ("device", "arguments", "expected"),
    [
        *(interpreted((change,), True) for change in ("", "frozen", "all frozen", "pooling")),
        interpreted(("", torch.float16), True),
        interpreted(("", torch.float32), False),
        interpreted(("", torch.bfloat16, torch.contiguous_format), False),
        *(interpreted((change,), False) for change in ("a stride", "one channel", "5 x 5", "images that learn")),
        interpreted(("filters with channels first",), False),
    ],
    indirect=["device"],
    ids=str,
)
def test_used_only_in_low_precision_with_three_channels(device, arguments, expected):
    assert device.call(uses_kernels, *arguments) is expected
