"""First layer of a network for small images: 3x3 convolution of three channels with batch norm; Triton kernels.

    images ─► y, and sums of y ─► scale, shift          (continued in `batch_norm`)
                                    │
    dz ─► sums (`batch_norm`) ─► dy = a · g + b · y + c ─► gradient of the weight

With so few channels, time is spent on memory traffic of y; here y is written once and dy never. The convolution is a
matrix product (im2col): the row of a pixel has the 27 inputs of its filter and five zeros. They are read repeatedly,
but from the cache. As in `batch_norm`, sums are added in a fixed order: equal inputs give equal bits.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.training.accelerators.batch_norm import (
    Affine,
    GradientSums,
    Normed,
    Tile,
    add_folded,
    compile_options,
    gradient_of_y,
    load_running_mean,
    new_images,
    shape_of,
    statistics_buffers,
    store_partial_sums,
)

FILTER_SHAPE = (3, 3, 3)  # channels, height and width
FORWARD = Tile(64, 64, 4, 396, stages=3)
BACKWARD = Tile(128, 64, 4, 264, stages=2)


@triton.jit
@no_type_check
def _patches(images, row, rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Load the im2col rows of some pixels, in the order of the weights in memory; zeros outside of the image."""
    number = tl.arange(0, 32)[None, :]
    neighbour = number // 3
    down, right = neighbour // 3 - 1, neighbour % 3 - 1
    pixel = row.to(tl.uint32)  # unsigned, so that -1 is larger than any row or column
    y, x = pixel // WIDTH % HEIGHT + down.to(tl.uint32), pixel % WIDTH + right.to(tl.uint32)
    mask = (row < rows) & (number < 27) & (y < HEIGHT) & (x < WIDTH)
    offset = (down * WIDTH + right) * 3 + number % 3
    return tl.load(images + row.to(tl.int64) * 3 + offset, mask=mask, other=0.0)


@triton.jit
@no_type_check
def convolve_kernel(
    images, filters, y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Convolve, and sum columns and their squares; the last program computes scale and shift."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    number = tl.arange(0, 32)[:, None]
    taps = tl.load(filters + column * 27 + number, mask=number < 27, other=0.0)
    center = load_running_mean(running_mean, column)
    program = tl.program_id(1)
    first, second = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32), tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    patches = _patches(images, program * ROWS + tl.arange(0, ROWS)[:, None], rows, HEIGHT, WIDTH)
    for start in range(program * ROWS, rows, blocks * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = row < rows
        rounded = tl.dot(patches, taps).to(y.dtype.element_ty)
        patches = _patches(images, row + blocks * ROWS, rows, HEIGHT, WIDTH)  # prefetch
        tl.store(y + row.to(tl.int64) * channels + column, rounded, mask=mask)
        value = tl.where(mask, rounded.to(tl.float32) - center, 0.0)
        first, second = add_folded(first, second, value, ROWS, COLUMNS)
    store_partial_sums(
        tl.reshape(first, (ROWS // 2, COLUMNS)), tl.reshape(second, (ROWS // 2, COLUMNS)), center, partial, counter,
        weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels, blocks, eps,
        momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def back_kernel(
    gradient, y, images, scale, shift, slope, offset, partial, rows, channels, blocks,
    MASK: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the filters over a block of rows, starting with the rows that are still in the cache."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((COLUMNS, 32), tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, blocks * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        value = gradient_of_y(
            gradient, y, scale, shift, slope, offset, row, column, 0, channels, row < rows, MASK, ROWS, COLUMNS
        )
        rounded = value.to(y.dtype.element_ty)  # the rounding of a stored gradient
        total = tl.dot(tl.trans(rounded), _patches(images, row, rows, HEIGHT, WIDTH), total)
    own_rows = partial + tl.program_id(1).to(tl.int64) * channels * 32
    tl.store(own_rows + tl.trans(column) * 32 + tl.arange(0, 32)[None, :], total)


@triton.jit
@no_type_check
def add_kernel(partial, result, channels, blocks, BLOCKS: tl.constexpr):
    """Add the partial gradients of one filter in a fixed order."""
    number = tl.arange(0, 32)[None, :]
    total = tl.zeros((BLOCKS, 32), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)[:, None]
        total += tl.load(partial + (block * channels + tl.program_id(0)) * 32 + number, mask=block < blocks, other=0.0)
    gradient = tl.sum(total, 0, keep_dims=True).to(result.dtype.element_ty)
    tl.store(result + tl.program_id(0) * 27 + number, gradient, mask=number < 27)


def fits(images: Tensor, filters: Tensor) -> bool:
    """Return whether the kernels support shapes and memory layout of images and filters."""
    return filters.shape[1:] == FILTER_SHAPE and all(
        tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, filters)
    )


def convolve(images: Tensor, filters: Tensor, norm: Affine, counter: Tensor) -> tuple[Tensor, Normed]:
    """Compute a 3x3 convolution with stride and padding 1 and the batch statistics; update the running statistics.

    Args:
        images: images with three channels, in channels-last layout.
        filters: 3x3 filters in channels-last layout, in the type of the images.
        norm: the batch norm after the convolution.
        counter: zeros, one for each block of columns.
    """
    height, width = images.shape[2:]
    y = new_images(images, len(filters))
    rows, channels = shape_of(y)
    blocks = FORWARD.blocks(rows, channels)
    statistics, partial = statistics_buffers(channels, blocks, y.device)
    convolve_kernel[channels // FORWARD.columns, blocks](
        images, filters, y, partial, counter, norm.weight, norm.bias, *statistics, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum, HEIGHT=height, WIDTH=width, **compile_options(FORWARD),
    )  # fmt: skip
    return y, statistics


def gradient_of_filters(images: Tensor, filters: Tensor, y: Tensor, statistics: Normed, sums: GradientSums) -> Tensor:
    """Compute the gradient of the filters from the result of the first backward pass of the batch norm."""
    rows, channels = shape_of(y)
    blocks = BACKWARD.blocks(rows, channels)
    partial = torch.empty(blocks, channels, 32, device=y.device, dtype=torch.float32)
    back_kernel[channels // BACKWARD.columns, blocks](
        sums.gradient, y, images, statistics.scale, statistics.shift, sums.slope, sums.offset, partial,
        rows, channels, blocks,
        MASK=sums.mask, HEIGHT=images.shape[2], WIDTH=images.shape[3], **compile_options(BACKWARD),
    )  # fmt: skip
    result = torch.empty_like(filters)
    add_kernel[(channels,)](partial, result, channels, blocks, BLOCKS=128)
    return result
