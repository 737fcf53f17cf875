"""Compare 1x1 convolutions fused with batch norm sums with torch's layers; a script for TRITON_INTERPRET=1.

    python tests/training/conv1x1_case.py cpu

Prints one line of JSON: errors of the kernels relative to float64 for some shapes and types, supported layers, and the
error of a step of a network with and without the kernels.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from resnet_case import affine_and_counter, distance, error, errors, in_float64, in_low_precision, outcome, smaller
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


# Images, height, width, channels of the images and of what they become: with what the images' norm was added, and
# how far apart the pixels are that another use looks at, 0 if there is none.
BACK = {
    "inside of a block": ((3, 5, 7, 64, 64), "nothing", 0),
    "first layer": ((2, 9, 9, 64, 64), "nothing", 1),
    "end of a block": ((2, 8, 8, 128, 64), "skip", 1),
    "end of a block with one use": ((2, 7, 5, 64, 256), "skip", 0),
    "two norms": ((3, 10, 11, 64, 64), "norm", 1),  # more tiles than programs
    "two norms, then a stride": ((2, 7, 6, 128, 64), "norm", 2),
    "then a stride of three": ((2, 5, 7, 64, 64), "skip", 3),
}

# All shapes in float32, which shows every digit, and one each in a type that the kernels are for; Triton's interpreter
# multiplies bfloat16 wrongly.
TYPES = {"float32": torch.float32, "float16": torch.float16}
CASES = [*((name, "float32") for name in SHAPES), ("more tiles than programs", "float16")]
CASES_BACK = [*((name, "float32") for name in BACK), ("two norms", "float16")]


def layer(shape: tuple[int, ...], device: str, mean: float = 1.0) -> dict[str, torch.Tensor]:
    """Return images of a size, a weight and a norm."""
    count, height, width, inputs, outputs = shape
    torch.manual_seed(0)
    images = mean + torch.randn(count, inputs, height, width)
    few = {"weight": 0.5 + torch.rand(outputs), "bias": torch.rand(outputs) - 0.5}
    few |= {"running_mean": torch.randn(outputs), "running_var": 0.5 + torch.rand(outputs)}
    many = {"images": images.to(memory_format=torch.channels_last)}
    many["factors"] = torch.randn(outputs, inputs, 1, 1) / inputs**0.5
    return {name: value.to(device) for name, value in (many | few).items()}


def by_torch(tensors: dict[str, torch.Tensor], narrow: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Convolve and normalise with torch's layers, in the type of the inputs; round y as the kernel does."""
    tensors = {name: value.clone() for name, value in tensors.items()}
    y = functional.conv2d(tensors["images"], tensors["factors"])
    if narrow is not None:
        y = y.to(narrow).to(y.dtype)
    statistics = tensors["running_mean"], tensors["running_var"]
    z = functional.batch_norm(y, *statistics, tensors["weight"], tensors["bias"], training=True)
    return {"y": y, "z": z, "running mean": statistics[0], "running var": statistics[1]}


def by_kernels(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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


def block(shape: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    """Return the input of a norm, a skip connection, the weight of the next convolution, and gradients of both uses."""
    count, height, width, inputs, outputs = shape
    torch.manual_seed(0)
    many = {name: torch.randn(count, inputs, height, width) for name in ("y", "skip", "second")}
    many["gradient"] = torch.randn(count, outputs, height, width)
    few = {name: 0.5 + torch.rand(inputs) for name in ("weight", "bias", "skip weight", "skip bias")}
    many = {name: value.to(memory_format=torch.channels_last) for name, value in many.items()}
    many["factors"] = torch.randn(outputs, inputs, 1, 1) / outputs**0.5
    return {name: value.to(device) for name, value in (many | few).items()}


def back_by_torch(given: dict[str, torch.Tensor], added: str, every: int) -> dict[str, torch.Tensor]:
    """Compute the backward pass of a 1x1 convolution, ReLU, residual add and norm with torch's layers."""
    learns = {name: value.clone().requires_grad_() for name, value in given.items()}

    def normed(images: str, norm: str) -> torch.Tensor:
        weights = learns[f"{norm}weight"], learns[f"{norm}bias"]
        return functional.batch_norm(learns[images], None, None, *weights, training=True)

    z = normed("y", "")
    if added != "nothing":
        z = z + (normed("skip", "skip ") if added == "norm" else learns["skip"])
    z = functional.relu(z)
    total = (functional.conv2d(z, given["factors"]) * given["gradient"]).sum()
    if every:
        total = total + (z * given["second"])[:, :, ::every, ::every].sum()
    total.backward()
    of_added = {"nothing": [], "skip": ["skip"], "norm": ["skip", "skip weight", "skip bias"]}[added]
    return {name: learns[name].grad for name in ("y", "weight", "bias", *of_added)}


def back_by_kernels(given: dict[str, torch.Tensor], added: str, every: int) -> dict[str, torch.Tensor]:
    """Compute the same with the kernels, with the product fused into the first backward pass."""
    y, skip, channels = given["y"], given["skip"], given["y"].shape[1]
    counter = torch.zeros(channels // 64, dtype=torch.int32, device=y.device)

    def looked(images: torch.Tensor, norm: str) -> batch_norm.Normed:
        statistics = torch.zeros(2, channels, device=y.device).unbind()
        affine = batch_norm.Affine(given[f"{norm}weight"], given[f"{norm}bias"], *statistics, eps=1e-5, momentum=0.1)
        return batch_norm.statistics(images, affine, counter)

    about, other = looked(y, ""), (skip, looked(skip, "skip ")) if added == "norm" else ()
    _, bits = batch_norm.activation(y, about, None if added == "nothing" else skip, other[1] if other else None)
    product = conv1x1.Product(given["gradient"], given["factors"])
    second: torch.Tensor | batch_norm.StridedGradient | None = given["second"] if every else None
    if every > 1:
        looked_at = given["second"][:, :, ::every, ::every].contiguous(memory_format=torch.channels_last)
        second = batch_norm.StridedGradient(looked_at, every)
    sums = conv1x1.gradient_sums(product, second, y, bits, about, counter, *other)
    assert not counter.any()
    found = batch_norm.gradients(sums, y, about, *other)
    parts = {"y": found.y, "weight": found.weight, "bias": found.bias}
    if added == "skip":
        parts["skip"] = found.skip
    of_other = {"skip": found.other_y, "skip weight": found.other_weight, "skip bias": found.other_bias}
    return parts | (of_other if other else {})


def back_compared(name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of the backward kernels relative to float64; check that they are reproducible."""
    shape, added, every = BACK[name]
    tensors = in_low_precision(block(shape, device), dtype)
    expected = back_by_torch(in_float64(tensors), added, every)
    with patch.object(conv1x1, "BACKWARD_TILE", conv1x1.BACKWARD_TILE._replace(programs=4)):
        ours, again = (back_by_kernels(tensors, added, every) for _ in range(2))
    assert all(torch.equal(ours[part], again[part]) for part in ours)
    return {part: error(ours[part], expected[part]) for part in expected}


def few(inputs: int) -> batch_norm.Tile:
    """Return the usual tile with few programs."""
    return CHOSEN(inputs)._replace(programs=4)


CHOSEN = conv1x1.tile_for


def compared(shape: tuple[int, ...], device: str, dtype: torch.dtype, mean: float = 1.0) -> dict[str, Any]:
    """Return the errors of torch and of the kernel relative to float64, and whether the kernel is reproducible."""
    tensors = in_low_precision(layer(shape, device, mean), dtype)
    expected = by_torch(in_float64(tensors), None if dtype == torch.float32 else dtype)
    with patch.object(conv1x1, "tile_for", few):
        ours, again = by_kernels(tensors), by_kernels(tensors)
    assert all(torch.equal(ours[part], again[part]) for part in ours)
    return errors(ours, by_torch(tensors), expected)


def lost_statistics(device: str) -> bool:
    """Return whether a NaN running mean affects nothing but itself."""
    tensors = layer(SHAPES["part of a tile"], device)
    expected = by_torch(tensors)
    tensors["running_mean"][::2] = torch.nan
    tensors["running_mean"][1::4] = torch.inf
    return error(by_kernels(tensors)["z"], expected["z"]) < 1e-5


def takes(device: str) -> dict[str, bool]:
    """Return which images and weights the kernels support."""

    def asked(
        inputs: int = 64, outputs: int = 128, side: int = 1, dtype: torch.dtype = torch.float16, **about: Any
    ) -> bool:
        layout = about.get("layout", torch.channels_last)
        images = torch.zeros(2, inputs, 3, 3, dtype=dtype, device=device).contiguous(memory_format=layout)
        weight = torch.zeros(outputs, inputs, side, side, dtype=dtype, device=device)
        return (conv1x1.fits_back if about.get("back") else conv1x1.fits)(images, weight)

    few = asked(), asked(256, 64, back=True)
    with patch.object(conv1x1, "MIN_ROWS", 0), patch.object(conv1x1, "MIN_ROWS_BACKWARD", 0):
        return {"few rows": few[0], "back, few rows": few[1], **_takes(asked)}


def _takes(asked: Callable[..., bool]) -> dict[str, bool]:
    return {
        "usual": asked(),
        "bfloat16": asked(dtype=torch.bfloat16),
        "to 192 channels": asked(128, 192),
        "from 256 to 128": asked(256, 128),
        "from 256 to 1024": asked(256, 1024),
        "from 192 channels": asked(192),
        "float32": asked(dtype=torch.float32),
        "3 x 3": asked(side=3),
        "96 channels": asked(96),
        "to 96 channels": asked(64, 96),
        "channels first": asked(layout=torch.contiguous_format),
        "back from 64 to 256": asked(256, 64, back=True),
        "back from 256 to 1024": asked(1024, 256, back=True),
        "back from 128 to 192": asked(192, 128, back=True),
        "back from 256 to 64": asked(64, 256, back=True),
        "back from 512 to 2048": asked(2048, 512, back=True),
        "back, float32": asked(256, 64, back=True, dtype=torch.float32),
        "back, 3 x 3": asked(256, 64, 3, back=True),
    }


def step(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the errors of a step relative to float64, with and without the kernel, and which products use it.

    One of the two blocks of the network keeps the size of the images, the other does not. In float32, which the kernel
    supports only here, the step without it is left out.
    """
    plain, images, labels, right = smaller("bottleneck", device, (4, 3, 3, 3))
    model = copy.deepcopy(plain)
    with (
        torch.autocast(device, dtype, enabled=dtype != torch.float32),
        patch.object(conv1x1, "MIN_ROWS", 0),
        patch.object(conv1x1, "MIN_ROWS_BACKWARD", 0),
        patch.object(conv1x1, "LOW_PRECISION_TYPES", (*batch_norm.LOW_PRECISION_TYPES, torch.float32)),
        patch.object(conv1x1, "multiply", wraps=conv1x1.multiply) as multiplied,
        patch.object(batch_norm, "statistics", wraps=batch_norm.statistics) as summed,
        patch.object(conv1x1, "gradient_sums", wraps=conv1x1.gradient_sums) as left,
        patch.object(batch_norm, "gradient_sums", wraps=batch_norm.gradient_sums) as summed_back,
    ):
        ours = outcome(model, images, labels)
        asked = [[call.args[-1].data_ptr() for call in some.mock_calls] for some in (multiplied, summed)]
        back = left.mock_calls, summed_back.mock_calls
        asked += [[call.args[5].data_ptr() for call in some] for some in back]
        asked += [
            [
                call.args[5].data_ptr()
                for some in back
                for call in some
                if isinstance(call.args[1], batch_norm.StridedGradient)
            ]
        ]
        with patch.object(conv1x1, "fits", lambda *_: False), patch.object(conv1x1, "fits_back", lambda *_: False):
            usual = ours if dtype == torch.float32 else outcome(plain, images, labels)
    layers = dict(model.named_modules())
    names = {model.counters[layer].data_ptr(): name for name, layer in layers.items() if layer in model.counters}
    far = {part: [distance(found[part], right[part]) for found in (ours, usual)] for part in right}
    kinds = "multiplied", "summed", "left", "summed back", "apart"
    return {"far": far} | {kind: [names[pointer] for pointer in some] for kind, some in zip(kinds, asked, strict=True)}


if __name__ == "__main__":
    where = sys.argv[1]
    found = {f"{name}, {kind}": compared(SHAPES[name], where, TYPES[kind]) for name, kind in CASES}
    found["far from zero"] = compared((3, 5, 7, 64, 64), where, torch.float32, mean=20.0)
    back = {f"{name}, {kind}": back_compared(name, where, TYPES[kind]) for name, kind in CASES_BACK}
    about = {"back": back, "takes": takes(where), "lost statistics": lost_statistics(where)}
    print(json.dumps({"shapes": found, "step": {kind: step(where, dtype) for kind, dtype in TYPES.items()}} | about))
