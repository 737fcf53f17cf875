"""The gaps between confidence and correctness of all samples, from which intervals of binned errors are computed."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import EdgeRule, exact
from fedlas.metrics.binning import EVERY_CLASS, Binning, Kind
from fedlas.metrics.inputs import Given, Pairs, Scope, pairs, rows
from fedlas.metrics.intervals.classwise import ClassGaps
from fedlas.metrics.intervals.resampling import AbstractGaps, Gaps
from fedlas.metrics.result import Result
from fedlas.predictions import Array


def gaps_of(
    probs: Given, labels: Array | None, binning: Binning, scope: Scope = "top-label", ignore_index: int | None = None
) -> AbstractGaps:
    """Return the bin and the gap of every sample."""
    if scope in EVERY_CLASS:
        return _class_gaps(probs, labels, binning, scope, ignore_index)
    found = pairs(probs, labels, scope, ignore_index)
    return found.once(("gaps", binning), lambda: _pair_gaps(found, binning))


def _pair_gaps(found: Pairs, binning: Binning) -> Gaps:
    index = binning.index(found.confidence)
    confidence, correct = exact(found.confidence), exact(found.correct)
    # On a device without float64, `exact` has moved the values to the CPU.
    index = index.to(confidence.device)
    bins = binning.bins + (binning.rule == EdgeRule.LEFT_OPEN)
    outside = (index < 0) | (index >= bins)
    confidence, correct = confidence.masked_fill(outside, 0), correct.masked_fill(outside, 0)
    # Floats that are all 0 or 1 are hard labels, whose variance follows from their rate.
    soft = found.correct.dtype != torch.bool and not bool(((correct == 0) | (correct == 1)).all())
    return Gaps(_numpy(index.masked_fill(outside, 0)), _numpy(confidence), _numpy(confidence - correct), bins, soft)


def _class_gaps(
    probs: Given, labels: Array | None, binning: Binning, scope: Scope, ignore_index: int | None
) -> ClassGaps:
    if binning.kind == "mass" or binning.compat is not None:
        raise UserError("intervals of class-wise errors exist for equal-width bins with the rule of this package only")
    table = rows(probs, labels, scope, ignore_index)
    return ClassGaps(table.probs, table.labels, binning.bins, "soft" in (table.about.scope or ""))


def noise_floor(
    probs: Given,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Return the calibration error that a perfectly calibrated model with these confidences would show on average."""
    rule = Binning(bins, binning)
    read = rows if scope in EVERY_CLASS else pairs
    about = rule.define(read(probs, labels, scope, ignore_index).about)
    gaps = gaps_of(probs, labels, rule, scope, ignore_index)
    return Result(gaps.noise_floor(), replace(about, estimator="expected ECE of a calibrated model", norm="L1"))


def _numpy(values: Tensor) -> Any:
    return values.cpu().numpy()
