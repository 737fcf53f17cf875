"""Metric sums of an epoch, one kernel each; `epoch_metrics` and `gate_statistics` compute the same with torch.

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

LOGITS_PER_PROGRAM = 4096
MAX_CLASSES = 16384  # more classes do not fit into the registers
SAMPLES_PER_TILE = 512


@triton.jit
@no_type_check
def batch_kernel(
    logits, labels, samples, correct, means, sums, rows, classes, row_stride, column_stride,
    MEANS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add a batch to the sums of the epoch.

    A prediction is correct if no other class has a larger logit, or the same logit and a smaller index. NaN is larger
    than all numbers, as in torch.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    label = tl.load(labels + row, mask=row < rows, other=-1)
    is_valid = (label >= 0) & (label < classes)
    start = logits + row.to(tl.int64) * row_stride
    label_logit = tl.load(start + label * column_stride, mask=is_valid, other=0.0).to(tl.float32)
    mask = (row < rows) & (column < classes)
    other = tl.load(start + column * column_stride, mask=mask, other=-float("inf")).to(tl.float32)
    is_earlier = column < label
    is_nan, label_is_nan = other != other, label_logit != label_logit  # noqa: PLR0124
    ahead = tl.where(
        label_is_nan, is_nan & is_earlier, is_nan | (other > label_logit) | ((other == label_logit) & is_earlier)
    )
    is_correct = is_valid & (tl.sum(ahead.to(tl.int32), 1, keep_dims=True) == 0)
    # An integer: its sum does not depend on the order.
    tl.atomic_add(correct, tl.sum(is_correct.to(tl.int32)).to(tl.float64))
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
    if classes > MAX_CLASSES:
        return False
    columns = triton.next_power_of_2(classes)
    height = max(1, LOGITS_PER_PROGRAM // columns)
    batch_kernel[(triton.cdiv(rows, height),)](
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
    """Add the gate of a batch to the sums, in one program; skip samples whose psi is NaN."""
    edge = tl.arange(0, EDGES)
    limit = tl.load(edges + edge, mask=edge < count, other=float("inf"))
    reached, valid, opposed = tl.zeros((EDGES,), tl.int32), tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
    ratio = tl.zeros((ROWS,), tl.float64)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = row < rows
        position = tl.load(index + row, mask=mask, other=-1)
        psi_value = tl.load(psi + row, mask=mask, other=float("nan")).to(tl.float32)
        gamma_value = tl.load(gamma + row, mask=mask, other=float("nan")).to(tl.float32)
        alpha_value = tl.load(alphas + row, mask=mask, other=0.0).to(tl.float32)
        is_valid = psi_value == psi_value  # noqa: PLR0124
        tl.store(
            now + position,
            tl.where(psi_value > 0, 1, -1).to(tl.int8),
            mask=is_valid & (position >= 0) & (position < samples),
        )
        sign = tl.where(gamma_value > 0, 1.0, 0.0) - tl.where(gamma_value < 0, 1.0, 0.0)
        valid += is_valid.to(tl.int32)
        opposed += (is_valid & (psi_value == -sign)).to(tl.int32)
        ratio += tl.where(is_valid, tl.div_rn(alpha_value, alpha), 0.0).to(tl.float64)
        reached += tl.sum((gamma_value[:, None] >= limit[None, :]).to(tl.int32), 0)
    tl.store(sums, tl.load(sums) + tl.sum(valid, 0))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(ratio, 0))
    tl.store(sums + 2, tl.load(sums + 2) + tl.sum(opposed, 0))
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
    inputs = [tensor.contiguous() for tensor in (index, psi, gamma, alpha_i)]
    if any(tensor.shape != index.shape for tensor in inputs):
        raise UserError(f"index, psi, gamma and alpha_i have shapes {[tuple(tensor.shape) for tensor in inputs]}")
    gate_kernel[(1,)](
        *inputs, edges, now, sums, len(index), len(now), len(edges), alpha,
        ROWS=SAMPLES_PER_TILE, EDGES=triton.next_power_of_2(len(edges)), num_warps=8,
    )  # fmt: skip
