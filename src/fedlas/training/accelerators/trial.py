"""Trials of the custom kernels on a device, before a network uses them.

Triton declares no requirements: a missing C compiler, an unsupported GPU or a lack of shared memory shows only when a
kernel is launched.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedlas.training.accelerators import batch_norm, conv1x1, stem
from fedlas.training.accelerators.batch_norm import CHANNEL_MULTIPLE
from fedlas.training.accelerators.resnet import Support, has_bottlenecks
from fedlas.training.compilation import first_line, ran_out_of_memory


def run_trial(trial: Callable[[], object]) -> str | None:
    """Run a trial, and return the reason if it fails; a lack of memory says nothing about the kernels and raises."""
    try:
        trial()
    except Exception as error:  # torch is the fallback for any other error
        if ran_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {first_line(error)}"
    return None


@cache
def batch_norm_failure(device: torch.device) -> str | None:
    """Return why the kernels that every residual network needs cannot run on a device, or None."""

    def trial() -> None:
        y = _zeros(device, 2, CHANNEL_MULTIPLE, 1, 1, dtype=torch.float32)
        batch_norm.statistics(y, *_norm(device))

    return run_trial(trial)


def resnet_support(model: Any, device: torch.device) -> Support:
    """Return which optional kernels of a network run on a device; warn once about each that does not."""
    has_stem, has_conv1x1 = model.conv1.weight.shape[1:] == stem.FILTER_SHAPE, has_bottlenecks(model)
    return Support(
        stem=has_stem and can_run("the first layer is", _try_stem, device),
        conv1x1=has_conv1x1 and can_run("1x1 convolutions are", _try_conv1x1, device),
        conv1x1_backward=has_conv1x1 and can_run("gradients of 1x1 convolutions are", _try_conv1x1_backward, device),
    )


@cache
def can_run(layers: str, trial: Callable[[torch.device], None], device: torch.device) -> bool:
    """Return whether the kernels of some layers run on a device; warn if they do not."""
    reason = run_trial(lambda: trial(device))
    if reason is not None:
        warnings.warn(f"{layers} computed by cuDNN, custom kernels cannot be used: {reason}", stacklevel=3)
    return reason is None


def _try_stem(device: torch.device) -> None:
    images, filters = _zeros(device, 32, 3, 32, 32), _zeros(device, CHANNEL_MULTIPLE, 3, 3, 3)
    norm, counter = _norm(device)
    y, statistics = stem.convolve(images, filters, norm, counter)
    bits = torch.empty(0, device=device, dtype=torch.uint8)
    sums = batch_norm.gradient_sums(y, y, y, bits, statistics, counter)
    stem.gradient_of_filters(images, filters, y, statistics, sums)


def _try_conv1x1(device: torch.device) -> None:
    for channels in (64, 256):  # the fewest and the most
        images, weight = _zeros(device, 32, channels, 32, 32), _zeros(device, CHANNEL_MULTIPLE, channels, 1, 1)
        conv1x1.multiply(images, weight, *_norm(device))


def _try_conv1x1_backward(device: torch.device) -> None:
    """Try the fewest and the most channels, with all optional inputs."""
    y = _zeros(device, 32, CHANNEL_MULTIPLE, 32, 32)
    strided = batch_norm.StridedGradient(_zeros(device, 32, CHANNEL_MULTIPLE, 16, 16), 2)
    statistics = batch_norm.Normed(*torch.zeros(4, CHANNEL_MULTIPLE, device=device).unbind())
    bits = torch.zeros(y.numel() // 8, dtype=torch.uint8, device=device)
    _, counter = _norm(device)
    for channels, second in ((64, strided), (256, y)):
        weight = _zeros(device, channels, CHANNEL_MULTIPLE, 1, 1)
        gemm = conv1x1.Gemm(_zeros(device, 32, channels, 32, 32), weight)
        conv1x1.gradient_sums(gemm, second, y, bits, statistics, counter, y, statistics)


def _zeros(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    zeros = torch.zeros(shape, device=device, dtype=dtype)
    return zeros.contiguous(memory_format=torch.channels_last)


def _norm(device: torch.device) -> tuple[batch_norm.Affine, Tensor]:
    """Return a batch norm with the fewest channels, and the counter of its kernels."""
    weight, bias, mean, var = torch.zeros(4, CHANNEL_MULTIPLE, device=device).unbind()
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    return batch_norm.Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1), counter
