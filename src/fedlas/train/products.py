"""Convolutions of 1 x 1 in narrow numbers, which are products of matrices, with the statistics of the batch norm after.

    x ─► y = x · wᵀ, and sums of y ─► scale, shift          (and from here on as in `kernels`)

Of few channels they wait for memory, not for the matrix units, and here y is not read once more to be summed. A program
keeps its columns of y and goes over tiles of rows, the next of which are on their way while it multiplies. As in
`kernels`, all programs together begin with the last rows, which the pass before has just written, and sums are added in
a fixed order: equal inputs give equal bits.
"""

import warnings
from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlas.train.kernels import (
    NARROWEST,
    Affine,
    Normed,
    Tile,
    example_norm,
    expected,
    folded,
    leave,
    meta,
    new_images,
    reason_against,
    room_for_sums,
    shape_of,
)

MULTIPROCESSORS = 132  # of an H200, on which tiles, and where all this pays, were found
MANY = 1 << 15  # rows from which on it pays
TYPES = (torch.bfloat16, torch.float16)  # the matrix units would round float32


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


def tile_for(inputs: int) -> Tile:
    """Choose the shape of a program's work; found by trying (benchmarks/products.py)."""
    return Tile(64, 64, 4, 264, stages=2) if inputs > 128 else Tile(64, 64, 4, 396, stages=3)


def registers(tile: Tile) -> int:
    """Say how many registers a thread may have, so that all programs of a tile run at a time.

    The loop needs no more. The few lines after it would take all there are.
    """
    threads = -(-tile.programs // MULTIPROCESSORS) * tile.warps * 32
    return min(248, 65536 // threads // 8 * 8)


def faster(rows: int, inputs: int, outputs: int) -> bool:
    """Say whether the kernel is faster than cuDNN and a pass that sums; found by trying (benchmarks/products.py)."""
    return rows >= MANY and (inputs in (64, 128) or (inputs == 256 and outputs <= 128))


@cache
def _can_be_made(device: torch.device) -> bool:
    """Try the kernel with the most and the fewest channels, and warn once where it cannot be made: an old GPU, say."""
    if device.type != "cuda":
        return True

    def work() -> None:
        for inputs in (64, 256):
            images = torch.zeros(32, inputs, 32, 32, device=device, dtype=torch.bfloat16)
            factors = torch.zeros(NARROWEST, inputs, 1, 1, device=device, dtype=torch.bfloat16)
            counter = torch.zeros(1, dtype=torch.int32, device=device)
            multiply(images.contiguous(memory_format=torch.channels_last), factors, example_norm(device), counter)

    reason = reason_against(work)
    if reason is not None:
        warnings.warn(f"convolutions of 1 x 1 are left to cuDNN, our kernel cannot be used: {reason}", stacklevel=2)
    return reason is None


def fits(images: Tensor, weight: Tensor) -> bool:
    """Say whether images and weight are of the kind, and lie in memory, as the kernel takes them, and it pays."""
    outputs, inputs, *window = weight.shape
    return (
        window == [1, 1]
        and outputs % NARROWEST == 0
        and weight.dtype in TYPES
        and all(one.is_contiguous(memory_format=torch.channels_last) for one in (images, weight))
        and faster(images.numel() // inputs, inputs, outputs)
        and _can_be_made(images.device)
    )


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
    product_kernel[(channels // tile.columns, blocks)](
        images, weight, y, partial, counter, norm.weight, norm.bias, *found, norm.running_mean, norm.running_var,
        rows, channels, blocks, norm.eps, norm.momentum,
        K=inputs, STAGES=tile.stages, EVEN=rows % tile.rows == 0, maxnreg=registers(tile), **meta(tile),
    )  # fmt: skip
    return y, found
