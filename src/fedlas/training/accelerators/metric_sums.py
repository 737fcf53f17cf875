"""Sums of an epoch, one kernel each; `epoch_metrics` and `gate_statistics` compute the same with torch.

    logits, labels, loss ─► add_batch ─► samples, correct, loss and its terms
    psi, gamma, alpha_i ─► add_gate ─► state of the gate per sample, alpha_i / alpha, histogram of gamma

Counts are integers, so the order of the programs does not matter; a single program computes all other sums.
"""

from typing import no_type_check

import triton
import triton.language as tl
from jaxtyping import Float, Int, Int8
from torch import Tensor

from fedlas.errors import UserError
from fedlas.training.accelerators.precompile import launch

LOGITS = 4096  # that a program looks at
WIDEST = 16384  # classes; more do not fit into the registers
SAMPLES = 512  # whose gates are looked at together


@triton.jit
@no_type_check
def batch_kernel(
    logits, labels, samples, correct, means, sums, rows, classes, down, across,
    MEANS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a batch to the sums of the epoch.

    A label is the network's answer if no other class is ahead: has a larger logit, or the same and comes first. NaN is
    larger than all numbers, as torch has it.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    label = tl.load(labels + row, mask=row < rows, other=-1)
    known = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * down
    own = tl.load(start + label * across, mask=known, other=0.0).to(tl.float32)
    there = (row < rows) & (column < classes)
    other = tl.load(start + column * across, mask=there, other=-float("inf")).to(tl.float32)
    first = column < label
    is_nan, own_is_nan = other != other, own != own  # noqa: PLR0124
    ahead = tl.where(own_is_nan, is_nan & first, is_nan | (other > own) | ((other == own) & first))
    hits = known & (tl.sum(ahead.to(tl.int32), 1, keep_dims=True) == 0)
    tl.atomic_add(correct, tl.sum(hits.to(tl.int32)).to(tl.float64))  # whole numbers: no order changes their sum
    if tl.program_id(0) == 0:
        tl.store(samples, tl.load(samples) + rows)
        for number in tl.static_range(MEANS):
            tl.store(sums[number], tl.load(sums[number]) + tl.load(means[number]) * rows)


def add_batch(
    logits: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
    samples: Float[Tensor, ""],
    correct: Float[Tensor, ""],
    means: list[Tensor],
    sums: list[Tensor],
) -> bool:
    """Add samples, correct predictions and means times samples; return False if there are too many classes."""
    rows, classes = logits.shape
    if classes > WIDEST:
        return False
    columns = triton.next_power_of_2(classes)
    height = max(1, LOGITS // columns)
    launch(batch_kernel, (triton.cdiv(rows, height),),
        logits, labels.contiguous(), samples, correct, tuple(means), tuple(sums), rows, classes, *logits.stride(),
        MEANS=len(means), ROWS=height, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return True


@triton.jit
@no_type_check
def gate_kernel(
    index, psi, gamma, alphas, edges, now, sums, rows, samples, count, alpha,
    ROWS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Note what the gate did with a batch, by one program; a sample whose psi is NaN is passed over."""
    edge = tl.arange(0, EDGES)
    limit = tl.load(edges + edge, mask=edge < count, other=float("inf"))
    reached, seen, against = tl.zeros((EDGES,), tl.int32), tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    ratio = tl.zeros((ROWS,), tl.float64)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < rows
        place = tl.load(index + row, mask=there, other=-1)
        state = tl.load(psi + row, mask=there, other=float("nan")).to(tl.float32)
        degree = tl.load(gamma + row, mask=there, other=float("nan")).to(tl.float32)
        own = tl.load(alphas + row, mask=there, other=0.0).to(tl.float32)
        known = state == state  # noqa: PLR0124
        tl.store(now + place, tl.where(state > 0, 1, -1).to(tl.int8), mask=known & (place >= 0) & (place < samples))
        sign = tl.where(degree > 0, 1.0, 0.0) - tl.where(degree < 0, 1.0, 0.0)
        seen += known.to(tl.int32)
        against += (known & (state == -sign)).to(tl.int32)
        ratio += tl.where(known, tl.div_rn(own, alpha), 0.0).to(tl.float64)
        reached += tl.sum((degree[:, None] >= limit[None, :]).to(tl.int32), 0)
    tl.store(sums, tl.load(sums) + tl.sum(seen, 0))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(ratio, 0))
    tl.store(sums + 2, tl.load(sums + 2) + tl.sum(against, 0))
    tl.store(sums + 3 + edge, tl.load(sums + 3 + edge, mask=edge < count) + reached, mask=edge < count)


def add_gate(
    index: Int[Tensor, " n"],
    psi: Float[Tensor, " n"],
    gamma: Float[Tensor, " n"],
    alpha_i: Float[Tensor, " n"],
    alpha: float,
    edges: Float[Tensor, " edges"],
    now: Int8[Tensor, " samples"],
    sums: Float[Tensor, " 3+edges"],
) -> None:
    """Store the state of the gate per sample; add samples, alpha_i / alpha, psi = -sign(gamma) and gammas per edge."""
    given = [one.contiguous() for one in (index, psi, gamma, alpha_i)]
    if any(one.shape != index.shape for one in given):
        raise UserError(f"index, psi, gamma and alpha_i have shapes {[tuple(one.shape) for one in given]}")
    launch(gate_kernel, (1,),
        *given, edges, now, sums, len(index), len(now), len(edges), alpha,
        ROWS=SAMPLES, EDGES=triton.next_power_of_2(len(edges)), num_warps=8,
    )  # fmt: skip
