"""Probabilities, confidences and predicted classes of logits, a part of a table at a time; rounded probabilities."""

import math
import warnings

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fedlas.errors import UserError
from fedlas.predictions.arrays import ENOUGH, TOLERANCE, RowLimits, check_finite, check_probs, check_rows, row_sums

# Number of logits whose softmax is computed at a time: 16 MiB on a CPU, a gigabyte on other devices. Smaller parts
# would fit a cache, but all threads wait for each other after each part, which is slow on a busy machine.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**22, 2**28
MAX_MISSING = 2e-2  # a row of rounded probabilities whose sum is further from one is normalized
NO_FLOAT64 = {"mps"}  # devices


def softmax(logits: Float[Tensor, "n classes *space"]) -> Float[Tensor, "n classes *space"]:
    """Return the probabilities of logits, in float32 or better."""
    return logits.softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))


def least_prob(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a type: the floor of probabilities whose logarithm is taken."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def least_log_prob(dtype: torch.dtype) -> float:
    """Return the logarithm of `least_prob`, also if such small numbers are flushed to zero (`set_flush_denormal`)."""
    return math.log(torch.finfo(dtype).tiny) + math.log(torch.finfo(dtype).eps)


def decimals_of(probs: Float[Tensor, "n classes"]) -> int | None:
    """Return the number of decimals that probabilities are rounded to; None if they are not, or too few.

    Rounded numbers are multiples of one unit, and none lies between zero and half a unit, as small probabilities of a
    softmax do. The first rows rule out nearly all tables that are not rounded.
    """
    if probs.dtype not in {torch.float32, torch.float64}:
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = [count for count in range(1, 13) if precision * 10**count <= 0.2]
    between = 0
    for part in (probs[:ENOUGH], *parts_of(probs)):
        # Multiples of a unit are multiples of a tenth of it as well: only the largest unit has to be checked.
        while digits and not _are_multiples(part, 10.0 ** digits[0], precision):
            del digits[0]
        if not digits:
            return None
        between += int(((part > 0) & (part < 1)).sum())
    return digits[0] if between >= 2 * ENOUGH else None


def _are_multiples(part: Tensor, scale: float, precision: float) -> bool:
    part = part.cpu() if part.device.type in NO_FLOAT64 else part
    scaled = part.double() * scale
    whole = scaled.round()
    return bool(((scaled - whole).abs() <= precision * scale).all() & ((part <= 0) | (whole >= 1)).all())


def slices_of(table: Tensor) -> list[slice]:
    """Return slices of the rows of a table, each small enough for a copy in another type."""
    at_once = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    size = max(1, at_once // max(1, table[:1].numel()))
    return [slice(start, min(start + size, len(table))) for start in range(0, max(1, len(table)), size)]


def parts_of(table: Tensor) -> list[Tensor]:
    """Return the parts of a table, each small enough for a copy in another type."""
    return [table[rows] for rows in slices_of(table)]


def largest(table: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "n *space"], Int[Tensor, "n *space"]]:
    """Return the largest value of every row and its column; of equal values the first."""
    if table.device.type == "cpu" and table.ndim == 2 and table.dtype in {torch.float32, torch.float64} and len(table):
        column = torch.from_numpy(table.numpy().argmax(1))  # five times as fast as torch
        return table.gather(1, column[:, None])[:, 0], column
    largest_values = table.max(dim=1)
    return largest_values.values, largest_values.indices


def top_of_logits(logits: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Return confidence and predicted class of every row, without the probabilities of all rows at once."""
    confidence, prediction, lowest = [], [], []
    for part in parts_of(logits):
        value, column = largest(softmax(part))
        confidence.append(value)
        prediction.append(column)
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    largest_probs = torch.cat(confidence)
    # NaN and plus infinity make a confidence NaN; minus infinity shows in the lowest logit alone.
    if not bool(torch.isfinite(largest_probs).all() & torch.isfinite(torch.stack(lowest)).all()):
        check_finite(logits)
    return largest_probs, torch.cat(prediction)


def log_uncertainty(
    logits: Float[Tensor, "n classes *space"], prediction: Int[Tensor, "n *space"]
) -> Float[Tensor, "n *space"]:
    """Return the log-probability of all classes but the predicted one, in float64 if the device has it."""
    parts = []
    for rows in slices_of(logits):
        part = logits[rows]
        part = part.float() if part.device.type in NO_FLOAT64 else part.double()
        column = prediction[rows].unsqueeze(1)
        margins = part - part.gather(1, column)
        others = margins.scatter_(1, column, -math.inf).logsumexp(1)
        parts.append(others - torch.logaddexp(others, torch.zeros_like(others)))
    return torch.cat(parts)


def top_of_probs(
    probs: Float[Tensor, "n classes *space"], ignored: Bool[Tensor, "n *space"] | None = None
) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Return confidence and predicted class of every row; raise if a row is not a distribution."""
    confidence, prediction, sums, lowest = [], [], [], []
    for part in parts_of(probs):
        value, column = largest(part)
        confidence.append(value)
        prediction.append(column)
        sums.append(row_sums(part))
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    # Only a failure takes a second pass, which finds the reason.
    near_one = ((torch.cat(sums) - 1).abs() <= TOLERANCE[probs.dtype]).all()
    if not len(probs) or not bool(near_one & (torch.stack(lowest) >= 0).all()):
        check_probs(probs, ignored=ignored)
    return torch.cat(confidence), torch.cat(prediction)


def rounding_limits(probs: Float[Tensor, "n classes"]) -> RowLimits | None:
    """Return how far rounding to decimals can move the sums of rows; None if a table is not rounded to decimals.

    The errors of the entries above zero add up as independent ones do: four standard deviations, and at most half a
    unit each. Entries that were rounded to zero have all lost something, at most half a unit each.
    """
    if probs.dtype not in {torch.float32, torch.float64} or not bool(torch.isfinite(probs).all()):
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = (d for d in range(1, 7) if precision * 10.0**d <= 0.01)
    fitting = (d for d in digits if all(_are_multiples(part, 10.0**d, precision) for part in parts_of(probs)))
    decimals = next(fitting, None)
    if decimals is None:
        return None
    positive = (probs > 0).sum(dim=1).to(torch.promote_types(probs.dtype, torch.float32))
    unit = torch.full_like(positive, 10.0**-decimals)
    above = unit * torch.minimum(4 * (positive / 12).sqrt(), positive / 2) * 1.000002 + TOLERANCE[probs.dtype]
    return RowLimits(above + unit / 2 * (probs.shape[1] - positive), above, unit)


def complete_rows(probs: Float[Tensor, "n classes"], limits: RowLimits) -> Float[Tensor, "n classes"]:
    """Normalize the rows of rounded probabilities whose sum differs from one by more than 0.02.

    The missing probability is spread over the zeros, at most half a unit each: dividing by the sum would raise every
    confidence. The rest is divided out.
    """
    sums = row_sums(probs)
    off = (sums - 1).abs() > MAX_MISSING
    if not bool(off.any()):
        return probs
    rows, totals, unit = probs[off], sums[off], limits.unit.to(sums)[off]
    zero = rows <= 0
    missing = torch.minimum((1 - totals).clamp_min(0) / zero.sum(dim=1).clamp_min(1), unit / 2)
    rows = torch.where(zero, missing[:, None].to(rows.dtype), rows)
    warnings.warn(
        f"{len(rows):,} of {len(probs):,} rows of rounded probabilities sum to {float(totals.min()):.4g} to "
        f"{float(totals.max()):.4g} and were normalized: below one, the zeros of a row take up the rest; above one, it "
        "is divided by its sum",
        stacklevel=3,
    )
    completed = probs.clone()
    completed[off] = rows / row_sums(rows)[:, None].to(rows.dtype)
    return completed


def normalize_rows(table: Tensor) -> Float[Tensor, "n classes"]:
    """Divide every row by its sum."""
    if table.ndim != 2 or table.shape[1] < 2:
        raise UserError(f"normalize needs a column for each class, not a table of shape {tuple(table.shape)}")
    sums = row_sums(table)
    good = torch.isfinite(sums) & (sums > 0) & (table.amin(dim=1) >= 0)
    check_rows("probs", table, good, "cannot be divided by its sum (entries of 0 or more, sum above 0)")
    return table / sums[:, None].to(table.dtype)
