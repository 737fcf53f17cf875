"""1x1 convolutions (GEMM) in low precision, fused with the sums of the next or previous batch norm; Triton kernels.

    x ─► y = x · wᵀ, and sums of y ─► scale, shift                                 (continued in `batch_norm`)
    dy ─► g = dy · w + gradient of the second use, ReLU backward ─► sums of g      (for the norm before x)

With few channels, these convolutions are limited by memory, and the fused sums save one read of the output. A program
keeps its columns of the weight and iterates over tiles of rows, which are prefetched. As in `batch_norm`, programs
start with the last rows, which are still in the cache, and sums are added in a fixed order: equal inputs give equal
bits.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.training.accelerators.batch_norm import (
    CHANNEL_MULTIPLE,
    LOW_PRECISION_TYPES,
    Affine,
    GradientSums,
    Normed,
    StridedGradient,
    Tile,
    add_folded,
    backward_launch,
    compile_options,
    load_running_mean,
    load_second_gradient,
    new_images,
    relu_backward,
    shape_of,
    statistics_buffers,
    store_partial_gradients,
    store_partial_sums,
)

MULTIPROCESSORS = 132  # of an H200, for which tiles and thresholds were tuned
MIN_ROWS = 1 << 15  # rows from which on the kernel is faster
MIN_ROWS_BACKWARD = 1 << 13  # the same for the backward pass
BACKWARD_TILE = Tile(64, 64, 4, 264, stages=3)


class Gemm(NamedTuple):
    """Output gradient and weight of a convolution, from which the gradient of its input is computed."""

    gradient: Tensor
    weight: Tensor


@triton.jit
@no_type_check
def gemm_kernel(
    x, factors, y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply, and sum columns and their squares; the last program computes scale and shift."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    program = tl.program_id(1)
    down, across = tl.arange(0, ROWS)[:, None], tl.arange(0, K)
    weights = tl.load(factors + column * K + across[:, None])
    center = load_running_mean(running_mean, column)
    first, second = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32), tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    last_tile = (tl.cdiv(rows, ROWS) - 1) * ROWS
    for start in tl.range(program * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        top = last_tile - start
        mask = EVEN | (down < rows - top)
        tile = x + top.to(tl.int64) * K + (down * K + across[None, :])
        rounded = tl.dot(tl.load(tile, mask=mask, other=0.0), weights).to(y.dtype.element_ty)
        tl.store(y + top.to(tl.int64) * channels + (down * channels + column), rounded, mask=mask)
        value = tl.where(mask, rounded.to(tl.float32) - center, 0.0)
        first, second = add_folded(first, second, value, ROWS, COLUMNS)
    store_partial_sums(
        tl.reshape(first, (ROWS // 2, COLUMNS)), tl.reshape(second, (ROWS // 2, COLUMNS)), center, partial, counter,
        weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels, blocks, eps,
        momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def gemm_backward_kernel(
    dy, factors, second, y, bits, gradient, scale, shift, mean, rstd, partial, counter,
    weight_gradient, bias_gradient, slope, offset,
    other, other_mean, other_rstd, other_scale, other_weight_gradient, other_bias_gradient, other_slope, other_offset,
    rows, channels, blocks,
    K: tl.constexpr, HAS_SECOND: tl.constexpr, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    MASK: tl.constexpr, HAS_OTHER: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply, add the gradient of the second use, apply ReLU backward, and sum as in `back_sums_kernel`."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    down, across = tl.arange(0, ROWS)[:, None], tl.arange(0, K)
    factor = tl.load(factors + across[:, None] * channels + column)
    mean_value = tl.load(mean + column)
    total, product = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    other_mean_value, other_product = mean_value, product
    if HAS_OTHER:
        other_mean_value = tl.load(other_mean + column)
    last_tile = (tl.cdiv(rows, ROWS) - 1) * ROWS
    for start in tl.range(tl.program_id(1) * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        top = last_tile - start
        mask = EVEN | (down < rows - top)
        offsets = top.to(tl.int64) * channels + (down * channels + column)
        dy_tile = tl.load(dy + top.to(tl.int64) * K + (down * K + across[None, :]), mask=mask, other=0.0)
        y_value = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.dot(dy_tile, factor)
        if HAS_SECOND:
            value += load_second_gradient(second, offsets, top + down, column, channels, mask, EVERY, HEIGHT, WIDTH)
        value = relu_backward(
            value, y_value, bits, scale, shift, top + down, column, tl.program_id(0), channels, mask, MASK, ROWS,
            COLUMNS,
        )  # fmt: skip
        rounded = value.to(gradient.dtype.element_ty)
        tl.store(gradient + offsets, rounded, mask=mask)
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        total += value
        product += value * (y_value - mean_value)
        if HAS_OTHER:
            other_product += value * (tl.load(other + offsets, mask=mask, other=0.0).to(tl.float32) - other_mean_value)
    store_partial_gradients(
        total, product, other_product, mean_value, other_mean_value, rstd, scale, partial, counter, weight_gradient,
        bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
        other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER, COLUMNS,
    )  # fmt: skip


def tile_for(inputs: int) -> Tile:
    """Return the tile for a number of input channels; tuned on an H200."""
    return Tile(64, 64, 4, 264, stages=2) if inputs > 128 else Tile(64, 64, 4, 396, stages=3)


def registers(tile: Tile) -> int:
    """Return the limit of registers per thread with which all programs of a tile run concurrently.

    The main loop needs no more; the code after it would use all registers.
    """
    threads = -(-tile.programs // MULTIPROCESSORS) * tile.warps * 32
    return min(248, 65536 // threads // 8 * 8)


def fits(images: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel supports the convolution and is faster than cuDNN and a separate pass for the sums.

    Thresholds were tuned on an H200.
    """
    outputs, inputs = weight.shape[:2]
    is_faster = images.numel() // inputs >= MIN_ROWS and (inputs in (64, 128) or (inputs == 256 and outputs <= 128))
    return is_faster and _has_supported_layout(images, weight)


def fits_back(images: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel of the input gradient supports the convolution and is faster than cuDNN."""
    outputs, inputs = weight.shape[:2]
    is_faster = images.numel() // inputs >= MIN_ROWS_BACKWARD and outputs in (64, 128, 256) and outputs <= inputs
    return is_faster and _has_supported_layout(images, weight)


def _has_supported_layout(images: Tensor, weight: Tensor) -> bool:
    """Return whether the kernels support shapes, type and memory layout of images and weight."""
    outputs, inputs, *kernel_size = weight.shape
    return (
        kernel_size == [1, 1]
        and outputs % CHANNEL_MULTIPLE == 0
        and inputs % CHANNEL_MULTIPLE == 0
        and weight.dtype in LOW_PRECISION_TYPES
        and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (images, weight))
    )


def multiply(images: Tensor, weight: Tensor, norm: Affine, counter: Tensor) -> tuple[Tensor, Normed]:
    """Compute a 1x1 convolution with stride 1 and the batch statistics; update the running statistics.

    Args:
        images: images in channels-last layout.
        weight: 1x1 weight, in the type of the images.
        norm: the batch norm after the convolution.
        counter: zeros, one for each block of columns.
    """
    inputs = images.shape[1]
    y = new_images(images, len(weight))
    rows, channels = shape_of(y)
    tile = tile_for(inputs)
    blocks = tile.blocks(rows, channels)
    statistics, partial = statistics_buffers(channels, blocks, y.device)
    gemm_kernel[channels // tile.columns, blocks](
        images, weight, y, partial, counter, norm.weight, norm.bias, *statistics, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum,
        K=inputs, STAGES=tile.stages, EVEN=rows % tile.rows == 0, maxnreg=registers(tile), **compile_options(tile),
    )  # fmt: skip
    return y, statistics


def gradient_sums(
    gemm: Gemm, second: Tensor | StridedGradient | None, y: Tensor, bits: Tensor, statistics: Normed,
    counter: Tensor, other: Tensor | None = None, other_statistics: Normed | None = None,
) -> GradientSums:  # fmt: skip
    """Compute the first backward pass of a batch norm, as `batch_norm.gradient_sums`, from a deferred GEMM."""
    gradient, rows = torch.empty_like(y), y.numel() // y.shape[1]
    launch = backward_launch(BACKWARD_TILE, gradient, second, y, bits, statistics, counter, other, other_statistics)
    gemm_backward_kernel[launch.grid](
        gemm.gradient, gemm.weight, *launch.arguments, K=len(gemm.weight), EVEN=rows % BACKWARD_TILE.rows == 0,
        **launch.options,
    )  # fmt: skip
    return GradientSums(gradient, "none", *launch.results)
