"""Compares steps with convolutions of `windows` with steps without; run by itself with TRITON_INTERPRET=1.

    python tests/training/conv3x3_case.py cpu

Kernels for GPUs of one kind cannot be interpreted: torch stands for these two here, and everything around them is what
it is. Prints one line of JSON: how far a step in float16 and another in float32 are from float64, with and without,
and which norms were summed for.
"""

import copy
import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from resnet_case import distance, network, outcome, smaller
from torch import Tensor, nn
from torch.nn import functional

from fedlas.training.accelerators import batch_norm, conv3x3
from fedlas.training.accelerators.precompile import launch
from fedlas.training.accelerators.resnet import fuse


def described(tensor: Tensor, *_: Any) -> SimpleNamespace:
    """Describe a tensor, of any type, to those that stand for kernels."""
    return SimpleNamespace(base=tensor)


def images_of(descriptor: Any) -> Tensor:
    """Give the images that a kernel was told of, as a network has them."""
    images: Tensor = descriptor.base.permute(0, 3, 1, 2)
    return images


def weight_of(descriptor: Any) -> Tensor:
    """Give the weight that a kernel was told of."""
    flat: Tensor = descriptor.base
    return flat.view(conv3x3.CHANNELS, 3, 3, conv3x3.CHANNELS).permute(0, 3, 1, 2)


def leave(partial: Tensor, *sums: Tensor, together: int) -> None:
    """Leave sums over some images each, as programs do."""
    for place, one in zip(partial, sums, strict=True):
        for number, part in enumerate(one.split(together)):
            place[number] = part.sum((0, 2, 3))


def lines(x: Any, w: Any, y: Any, running_mean: Tensor, partial: Tensor, *_: int, **about: Any) -> None:
    """Stand for `hopper.lines_kernel`."""
    found = images_of(y)
    found.copy_(functional.conv2d(images_of(x).float(), weight_of(w).float(), padding=1))
    off = found.float() - running_mean[:, None, None]
    leave(partial, off, off * off, together=about["IMAGES"])


def back_lines(*given: Any, **about: Any) -> None:
    """Stand for `hopper.back_lines_kernel`."""
    dy, w, second, y, bits, gradient, scale, shift, mean, partial, *_ = given
    found = functional.conv_transpose2d(images_of(dy).float(), weight_of(w).float(), padding=1).to(y.dtype).float()
    if about["HAS_SECOND"]:
        found += second.float()
    if about["MASK"] == "bits":
        off = (bits.view(*y.permute(0, 2, 3, 1).shape[:3], -1, 1) >> torch.arange(8)) & 1
        off = off.flatten(3).permute(0, 3, 1, 2).bool()
    else:
        off = y.float() * scale[:, None, None] + shift[:, None, None] <= 0
    gradient.copy_(found.masked_fill(off, 0))
    value = gradient.float()
    leave(partial, value, value * (y.float() - mean[:, None, None]), together=about["IMAGES"])


def started(kernel: Any, grid: tuple[int, ...], *given: Any, **about: Any) -> None:
    """Start a kernel, or torch in its place."""
    others = {conv3x3.hopper.lines_kernel: lines, conv3x3.hopper.back_lines_kernel: back_lines}
    if kernel in others:
        others[kernel](*given, **about)
    else:
        launch(kernel, grid, *given, **about)


def usable(images: Tensor, weight: Tensor) -> bool:
    """Say whether images and weight have the right shape, whatever they are on."""
    return weight.shape == (64, 64, 3, 3) and conv3x3.ROWS % images.shape[3] == 0


def beside_a_norm(device: str) -> tuple[Any, Tensor, Tensor, Any]:
    """Make what `smaller` makes, of three blocks on 64 channels, the first beside a convolution with a norm."""
    plain: Any = network("basic").to(device, memory_format=torch.channels_last)
    aside = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64))
    plain.layer1[0].downsample = aside.to(device, memory_format=torch.channels_last)
    plain.layer1.append(copy.deepcopy(plain.layer1[1]))
    plain.layer2 = plain.layer2[:0]
    plain.fc = nn.Linear(64, 5, device=device)
    images = torch.randn(5, 3, 3, 4, device=device).to(memory_format=torch.channels_last)
    labels = torch.arange(5, device=device)
    right = outcome(copy.deepcopy(plain).double(), images.double(), labels)
    assert fuse(plain)
    return plain, images, labels, right


def step(
    dtype: torch.dtype, plain: Any, images: Tensor, labels: Tensor, right: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """Give how far a network's step is from one in float64, with the kernels and without, and whom they summed for."""
    model, device = copy.deepcopy(plain), images.device.type
    with ExitStack() as patched:
        patched.enter_context(torch.autocast(device, dtype, enabled=dtype != torch.float32))
        usual = outcome(plain, images, labels)
        patched.enter_context(patch.object(conv3x3, "fits", usable))
        patched.enter_context(patch.object(conv3x3, "ROWS", 8))  # of two images, so that there are three programs
        patched.enter_context(patch.object(conv3x3, "launch", started))
        patched.enter_context(patch.object(conv3x3.TensorDescriptor, "from_tensor", described))
        there = patched.enter_context(patch.object(conv3x3, "convolve", wraps=conv3x3.convolve))
        back = patched.enter_context(patch.object(conv3x3, "gradient_sums", wraps=conv3x3.gradient_sums))
        summed = patched.enter_context(patch.object(batch_norm, "statistics", wraps=batch_norm.statistics))
        ours = outcome(model, images, labels)
    weights = {one.weight.data_ptr(): name for name, one in model.named_modules() if hasattr(one, "counter")}
    return {
        "far": {part: [distance(found[part], right[part]) for found in (ours, usual)] for part in right},
        "convolved": sorted(weights[call.args[2].weight.data_ptr()] for call in there.mock_calls),
        "summed": sorted(weights[call.args[1].weight.data_ptr()] for call in summed.mock_calls),
        "back": len(back.mock_calls),
        "seconds": [call.args[2] is not None for call in back.mock_calls],
        "bits": [call.args[4].numel() > 0 for call in back.mock_calls],
    }


if __name__ == "__main__":
    narrow = step(torch.float16, *smaller("basic", sys.argv[1], (5, 3, 3, 4)))
    print(json.dumps({"float16": narrow, "beside a norm": step(torch.float32, *beside_a_norm(sys.argv[1]))}))
