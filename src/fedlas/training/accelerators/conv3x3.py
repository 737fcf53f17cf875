"""Convolutions of 3 x 3 on 64 channels in narrow numbers, with the sums that batch norms want, on GPUs of one kind.

    x ─► y = x convolved, and sums of y ─► scale, shift                          (and from here on as in `norms`)
    dy ─► g = dy convolved back + gradient of another use, cut off ─► sums of g  (for the norm that made x)

So few channels keep no matrix unit busy if each pixel is fetched nine times, once for each weight of the window; the
kernels of `hopper` fetch it three times, and what they have convolved is not read once more to be summed. As in
`norms`, sums are added in a fixed order: equal inputs give equal bits.
"""

from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.training.accelerators.batch_norm import (
    NARROW_TYPES,
    Affine,
    GradientSums,
    Normed,
    asked,
    example_norm,
    expected,
    finish,
    finish_gradients,
    new_images,
    room_for_gradients,
    room_for_sums,
    shape_of,
    tried,
)
from fedlas.training.accelerators.precompile import launch

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from fedlas.training.accelerators import hopper
except (ImportError, AttributeError):  # an older Triton, or one in which names have changed
    hopper = None  # type: ignore[assignment]

GENERATION = 9  # of the GPUs that have the instructions; all this was tried on an H200
BUSY = 0.75  # share of the multiprocessors that has to have work, for it to pay
CHANNELS = 64
LEAST = 3  # lines of an image; the way back with fewer, a loop that is gone through once, breaks Triton's compiler
ALIGNED = 16  # bytes, at which images and weights have to start
ROWS = 128  # pixels of a line of some images, which a program convolves together
SLOTS = 8  # such lines, moved to one side or not, that are there or on their way; three are worked on
WARPS = 8
COLUMNS = 16  # that one program finishes


@triton.jit
@no_type_check
def finish_kernel(
    partial, weight, bias, mean, rstd, scale, shift, running_mean, running_var, rows, channels, blocks, eps, momentum,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make scale and shift of what all programs have left, and move running statistics."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    finish(
        expected(running_mean, column), partial, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
        column, rows, channels, blocks, eps, momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def back_finish_kernel(
    partial, mean, rstd, scale, weight_gradient, bias_gradient, slope, offset, rows, channels, blocks,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make factors of dy of what all programs have left."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    finish_gradients(
        partial, tl.load(mean + column), rstd, scale, weight_gradient, bias_gradient, slope, offset, column, rows,
        channels, blocks, COLUMNS,
    )  # fmt: skip


def fits(images: Tensor, weight: Tensor) -> bool:
    """Say whether the kernels can convolve these with a stride and padding of one, there and back, and are faster."""
    return _of_the_kind(images, weight) and _keep_busy(images) and asked(_can_be_made, images.device)


def _of_the_kind(images: Tensor, weight: Tensor) -> bool:
    """Say whether GPU, images and weight are of the kind, and lie in memory, as the kernels take them."""
    if hopper is None or not images.is_cuda or weight.shape != (CHANNELS, CHANNELS, 3, 3) or not images.numel():
        return False
    if torch.cuda.get_device_capability(images.device)[0] != GENERATION:
        return False
    _, channels, height, width = images.shape
    return (
        channels == CHANNELS
        and height >= LEAST
        and ROWS % width == 0
        and images.dtype == weight.dtype
        and weight.dtype in NARROW_TYPES
        and all(one.is_contiguous(memory_format=torch.channels_last) for one in (images, weight))
        and not any(one.data_ptr() % ALIGNED for one in (images, weight))
    )


def _keep_busy(images: Tensor) -> bool:
    """Say whether there are images for most multiprocessors, in the last turn too."""
    programs, together = _programs(images), torch.cuda.get_device_properties(images.device).multi_processor_count
    return programs >= BUSY * -(-programs // together) * together


@cache
def _can_be_made(device: torch.device) -> bool:
    """Try the kernels, forward and back, with all that they can read; CIFAR's size is that of most uses."""

    def work() -> None:
        images = torch.zeros(64, CHANNELS, 32, 32, device=device, dtype=torch.bfloat16)  # as even a number as 512
        images = images.contiguous(memory_format=torch.channels_last)
        weight = images.new_zeros(CHANNELS, CHANNELS, 3, 3).contiguous(memory_format=torch.channels_last)
        y, about = convolve(images, weight, example_norm(device))
        bits = torch.zeros(y.numel() // 8, dtype=torch.uint8, device=device)
        for second, off in ((None, bits[:0]), (y, bits)):
            gradient_sums(images, weight, second, y, off, about)

    return tried(device, "convolutions of 3 x 3 on 64 channels are", work)


def convolve(images: Tensor, weight: Tensor, norm: Affine) -> tuple[Tensor, Normed]:
    """Convolve with a stride and padding of one, look at the batch, and move running statistics.

    Args:
        images: channels last in memory.
        weight: of 3 x 3, channels last in memory, in the images' type.
        norm: what normalises the result.
    """
    y = new_images(images, CHANNELS)
    rows, channels = shape_of(y)
    blocks = _programs(images)
    found, partial = room_for_sums(channels, blocks, y.device)
    launch(hopper.lines_kernel, (blocks,),
        _lines(images), _matrices(weight), _lines(y), norm.running_mean, partial, len(images), blocks, **_meta(images),
    )  # fmt: skip
    launch(finish_kernel, (channels // COLUMNS,),
        partial, norm.weight, norm.bias, *found, norm.running_mean, norm.running_var, rows, channels, blocks, norm.eps,
        norm.momentum, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return y, found


def gradient_sums(
    gradient: Tensor, weight: Tensor, second: Tensor | None, y: Tensor, bits: Tensor, about: Normed
) -> GradientSums:
    """Do the first pass back through a norm, as `norms.gradient_sums`, from the gradient after a convolution.

    Args:
        gradient: of what was convolved from the norm's result.
        weight: of the convolution.
        second: gradient of another use of the norm's result, if there is one.
        y: what was normalised.
        bits: where something was added before the ReLU, what was cut off; empty where that follows from y.
        about: what was found out about y.
    """
    rows, channels = shape_of(y)
    blocks = _programs(y)
    result = torch.empty_like(y)
    numbers, partial = room_for_gradients(channels, blocks, y.device, two_norms=False)
    weight_gradient, bias_gradient, slope, offset, *_ = numbers
    launch(hopper.back_lines_kernel, (blocks,),
        _lines(gradient), _matrices(weight), y if second is None else second, y, bits, result, about.scale, about.shift,
        about.mean, partial, len(y), blocks,
        HAS_SECOND=second is not None, MASK="bits" if bits.numel() else "y", **_meta(y),
    )  # fmt: skip
    launch(back_finish_kernel, (channels // COLUMNS,),
        partial, about.mean, about.rstd, about.scale, weight_gradient, bias_gradient, slope, offset, rows, channels,
        blocks, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return GradientSums(result, "none", *numbers)


def _programs(images: Tensor) -> int:
    """Say how many programs share some images."""
    return -(-len(images) // (ROWS // images.shape[3]))


def _meta(images: Tensor) -> dict[str, Any]:
    """Say what the kernels are compiled for."""
    height, width = images.shape[2:]
    together = ROWS // width
    even = len(images) % together == 0
    about = {"HEIGHT": height, "WIDTH": width, "IMAGES": together, "C": CHANNELS, "SLOTS": SLOTS, "EVEN": even}
    return about | {"num_warps": WARPS}


def _lines(images: Tensor) -> Any:
    """Describe images to the kernels: a line of some of them comes or goes at once."""
    block = [ROWS // images.shape[3], 1, images.shape[3], CHANNELS]
    return TensorDescriptor.from_tensor(images.permute(0, 2, 3, 1), block, gl.NVMMASharedLayout(128, 16, 4))


def _matrices(weight: Tensor) -> Any:
    """Describe a weight to the kernels: nine matrices beside each other."""
    flat = weight.permute(0, 2, 3, 1).reshape(CHANNELS, 9 * CHANNELS)
    return TensorDescriptor.from_tensor(flat, [CHANNELS, CHANNELS], gl.NVMMASharedLayout(128, 16, 2))
