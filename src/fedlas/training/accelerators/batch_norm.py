"""Batch norm, sum and ReLU in two passes forward and two backward; Triton kernels for images with channels last.

    y ─► sums ─────► scale, shift ─► z = relu(y · scale + shift + skip)
                        │
    dz ─► sums of g, g · (y - mean) ─► dy = a · g + b · y + c          g = dz where z > 0

Images are matrices here, a row for each pixel and a column for each channel. Sums are taken in blocks of rows, and the
program that ends last adds the blocks up, always in one order: equal inputs give equal bits. All programs together
sweep over the rows from the last to the first, because a convolution has just written the last ones and the cache still
holds them; the pass that follows begins with the first.
Where a ReLU cut off is computed again from y where nothing was added to it, and kept as one bit a number where
something was.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.errors import UserError
from fedlas.training.accelerators.precompile import launch, precompiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton looks at it when it reads what follows
AT_A_TIME = tl.constexpr(8)  # loads of what blocks of rows left
ONCE = tl.constexpr("evict_first")  # how to read what nobody reads again for long: the cache may keep other things
NARROWEST = 64  # how many channels there have to be a multiple of
NARROW_TYPES = (torch.bfloat16, torch.float16)  # types that matrix units multiply as they are; they would round float32


class Tile(NamedTuple):
    """Rows and columns that a program looks at together, its warps, and how many programs share a sum.

    Stages are tiles of each tensor that are under way at a time. All found by trying, on an H200 with its 132
    multiprocessors (benchmarks/norms.py).
    """

    rows: int
    columns: int
    warps: int
    programs: int = 0
    stages: int = 1

    def blocks(self, rows: int, channels: int) -> int:
        """Say in how many blocks of rows columns are summed."""
        return min(-(-rows // self.rows), max(1, self.programs // (channels // self.columns)))


SUMS = Tile(64, 64, 4, 264, stages=4)
SUMS_OF_FEW = Tile(64, 64, 4, 132, stages=4)  # the last program has less to add up
FEW = 2**23  # numbers to be read, up to which that pays
SUMS_WITH_KEPT = Tile(64, 64, 4, 264)  # of gradients that are added up and written too


def tile_for_sums(numbers: int) -> Tile:
    """Choose the shape of a program's work where so many numbers are read and summed."""
    return SUMS_OF_FEW if numbers <= FEW else SUMS


def tile_for(channels: int) -> Tile:
    """Choose the shape of a program's work where nothing is summed: whole lines of memory."""
    return Tile(64, 64, 4) if channels % (2 * NARROWEST) else Tile(64, 128, 8)


@triton.jit
@no_type_check
def finished(counter, blocks):
    """Return whether this program is the last of its columns; the counter is then ready for the next launch."""
    tl.debug_barrier()
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    last = ticket == blocks - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
@no_type_check
def _sums(first, second):
    """Sum the columns of two tiles, both at once: a sum waits for all warps several times."""
    return tl.split(tl.sum(tl.join(first, second), 0, keep_dims=True))


@triton.jit
@no_type_check
def expected(running_mean, column):
    """Return a number near the mean of a column of which no row is known yet.

    Where a mean is far from zero, squares lose digits, so what is left around this number is summed. It is moved when
    all programs have read it; one that is lost must not spoil the batch.
    """
    usual = tl.load(running_mean + column)
    return tl.where(tl.abs(usual) < 1e30, usual, 0.0)


@triton.jit
@no_type_check
def _totals(partial, column, blocks, channels, COLUMNS: tl.constexpr):
    """Add up what all blocks of rows left of two sums, always in one order; several loads are under way at a time."""
    first, second = tl.zeros((16, COLUMNS), tl.float32), tl.zeros((16, COLUMNS), tl.float32)
    for start in range(0, blocks, 16 * AT_A_TIME):
        for turn in tl.static_range(AT_A_TIME):
            block = start + turn * 16 + tl.arange(0, 16)[:, None]
            there = block < blocks
            place = partial + block * channels + column
            first += tl.load(place, mask=there, other=0.0)
            second += tl.load(place + blocks * channels, mask=there, other=0.0)
    return _sums(first, second)


@triton.jit
@no_type_check
def finish(
    around, partial, weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels, blocks,
    eps, momentum, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make scale and shift of the sums of what was left around some numbers, and move running statistics."""
    before_mean, before_var = tl.load(running_mean + column), tl.load(running_var + column)
    times, plus = tl.load(weight + column), tl.load(bias + column)
    total, squares = _totals(partial, column, blocks, channels, COLUMNS)
    off, square = total / rows, squares / rows
    middle, spread = around + off, tl.maximum(square - off * off, 0.0)
    inverse = 1.0 / tl.sqrt(spread + eps)
    factor = times * inverse
    tl.store(mean + column, middle)
    tl.store(rstd + column, inverse)
    tl.store(scale + column, factor)
    tl.store(shift + column, plus - middle * factor)
    tl.store(running_mean + column, before_mean + momentum * (middle - before_mean))
    tl.store(running_var + column, before_var + momentum * (spread * rows / (rows - 1) - before_var))


@triton.jit
@no_type_check
def leave(
    first, second, around, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var, column,
    rows, channels, blocks, eps, momentum, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Leave what this program has of two sums; the last one makes scale and shift of what all have left."""
    here = partial + tl.program_id(1) * channels + column
    first, second = _sums(first, second)
    tl.store(here, first)
    tl.store(here + blocks * channels, second)
    if finished(counter + tl.program_id(0), blocks):
        finish(
            around, partial, weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels,
            blocks, eps, momentum, COLUMNS,
        )  # fmt: skip


@triton.jit
@no_type_check
def folded(first, second, value, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add a tile to a sum and its squares to another, rows that are eight apart together.

    Of a product, a thread holds both of them, and keeps half as many sums.
    """
    one, other = tl.split(tl.permute(tl.reshape(value, (ROWS // 16, 2, 8, COLUMNS)), (0, 2, 3, 1)))
    return first + (one + other), tl.fma(one, one, tl.fma(other, other, second))


@triton.jit
@no_type_check
def sums_kernel(
    y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum columns and their squares; the last program makes scale and shift of them, and moves running statistics."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = tl.program_id(1)
    around = tl.load(y + column).to(tl.float32)  # of the first row: where a mean is far from zero, squares lose digits
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(place * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        row = rows - 1 - start - tl.arange(0, ROWS)[:, None]
        there = row >= 0
        seen = tl.load(y + row.to(tl.int64) * channels + column, mask=there, other=0.0)
        value = tl.where(there, seen.to(tl.float32) - around, 0.0)
        first += value
        second += value * value
    leave(
        first, second, around, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
        column, rows, channels, blocks, eps, momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def _place_of_bits(row, across, channels, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return where the bits of a tile are, so many channels together."""
    column = across * (COLUMNS // TOGETHER) + tl.arange(0, COLUMNS // TOGETHER)[None, :]
    return row.to(tl.int64) * (channels // TOGETHER) + column


@triton.jit
@no_type_check
def _tile(channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return rows, columns and number across of a program's tile.

    All programs lie on one axis: the others end at 65,535.
    """
    wide = channels // COLUMNS
    across, down = tl.program_id(0) % wide, tl.program_id(0) // wide
    return down * ROWS + tl.arange(0, ROWS)[:, None], across * COLUMNS + tl.arange(0, COLUMNS)[None, :], across


@triton.jit
@no_type_check
def apply_kernel(
    y, scale, shift, skip, skip_scale, skip_shift, z, bits, rows, channels,
    HAS_SKIP: tl.constexpr, SKIP_IS_NORMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalise, add what skipped the layers, cut off what is negative."""
    row, column, across = _tile(channels, ROWS, COLUMNS)
    there = row < rows
    place = row.to(tl.int64) * channels + column
    value = tl.load(y + place, mask=there, other=0.0, eviction_policy=ONCE).to(tl.float32)
    value = value * tl.load(scale + column) + tl.load(shift + column)
    if HAS_SKIP:
        other = tl.load(skip + place, mask=there, other=0.0, eviction_policy=ONCE).to(tl.float32)
        if SKIP_IS_NORMED:
            other = other * tl.load(skip_scale + column) + tl.load(skip_shift + column)
        value += other
    off = value <= 0  # NaN stays
    tl.store(z + place, tl.where(off, 0.0, value).to(z.dtype.element_ty), mask=there)
    if HAS_SKIP:
        eight = tl.reshape(off.to(tl.int32), (ROWS, COLUMNS // 8, 8)) << tl.arange(0, 8)[None, None, :]
        tl.store(bits + _place_of_bits(row, across, channels, COLUMNS, 8), tl.sum(eight, 2).to(tl.uint8), mask=there)


@triton.jit
@no_type_check
def cut(
    value, seen, bits, scale, shift, row, column, across, channels, there,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a gradient before the ReLU; MASK says what tells where that was cut off."""
    if MASK == "y":
        value = tl.where(seen * tl.load(scale + column) + tl.load(shift + column) <= 0, 0.0, value)
    if MASK == "bits":
        words = bits.to(tl.pointer_type(tl.int32), bitcast=True)  # of four bytes, which can be on their way early
        word = tl.load(words + _place_of_bits(row, across, channels, COLUMNS, 32), mask=there, other=0)
        off = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        value = tl.where(tl.reshape(off, (ROWS, COLUMNS)) != 0, 0.0, value)
    return value


@triton.jit
@no_type_check
def load_other_use(
    second, place, row, column, channels, there, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Return a tile of the gradient of another use; one that looked at some pixels alone left nothing of the others."""
    if EVERY > 1:
        across, line = row % WIDTH, row // WIDTH
        image, down = line // HEIGHT, line % HEIGHT
        there = there & (across % EVERY == 0) & (down % EVERY == 0)
        line = image * ((HEIGHT + EVERY - 1) // EVERY) + down // EVERY
        pixel = line * ((WIDTH + EVERY - 1) // EVERY) + across // EVERY
        place = pixel.to(tl.int64) * channels + column
    return tl.load(second + place, mask=there, other=0.0, eviction_policy=ONCE).to(tl.float32)


@triton.jit
@no_type_check
def back_sums_kernel(
    first, second, y, bits, kept, scale, shift, mean, rstd, partial, counter,
    weight_gradient, bias_gradient, slope, offset,
    other, other_mean, other_rstd, other_scale, other_weight_gradient, other_bias_gradient, other_slope, other_offset,
    rows, channels, blocks,
    HAS_SECOND: tl.constexpr, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    KEEP: tl.constexpr, HAS_OTHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times what was normalised; the last program makes factors of dy of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    middle = tl.load(mean + column)
    total, product = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    other_middle, other_product = middle, product
    if HAS_OTHER:
        other_middle = tl.load(other_mean + column)
    last_use: tl.constexpr = ONCE if KEEP else ""
    for start in tl.range(tl.program_id(1) * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        row = rows - 1 - start - tl.arange(0, ROWS)[:, None]
        there = row >= 0
        place = row.to(tl.int64) * channels + column
        seen = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
        value = tl.load(first + place, mask=there, other=0.0, eviction_policy=last_use).to(tl.float32)
        if HAS_SECOND:
            value += load_other_use(second, place, row, column, channels, there, EVERY, HEIGHT, WIDTH)
        value = cut(
            value, seen, bits, scale, shift, row, column, tl.program_id(0), channels, there, MASK, ROWS, COLUMNS
        )
        value = tl.where(there, value, 0.0)
        if HAS_OTHER:
            beside = tl.load(other + place, mask=there, other=0.0).to(tl.float32)
        if KEEP:
            narrow = value.to(kept.dtype.element_ty)
            tl.store(kept + place, narrow, mask=there)
            value = narrow.to(tl.float32)
        total += value
        product += value * (seen - middle)
        if HAS_OTHER:
            other_product += value * (beside - other_middle)
    leave_gradients(
        total, product, other_product, middle, other_middle, rstd, scale, partial, counter, weight_gradient,
        bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
        other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def leave_gradients(
    total, product, other_product, middle, other_middle, rstd, scale, partial, counter, weight_gradient,
    bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
    other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Leave what this program has of the sums back; the last one makes factors of dy of what all have left."""
    here = partial + tl.program_id(1) * channels + column
    total, product = _sums(total, product)
    tl.store(here, total)
    tl.store(here + blocks * channels, product)
    if HAS_OTHER:
        tl.store(here + 2 * blocks * channels, tl.sum(other_product, 0, keep_dims=True))
    if finished(counter + tl.program_id(0), blocks):
        all_of_it = finish_gradients(
            partial, middle, rstd, scale, weight_gradient, bias_gradient, slope, offset, column, rows, channels, blocks,
            COLUMNS,
        )  # fmt: skip
        if HAS_OTHER:
            _, times = _totals(partial + blocks * channels, column, blocks, channels, COLUMNS)
            tl.store(other_bias_gradient + column, all_of_it)
            _factors(
                all_of_it, times, other_middle, other_rstd, other_scale,
                other_weight_gradient, other_slope, other_offset, column, rows,
            )  # fmt: skip


@triton.jit
@no_type_check
def finish_gradients(
    partial, middle, rstd, scale, weight_gradient, bias_gradient, slope, offset, column, rows, channels, blocks,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Make factors of dy of what all blocks of rows have left of two sums; give the first sum."""
    total, product = _totals(partial, column, blocks, channels, COLUMNS)
    tl.store(bias_gradient + column, total)
    _factors(total, product, middle, rstd, scale, weight_gradient, slope, offset, column, rows)
    return total


@triton.jit
@no_type_check
def _factors(total, product, middle, rstd, scale, weight_gradient, slope, offset, column, rows):
    """Write the gradient of the weight, and b and c of dy = scale · g + b · y + c."""
    inverse, factor = tl.load(rstd + column), tl.load(scale + column)
    tl.store(weight_gradient + column, product * inverse)
    b = -factor * inverse * inverse * product / rows
    tl.store(slope + column, b)
    tl.store(offset + column, -factor * total / rows - b * middle)


@triton.jit
@no_type_check
def gradient_of_y(
    gradient, y, scale, shift, slope, offset, row, column, across, channels, there,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of y."""
    place = row.to(tl.int64) * channels + column
    seen = tl.load(y + place, mask=there, other=0.0, eviction_policy=ONCE).to(tl.float32)
    value = tl.load(gradient + place, mask=there, other=0.0, eviction_policy=ONCE).to(tl.float32)
    value = cut(value, seen, y, scale, shift, row, column, across, channels, there, MASK, ROWS, COLUMNS)
    return value * tl.load(scale + column) + seen * tl.load(slope + column) + tl.load(offset + column)


@triton.jit
@no_type_check
def back_apply_kernel(
    gradient, y, scale, shift, slope, offset, result, rows, channels,
    MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of y."""
    row, column, across = _tile(channels, ROWS, COLUMNS)
    there = row < rows
    value = gradient_of_y(
        gradient, y, scale, shift, slope, offset, row, column, across, channels, there, MASK, ROWS, COLUMNS
    )
    tl.store(result + row.to(tl.int64) * channels + column, value.to(result.dtype.element_ty), mask=there)


@triton.jit
@no_type_check
def spread_kernel(gradient, result, rows, channels, pixels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return each pixel of an image its share of a gradient."""
    row, column, _ = _tile(channels, ROWS, COLUMNS)
    there = row < rows
    value = tl.load(gradient + (row // pixels).to(tl.int64) * channels + column, mask=there, other=0.0).to(tl.float32)
    tl.store(result + row.to(tl.int64) * channels + column, (value / pixels).to(result.dtype.element_ty), mask=there)


class Normed(NamedTuple):
    """What a batch norm found out about a batch: a number for each channel."""

    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor


class Affine(NamedTuple):
    """Weights and running statistics of a batch norm."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps: float
    momentum: float


def shape_of(y: Tensor) -> tuple[int, int]:
    """Return rows and columns of images as a matrix."""
    count, channels, height, width = y.shape
    if not y.is_contiguous(memory_format=torch.channels_last) or channels % NARROWEST:
        raise UserError(f"images of {tuple(y.shape)} need channels last in memory, a multiple of {NARROWEST} of them")
    if count * height * width == 1:
        raise UserError(f"batch norm needs more than one value of each channel, and has images of {tuple(y.shape)}")
    return count * height * width, channels


def meta(tile: Tile) -> dict[str, int]:
    """Return a tile as what kernels are compiled for."""
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps, "num_stages": tile.stages}


def new_images(like: Tensor, channels: int, *size: int) -> Tensor:
    """Make room for images beside others, with other channels, and perhaps of another height and width."""
    shape = len(like), channels, *(size or like.shape[2:])
    return torch.empty(shape, device=like.device, dtype=like.dtype, memory_format=torch.channels_last)


def room_for_sums(channels: int, blocks: int, device: torch.device) -> tuple[Normed, Tensor]:
    """Make room for what a batch norm finds out, and for what blocks of rows leave of two sums."""
    found = Normed(*torch.empty(4, channels, device=device, dtype=torch.float32).unbind())
    return found, torch.empty(2, blocks, channels, device=device, dtype=torch.float32)


def statistics(y: Tensor, norm: Affine, counter: Tensor) -> Normed:
    """Look at a batch, and move running statistics."""
    rows, channels = shape_of(y)
    tile = tile_for_sums(y.numel())
    blocks = tile.blocks(rows, channels)
    found, partial = room_for_sums(channels, blocks, y.device)
    launch(sums_kernel, (channels // tile.columns, blocks),
        y, partial, counter, norm.weight, norm.bias, *found, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum, STAGES=tile.stages, **meta(tile),
    )  # fmt: skip
    return found


def activation(y: Tensor, about: Normed, skip: Tensor | None, skip_about: Normed | None) -> tuple[Tensor, Tensor]:
    """Normalise, add, and cut off what is negative.

    Returns:
        The result, and, where something was added, a bit for each number that was cut off.
    """
    rows, channels = shape_of(y)
    tile = tile_for(channels)
    z = torch.empty_like(y)
    bits = torch.empty(0 if skip is None else y.numel() // 8, device=y.device, dtype=torch.uint8)
    other = skip_about or about
    launch(apply_kernel, (channels // tile.columns * triton.cdiv(rows, tile.rows),),
        y, about.scale, about.shift, y if skip is None else skip, other.scale, other.shift, z, bits, rows, channels,
        HAS_SKIP=skip is not None, SKIP_IS_NORMED=skip_about is not None, **meta(tile),
    )  # fmt: skip
    return z, bits


class StridedGradient(NamedTuple):
    """The gradient of some images from a use that looked at every so-many-th pixel alone, of every so-many-th line."""

    gradient: Tensor
    every: int

    def whole(self, images: Tensor) -> Tensor:
        """Return a gradient for all pixels."""
        whole = torch.zeros_like(images)
        whole[:, :, :: self.every, :: self.every] = self.gradient
        return whole


def about_other_use(second: Tensor | StridedGradient | None, y: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Return the gradient of another use, if there is one, and what kernels are compiled for because of it."""
    if isinstance(second, StridedGradient):
        height, width = y.shape[2:]
        return second.gradient, {"HAS_SECOND": True, "EVERY": second.every, "HEIGHT": height, "WIDTH": width}
    about = {"HAS_SECOND": second is not None, "EVERY": 1, "HEIGHT": 1, "WIDTH": 1}
    return y if second is None else second, about


class GradientSums(NamedTuple):
    """What the first pass back through a batch norm found, and what its second pass needs.

    Attributes:
        gradient: of z, or, where two of them met or something was added before the ReLU, of what the ReLU was given.
        mask: what tells where it is cut off, "y" or "none".
        weight: gradient of the norm's weight.
        bias: gradient of its bias.
        slope: b of dy = scale · gradient + b · y + c.
        offset: c of it.
        other_weight: the same, of the norm whose result was added, if there was one.
        other_bias: the same; equal to `bias`, in a place of its own.
        other_slope: the same.
        other_offset: the same.
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


def room_for_gradients(
    channels: int, blocks: int, device: torch.device, *, two_norms: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Make room for the eight numbers a channel that the first pass back finds, and for what blocks of rows leave."""
    numbers = torch.empty(8, channels, device=device, dtype=torch.float32).unbind()
    return numbers, torch.empty(3 if two_norms else 2, blocks, channels, device=device, dtype=torch.float32)


def gradient_sums(
    first: Tensor, second: Tensor | StridedGradient | None, y: Tensor, bits: Tensor, about: Normed, counter: Tensor,
    other: Tensor | None = None, other_about: Normed | None = None,
) -> GradientSums:  # fmt: skip
    """Do the first pass back from the gradients of both uses of z.

    Args:
        first: gradient of z from one use.
        second: from another, if there is one.
        y: what was normalised.
        bits: where something was added before the ReLU, what was cut off; empty where that follows from y.
        about: what was found out about y.
        counter: zeros, one for each block of columns.
        other: what was normalised and added, if anything was.
        other_about: what was found out about it.
    """
    rows, channels = shape_of(y)
    keep = bits.numel() > 0 or second is not None
    tile = SUMS_WITH_KEPT if keep else tile_for_sums(2 * y.numel())
    blocks = tile.blocks(rows, channels)
    kept = torch.empty_like(y) if keep else y
    numbers, partial = room_for_gradients(channels, blocks, y.device, two_norms=other is not None)
    weight, bias, slope, offset, *of_other = numbers
    beside = other_about or about
    of_second, about_second = about_other_use(second, y)
    launch(back_sums_kernel, (channels // tile.columns, blocks),
        first, of_second, y, bits, kept, about.scale, about.shift,
        about.mean, about.rstd, partial, counter, weight, bias, slope, offset,
        y if other is None else other, beside.mean, beside.rstd, beside.scale, *of_other,
        rows, channels, blocks, MASK="bits" if bits.numel() else "y", KEEP=keep,
        HAS_OTHER=other is not None, STAGES=tile.stages, **about_second, **meta(tile),
    )  # fmt: skip
    return GradientSums(kept if keep else first, "none" if keep else "y", *numbers)


def gradient_applied(sums: GradientSums, y: Tensor, about: Normed, slope: Tensor, offset: Tensor) -> Tensor:
    """Do the second pass back, to what was normalised."""
    rows, channels = shape_of(y)
    tile, result = tile_for(channels), torch.empty_like(y)
    launch(back_apply_kernel, (channels // tile.columns * triton.cdiv(rows, tile.rows),),
        sums.gradient, y, about.scale, about.shift, slope, offset, result, rows, channels,
        MASK=sums.mask, **meta(tile),
    )  # fmt: skip
    return result


class Gradients(NamedTuple):
    """What comes back through a batch norm with sum and ReLU."""

    y: Tensor
    weight: Tensor
    bias: Tensor
    skip: Tensor | None
    other_y: Tensor | None = None
    other_weight: Tensor | None = None
    other_bias: Tensor | None = None


def gradients(
    sums: GradientSums, y: Tensor, about: Normed, other: Tensor | None = None, other_about: Normed | None = None
) -> Gradients:
    """Do the second pass back; arguments are those of `gradient_sums`."""
    of_y = gradient_applied(sums, y, about, sums.slope, sums.offset)
    if other is None or other_about is None:
        return Gradients(of_y, sums.weight, sums.bias, sums.gradient if sums.mask == "none" else None)
    of_other = gradient_applied(sums, other, other_about, sums.other_slope, sums.other_offset)
    return Gradients(of_y, sums.weight, sums.bias, sums.gradient, of_other, sums.other_weight, sums.other_bias)


def spread(gradient: Tensor, height: int, width: int) -> Tensor:
    """Make images of one pixel larger; all of their pixels get the same share of it."""
    result = new_images(gradient, gradient.shape[1], height, width)
    rows, channels = shape_of(result)
    tile = tile_for(channels)
    launch(
        spread_kernel,
        (channels // tile.columns * triton.cdiv(rows, tile.rows),),
        gradient.contiguous(),
        result,
        rows,
        channels,
        height * width,
        **meta(tile),
    )
    return result


@cache
def why_not(device: torch.device) -> str | None:
    """Try a kernel, and give the reason why none can run there, if there is one: no compiler, or an old GPU."""
    y, norm = torch.zeros(2, NARROWEST, 1, 1, device=device), example_norm(device)
    y = y.contiguous(memory_format=torch.channels_last)
    return reason_against(lambda: statistics(y, norm, torch.zeros(1, dtype=torch.int32, device=device)))


def reason_against(work: Callable[[], object]) -> str | None:
    """Try some work, and give the reason why it cannot be done, if there is one."""
    try:
        work()
    except Exception as error:  # whatever it is, there is another way
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
    return None


def tried(device: torch.device, what: str, work: Callable[[], object]) -> bool:
    """Return whether some work of kernels can be done, and warn where it cannot: an old GPU, say."""
    reason = reason_against(work) if device.type == "cuda" else None
    if reason is not None:
        warnings.warn(f"{what} left to cuDNN, our own kernels cannot be used: {reason}", stacklevel=3)
    return reason is None


def asked(trial: Callable[[torch.device], bool], device: torch.device) -> bool:
    """Ask a trial that remembers its answer; in a precompilation its kernels are compiled, and it knows nothing yet."""
    now = precompiling()
    if now is None:
        return trial(device)
    if trial not in now.tried:
        now.tried.add(trial)
        inspect.unwrap(trial)(device)
    return True


def example_norm(device: torch.device) -> Affine:
    """Make a norm of as few channels as there may be, to try kernels with."""
    weight, bias, mean, var = torch.zeros(4, NARROWEST, device=device).unbind()
    return Affine(weight, bias, mean, var, eps=1e-5, momentum=0.1)
