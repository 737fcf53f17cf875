"""A kernel for CUDA devices that reads logits once and keeps only the top label of every row.

With m the largest logit of a row, its confidence is 1 / sum_k exp(x_k - m), and its class the first k with
exp(x_k - m) = 1. A whole row lies in the registers of one program, so nothing is read twice and no table is written.

This module needs triton, which comes with torch on CUDA; `samples.py` imports it when a table there is large enough.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # logits that one warp holds


# The numbers of classes and of the stride are constants, so that triton knows how many logits it may load at a time.
# Triton reads the source of this function; the shape checks of the tests, which wrap functions, have to leave it alone.
@triton.jit
@no_type_check
def _read(  # noqa: PLR0917
    logits,
    totals,
    places,
    rows,
    classes: tl.constexpr,
    stride: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    column = tl.arange(0, width)
    there = (row < rows)[:, None] & (column < classes)[None, :]
    x = tl.load(logits + row[:, None] * stride + column[None, :], mask=there, other=-float("inf")).to(tl.float32)
    lowest = tl.min(tl.where(there, x, float("inf")), axis=1)
    share = tl.exp(x - tl.max(x, axis=1)[:, None])
    # Minus infinity would be a share of zero, and pass unseen.
    total = tl.where(lowest == -float("inf"), float("nan"), tl.sum(share, axis=1))
    place = tl.min(tl.where(share == 1.0, column[None, :], width), axis=1)
    tl.store(totals + row, total, mask=row < rows)
    tl.store(places + row, place, mask=row < rows)


def top_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find for every row the sum of exp(x - max), which is one over its confidence, and the class of the maximum.

    The sum is NaN where a row holds NaN or infinity.
    """
    rows, classes = logits.shape
    table = logits if logits.stride(1) == 1 else logits.contiguous()
    totals = torch.empty(rows, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    width = triton.next_power_of_2(classes)
    height = max(1, TILE // width)
    grid = (triton.cdiv(rows, height),)
    warps = min(16, max(1, width // TILE))
    with torch.cuda.device_of(logits):
        _read[grid](table, totals, places, rows, classes, table.stride(0), height=height, width=width, num_warps=warps)
    return totals, places
