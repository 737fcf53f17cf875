"""A Triton kernel that computes the top label and its confidence for each row of logits in one pass.

With m the largest logit of a row, its confidence is 1 / sum_k exp(x_k - m), and its class the first k with
exp(x_k - m) = 1. A row is kept in the registers of one program, so logits are read once and no table is written.

This module needs triton, which comes with torch on CUDA; `inputs.py` imports it for large tables on CUDA devices.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # logits per warp


# Classes and stride are constants, so that Triton can vectorise loads. Triton reads the source of this function, so it
# must not be wrapped by the shape checks of the tests.
@triton.jit
@no_type_check
def _top_label(  # noqa: PLR0917
    logits,
    totals,
    indices,
    rows,
    classes: tl.constexpr,
    stride: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, width)
    valid = (row < rows)[:, None] & (column < classes)[None, :]
    x = tl.load(logits + row[:, None] * stride + column[None, :], mask=valid, other=-float("inf")).to(tl.float32)
    lowest = tl.min(tl.where(valid, x, float("inf")), axis=1)
    weight = tl.exp(x - tl.max(x, axis=1)[:, None])
    # The weight of minus infinity is zero, so it needs a test of its own.
    total = tl.where(lowest == -float("inf"), float("nan"), tl.sum(weight, axis=1))
    index = tl.min(tl.where(weight == 1.0, column[None, :], width), axis=1)
    tl.store(totals + row, total, mask=row < rows)
    tl.store(indices + row, index, mask=row < rows)


def top_label(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of exp(x - max) of each row, which is one over its confidence, and the class of the maximum.

    The sum is NaN if a row holds NaN or infinity.
    """
    rows, classes = logits.shape
    table = logits if logits.stride(1) == 1 else logits.contiguous()
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, dtype=torch.int64, device=logits.device)
    width = triton.next_power_of_2(classes)
    height = max(1, TILE // width)
    grid = (triton.cdiv(rows, height),)
    warps = min(16, max(1, width // TILE))
    with torch.cuda.device_of(logits):
        _top_label[grid](
            table, totals, indices, rows, classes, table.stride(0), height=height, width=width, num_warps=warps
        )
    return totals, indices
