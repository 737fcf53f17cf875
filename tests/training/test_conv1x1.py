"""Kernels of 1x1 convolutions, fused with the sums of a batch norm, against torch's layers."""

from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from devices import interpreted, on_cuda
from torch.nn import functional

pytest.importorskip("triton")
from kernel_cases import (
    Tensors,
    affine_and_counter,
    compare_step,
    in_float64,
    in_low_precision,
    random_norm,
    reproducible_errors,
)

from fedlas.training.accelerators import batch_norm, conv1x1

LOW_PRECISION = torch.bfloat16, torch.float16  # Triton's interpreter is wrong for products in bfloat16
# Images, height, width, channels before and after.
PART_OF_A_TILE = (3, 5, 7, 64, 64)
MORE_TILES = (3, 11, 13, 256, 128)  # than programs
WHOLE_TILES = (4, 8, 8, 128, 128)
THREE_BLOCKS = (2, 10, 13, 128, 192)  # of columns
ONE_PIXEL = (9, 1, 1, 256, 64)
LARGE = (
    (128, 32, 32, 64, 256), (128, 32, 32, 256, 64), (128, 16, 16, 128, 512), (128, 8, 8, 256, 128),
    PART_OF_A_TILE, (31, 17, 13, 128, 192),
)  # fmt: skip
LARGE_BACKWARD = (
    (128, 32, 32, 256, 64), (128, 16, 16, 512, 128), (128, 8, 8, 1024, 256), PART_OF_A_TILE, (31, 17, 13, 192, 128),
)  # fmt: skip


def layer(device: str, shape: tuple[int, ...], mean: float = 1.0) -> Tensors:
    """Return images of a size, a weight and a norm."""
    count, height, width, inputs, outputs = shape
    torch.manual_seed(0)
    images = mean + torch.randn(count, inputs, height, width)
    tensors = random_norm(outputs) | {"images": images.to(memory_format=torch.channels_last)}
    tensors["factors"] = torch.randn(outputs, inputs, 1, 1) / inputs**0.5
    return {name: value.to(device) for name, value in tensors.items()}


def by_torch(tensors: Tensors, y_dtype: torch.dtype | None = None) -> Tensors:
    """Convolve and normalise with torch's layers, in the type of the inputs; round y as the kernel does."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    y = functional.conv2d(tensors["images"], tensors["factors"])
    if y_dtype is not None:
        y = y.to(y_dtype).to(y.dtype)
    statistics = tensors["running_mean"], tensors["running_var"]
    z = functional.batch_norm(y, *statistics, tensors["weight"], tensors["bias"], training=True)
    return {"y": y, "z": z, "running mean": statistics[0], "running var": statistics[1]}


def by_kernels(tensors: Tensors) -> Tensors:
    """Compute the same with the kernel; z is computed here from its scale and shift."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    norm, counter = affine_and_counter(tensors)
    y, statistics = conv1x1.multiply(tensors["images"], tensors["factors"], norm, counter)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not counter.any()
    scale, shift = (value.double()[None, :, None, None] for value in (statistics.scale, statistics.shift))
    torch.testing.assert_close(statistics.shift, norm.bias - statistics.mean * statistics.scale)
    torch.testing.assert_close(statistics.scale, norm.weight * statistics.rstd)
    return {"y": y, "z": y.double() * scale + shift, "running mean": norm.running_mean, "running var": norm.running_var}


def errors(
    device: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, mean: float = 1.0
) -> dict[str, float]:
    """Return the errors of the kernel relative to torch's layers in float64."""
    tensors = in_low_precision(layer(device, shape, mean), dtype)
    return reproducible_errors(partial(by_kernels, tensors), by_torch(in_float64(tensors), y_dtype=dtype))


@pytest.mark.parametrize(
    ("device", "shape", "dtype"),
    [
        *(
            interpreted(shape, torch.float32)
            for shape in (PART_OF_A_TILE, WHOLE_TILES, MORE_TILES, THREE_BLOCKS, ONE_PIXEL)
        ),
        interpreted(MORE_TILES, torch.float16),
        *(on_cuda(shape, dtype) for shape in LARGE for dtype in LOW_PRECISION),
    ],
    indirect=["device"],
    ids=str,
)
def test_outputs_and_statistics_are_as_exact_as_their_type_and_reproducible(device, shape, dtype):
    for part, error in device.call(errors, shape, dtype).items():
        bound = 1e-5 if dtype == torch.float32 else 1e-4
        if dtype != torch.float32 and part in {"y", "z"}:
            bound = torch.finfo(dtype).eps / 2  # some are rounded to the other side
        assert error < bound, part


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_a_mean_far_from_zero_loses_few_digits(device):
    for part, error in device.call(errors, PART_OF_A_TILE, torch.float32, 20.0).items():
        assert error < 2e-4, part  # some means are fifty times the standard deviation here


def block(device: str, shape: tuple[int, ...]) -> Tensors:
    """Return the input of a norm, a skip connection, the weight of the next convolution, and gradients of both uses."""
    count, height, width, inputs, outputs = shape
    torch.manual_seed(0)
    tensors = {name: torch.randn(count, inputs, height, width) for name in ("y", "skip", "second")}
    tensors["gradient"] = torch.randn(count, outputs, height, width)
    norm_parameters = {name: 0.5 + torch.rand(inputs) for name in ("weight", "bias", "skip weight", "skip bias")}
    tensors = {name: value.to(memory_format=torch.channels_last) for name, value in tensors.items()}
    tensors["factors"] = torch.randn(outputs, inputs, 1, 1) / outputs**0.5
    return {name: value.to(device) for name, value in (tensors | norm_parameters).items()}


def backward_by_torch(tensors: Tensors, residual: str, stride: int) -> Tensors:
    """Compute the backward pass of a 1x1 convolution, ReLU, residual add and norm with torch's layers."""
    leaves = {name: value.clone().requires_grad_() for name, value in tensors.items()}

    def normalise(images: str, norm: str) -> torch.Tensor:
        weights = leaves[f"{norm}weight"], leaves[f"{norm}bias"]
        return functional.batch_norm(leaves[images], None, None, *weights, training=True)

    z = normalise("y", "")
    if residual != "nothing":
        z = z + (normalise("skip", "skip ") if residual == "norm" else leaves["skip"])
    z = functional.relu(z)
    total = (functional.conv2d(z, tensors["factors"]) * tensors["gradient"]).sum()
    if stride:
        total = total + (z * tensors["second"])[:, :, ::stride, ::stride].sum()
    total.backward()
    residual_names = {"nothing": [], "skip": ["skip"], "norm": ["skip", "skip weight", "skip bias"]}[residual]
    return {name: leaves[name].grad for name in ("y", "weight", "bias", *residual_names)}


def backward_by_kernels(tensors: Tensors, residual: str, stride: int) -> Tensors:
    """Compute the same with the kernels, with the GEMM fused into the first backward pass."""
    y, skip, channels = tensors["y"], tensors["skip"], tensors["y"].shape[1]
    counter = torch.zeros(channels // 64, dtype=torch.int32, device=y.device)

    def normed(images: torch.Tensor, norm: str) -> batch_norm.Normed:
        running_statistics = torch.zeros(2, channels, device=y.device).unbind()
        affine = batch_norm.Affine(
            tensors[f"{norm}weight"], tensors[f"{norm}bias"], *running_statistics, eps=1e-5, momentum=0.1
        )
        return batch_norm.statistics(images, affine, counter)

    y_norm, skip_and_norm = normed(y, ""), (skip, normed(skip, "skip ")) if residual == "norm" else ()
    _, bits = batch_norm.activation(
        y, y_norm, None if residual == "nothing" else skip, skip_and_norm[1] if skip_and_norm else None
    )
    gemm = conv1x1.Gemm(tensors["gradient"], tensors["factors"])
    other_gradient: torch.Tensor | batch_norm.StridedGradient | None = tensors["second"] if stride else None
    if stride > 1:
        strided = tensors["second"][:, :, ::stride, ::stride].contiguous(memory_format=torch.channels_last)
        other_gradient = batch_norm.StridedGradient(strided, stride)
    sums = conv1x1.gradient_sums(gemm, other_gradient, y, bits, y_norm, counter, *skip_and_norm)
    assert not counter.any()
    of_y, of_skip = batch_norm.gradients(sums, y, y_norm, *skip_and_norm)
    result = {"y": of_y, "weight": sums.weight, "bias": sums.bias}
    if residual == "skip":
        result["skip"] = of_skip
    if residual == "norm":
        result |= {"skip": of_skip, "skip weight": sums.other_weight, "skip bias": sums.other_bias}
    return result


def backward_errors(
    device: str, shape: tuple[int, ...], residual: str, stride: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the errors of the backward kernels relative to torch's layers in float64."""
    tensors = in_low_precision(block(device, shape), dtype)
    expected = backward_by_torch(in_float64(tensors), residual, stride)
    return reproducible_errors(partial(backward_by_kernels, tensors, residual, stride), expected)


# What was added to the normalised images ("nothing", "skip" or "norm", a skip connection with its own norm); and the
# stride of a second layer that uses the sum, 0 without one.
@pytest.mark.parametrize(
    ("device", "shape", "residual", "stride", "dtype"),
    [
        interpreted(PART_OF_A_TILE, "nothing", 0, torch.float32),  # inside of a block
        interpreted((2, 9, 9, 64, 64), "nothing", 1, torch.float32),  # first layer
        interpreted((2, 8, 8, 128, 64), "skip", 1, torch.float32),  # end of a block
        interpreted((2, 7, 5, 64, 256), "skip", 0, torch.float32),  # end of a block with one use
        *(interpreted((3, 10, 11, 64, 64), "norm", 1, dtype) for dtype in (torch.float32, torch.float16)),
        interpreted((2, 7, 6, 128, 64), "norm", 2, torch.float32),
        interpreted((2, 5, 7, 64, 64), "skip", 3, torch.float32),
        *(
            on_cuda(shape, residual, stride, dtype)
            for shape in LARGE_BACKWARD
            for residual in ("nothing", "skip", "norm")
            for stride in (1, 2)
            for dtype in LOW_PRECISION
        ),
    ],
    indirect=["device"],
    ids=str,
)
def test_gradients_are_as_exact_as_their_type_and_reproducible(device, shape, residual, stride, dtype):
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for part, error in device.call(backward_errors, shape, residual, stride, dtype).items():
        assert error < bound, part


ALL = ("fits", "fits_back")


@cache
def compare_step_of_network(device: str, count: int, dtype: torch.dtype, fits: tuple[str, ...]) -> dict[str, Any]:
    """Compare a step with all kernels with a step without some of them; in float32 only the interpreter has kernels."""
    work = {
        "multiply": (conv1x1, "multiply"),
        "statistics": (batch_norm, "statistics"),
        "fused sums": (conv1x1, "gradient_sums"),
        "separate sums": (batch_norm, "gradient_sums"),
    }
    types = (*batch_norm.LOW_PRECISION_TYPES, dtype)
    with patch.multiple(conv1x1, MIN_ROWS=0, MIN_ROWS_BACKWARD=0, LOW_PRECISION_TYPES=types):
        return compare_step(device, "bottleneck", count, dtype, work=work, fits=[(conv1x1, name) for name in fits])


@pytest.mark.parametrize(
    ("device", "count", "dtype", "fits"),
    [
        interpreted(4, torch.float16, ALL),
        *(on_cuda(count, torch.bfloat16, (name,)) for count in (3, 128) for name in ALL),
    ],
    indirect=["device"],
    ids=str,
)
def test_a_step_with_the_kernels_is_as_exact_as_without(device, count, dtype, fits):
    result = device.call(compare_step_of_network, count, dtype, fits)
    for part, (error_with, error_without) in result["errors"].items():
        assert error_with < 1.3 * error_without, part
    for name, kernel in (("fits", "multiply"), ("fits_back", "fused sums")):
        assert bool(result["calls without"][kernel]) == (name not in fits)
    if device.name == "cuda":  # seven in the first stage, five in the second; the first ones of the first 13 blocks
        assert [len(result["calls"][kernel]) for kernel in ("multiply", "fused sums")] == [12, 13]


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_a_float32_step_loses_no_digits(device):
    for part, (error_with, _) in device.call(compare_step_of_network, 4, torch.float32, ALL)["errors"].items():
        assert error_with < 1e-5, part


@pytest.mark.parametrize("device", [interpreted()], indirect=True)
def test_kernels_of_a_step(device):
    """They are used for stride 1, statistics are computed once, and input gradients compute sums where that fits."""
    calls = device.call(compare_step_of_network, 4, torch.float16, ALL)["calls"]
    products = {"layer1.0.bn1", "layer1.0.bn3", "layer1.0.downsample.1", "layer2.0.bn1", "layer2.0.bn3"}
    assert sorted(calls["multiply"]) == sorted(products)
    # That of the first layer has its own kernels.
    assert sorted(calls["statistics"]) == ["layer1.0.bn2", "layer2.0.bn2", "layer2.0.downsample.1"]
    # They are followed by a 1x1 convolution with at most as many channels; the skip connection of the next block has a
    # stride, and so has its gradient.
    assert sorted(calls["fused sums"]) == ["bn1", "layer1.0.bn3, strided"]
    assert sorted(calls["separate sums"]) == sorted(
        {f"layer{stage}.0.bn{norm}" for stage in (1, 2) for norm in (1, 2, 3)} - {"layer1.0.bn3"}
    )


@pytest.mark.parametrize(
    ("fits", "channels", "options", "expected"),
    [
        (conv1x1.fits, (64, 128), {}, True),
        (conv1x1.fits, (64, 128), {"dtype": torch.bfloat16}, True),
        (conv1x1.fits, (128, 192), {}, True),
        (conv1x1.fits, (256, 128), {}, True),
        (conv1x1.fits, (256, 1024), {}, False),
        (conv1x1.fits, (192, 128), {}, False),
        (conv1x1.fits, (96, 128), {}, False),
        (conv1x1.fits, (64, 96), {}, False),
        (conv1x1.fits, (64, 128), {"min_rows": 19}, False),
        (conv1x1.fits, (64, 128), {"dtype": torch.float32}, False),
        (conv1x1.fits, (64, 128), {"kernel_size": 3}, False),
        (conv1x1.fits, (64, 128), {"layout": torch.contiguous_format}, False),
        (conv1x1.fits_back, (256, 64), {}, True),
        (conv1x1.fits_back, (1024, 256), {}, True),
        (conv1x1.fits_back, (192, 128), {}, True),
        (conv1x1.fits_back, (64, 256), {}, False),
        (conv1x1.fits_back, (2048, 512), {}, False),
        (conv1x1.fits_back, (256, 64), {"min_rows": 19}, False),
        (conv1x1.fits_back, (256, 64), {"dtype": torch.float32}, False),
        (conv1x1.fits_back, (256, 64), {"kernel_size": 3}, False),
    ],
)
def test_supports_only_1x1_in_channels_last_layout_where_it_is_faster(fits, channels, options, expected, monkeypatch):
    dtype, layout = options.get("dtype", torch.float16), options.get("layout", torch.channels_last)
    (inputs, outputs), size = channels, options.get("kernel_size", 1)
    for name in ("MIN_ROWS", "MIN_ROWS_BACKWARD"):
        monkeypatch.setattr(conv1x1, name, options.get("min_rows", 18))
    images = torch.zeros(2, inputs, 3, 3, dtype=dtype).contiguous(memory_format=layout)
    assert fits(images, torch.zeros(outputs, inputs, size, size, dtype=dtype)) is expected
