"""Trials of the custom kernels on a device, before a network uses them.

Triton declares no requirements: a missing C compiler, an unsupported GPU or a lack of shared memory shows only when a
kernel is launched.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fedlas.training.accelerators import batch_norm, conv1x1, stem
from fedlas.training.accelerators.batch_norm import CHANNEL_MULTIPLE


def failure(trial: Callable[[], object]) -> str | None:
    """Run a trial, and return the reason if it fails."""
    try:
        trial()
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:  # torch is the fallback for any other error
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
    return None


@cache
def resnet_failure(device: torch.device, *, bottlenecks: bool) -> str | None:
    """Return why the kernels of residual networks cannot run on a device, or None.

    Args:
        device: the device.
        bottlenecks: whether the network has 1x1 convolutions with stride 1.
    """

    def trial() -> None:
        _try_first_layer(device)
        if bottlenecks:
            for channels in (64, 256):  # the fewest and the most
                _try_products(device, channels)

    return failure(trial)


def _try_first_layer(device: torch.device) -> None:
    images, filters = _zeros(device, 32, 3, 32, 32), _zeros(device, CHANNEL_MULTIPLE, 3, 3, 3)
    norm, counter = _norm(device)
    y, statistics = stem.convolve(images, filters, norm, counter)
    batch_norm.statistics(y, norm, counter)
    bits = torch.empty(0, device=device, dtype=torch.uint8)
    sums = batch_norm.gradient_sums(y, y, y, bits, statistics, counter)
    stem.gradient_of_filters(images, filters, y, statistics, sums)


def _try_products(device: torch.device, channels: int) -> None:
    """Try 1x1 convolutions from and to a number of channels, backward with all optional inputs."""
    images, weight = _zeros(device, 32, channels, 32, 32), _zeros(device, CHANNEL_MULTIPLE, channels, 1, 1)
    norm, counter = _norm(device)
    y, statistics = conv1x1.multiply(images, weight, norm, counter)
    product = conv1x1.Product(images, _zeros(device, channels, CHANNEL_MULTIPLE, 1, 1))
    strided = batch_norm.StridedGradient(_zeros(device, 32, CHANNEL_MULTIPLE, 16, 16), 2)
    second = y if channels == 256 else strided
    bits = torch.zeros(y.numel() // 8, dtype=torch.uint8, device=device)
    conv1x1.gradient_sums(product, second, y, bits, statistics, counter, y, statistics)


def _zeros(device: torch.device, *shape: int) -> Tensor:
    zeros = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    return zeros.contiguous(memory_format=torch.channels_last)


def _norm(device: torch.device) -> tuple[batch_norm.Affine, Tensor]:
    """Return a batch norm with the fewest channels, and the counter of its kernels."""
    weight, bias, mean, var = torch.zeros(4, CHANNEL_MULTIPLE, device=device).unbind()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    return batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1), counter
