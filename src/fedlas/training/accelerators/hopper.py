"""Convolutions of 3 x 3 on few channels, as GPUs of the Hopper kind do them best; kernels in Triton's Gluon.

A program takes a few images and goes down their lines, a line of all of them at a time. It has each line three times,
as it is and moved to either side, and adds it to three lines of the result, of which the uppermost is then complete:

    line of x ─► · weights of the last row  ─► line above, complete ─► written, and summed for a norm
              ─► · weights of the middle    ─► same line
              ─► · weights of the first row ─► line below

All nine products of a line are on their way at once. While those of the lines that are not complete go on, the one that
is gets written, and what comes next is fetched into the places of the line before.
Sums are left for each program; who calls adds them up (`windows`).
"""

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# Names that have changed: those of Triton 3.9, or else those of 3.6.
everyone = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
send = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
@no_type_check
def _fetch(x, ring, ready, number, image, TILES: gl.constexpr, SLOTS: gl.constexpr):
    """Let a tile come into its slot: line number // 3, moved by number % 3 - 1; zeros outside of the image."""
    line, there = number // 3, number < TILES
    come = ready.index(line % 3)
    mbarrier.expect(come, x.block_type.nbytes, there)
    bring(x, [image, line, number % 3 - 1, 0], come, ring.index(number % SLOTS), there)


@gluon.jit
@no_type_check
def _tile(ring, number, SLOTS: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr):
    """Give a tile as a matrix with a row for each pixel."""
    return ring.index(number % SLOTS).reshape([ROWS, C])


@gluon.jit
@no_type_check
def _matrix(weights, PLACE: gl.constexpr, BACK: gl.constexpr):
    """Give the matrix at some place of the window; for the way back the window is turned around."""
    if BACK:
        return weights.index(8 - PLACE)
    else:  # noqa: RET505  # the compiler would go on
        return weights.index(PLACE).permute((1, 0))


@gluon.jit
@no_type_check
def _begin(x, w, image, TILES: gl.constexpr, SLOTS: gl.constexpr, C: gl.constexpr):
    """Fetch the weights and the first tiles; give where they are and what tells that a tile has come."""
    ring = gl.allocate_shared_memory(x.dtype, [SLOTS] + x.block_shape, x.layout)  # noqa: RUF005  # no stars in here
    weights = gl.allocate_shared_memory(w.dtype, [9] + w.block_shape, w.layout)  # noqa: RUF005
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for line in gl.static_range(3):
        mbarrier.init(ready.index(line), count=3)
    mbarrier.init(loaded, count=1)
    fence_async_shared()
    everyone()
    mbarrier.expect(loaded, 9 * w.block_type.nbytes)
    for place in gl.static_range(9):
        bring(w, [0, place * C], loaded, weights.index(place))
    for number in gl.static_range(SLOTS):
        _fetch(x, ring, ready, number, image, TILES, SLOTS)
    mbarrier.wait(loaded, 0)
    everyone()
    mbarrier.invalidate(loaded)  # before its place is used for anything else
    return ring, ready, weights


@gluon.jit
@no_type_check
def _line(
    x, ring, ready, weights, line, image, above, here,
    TILES: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, BACK: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Multiply a line; give the one above, which is complete, and two that are still on their way."""
    mbarrier.wait(ready.index(line % 3), line // 3 & 1)
    left = _tile(ring, 3 * line, SLOTS, ROWS, C)
    middle = _tile(ring, 3 * line + 1, SLOTS, ROWS, C)
    right = _tile(ring, 3 * line + 2, SLOTS, ROWS, C)
    above = warpgroup_mma(left, _matrix(weights, 6, BACK), above, is_async=True)
    above = warpgroup_mma(middle, _matrix(weights, 7, BACK), above, is_async=True)
    above = warpgroup_mma(right, _matrix(weights, 8, BACK), above, is_async=True)
    here = warpgroup_mma(left, _matrix(weights, 3, BACK), here, is_async=True)
    here = warpgroup_mma(middle, _matrix(weights, 4, BACK), here, is_async=True)
    here = warpgroup_mma(right, _matrix(weights, 5, BACK), here, is_async=True)
    below = warpgroup_mma_init(gl.zeros([ROWS, C], gl.float32, layout))
    below = warpgroup_mma(left, _matrix(weights, 0, BACK), below, use_acc=False, is_async=True)
    below = warpgroup_mma(middle, _matrix(weights, 1, BACK), below, is_async=True)
    below = warpgroup_mma(right, _matrix(weights, 2, BACK), below, is_async=True)
    done = warpgroup_mma_wait(6, deps=[above])
    tma.store_wait(0)
    everyone()  # the line before is multiplied and written by all
    if line > 0:
        for side in gl.static_range(3):
            _fetch(x, ring, ready, 3 * line - 3 + side + SLOTS, image, TILES, SLOTS)
    return done, here, below


@gluon.jit
@no_type_check
def _summed(value, ROWS: gl.constexpr, C: gl.constexpr):
    """Add rows that one thread has."""
    together: gl.constexpr = 4 * gl.num_warps()
    return gl.sum(gl.reshape(value, [ROWS // together, together, C]), 0)


@gluon.jit
@no_type_check
def _cut(
    value, seen, word, bit, scale, shift, column,
    MASK: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, spread: gl.constexpr,
):  # fmt: skip
    """Give a gradient before the ReLU, as `norms.cut` does."""
    if MASK == "bits":
        off = gl.convert_layout(gl.reshape((word.to(gl.int32) >> bit) & 1, [ROWS, C]), spread) != 0
    else:
        off = seen * gl.load(scale + column)[None, :] + gl.load(shift + column)[None, :] <= 0
    return gl.where(off, 0.0, value)


@gluon.jit
@no_type_check
def _leave(ready, first, second, partial, column, blocks, C: gl.constexpr, spread: gl.constexpr):
    """Leave what this program has of two sums; nobody waits for a tile any more."""
    everyone()
    for line in gl.static_range(3):
        mbarrier.invalidate(ready.index(line))
    place = partial + gl.program_id(0) * C + column
    gl.store(place, gl.convert_layout(gl.sum(first, 0), gl.SliceLayout(0, spread)))
    gl.store(place + blocks * C, gl.convert_layout(gl.sum(second, 0), gl.SliceLayout(0, spread)))


@gluon.jit
@no_type_check
def lines_kernel(
    x, w, y, running_mean, partial, count, blocks,
    HEIGHT: gl.constexpr, WIDTH: gl.constexpr, IMAGES: gl.constexpr, C: gl.constexpr, SLOTS: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Convolve, and sum columns and their squares, around the usual mean, as `norms.expected` has it."""
    rows: gl.constexpr = IMAGES * WIDTH
    lines: gl.constexpr = (HEIGHT + 3) // 3 * 3  # with one more than there are, the last is complete, too
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    image = gl.program_id(0) * IMAGES
    ring, ready, weights = _begin(x, w, image, 3 * lines, SLOTS, C)
    staging = gl.allocate_shared_memory(y.dtype, y.block_shape, y.layout)
    column = gl.arange(0, C, gl.SliceLayout(0, spread))
    usual = gl.load(running_mean + column)
    around = gl.where(gl.abs(usual) < 1e30, usual, 0.0)[None, :]
    pixel = gl.arange(0, rows, gl.SliceLayout(1, spread))
    there = (pixel < (rows if EVEN else (count - image) * WIDTH))[:, None]
    first = _summed(gl.zeros([rows, C], gl.float32, spread), rows, C)
    second = first
    above = warpgroup_mma_init(gl.zeros([rows, C], gl.float32, layout))
    here = warpgroup_mma_init(gl.zeros([rows, C], gl.float32, layout))
    for turn in range(lines // 3):
        for part in gl.static_range(3):  # after which each sum is again where it was
            line = 3 * turn + part
            done, above, here = _line(
                x, ring, ready, weights, line, image, above, here, 3 * lines, SLOTS, rows, C, False, layout
            )
            staging.reshape([rows, C]).store(done.to(y.dtype))
            fence_async_shared()
            everyone()
            if (line > 0) & (line <= HEIGHT):
                send(y, [image, line - 1, 0, 0], staging)
                value = staging.reshape([rows, C]).load(spread).to(gl.float32) - around
                value = gl.where(there, value, 0.0)
                first += _summed(value, rows, C)
                second += _summed(value * value, rows, C)
        above, here = warpgroup_mma_wait(0, deps=[above, here])  # once in three lines, for ptxas wants it in a loop
        above, here = warpgroup_mma_init(above), warpgroup_mma_init(here)
    tma.store_wait(0)
    _leave(ready, first, second, partial, column, blocks, C, spread)


@gluon.jit
@no_type_check
def back_lines_kernel(
    dy, w, second, y, bits, gradient, scale, shift, mean, partial, count, blocks,
    HAS_SECOND: gl.constexpr, MASK: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, IMAGES: gl.constexpr,
    C: gl.constexpr, SLOTS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Convolve, add the gradient of another use, cut off, and sum as `norms.back_sums_kernel` does."""
    rows: gl.constexpr = IMAGES * WIDTH
    lines: gl.constexpr = (HEIGHT + 3) // 3 * 3
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    eights: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    image = gl.program_id(0) * IMAGES
    ring, ready, weights = _begin(dy, w, image, 3 * lines, SLOTS, C)
    staging = gl.allocate_shared_memory(dy.dtype, dy.block_shape, dy.layout)
    column = gl.arange(0, C, gl.SliceLayout(0, spread))
    pixel = gl.arange(0, rows, gl.SliceLayout(1, spread))
    there = (pixel < (rows if EVEN else (count - image) * WIDTH))[:, None]
    offset = (pixel // WIDTH * (HEIGHT * WIDTH * C) + pixel % WIDTH * C)[:, None] + column[None, :]
    start = image.to(gl.int64) * (HEIGHT * WIDTH * C)
    bit = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, eights)))[None, None, :]
    byte = gl.arange(0, C // 8, gl.SliceLayout(0, gl.SliceLayout(2, eights)))[None, :, None]
    row = gl.arange(0, rows, gl.SliceLayout(1, gl.SliceLayout(2, eights)))
    row_there = (row < (rows if EVEN else (count - image) * WIDTH))[:, None, None]
    byte += (row // WIDTH * (HEIGHT * WIDTH * C // 8) + row % WIDTH * (C // 8))[:, None, None]
    seen = gl.zeros([rows, C], dy.dtype, spread)
    beside = seen
    word = gl.zeros([rows, C // 8, 1], gl.uint8, eights)
    total = _summed(gl.zeros([rows, C], gl.float32, spread), rows, C)
    product = total
    above = warpgroup_mma_init(gl.zeros([rows, C], gl.float32, layout))
    here = warpgroup_mma_init(gl.zeros([rows, C], gl.float32, layout))
    for turn in range(lines // 3):
        for part in gl.static_range(3):
            line = 3 * turn + part
            before = start + (line - 1) * (WIDTH * C)
            done, above, here = _line(
                dy, ring, ready, weights, line, image, above, here, 3 * lines, SLOTS, rows, C, True, layout
            )
            staging.reshape([rows, C]).store(done.to(dy.dtype))
            if (line > 0) & (line <= HEIGHT):
                value = staging.reshape([rows, C]).load(spread).to(gl.float32)
                if HAS_SECOND:
                    value += beside.to(gl.float32)
                wide = seen.to(gl.float32)
                value = _cut(value, wide, word, bit, scale, shift, column, MASK, rows, C, spread)
                narrow = gl.where(there, value, 0.0).to(dy.dtype)
                gl.store(gradient + before + offset, narrow, mask=there)
                value = narrow.to(gl.float32)
                total += _summed(value, rows, C)
                product += _summed(value * (wide - gl.load(mean + column)[None, :]), rows, C)
            after, more = before + WIDTH * C, line < HEIGHT  # what the next line needs is on its way meanwhile
            seen = gl.load(y + after + offset, mask=there & more, other=0.0)
            if HAS_SECOND:
                beside = gl.load(second + after + offset, mask=there & more, other=0.0)
            if MASK == "bits":
                word = gl.load(bits + after // 8 + byte, mask=row_there & more, other=0)
        above, here = warpgroup_mma_wait(0, deps=[above, here])
        above, here = warpgroup_mma_init(above), warpgroup_mma_init(here)
    _leave(ready, total, product, partial, column, blocks, C, spread)
