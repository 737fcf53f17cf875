"""The gaps between confidence and correctness of all samples, as input of the intervals of binned errors."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import EdgeRule, exact
from fedlas.metrics.binning import Binning, Kind, samples_of
from fedlas.metrics.inputs import MetricInput, Pairs, Rows, Scope
from fedlas.metrics.intervals.classwise import ClassGaps
from fedlas.metrics.intervals.resampling import AbstractGaps, Gaps
from fedlas.metrics.result import Result
from fedlas.predictions.arrays import Array


def gaps_of(samples: Pairs | Rows, binning: Binning) -> AbstractGaps:
    """Return the bin of every sample, and its gap between confidence and correctness."""
    if isinstance(samples, Pairs):
        return samples.once(("gaps", binning), lambda: _pair_gaps(samples, binning))
    if binning.kind == "mass" or binning.compat is not None:
        raise UserError("intervals of class-wise errors exist for equal-width bins with the rule of this package only")
    return ClassGaps(samples.probs, samples.labels, binning.bins, "soft" in (samples.definition.scope or ""))


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
    rule, samples = Binning(bins, binning), samples_of(probs, labels, scope, ignore_index)
    definition = replace(rule.define(samples.definition), estimator="expected ECE of a calibrated model", norm="L1")
    return Result(gaps_of(samples, rule).noise_floor(), definition)


def _numpy(values: Tensor) -> Any:
    return values.cpu().numpy()
