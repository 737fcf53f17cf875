"""The gaps between confidence and correctness of all samples, as input of the intervals of binned errors."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import EdgeRule, exact
from fedlas.metrics.binning import EVERY_CLASS, Binning, Kind
from fedlas.metrics.inputs import MetricInput, Pairs, Scope, pairs, rows
from fedlas.metrics.intervals.classwise import ClassGaps
from fedlas.metrics.intervals.resampling import AbstractGaps, Gaps
from fedlas.metrics.result import Result
from fedlas.predictions.arrays import Array


def gaps_of(
    probs: MetricInput,
    labels: Array | None,
    binning: Binning,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> AbstractGaps:
    """Return the bin of every sample, and its gap between confidence and correctness."""
    if scope in EVERY_CLASS:
        return _class_gaps(probs, labels, binning, scope, ignore_index)
    samples = pairs(probs, labels, scope, ignore_index)
    return samples.once(("gaps", binning), lambda: _pair_gaps(samples, binning))


def _pair_gaps(samples: Pairs, binning: Binning) -> Gaps:
    index = binning.index(samples.confidence)
    confidence, correct = exact(samples.confidence), exact(samples.correct)
    # On a device without float64, `exact` has moved the values to the CPU.
    index = index.to(confidence.device)
    bins = binning.bins + (binning.rule == EdgeRule.LEFT_OPEN)
    outside = (index < 0) | (index >= bins)
    confidence, correct = confidence.masked_fill(outside, 0), correct.masked_fill(outside, 0)
    # Floats that are all 0 or 1 are hard labels, whose variance follows from their rate.
    soft = samples.correct.dtype != torch.bool and not bool(((correct == 0) | (correct == 1)).all())
    return Gaps(_numpy(index.masked_fill(outside, 0)), _numpy(confidence), _numpy(confidence - correct), bins, soft)


def _class_gaps(
    probs: MetricInput, labels: Array | None, binning: Binning, scope: Scope, ignore_index: int | None
) -> ClassGaps:
    if binning.kind == "mass" or binning.compat is not None:
        raise UserError("intervals of class-wise errors exist for equal-width bins with the rule of this package only")
    table = rows(probs, labels, scope, ignore_index)
    return ClassGaps(table.probs, table.labels, binning.bins, "soft" in (table.definition.scope or ""))


def noise_floor(
    probs: MetricInput,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Return the calibration error that a perfectly calibrated model with these confidences has on average."""
    rule = Binning(bins, binning)
    reduce = rows if scope in EVERY_CLASS else pairs
    definition = rule.define(reduce(probs, labels, scope, ignore_index).definition)
    gaps = gaps_of(probs, labels, rule, scope, ignore_index)
    return Result(gaps.noise_floor(), replace(definition, estimator="expected ECE of a calibrated model", norm="L1"))


def _numpy(values: Tensor) -> Any:
    return values.cpu().numpy()
