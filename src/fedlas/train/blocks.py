"""Many tensors in one kernel: all of them are cut into blocks, and a table tells each program about its own.

    tensors   aaaaaaaaaaa  bbb                each as its numbers lie in memory
    blocks    aaaa aaaa aaa. .... bbb. ....   a row of the table each: address, numbers from there on, which tensor

Whatever else belongs to the tensors, their gradients or narrow copies, lies in one flat tensor, each from the start of
a tile of some blocks on: so a block has the same number there as in the table, and a tile is of one tensor.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

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
        """Give each tensor its part of the flat one, in its own shape and order in memory."""
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
    """Say whether a tensor is wide, without gaps, and starts where many bytes can be read together."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(one)
    return one.dtype == torch.float32 and bool(dense) and one.data_ptr() % ALIGNED == 0
