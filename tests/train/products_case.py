"""Compares 1 x 1 convolutions that sum for their norm with torch's layers; run by itself with TRITON_INTERPRET=1.

    python tests/train/products_case.py cpu

Prints one line of JSON: how far the kernel is from float64, for some shapes and types; what it takes; how far a
network's step with it, and without it, is, and for which layers it was used.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from fused_case import distance, outcome, smaller
from torch.nn import functional

from fedlas.train import kernels, products

# Images, height, width, channels before and after: a part of a tile, tiles that end with the last row, more tiles than
# programs.
SHAPES = {
    "part of a tile": (3, 5, 7, 64, 64),
    "whole tiles": (4, 8, 8, 128, 128),
    "more tiles than programs": (3, 11, 13, 256, 128),
    "three blocks of columns": (2, 10, 13, 128, 192),
    "one pixel": (9, 1, 1, 256, 64),
}


def layer(shape: tuple[int, ...], device: str, mean: float = 1.0) -> dict[str, torch.Tensor]:
    """Make images of a size, a weight and a norm."""
    count, height, width, inputs, outputs = shape
    torch.manual_seed(0)
    images = mean + torch.randn(count, inputs, height, width)
    few = {"weight": 0.5 + torch.rand(outputs), "bias": torch.rand(outputs) - 0.5}
    few |= {"running_mean": torch.randn(outputs), "running_var": 0.5 + torch.rand(outputs)}
    many = {"images": images.to(memory_format=torch.channels_last)}
    many["factors"] = torch.randn(outputs, inputs, 1, 1) / inputs**0.5
    return {name: one.to(device) for name, one in (many | few).items()}


def narrowed(given: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Give images and weight in a narrow type."""
    return {name: one.to(dtype) if one.dim() == 4 else one for name, one in given.items()}


def by_torch(given: dict[str, torch.Tensor], narrow: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Convolve and normalise with torch's layers, in the type that was given, y rounded where the kernel does."""
    given = {name: one.clone() for name, one in given.items()}
    y = functional.conv2d(given["images"], given["factors"])
    if narrow is not None:
        y = y.to(narrow).to(y.dtype)
    statistics = given["running_mean"], given["running_var"]
    z = functional.batch_norm(y, *statistics, given["weight"], given["bias"], training=True)
    return {"y": y, "z": z, "running mean": statistics[0], "running var": statistics[1]}


def by_kernels(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Do the same with the kernel; z is computed here, of its scale and shift."""
    given = {name: one.clone() for name, one in given.items()}
    statistics = given["running_mean"], given["running_var"]
    norm = kernels.Affine(given["weight"], given["bias"], *statistics, eps=1e-5, momentum=0.1)
    counter = torch.zeros(len(given["weight"]) // 64, dtype=torch.int32, device=given["weight"].device)
    y, about = products.multiply(given["images"], given["factors"], norm, counter)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert not counter.any()
    scale, shift = (one.double()[None, :, None, None] for one in (about.scale, about.shift))
    torch.testing.assert_close(about.shift, given["bias"] - about.mean * about.scale)
    torch.testing.assert_close(about.scale, given["weight"] * about.rstd)
    return {"y": y, "z": y.double() * scale + shift, "running mean": statistics[0], "running var": statistics[1]}


def few(inputs: int) -> kernels.Tile:
    """Choose a tile as usual, with few programs."""
    return CHOSEN(inputs)._replace(programs=4)


CHOSEN = products.tile_for


def compared(shape: tuple[int, ...], device: str, dtype: torch.dtype, mean: float = 1.0) -> dict[str, Any]:
    """Give the distances from float64 of both ways, and whether the kernel gives equal bits again."""
    given = narrowed(layer(shape, device, mean), dtype)
    wide = {name: one.double() for name, one in given.items()}
    right = by_torch(wide, None if dtype == torch.float32 else dtype)
    with patch.object(products, "tile_for", few):
        ours, again = by_kernels(given), by_kernels(given)
    assert all(torch.equal(ours[part], again[part]) for part in ours)
    usual = by_torch(given)
    return {part: [distance({"": found[part]}, {"": right[part]}) for found in (ours, usual)] for part in right}


def lost_statistics(device: str) -> bool:
    """Say whether a running mean that is no number spoils nothing but itself."""
    given = layer(SHAPES["part of a tile"], device)
    right = by_torch(given)
    given["running_mean"][::2] = torch.nan
    given["running_mean"][1::4] = torch.inf
    return distance({"": by_kernels(given)["z"]}, {"": right["z"]}) < 1e-5


def takes(device: str) -> dict[str, bool]:
    """Say which images and weights the kernel takes."""

    def asked(
        inputs: int = 64, outputs: int = 128, side: int = 1, dtype: torch.dtype = torch.float16, **about: Any
    ) -> bool:
        layout = about.get("layout", torch.channels_last)
        images = torch.zeros(2, inputs, 3, 3, dtype=dtype, device=device).contiguous(memory_format=layout)
        return products.fits(images, torch.zeros(outputs, inputs, side, side, dtype=dtype, device=device))

    few = asked()
    with patch.object(products, "MANY", 0):
        return {"few rows": few, **_takes(asked)}


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
    }


def step(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Give how far a network's step is from one in float64, with the kernel and without, and whose products it takes.

    Of its two blocks, one keeps the size of the images and the other does not. In float32, which the kernel is made to
    take here, the step without it is left out.
    """
    plain, images, labels, right = smaller("bottleneck", device, (4, 3, 3, 3))
    model = copy.deepcopy(plain)
    with (
        torch.autocast(device, dtype, enabled=dtype != torch.float32),
        patch.object(products, "MANY", 0),
        patch.object(products, "TYPES", (*products.TYPES, torch.float32)),
        patch.object(products, "multiply", wraps=products.multiply) as multiplied,
        patch.object(kernels, "statistics", wraps=kernels.statistics) as summed,
    ):
        ours = outcome(model, images, labels)
        asked = [[call.args[-1].data_ptr() for call in some.mock_calls] for some in (multiplied, summed)]
        with patch.object(products, "fits", lambda *_: False):
            usual = ours if dtype == torch.float32 else outcome(plain, images, labels)
    names = {layer.counter.data_ptr(): name for name, layer in model.named_modules() if hasattr(layer, "counter")}
    far = {part: [distance(found[part], right[part]) for found in (ours, usual)] for part in right}
    return {"far": far, "multiplied": [names[one] for one in asked[0]], "summed": [names[one] for one in asked[1]]}


if __name__ == "__main__":
    where = sys.argv[1]
    types = {"float16": torch.float16, "float32": torch.float32}  # Triton's interpreter multiplies bfloat16 wrongly
    found = {
        f"{name}, {kind}": compared(shape, where, dtype)
        for name, shape in SHAPES.items()
        for kind, dtype in types.items()
    }
    found["far from zero"] = compared((3, 5, 7, 64, 64), where, torch.float32, mean=20.0)
    about = {"takes": takes(where), "lost statistics": lost_statistics(where)}
    print(json.dumps({"shapes": found, "step": {kind: step(where, dtype) for kind, dtype in types.items()}} | about))
