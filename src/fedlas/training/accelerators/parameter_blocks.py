"""Block tables, with which one kernel processes many tensors.

    tensors   aaaaaaaaaaa  bbb                elements in memory order
    blocks    aaaa aaaa aaa. .... bbb. ....   rows of the table: address, remaining elements, index of the tensor

Gradients or low-precision copies of the tensors are stored in one flat tensor, each aligned to a tile of several
blocks. So a block has the same index there as in the table, and a tile belongs to one tensor.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from fedlas.training.accelerators import batch_norm

BLOCK = 2048  # elements of one tensor that a program updates
TILE = 4 * BLOCK  # elements that a program of the norm reads
ALIGNED = 16  # bytes of a vectorised load
VECTOR = 4  # float32 elements of a vectorised load
COLUMNS = 3  # of the table: address, remaining elements of the tensor, index of the tensor


class Layout(NamedTuple):
    """Start of each tensor in a flat tensor, and the end of the last one."""

    starts: list[int]
    end: int

    def views(self, flat: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the view of the flat tensor for each tensor, with its shape and strides."""
        pairs = zip(tensors, self.starts, strict=True)
        return [flat.as_strided(tensor.shape, tensor.stride(), start) for tensor, start in pairs]


def lay_out(tensors: Iterable[Tensor], start: int = 0) -> Layout:
    """Return a layout of tensors one after the other, each aligned to a tile."""
    starts = []
    for tensor in tensors:
        starts.append(start)
        start += -(-tensor.numel() // TILE) * TILE
    return Layout(starts, start)


def block_table(tensors: Sequence[Tensor], layout: Layout) -> Int[Tensor, "blocks 3"]:
    """Return the table of the blocks of float32 tensors; blocks of padding have no elements."""
    rows = torch.zeros(layout.end // BLOCK, COLUMNS, dtype=torch.int64)
    for number, (tensor, start) in enumerate(zip(tensors, layout.starts, strict=True)):
        offsets = torch.arange(0, tensor.numel(), BLOCK)
        tensor_rows = rows[start // BLOCK :][: len(offsets)]
        tensor_rows[:, 0] = tensor.data_ptr() + tensor.element_size() * offsets
        tensor_rows[:, 1], tensor_rows[:, 2] = tensor.numel() - offsets, number
    return rows


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is float32, dense, and aligned for vectorised loads."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return tensor.dtype == torch.float32 and bool(dense) and tensor.data_ptr() % ALIGNED == 0


@triton.jit
@no_type_check
def cast_kernel(blocks, flat, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, VECTOR: tl.constexpr):
    """Cast a block to the type of the flat tensor, with vectorised loads up to the end of the tensor."""
    block = tl.program_id(0).to(tl.int64)
    entry, offsets = blocks + block * COLUMNS, tl.arange(0, BLOCK)
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.float32)), ALIGNED)
    mask = offsets < tl.load(entry + 1) // VECTOR * VECTOR
    tl.store(flat + block * BLOCK + offsets, tl.load(source + offsets, mask=mask).to(flat.dtype.element_ty), mask=mask)


class WeightCast:
    """Casts float32 tensors to low precision with one kernel.

    Args:
        tensors: tensors to cast; their addresses are stored, see `holds`.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = _addresses(tensors)
        usable = tensors[0].is_cuda or batch_norm.INTERPRETED
        self.fits = usable and all(is_plain(tensor) and tensor.numel() % VECTOR == 0 for tensor in tensors)
        self.layout = lay_out(tensors)
        self.blocks = block_table(tensors, self.layout).to(tensors[0].device)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the tensors are those of the constructor, at the same addresses."""
        return self.addresses == _addresses(tensors)

    def copies(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return low-precision copies in new memory; torch casts tensors that the kernel does not support."""
        if not self.fits:
            copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
            torch._foreach_copy_(copies, list(tensors))
            return copies
        flat = torch.empty(self.layout.end, dtype=dtype, device=self.blocks.device)
        cast_kernel[(len(self.blocks),)](
            self.blocks, flat, BLOCK=BLOCK, COLUMNS=COLUMNS, ALIGNED=ALIGNED, VECTOR=VECTOR, num_warps=4,
        )  # fmt: skip
        return self.layout.views(flat, tensors)


def _addresses(tensors: Sequence[Tensor]) -> list[tuple[int, torch.dtype, torch.Size, tuple[int, ...]]]:
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
