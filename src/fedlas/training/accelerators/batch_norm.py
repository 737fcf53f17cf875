"""Fused batch norm, residual add and ReLU: Triton kernels for images in channels-last layout.

    y ─► sums ─────► scale, shift ─► z = relu(y · scale + shift + skip)
                        │
    dz ─► sums of g, g · (y - mean) ─► dy = a · g + b · y + c          g = dz where z > 0

There are two passes forward and two backward. Images are matrices with a row for each pixel and a column for each
channel. Each program sums a block of rows, and the last program adds the partial sums in a fixed order: equal inputs
give equal bits. The first pass reads the rows from the last to the first, because the convolution has just written the
last ones and they are still in the cache; the second pass starts with the first rows. The backward pass recomputes the
sign of the ReLU input from y if there is no residual add; otherwise the forward pass stores it as one bit per element.
"""

import os
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.errors import UserError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when a kernel is defined
UNROLL = tl.constexpr(8)  # loads of partial sums in flight
EVICT_FIRST = tl.constexpr("evict_first")  # cache policy of data that is not read again soon
CHANNEL_MULTIPLE = 64  # the number of channels has to be a multiple of it
LOW_PRECISION_TYPES = (torch.bfloat16, torch.float16)  # inputs of matrix units; float32 would be rounded


class Tile(NamedTuple):
    """Tile of a program (rows, columns), its warps, the number of programs that share a sum, and pipeline stages.

    Tuned on an H200 with 132 multiprocessors.
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0
    stages: int = 1

    def blocks(self, rows: int, channels: int) -> int:
        """Return the number of blocks of rows, each summed by one program."""
        return min(-(-rows // self.rows), max(1, self.programs // (channels // self.columns)))


SUMS = Tile(64, 64, 4, 264, stages=4)
SUMS_SMALL = Tile(64, 64, 4, 132, stages=4)  # the last program adds fewer partial sums
SMALL_SIZE = 2**23  # elements up to which SUMS_SMALL is faster
SUMS_WITH_OUTPUT = Tile(64, 64, 4, 264)  # for gradients that are also added and written


def tile_for_sums(numbers: int) -> Tile:
    """Return the tile of a reduction over a number of elements."""
    return SUMS_SMALL if numbers <= SMALL_SIZE else SUMS


def tile_for(channels: int) -> Tile:
    """Return the tile of an elementwise kernel."""
    return Tile(64, 64, 4) if channels % (2 * CHANNEL_MULTIPLE) else Tile(64, 128, 8)


@triton.jit
@no_type_check
def is_last_program(counter, blocks):
    """Return whether this program is the last of its columns; reset the counter for the next launch."""
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    last = ticket == blocks - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
@no_type_check
def _column_sums(first, second):
    """Sum the columns of two tiles in one reduction, because each reduction synchronises all warps."""
    return tl.split(tl.sum(tl.join(first, second), 0, keep_dims=True))


@triton.jit
@no_type_check
def load_running_mean(running_mean, column):
    """Return the running mean as an estimate of the mean of a column, 0 if it is not finite.

    Sums are taken around it, because squares lose digits if the mean is far from zero.
    """
    value = tl.load(running_mean + column)
    return tl.where(tl.abs(value) < 1e30, value, 0.0)


@triton.jit
@no_type_check
def _add_partial_sums(partial, column, blocks, channels, COLUMNS: tl.constexpr):
    """Add the partial sums of all blocks in a fixed order, with several loads in flight."""
    first, second = tl.zeros((16, COLUMNS), tl.float32), tl.zeros((16, COLUMNS), tl.float32)
    for start in range(0, blocks, 16 * UNROLL):
        for step in tl.static_range(UNROLL):
            block = start + step * 16 + tl.arange(0, 16)[:, None]
            mask = block < blocks
            pointers = partial + block * channels + column
            first += tl.load(pointers, mask=mask, other=0.0)
            second += tl.load(pointers + blocks * channels, mask=mask, other=0.0)
    return _column_sums(first, second)


@triton.jit
@no_type_check
def store_partial_sums(
    first, second, center, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var, column,
    rows, channels, blocks, eps, momentum, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store partial sums; the last program computes scale and shift, and updates the running statistics."""
    own_row = partial + tl.program_id(1) * channels + column
    first, second = _column_sums(first, second)
    tl.store(own_row, first)
    tl.store(own_row + blocks * channels, second)
    if is_last_program(counter + tl.program_id(0), blocks):
        old_mean, old_var = tl.load(running_mean + column), tl.load(running_var + column)
        gamma, beta = tl.load(weight + column), tl.load(bias + column)
        total, squares = _add_partial_sums(partial, column, blocks, channels, COLUMNS)
        deviation, mean_square = total / rows, squares / rows
        new_mean, variance = center + deviation, tl.maximum(mean_square - deviation * deviation, 0.0)
        inverse_std = 1.0 / tl.sqrt(variance + eps)
        factor = gamma * inverse_std
        tl.store(mean + column, new_mean)
        tl.store(rstd + column, inverse_std)
        tl.store(scale + column, factor)
        tl.store(shift + column, beta - new_mean * factor)
        tl.store(running_mean + column, old_mean + momentum * (new_mean - old_mean))
        tl.store(running_var + column, old_var + momentum * (variance * rows / (rows - 1) - old_var))


@triton.jit
@no_type_check
def add_folded(first, second, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add a tile to a sum and its squares to another, after folding rows that are eight apart.

    A thread holds both rows of a matrix product, so it needs half as many registers for the sums.
    """
    upper, lower = tl.split(tl.permute(tl.reshape(value, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 3, 1)))
    return first + (upper + lower), tl.fma(upper, upper, tl.fma(lower, lower, second))


@triton.jit
@no_type_check
def sums_kernel(
    y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum columns and their squares; the last program computes scale and shift and updates running statistics."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    program = tl.program_id(1)
    center = tl.load(y + column).to(tl.float32)  # the first row: centred squares lose fewer digits
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(program * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        row = rows - 1 - start - tl.arange(0, ROWS)[:, None]
        mask = row >= 0
        loaded = tl.load(y + row.to(tl.int64) * channels + column, mask=mask, other=0.0)
        value = tl.where(mask, loaded.to(tl.float32) - center, 0.0)
        first += value
        second += value * value
    store_partial_sums(
        first, second, center, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
        column, rows, channels, blocks, eps, momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def _bit_offsets(row, across, channels, COLUMNS: tl.constexpr, CHANNELS_PER_WORD: tl.constexpr):
    """Return the offsets of the ReLU bits of a tile, with a number of channels per word."""
    column = across * (COLUMNS // CHANNELS_PER_WORD) + tl.arange(0, COLUMNS // CHANNELS_PER_WORD)[None, :]
    return row.to(tl.int64) * (channels // CHANNELS_PER_WORD) + column


@triton.jit
@no_type_check
def _tile(channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows, columns and column index of a program's tile.

    The grid has one axis, because the others are limited to 65,535 programs.
    """
    column_tiles = channels // COLUMNS
    across, down = tl.program_id(0) % column_tiles, tl.program_id(0) // column_tiles
    return down * ROWS + tl.arange(0, ROWS)[:, None], across * COLUMNS + tl.arange(0, COLUMNS)[None, :], across


@triton.jit
@no_type_check
def apply_kernel(
    y, scale, shift, skip, skip_scale, skip_shift, z, bits, rows, channels,
    HAS_SKIP: tl.constexpr, SKIP_IS_NORMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Apply batch norm, the residual add and ReLU."""
    row, column, across = _tile(channels, ROWS, COLUMNS)
    mask = row < rows
    offsets = row.to(tl.int64) * channels + column
    value = tl.load(y + offsets, mask=mask, other=0.0, eviction_policy=EVICT_FIRST).to(tl.float32)
    value = value * tl.load(scale + column) + tl.load(shift + column)
    if HAS_SKIP:
        other = tl.load(skip + offsets, mask=mask, other=0.0, eviction_policy=EVICT_FIRST).to(tl.float32)
        if SKIP_IS_NORMED:
            other = other * tl.load(skip_scale + column) + tl.load(skip_shift + column)
        value += other
    is_negative = value <= 0  # keeps NaN
    tl.store(z + offsets, tl.where(is_negative, 0.0, value).to(z.dtype.element_ty), mask=mask)
    if HAS_SKIP:
        byte_bits = tl.reshape(is_negative.to(tl.int32), (ROWS, COLUMNS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(bits + _bit_offsets(row, across, channels, COLUMNS, 8), tl.sum(byte_bits, 2).to(tl.uint8), mask=mask)


@triton.jit
@no_type_check
def relu_backward(
    value, y_value, bits, scale, shift, row, column, across, channels, mask,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the ReLU input; MASK selects the source of the sign: "y", "bits" or none."""
    if MASK == "y":
        value = tl.where(y_value * tl.load(scale + column) + tl.load(shift + column) <= 0, 0.0, value)
    if MASK == "bits":
        words = bits.to(tl.pointer_type(tl.int32), bitcast=True)  # four bytes at once, which can be prefetched
        word = tl.load(words + _bit_offsets(row, across, channels, COLUMNS, 32), mask=mask, other=0)
        is_negative = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        value = tl.where(tl.reshape(is_negative, (ROWS, COLUMNS)) != 0, 0.0, value)
    return value


@triton.jit
@no_type_check
def load_second_gradient(
    second, offsets, row, column, channels, mask, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Load a tile of the gradient of the second use; a strided use has a gradient at every EVERY-th pixel only."""
    if EVERY > 1:
        across, pixel_row = row % WIDTH, row // WIDTH
        image, down = pixel_row // HEIGHT, pixel_row % HEIGHT
        mask = mask & (across % EVERY == 0) & (down % EVERY == 0)
        pixel_row = image * ((HEIGHT + EVERY - 1) // EVERY) + down // EVERY
        pixel = pixel_row * ((WIDTH + EVERY - 1) // EVERY) + across // EVERY
        offsets = pixel.to(tl.int64) * channels + column
    return tl.load(second + offsets, mask=mask, other=0.0, eviction_policy=EVICT_FIRST).to(tl.float32)


@triton.jit
@no_type_check
def back_sums_kernel(
    first, second, y, bits, output, scale, shift, mean, rstd, partial, counter,
    weight_gradient, bias_gradient, slope, offset,
    other, other_mean, other_rstd, other_scale, other_weight_gradient, other_bias_gradient, other_slope, other_offset,
    rows, channels, blocks,
    HAS_SECOND: tl.constexpr, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    KEEP: tl.constexpr, HAS_OTHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the centred input; the last program computes the factors of dy."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mean_value = tl.load(mean + column)
    total, product = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    other_mean_value, other_product = mean_value, product
    if HAS_OTHER:
        other_mean_value = tl.load(other_mean + column)
    eviction: tl.constexpr = EVICT_FIRST if KEEP else ""
    for start in tl.range(tl.program_id(1) * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        row = rows - 1 - start - tl.arange(0, ROWS)[:, None]
        mask = row >= 0
        offsets = row.to(tl.int64) * channels + column
        y_value = tl.load(y + offsets, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(first + offsets, mask=mask, other=0.0, eviction_policy=eviction).to(tl.float32)
        if HAS_SECOND:
            value += load_second_gradient(second, offsets, row, column, channels, mask, EVERY, HEIGHT, WIDTH)
        value = relu_backward(
            value, y_value, bits, scale, shift, row, column, tl.program_id(0), channels, mask, MASK, ROWS, COLUMNS
        )
        value = tl.where(mask, value, 0.0)
        if HAS_OTHER:
            other_value = tl.load(other + offsets, mask=mask, other=0.0).to(tl.float32)
        if KEEP:
            rounded = value.to(output.dtype.element_ty)
            tl.store(output + offsets, rounded, mask=mask)
            value = rounded.to(tl.float32)
        total += value
        product += value * (y_value - mean_value)
        if HAS_OTHER:
            other_product += value * (other_value - other_mean_value)
    store_partial_gradients(
        total, product, other_product, mean_value, other_mean_value, rstd, scale, partial, counter, weight_gradient,
        bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
        other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def store_partial_gradients(
    total, product, other_product, mean_value, other_mean_value, rstd, scale, partial, counter, weight_gradient,
    bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
    other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store the partial sums of the backward pass; the last program computes the factors of dy."""
    own_row = partial + tl.program_id(1) * channels + column
    total, product = _column_sums(total, product)
    tl.store(own_row, total)
    tl.store(own_row + blocks * channels, product)
    if HAS_OTHER:
        tl.store(own_row + 2 * blocks * channels, tl.sum(other_product, 0, keep_dims=True))
    if is_last_program(counter + tl.program_id(0), blocks):
        gradient_sum, product_sum = _add_partial_sums(partial, column, blocks, channels, COLUMNS)
        tl.store(bias_gradient + column, gradient_sum)
        _store_factors(gradient_sum, product_sum, mean_value, rstd, scale, weight_gradient, slope, offset, column, rows)
        if HAS_OTHER:
            _, other_product_sum = _add_partial_sums(partial + blocks * channels, column, blocks, channels, COLUMNS)
            tl.store(other_bias_gradient + column, gradient_sum)
            _store_factors(
                gradient_sum, other_product_sum, other_mean_value, other_rstd, other_scale,
                other_weight_gradient, other_slope, other_offset, column, rows,
            )  # fmt: skip


@triton.jit
@no_type_check
def _store_factors(total, product, mean_value, rstd, scale, weight_gradient, slope, offset, column, rows):
    """Store the gradient of the weight, and b and c of dy = scale · g + b · y + c."""
    inverse_std, factor = tl.load(rstd + column), tl.load(scale + column)
    tl.store(weight_gradient + column, product * inverse_std)
    b = -factor * inverse_std * inverse_std * product / rows
    tl.store(slope + column, b)
    tl.store(offset + column, -factor * total / rows - b * mean_value)


@triton.jit
@no_type_check
def gradient_of_y(
    gradient, y, scale, shift, slope, offset, row, column, across, channels, mask,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of y."""
    offsets = row.to(tl.int64) * channels + column
    y_value = tl.load(y + offsets, mask=mask, other=0.0, eviction_policy=EVICT_FIRST).to(tl.float32)
    value = tl.load(gradient + offsets, mask=mask, other=0.0, eviction_policy=EVICT_FIRST).to(tl.float32)
    value = relu_backward(value, y_value, y, scale, shift, row, column, across, channels, mask, MASK, ROWS, COLUMNS)
    return value * tl.load(scale + column) + y_value * tl.load(slope + column) + tl.load(offset + column)


@triton.jit
@no_type_check
def back_apply_kernel(
    gradient, y, scale, shift, slope, offset, result, rows, channels,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of y."""
    row, column, across = _tile(channels, ROWS, COLUMNS)
    mask = row < rows
    value = gradient_of_y(
        gradient, y, scale, shift, slope, offset, row, column, across, channels, mask, MASK, ROWS, COLUMNS
    )
    tl.store(result + row.to(tl.int64) * channels + column, value.to(result.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def spread_kernel(gradient, result, rows, channels, pixels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Divide the gradient of a global mean evenly among the pixels."""
    row, column, _ = _tile(channels, ROWS, COLUMNS)
    mask = row < rows
    value = tl.load(gradient + (row // pixels).to(tl.int64) * channels + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + row.to(tl.int64) * channels + column, (value / pixels).to(result.dtype.element_ty), mask=mask)


class Normed(NamedTuple):
    """Statistics of a batch: one value per channel."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor


class Affine(NamedTuple):
    """Parameters and running statistics of a batch norm."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps: float
    momentum: float


def shape_of(y: Tensor) -> tuple[int, int]:
    """Return rows and columns of images as a matrix."""
    count, channels, height, width = y.shape
    if not y.is_contiguous(memory_format=torch.channels_last) or channels % CHANNEL_MULTIPLE:
        raise UserError(
            f"images of shape {tuple(y.shape)} need channels-last layout and a multiple of {CHANNEL_MULTIPLE} channels"
        )
    if count * height * width == 1:
        raise UserError(f"batch norm needs more than one value per channel, but the images have shape {tuple(y.shape)}")
    return count * height * width, channels


def compile_options(tile: Tile) -> dict[str, int]:
    """Return the constants and compile options of a kernel for a tile."""
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps, "num_stages": tile.stages}


def new_images(like: Tensor, channels: int, *size: int) -> Tensor:
    """Allocate channels-last images of another number of channels and, if given, another height and width."""
    shape = len(like), channels, *(size or like.shape[2:])
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def statistics_buffers(channels: int, blocks: int, device: torch.device) -> tuple[Normed, Tensor]:
    """Allocate the statistics of a batch and the partial sums."""
    statistics = Normed(*torch.empty(4, channels, device=device, dtype=torch.float32).unbind())
    return statistics, torch.empty(2, blocks, channels, device=device, dtype=torch.float32)


def statistics(y: Tensor, norm: Affine, counter: Tensor) -> Normed:
    """Compute the statistics of a batch, and update the running statistics."""
    rows, channels = shape_of(y)
    tile = tile_for_sums(y.numel())
    blocks = tile.blocks(rows, channels)
    result, partial = statistics_buffers(channels, blocks, y.device)
    sums_kernel[channels // tile.columns, blocks](
        y, partial, counter, norm.weight, norm.bias, *result, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum, STAGES=tile.stages, **compile_options(tile),
    )  # fmt: skip
    return result


def activation(
    y: Tensor, statistics: Normed, skip: Tensor | None, skip_statistics: Normed | None
) -> tuple[Tensor, Tensor]:
    """Apply batch norm, the residual add and ReLU.

    Returns:
        The output, and, with a residual add, one bit for each negative element.
    """
    rows, channels = shape_of(y)
    tile = tile_for(channels)
    z = torch.empty_like(y)
    bits = torch.empty(0 if skip is None else y.numel() // 8, device=y.device, dtype=torch.uint8)
    skip_affine = skip_statistics or statistics
    apply_kernel[(channels // tile.columns * triton.cdiv(rows, tile.rows),)](
        y, statistics.scale, statistics.shift, y if skip is None else skip, skip_affine.scale, skip_affine.shift,
        z, bits, rows, channels,
        HAS_SKIP=skip is not None, SKIP_IS_NORMED=skip_statistics is not None, **compile_options(tile),
    )  # fmt: skip
    return z, bits


class StridedGradient(NamedTuple):
    """Gradient of images that a strided convolution reads; zero except at every `every`-th row and column."""

    gradient: Tensor
    every: int


class GradientSums(NamedTuple):
    """Result of the first backward pass through a batch norm, and input of the second pass.

    Attributes:
        gradient: gradient of z, or of the ReLU input if there were two gradients or a residual add.
        mask: how the second pass finds the sign of the ReLU input, "y", or "none" if it is already applied.
        weight: gradient of the weight of the norm.
        bias: gradient of its bias.
        slope: b of dy = scale · gradient + b · y + c.
        offset: c of dy.
        other_weight: gradient of the weight of the norm on the skip connection, if there is one.
        other_bias: gradient of its bias; equal to `bias`, in separate memory.
        other_slope: its slope.
        other_offset: its offset.
    """

    gradient: Tensor
    mask: str
    weight: Tensor
    bias: Tensor
    slope: Tensor
    offset: Tensor
    other_weight: Tensor
    other_bias: Tensor
    other_slope: Tensor
    other_offset: Tensor


class BackwardLaunch(NamedTuple):
    """Grid, arguments after the gradient of z, constants and results of both kernels of the first backward pass."""

    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Tensor, ...]


def backward_launch(
    tile: Tile, output: Tensor, second: Tensor | StridedGradient | None, y: Tensor, bits: Tensor, statistics: Normed,
    counter: Tensor, other: Tensor | None, other_statistics: Normed | None,
) -> BackwardLaunch:  # fmt: skip
    """Allocate results and partial sums of the first backward pass, and list the arguments of its kernel."""
    rows, channels = shape_of(y)
    blocks = tile.blocks(rows, channels)
    results = torch.empty(8, channels, device=y.device, dtype=torch.float32).unbind()
    partial = torch.empty(2 if other is None else 3, blocks, channels, device=y.device, dtype=torch.float32)
    weight, bias, slope, offset, *of_other = results
    options: dict[str, Any] = {"HAS_SECOND": second is not None, "EVERY": 1, "HEIGHT": 1, "WIDTH": 1}
    if isinstance(second, StridedGradient):
        options |= {"EVERY": second.every, "HEIGHT": y.shape[2], "WIDTH": y.shape[3]}
        second = second.gradient
    other_arguments = other_statistics or statistics
    arguments = (
        y if second is None else second, y, bits, output,
        statistics.scale, statistics.shift, statistics.mean, statistics.rstd,
        partial, counter, weight, bias, slope, offset, y if other is None else other,
        other_arguments.mean, other_arguments.rstd, other_arguments.scale, *of_other, rows, channels, blocks,
    )  # fmt: skip
    options |= {"MASK": "bits" if bits.numel() else "y", "HAS_OTHER": other is not None, "STAGES": tile.stages}
    grid = channels // tile.columns, blocks
    return BackwardLaunch(grid, arguments, options | compile_options(tile), results)


def gradient_sums(
    first: Tensor, second: Tensor | StridedGradient | None, y: Tensor, bits: Tensor, statistics: Normed,
    counter: Tensor, other: Tensor | None = None, other_statistics: Normed | None = None,
) -> GradientSums:  # fmt: skip
    """Compute the first backward pass from the gradients of both uses of z.

    Args:
        first: gradient of z from the first use.
        second: gradient of z from the second use, if there is one.
        y: input of the norm.
        bits: sign bits of the ReLU input after a residual add; empty without one.
        statistics: statistics of y.
        counter: zeros, one for each block of columns.
        other: input of the norm on the skip connection, if there is one.
        other_statistics: its statistics.
    """
    writes_output = bits.numel() > 0 or second is not None
    tile = SUMS_WITH_OUTPUT if writes_output else tile_for_sums(2 * y.numel())
    output = torch.empty_like(y) if writes_output else y
    launch = backward_launch(tile, output, second, y, bits, statistics, counter, other, other_statistics)
    back_sums_kernel[launch.grid](first, *launch.arguments, KEEP=writes_output, **launch.options)
    return GradientSums(output if writes_output else first, "none" if writes_output else "y", *launch.results)


def apply_gradient(sums: GradientSums, y: Tensor, statistics: Normed, slope: Tensor, offset: Tensor) -> Tensor:
    """Compute the second backward pass: the gradient of the input of a norm."""
    rows, channels = shape_of(y)
    tile, result = tile_for(channels), torch.empty_like(y)
    back_apply_kernel[(channels // tile.columns * triton.cdiv(rows, tile.rows),)](
        sums.gradient, y, statistics.scale, statistics.shift, slope, offset, result, rows, channels,
        MASK=sums.mask, **compile_options(tile),
    )  # fmt: skip
    return result


def gradients(
    sums: GradientSums,
    y: Tensor,
    statistics: Normed,
    other: Tensor | None = None,
    other_statistics: Normed | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the second backward pass; arguments are those of `gradient_sums`.

    Returns:
        The gradients of y and of the skip connection; without one, ignore the second.
    """
    of_y = apply_gradient(sums, y, statistics, sums.slope, sums.offset)
    if other is None or other_statistics is None:
        return of_y, sums.gradient
    return of_y, apply_gradient(sums, other, other_statistics, sums.other_slope, sums.other_offset)


def spread_mean_gradient(gradient: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient of the input of a global mean."""
    result = new_images(gradient, gradient.shape[1], height, width)
    rows, channels = shape_of(result)
    tile = tile_for(channels)
    spread_kernel[(channels // tile.columns * triton.cdiv(rows, tile.rows),)](
        gradient.contiguous(), result, rows, channels, height * width, **compile_options(tile),
    )  # fmt: skip
    return result
