"""Convolutions of 1 x 1 in narrow numbers, which are products of matrices, with the sums that batch norms want.

    x ─► y = x · wᵀ, and sums of y ─► scale, shift                       (and from here on as in `norms`)
    dy ─► g = dy · w + gradient of another use, cut off ─► sums of g     (for the norm that made x)

Of few channels they wait for memory, not for the matrix units, and here their result is not read once more to be
summed. A program keeps its columns of the result and goes over tiles of rows, the next of which are on their way while
it multiplies. As in `norms`, all programs together begin with the last rows, which the pass before has just written,
and sums are added in a fixed order: equal inputs give equal bits.
"""

from functools import cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.training.accelerators.batch_norm import (
    NARROW_TYPES,
    NARROWEST,
    Affine,
    GradientSums,
    Normed,
    StridedGradient,
    Tile,
    about_other_use,
    asked,
    cut,
    example_norm,
    expected,
    folded,
    leave,
    leave_gradients,
    load_other_use,
    meta,
    new_images,
    room_for_gradients,
    room_for_sums,
    shape_of,
    tried,
)
from fedlas.training.accelerators.precompile import launch

MULTIPROCESSORS = 132  # of an H200, on which tiles, and where all this pays, were found
MANY = 1 << 15  # rows from which on it pays
MANY_BACK = 1 << 13  # and back
BACK = Tile(64, 64, 4, 264, stages=3)


class Product(NamedTuple):
    """The gradient of a convolution and its weight, whose product, or convolution, is the gradient of its images."""

    gradient: Tensor
    weight: Tensor


@triton.jit
@no_type_check
def product_kernel(
    x, factors, y, partial, counter, weight, bias, mean, rstd, scale, shift, running_mean, running_var,
    rows, channels, blocks, eps, momentum,
    K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply, and sum columns and their squares; the last program makes scale and shift of them."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    place = tl.program_id(1)
    down, across = tl.arange(0, ROWS)[:, None], tl.arange(0, K)
    kept = tl.load(factors + column * K + across[:, None])
    around = expected(running_mean, column)
    first, second = tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32), tl.zeros((ROWS // 16, 8, COLUMNS), tl.float32)
    above = (tl.cdiv(rows, ROWS) - 1) * ROWS
    for start in tl.range(place * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        top = above - start
        there = EVEN | (down < rows - top)
        tile = x + top.to(tl.int64) * K + (down * K + across[None, :])
        narrow = tl.dot(tl.load(tile, mask=there, other=0.0), kept).to(y.dtype.element_ty)
        tl.store(y + top.to(tl.int64) * channels + (down * channels + column), narrow, mask=there)
        value = tl.where(there, narrow.to(tl.float32) - around, 0.0)
        first, second = folded(first, second, value, ROWS, COLUMNS)
    leave(
        tl.reshape(first, (ROWS // 2, COLUMNS)), tl.reshape(second, (ROWS // 2, COLUMNS)), around, partial, counter,
        weight, bias, mean, rstd, scale, shift, running_mean, running_var, column, rows, channels, blocks, eps,
        momentum, COLUMNS,
    )  # fmt: skip


@triton.jit
@no_type_check
def back_product_kernel(
    dy, factors, second, y, bits, gradient, scale, shift, mean, rstd, partial, counter,
    weight_gradient, bias_gradient, slope, offset,
    other, other_mean, other_rstd, other_scale, other_weight_gradient, other_bias_gradient, other_slope, other_offset,
    rows, channels, blocks,
    K: tl.constexpr, HAS_SECOND: tl.constexpr, EVERY: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    MASK: tl.constexpr, HAS_OTHER: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply, add the gradient of another use, cut off, and sum for the norm before, as `back_sums_kernel` does."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    down, across = tl.arange(0, ROWS)[:, None], tl.arange(0, K)
    factor = tl.load(factors + across[:, None] * channels + column)
    middle = tl.load(mean + column)
    total, product = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    other_middle, other_product = middle, product
    if HAS_OTHER:
        other_middle = tl.load(other_mean + column)
    above = (tl.cdiv(rows, ROWS) - 1) * ROWS
    for start in tl.range(tl.program_id(1) * ROWS, rows, blocks * ROWS, num_stages=STAGES):
        top = above - start
        there = EVEN | (down < rows - top)
        place = top.to(tl.int64) * channels + (down * channels + column)
        given = tl.load(dy + top.to(tl.int64) * K + (down * K + across[None, :]), mask=there, other=0.0)
        seen = tl.load(y + place, mask=there, other=0.0).to(tl.float32)
        value = tl.dot(given, factor)
        if HAS_SECOND:
            value += load_other_use(second, place, top + down, column, channels, there, EVERY, HEIGHT, WIDTH)
        value = cut(
            value, seen, bits, scale, shift, top + down, column, tl.program_id(0), channels, there, MASK, ROWS, COLUMNS
        )
        narrow = value.to(gradient.dtype.element_ty)
        tl.store(gradient + place, narrow, mask=there)
        value = tl.where(there, narrow.to(tl.float32), 0.0)
        total += value
        product += value * (seen - middle)
        if HAS_OTHER:
            other_product += value * (tl.load(other + place, mask=there, other=0.0).to(tl.float32) - other_middle)
    leave_gradients(
        total, product, other_product, middle, other_middle, rstd, scale, partial, counter, weight_gradient,
        bias_gradient, slope, offset, other_rstd, other_scale, other_weight_gradient, other_bias_gradient,
        other_slope, other_offset, column, rows, channels, blocks, HAS_OTHER, COLUMNS,
    )  # fmt: skip


def tile_for(inputs: int) -> Tile:
    """Choose the shape of a program's work; found by trying (benchmarks/products.py)."""
    return Tile(64, 64, 4, 264, stages=2) if inputs > 128 else Tile(64, 64, 4, 396, stages=3)


def registers(tile: Tile) -> int:
    """Return how many registers a thread may have, so that all programs of a tile run at a time.

    The loop needs no more. The few lines after it would take all there are.
    """
    threads = -(-tile.programs // MULTIPROCESSORS) * tile.warps * 32
    return min(248, 65536 // threads // 8 * 8)


def fits(images: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel can convolve and sum for the norm after, and is faster than cuDNN and another pass.

    Where it is was found by trying (benchmarks/products.py).
    """
    outputs, inputs = weight.shape[:2]
    pays = images.numel() // inputs >= MANY and (inputs in (64, 128) or (inputs == 256 and outputs <= 128))
    return pays and _of_the_kind(images, weight) and asked(_can_be_made, images.device)


def fits_back(images: Tensor, weight: Tensor) -> bool:
    """Say the same of the gradient of the images and the sums back through the norm before."""
    outputs, inputs = weight.shape[:2]
    pays = images.numel() // inputs >= MANY_BACK and outputs in (64, 128, 256) and outputs <= inputs
    return pays and _of_the_kind(images, weight) and asked(_can_be_made_back, images.device)


def _of_the_kind(images: Tensor, weight: Tensor) -> bool:
    """Return whether images and weight are of the kind, and lie in memory, as the kernels take them."""
    outputs, inputs, *window = weight.shape
    return (
        window == [1, 1]
        and outputs % NARROWEST == 0
        and inputs % NARROWEST == 0
        and weight.dtype in NARROW_TYPES
        and all(one.is_contiguous(memory_format=torch.channels_last) for one in (images, weight))
    )


@cache
def _can_be_made(device: torch.device) -> bool:
    """Try the kernel with the fewest and the most channels."""

    def work() -> None:
        for channels in (64, 256):
            multiply(*_example(device, channels, NARROWEST))

    return tried(device, "convolutions of 1 x 1 are", work)


@cache
def _can_be_made_back(device: torch.device) -> bool:
    """Try the other kernel with the fewest and the most channels, and with all that it can read."""

    def work() -> None:
        for channels in (64, 256):
            y, factors, _, counter = _example(device, NARROWEST, channels)
            second = y if channels == 256 else StridedGradient(new_images(y, NARROWEST, 16, 16).zero_(), 2)
            about = Normed(*torch.zeros(4, NARROWEST, device=device).unbind())
            bits = torch.zeros(y.numel() // 8, dtype=torch.uint8, device=device)
            owed = Product(new_images(y, channels).zero_(), factors)
            gradient_sums(owed, second, y, bits, about, counter, y, about)

    return tried(device, "gradients of convolutions of 1 x 1 are", work)


def _example(device: torch.device, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Affine, Tensor]:
    """Make what `multiply` takes."""
    images = torch.zeros(32, inputs, 32, 32, device=device, dtype=torch.bfloat16)
    factors = torch.zeros(outputs, inputs, 1, 1, device=device, dtype=torch.bfloat16)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    return images.contiguous(memory_format=torch.channels_last), factors, example_norm(device), counter


def multiply(images: Tensor, weight: Tensor, norm: Affine, counter: Tensor) -> tuple[Tensor, Normed]:
    """Convolve with 1 x 1 and a stride of one, look at the batch, and move running statistics.

    Args:
        images: channels last in memory.
        weight: of 1 x 1, in the images' type.
        norm: what normalises the result.
        counter: zeros, one for each block of columns.
    """
    inputs = images.shape[1]
    y = new_images(images, len(weight))
    rows, channels = shape_of(y)
    tile = tile_for(inputs)
    blocks = tile.blocks(rows, channels)
    found, partial = room_for_sums(channels, blocks, y.device)
    launch(product_kernel, (channels // tile.columns, blocks),
        images, weight, y, partial, counter, norm.weight, norm.bias, *found, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum,
        K=inputs, STAGES=tile.stages, EVEN=rows % tile.rows == 0, maxnreg=registers(tile), **meta(tile),
    )  # fmt: skip
    return y, found


def gradient_sums(
    owed: Product, second: Tensor | StridedGradient | None, y: Tensor, bits: Tensor, about: Normed, counter: Tensor,
    other: Tensor | None = None, other_about: Normed | None = None,
) -> GradientSums:  # fmt: skip
    """Do the first pass back through a norm, as `norms.gradient_sums`, from a product that is still to be made."""
    rows, channels = shape_of(y)
    tile = BACK
    blocks = tile.blocks(rows, channels)
    gradient = torch.empty_like(y)
    numbers, partial = room_for_gradients(channels, blocks, y.device, two_norms=other is not None)
    weight, bias, slope, offset, *of_other = numbers
    beside = other_about or about
    of_second, about_second = about_other_use(second, y)
    launch(back_product_kernel, (channels // tile.columns, blocks),
        owed.gradient, owed.weight, of_second, y, bits, gradient, about.scale, about.shift,
        about.mean, about.rstd, partial, counter, weight, bias, slope, offset,
        y if other is None else other, beside.mean, beside.rstd, beside.scale, *of_other,
        rows, channels, blocks, K=len(owed.weight), MASK="bits" if bits.numel() else "y",
        HAS_OTHER=other is not None, STAGES=tile.stages, EVEN=rows % tile.rows == 0, **about_second, **meta(tile),
    )  # fmt: skip
    return GradientSums(gradient, "none", *numbers)
