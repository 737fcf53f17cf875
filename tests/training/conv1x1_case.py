"""Compare 1x1 convolutions fused with batch norm sums with torch's layers; a script for TRITON_INTERPRET=1.

    python tests/training/conv1x1_case.py cpu

Prints one line of JSON: errors of the kernels relative to float64 for some shapes and types, supported layers, and the
error of a step of a network with and without the kernels.
"""

import copy
import json
import sys
from contextlib import ExitStack
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
    random_norm,
    small_case,
    step_errors,
)
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, conv1x1

# Images, height, width, channels before and after: a part of a tile, tiles that end with the last row, more tiles than
# programs.
SHAPES = {
    "part of a tile": (3, 5, 7, 64, 64),
    "whole tiles": (4, 8, 8, 128, 128),
    "more tiles than programs": (3, 11, 13, 256, 128),
    "three blocks of columns": (2, 10, 13, 128, 192),
    "one pixel": (9, 1, 1, 256, 64),
}


# Images, height, width, channels before and after; what was added to the normalised images ("nothing", "skip" or
# "norm", a skip connection with its own norm); and the stride of a second layer that uses the sum, 0 without one.
BACKWARD_SHAPES = {
    "inside of a block": ((3, 5, 7, 64, 64), "nothing", 0),
    "first layer": ((2, 9, 9, 64, 64), "nothing", 1),
    "end of a block": ((2, 8, 8, 128, 64), "skip", 1),
    "end of a block with one use": ((2, 7, 5, 64, 256), "skip", 0),
    "two norms": ((3, 10, 11, 64, 64), "norm", 1),  # more tiles than programs
    "two norms, then a stride": ((2, 7, 6, 128, 64), "norm", 2),
    "then a stride of three": ((2, 5, 7, 64, 64), "skip", 3),
}

# All shapes in float32, for exact comparison, and one each in float16; Triton's interpreter is wrong for products in
# bfloat16.
TYPES = {"float32": torch.float32, "float16": torch.float16}
CASES = [*((name, "float32") for name in SHAPES), ("more tiles than programs", "float16")]
BACKWARD_CASES = [*((name, "float32") for name in BACKWARD_SHAPES), ("two norms", "float16")]


def layer(shape: tuple[int, ...], device: str, mean: float = 1.0) -> Tensors:
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


def block(shape: tuple[int, ...], device: str) -> Tensors:
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


def compare_backward(name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of the backward kernels relative to float64; check that they are reproducible."""
    shape, residual, stride = BACKWARD_SHAPES[name]
    tensors = in_low_precision(block(shape, device), dtype)
    expected = backward_by_torch(in_float64(tensors), residual, stride)
    with patch.object(conv1x1, "BACKWARD_TILE", conv1x1.BACKWARD_TILE._replace(programs=4)):
        gradients, repeated = (backward_by_kernels(tensors, residual, stride) for _ in range(2))
    assert all(torch.equal(gradients[part], repeated[part]) for part in gradients)
    return {part: error(gradients[part], expected[part]) for part in expected}


def with_few_programs(inputs: int) -> batch_norm.Tile:
    """Return the tile that the library chooses, with few programs."""
    return LIBRARY_TILE_FOR(inputs)._replace(programs=4)


LIBRARY_TILE_FOR = conv1x1.tile_for


def compare(shape: tuple[int, ...], device: str, dtype: torch.dtype, mean: float = 1.0) -> dict[str, Any]:
    """Return the errors of torch and of the kernel relative to float64, and whether the kernel is reproducible."""
    tensors = in_low_precision(layer(shape, device, mean), dtype)
    expected = by_torch(in_float64(tensors), None if dtype == torch.float32 else dtype)
    with patch.object(conv1x1, "tile_for", with_few_programs):
        outputs, repeated = by_kernels(tensors), by_kernels(tensors)
    assert all(torch.equal(outputs[part], repeated[part]) for part in outputs)
    return errors(outputs, by_torch(tensors), expected)


def supported_layers(device: str) -> dict[str, bool]:
    """Return which images and weights the kernels support."""

    def is_supported(
        inputs: int = 64, outputs: int = 128, kernel_size: int = 1, dtype: torch.dtype = torch.float16, **options: Any
    ) -> bool:
        layout = options.get("layout", torch.channels_last)
        images = torch.zeros(2, inputs, 3, 3, dtype=dtype, device=device).contiguous(memory_format=layout)
        weight = torch.zeros(outputs, inputs, kernel_size, kernel_size, dtype=dtype, device=device)
        return (conv1x1.fits_back if options.get("back") else conv1x1.fits)(images, weight)

    few_rows = {"few rows": is_supported(), "back, few rows": is_supported(256, 64, back=True)}
    with patch.multiple(conv1x1, MIN_ROWS=0, MIN_ROWS_BACKWARD=0):
        return few_rows | {
            "usual": is_supported(),
            "bfloat16": is_supported(dtype=torch.bfloat16),
            "to 192 channels": is_supported(128, 192),
            "from 256 to 128": is_supported(256, 128),
            "from 256 to 1024": is_supported(256, 1024),
            "from 192 channels": is_supported(192),
            "float32": is_supported(dtype=torch.float32),
            "3 x 3": is_supported(kernel_size=3),
            "96 channels": is_supported(96),
            "to 96 channels": is_supported(64, 96),
            "channels first": is_supported(layout=torch.contiguous_format),
            "back from 64 to 256": is_supported(256, 64, back=True),
            "back from 256 to 1024": is_supported(1024, 256, back=True),
            "back from 128 to 192": is_supported(192, 128, back=True),
            "back from 256 to 64": is_supported(64, 256, back=True),
            "back from 512 to 2048": is_supported(2048, 512, back=True),
            "back, float32": is_supported(256, 64, back=True, dtype=torch.float32),
            "back, 3 x 3": is_supported(256, 64, 3, back=True),
        }


# The kernels of a step, and the position of the counter of the batch norm among their arguments.
KERNELS = {
    "multiply": (conv1x1, "multiply", -1),
    "statistics": (batch_norm, "statistics", -1),
    "fused sums": (conv1x1, "gradient_sums", 5),
    "separate sums": (batch_norm, "gradient_sums", 5),
}


def step(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of a step relative to float64, with and without the kernels, and the norms of their calls.

    One of the two blocks of the network keeps the size of the images, the other does not. In float32, which the kernels
    support only here, the step without them is left out.
    """
    fused_model, images, labels, expected = small_case("bottleneck", device, (4, 3, 3, 3))
    model = copy.deepcopy(fused_model)
    types = (*batch_norm.LOW_PRECISION_TYPES, torch.float32)
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, dtype, enabled=dtype != torch.float32))
        stack.enter_context(patch.multiple(conv1x1, MIN_ROWS=0, MIN_ROWS_BACKWARD=0, LOW_PRECISION_TYPES=types))
        kernels = {
            kind: stack.enter_context(patch.object(module, name, wraps=getattr(module, name)))
            for kind, (module, name, _) in KERNELS.items()
        }
        with_kernels = without_kernels = forward_and_backward(model, images, labels)
        calls = {kind: [call.args for call in kernel.mock_calls] for kind, kernel in kernels.items()}
        if dtype != torch.float32:
            stack.enter_context(patch.multiple(conv1x1, fits=lambda *_: False, fits_back=lambda *_: False))
            without_kernels = forward_and_backward(fused_model, images, labels)
    layers = dict(model.named_modules())
    names = {model.counters[layer].data_ptr(): name for name, layer in layers.items() if layer in model.counters}
    norms = {kind: [names[args[KERNELS[kind][2]].data_ptr()] for args in calls[kind]] for kind in KERNELS}
    norms["strided"] = [
        norm
        for kind in ("fused sums", "separate sums")
        for norm, args in zip(norms[kind], calls[kind], strict=True)
        if isinstance(args[1], batch_norm.StridedGradient)
    ]
    return {"errors": step_errors(with_kernels, without_kernels, expected), **norms}


if __name__ == "__main__":
    target = sys.argv[1]
    shapes = {f"{name}, {kind}": compare(SHAPES[name], target, TYPES[kind]) for name, kind in CASES}
    shapes["far from zero"] = compare((3, 5, 7, 64, 64), target, torch.float32, mean=20.0)
    backward = {f"{name}, {kind}": compare_backward(name, target, TYPES[kind]) for name, kind in BACKWARD_CASES}
    results = {
        "shapes": shapes,
        "step": {kind: step(target, dtype) for kind, dtype in TYPES.items()},
        "backward": backward,
        "supported": supported_layers(target),
        "lost statistics": ignores_lost_statistics(layer(SHAPES["part of a tile"], target), by_torch, by_kernels),
    }
    print(json.dumps(results))
