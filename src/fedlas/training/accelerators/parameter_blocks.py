"""Many tensors in one kernel: all of them are cut into blocks, and a table tells each program about its own.

    tensors   aaaaaaaaaaa  bbb                each as its numbers lie in memory
    blocks    aaaa aaaa aaa. .... bbb. ....   a row of the table each: address, numbers from there on, which tensor

Whatever else belongs to the tensors, their gradients or narrow copies, lies in one flat tensor, each from the start of
a tile of some blocks on: so a block has the same number there as in the table, and a tile is of one tensor.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from fedlas.training.accelerators import batch_norm
from fedlas.training.accelerators.precompile import launch

BLOCK = 2048  # numbers of one tensor that a program changes
TILE = 4 * BLOCK  # numbers that one looks at
ALIGNED = 16  # bytes that are read together
EVEN = 4  # wide numbers in these
COLUMNS = 3  # of the table: address, numbers of the tensor from there on, number of the tensor


class Layout(NamedTuple):
    """Where tensors start in a flat one, and where the last of them ends."""

    starts: list[int]
    end: int

    def views(self, flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return each tensor its part of the flat one, in its own shape and order in memory."""
        pairs = zip(tensors, self.starts, strict=True)
        return [flat.as_strided(one.shape, one.stride(), start) for one, start in pairs]


def laid_out(tensors: Iterable[Tensor], start: int = 0) -> Layout:
    """Lay tensors one after the other, each from the start of a tile on."""
    starts = []
    for one in tensors:
        starts.append(start)
        start += -(-one.numel() // TILE) * TILE
    return Layout(starts, start)


def table_of(tensors: Sequence[Tensor], layout: Layout) -> Int[Tensor, "blocks 3"]:
    """List the blocks of wide tensors; those in which no tensor lies have no numbers."""
    rows = torch.zeros(layout.end // BLOCK, COLUMNS, dtype=torch.int64)
    for number, (one, start) in enumerate(zip(tensors, layout.starts, strict=True)):
        first = torch.arange(0, one.numel(), BLOCK)
        mine = rows[start // BLOCK :][: len(first)]
        mine[:, 0] = one.data_ptr() + one.element_size() * first
        mine[:, 1], mine[:, 2] = one.numel() - first, number
    return rows


def is_plain(one: Tensor) -> bool:
    """Return whether a tensor is wide, without gaps, and starts where many bytes can be read together."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(one)
    return one.dtype == torch.float32 and bool(dense) and one.data_ptr() % ALIGNED == 0


@triton.jit
@no_type_check
def cast_kernel(blocks, flat, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr):
    """Write a block in a narrower type; what is left of a tensor at its end is still read many bytes at a time."""
    block = tl.program_id(0).to(tl.int64)
    about, place = blocks + block * COLUMNS, tl.arange(0, BLOCK)
    wide = tl.multiple_of(tl.load(about).to(tl.pointer_type(tl.float32)), ALIGNED)
    there = place < tl.load(about + 1) // EVEN * EVEN
    tl.store(flat + block * BLOCK + place, tl.load(wide + place, mask=there).to(flat.dtype.element_ty), mask=there)


class WeightCast:
    """Copies of wide tensors in a narrower type, by one kernel.

    Args:
        tensors: what is to be copied; their addresses are remembered, see `holds`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = _addresses(tensors)
        usable = tensors[0].is_cuda or batch_norm.INTERPRETED
        self.fits = usable and all(is_plain(one) and one.numel() % EVEN == 0 for one in tensors)
        self.layout = laid_out(tensors)
        self.blocks = table_of(tensors, self.layout).to(tensors[0].device)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the tensors that it was made for, and where they were."""
        return self.addresses == _addresses(tensors)

    def copies(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Make copies, each time in memory of their own; torch does it where the kernel cannot."""
        if not self.fits:
            copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
            torch._foreach_copy_(copies, list(tensors))
            return copies
        flat = torch.empty(self.layout.end, dtype=dtype, device=self.blocks.device)
        launch(
            cast_kernel,
            (len(self.blocks),),
            self.blocks,
            flat,
            BLOCK=BLOCK,
            COLUMNS=COLUMNS,
            ALIGNED=ALIGNED,
            EVEN=EVEN,
            num_warps=4,
        )
        return self.layout.views(flat, tensors)


def _addresses(tensors: Sequence[Tensor]) -> list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]]:
    return [(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in tensors]
