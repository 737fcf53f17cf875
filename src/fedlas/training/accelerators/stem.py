"""The first layer of a network for small images, 3 x 3 on three channels, with its batch norm; Triton kernels.

    images ─► y, and sums of y ─► scale, shift          (and from here on as in `norms`)
                                    │
    dz ─► sums (`norms`) ─► dy = a · g + b · y + c ─► gradient of the weight

So few channels keep no matrix unit busy: time goes into reading and writing y, the large one, and here it is written
once and dy never. A pixel's row of a matrix is what its 27 weights look at, three channels of nine neighbours, and five
zeros; they are read again and again, but from the cache. As in `norms`, sums are added in a fixed order: equal inputs
give equal bits.
"""

from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.training.accelerators.batch_norm import (
    NARROWEST,
    Affine,
    GradientSums,
    Normed,
    Tile,
    asked,
    example_norm,
    expected,
    folded,
    gradient_of_y,
    gradient_sums,
    leave,
    meta,
    new_images,
    room_for_sums,
    shape_of,
    tried,
)
from fedlas.training.accelerators.precompile import launch

WINDOW = (3, 3, 3)  # channels, height and width of what a pixel looks at
FORWARD = Tile(64, 64, 4, 396, stages=3)
BACKWARD = Tile(128, 64, 4, 264, stages=2)


@triton.jit
@no_type_check
def _patches(images, row, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return what the weights of some pixels look at, in the weights' order in memory; zeros outside of the image."""
    number = tl.arange(0, 32)[None, :]
    neighbour = number // 3
    down, right = neighbour // 3 - 1, neighbour % 3 - 1
    pixel = row.to(tl.uint32)  # without a sign, what lies before the first line is far behind the last
    line, place = pixel // WIDTH % HEIGHT + down.to(tl.uint32), pixel % WIDTH + right.to(tl.uint32)
    there = (row < rows) & (number < 27) & (line < HEIGHT) & (place < WIDTH)
    away = (down * WIDTH + right) * 3 + number % 3
    return tl.load(images + row.to(tl.int64) * 3 + away, mask=there, other=0.0)


@triton.jit
@no_type_check
def convolve_kernel(
    images, filters, y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convolve, and sum columns and their squares; the last program makes scale and shift of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    number = tl.arange(0, 32)[:, None]
    taps = tl.load(filters + column * 27 + number, mask=number < 27, other=0.0)
    around = expected(running_mean, column)
    place = tl.program_id(1)
    first, second = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32), tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    patches = _patches(images, place * ROWS + tl.arange(0, ROWS)[:, None], rows, HEIGHT, WIDTH)
    for start in range(place * ROWS, rows, blocks * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        there = row < rows
        narrow = tl.dot(patches, taps).to(y.dtype.element_ty)
        patches = _patches(images, row + blocks * ROWS, rows, HEIGHT, WIDTH)  # under way while the rest is done
        tl.store(y + row.to(tl.int64) * channels + column, narrow, mask=there)
        value = tl.where(there, narrow.to(tl.float32) - around, 0.0)
        first, second = folded(first, second, value, ROWS, COLUMNS)
    leave(
        tl.reshape(first, (ROWS // 2, COLUMNS)), tl.reshape(second, (ROWS // 2, COLUMNS)), around, partial, counter,
        weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels, blocks, eps,
        momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def back_kernel(
    gradient, y, images, scale, shift, slope, offset, partial, rows, channels, blocks,
    MASK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the filters' gradient over a block's rows, from the first on, which the sums of the norm have read last."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((COLUMNS, 32), tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, blocks * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        value = gradient_of_y(
            gradient, y, scale, shift, slope, offset, row, column, 0, channels, row < rows, MASK, ROWS, COLUMNS
        )
        narrow = value.to(y.dtype.element_ty)  # as if it had been written
        total = tl.dot(tl.trans(narrow), _patches(images, row, rows, HEIGHT, WIDTH), total)
    here = partial + tl.program_id(1).to(tl.int64) * channels * 32
    tl.store(here + tl.trans(column) * 32 + tl.arange(0, 32)[None, :], total)


@triton.jit
@no_type_check
def add_kernel(partial, result, channels, blocks, BLOCKS: tl.constexpr):
    """Add up what all blocks left of one filter's gradient, always in one order."""
    number = tl.arange(0, 32)[None, :]
    total = tl.zeros((BLOCKS, 32), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        total += tl.load(partial + (block * channels + tl.program_id(0)) * 32 + number, mask=block < blocks, other=0.0)
    found = tl.sum(total, 0, keep_dims=True).to(result.dtype.element_ty)
    tl.store(result + tl.program_id(0) * 27 + number, found, mask=number < 27)


def fits(images: Tensor, filters: Tensor) -> bool:
    """Return whether images and filters are of the kind, and lie in memory, as the kernels take them."""
    return (
        filters.shape[1:] == WINDOW
        and all(one.is_contiguous(memory_format=torch.channels_last) for one in (images, filters))
        and asked(_can_be_made, images.device)
    )


@cache
def _can_be_made(device: torch.device) -> bool:
    """Try the kernels, forward and back, and warn once where they cannot be made; CIFAR's size is that of most uses."""

    def zeros(*shape: int) -> Tensor:
        made = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        return made.contiguous(memory_format=torch.channels_last)

    def work() -> None:
        images, filters = zeros(32, 3, 32, 32), zeros(NARROWEST, 3, 3, 3)
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        y, about = convolve(images, filters, example_norm(device), counter)
        bits = torch.empty(0, device=device, dtype=torch.uint8)
        gradient_of_filters(images, filters, y, about, gradient_sums(y, y, y, bits, about, counter))

    return tried(device, "the first layer is", work)


def convolve(images: Tensor, filters: Tensor, norm: Affine, counter: Tensor) -> tuple[Tensor, Normed]:
    """Convolve with a stride and padding of one, look at the batch, and move running statistics.

    Args:
        images: three channels, last in memory.
        filters: of 3 x 3, channels last in memory, in the images' type.
        norm: what normalises the result.
        counter: zeros, one for each block of columns.
    """
    height, width = images.shape[2:]
    y = new_images(images, len(filters))
    rows, channels = shape_of(y)
    blocks = FORWARD.blocks(rows, channels)
    found, partial = room_for_sums(channels, blocks, y.device)
    launch(convolve_kernel, (channels // FORWARD.columns, blocks),
        images, filters, y, partial, counter, norm.weight, norm.bias, *found, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum, HEIGHT=height, WIDTH=width, **meta(FORWARD),
    )  # fmt: skip
    return y, found


def gradient_of_filters(images: Tensor, filters: Tensor, y: Tensor, about: Normed, sums: GradientSums) -> Tensor:
    """Go back from what the first pass back through the norm found to the gradient of the filters."""
    rows, channels = shape_of(y)
    blocks = BACKWARD.blocks(rows, channels)
    partial = torch.empty(blocks, channels, 32, device=y.device, dtype=torch.float32)
    launch(back_kernel, (channels // BACKWARD.columns, blocks),
        sums.gradient, y, images, about.scale, about.shift, sums.slope, sums.offset, partial,
        rows, channels, blocks,
        MASK=sums.mask, HEIGHT=images.shape[2], WIDTH=images.shape[3], **meta(BACKWARD),
    )  # fmt: skip
    result = torch.empty_like(filters)
    launch(add_kernel, (channels,), partial, result, channels, blocks, BLOCKS=128)
    return result
