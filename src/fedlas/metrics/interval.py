"""How sure a number is: intervals, and the error that chance alone would show.

A binned error is a sum of absolute gaps, T = sum_b |g_b|, so noise makes it too large: even a perfectly calibrated
model shows the `noise_floor`. Plain percentile intervals add that bias a second time and miss the true value about half
of the time. Here the bootstrap is turned around instead (test inversion):

1. Resampling gives deviations Z of the gaps (`resampling.py`).
2. A one-parameter family of possible truths is laid through the observed gaps: mu_b(t) is g_b moved towards zero, or
   away from it, by a multiple of its standard error, such that sum_b |mu_b(t)| = t.
3. The interval holds every t for which the observed T lies in the middle 95 % of sum_b |mu_b(t) + Z_b|.

Means over samples (NLL, Brier score, signed ECE) get bias-corrected and accelerated intervals, and accuracy a Wilson
interval, which is right even when every answer is.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from fedlas.metrics import calibration, scoring
from fedlas.metrics.bins import exact
from fedlas.metrics.inversion import inverted_interval
from fedlas.metrics.presets import Binning, Compat, Kind
from fedlas.metrics.resampling import Gaps, Part, World, mean_interval
from fedlas.metrics.result import Interval, Result
from fedlas.metrics.samples import Scope, pairs, rows
from fedlas.predictions import Array, Predictions, optional_module

Metric = Callable[..., Any]


@overload
def bootstrap(
    metric: Callable[..., Result], probs: Predictions | Array, labels: Array | None = ..., **options: Any
) -> Result: ...
@overload
def bootstrap(
    metric: Callable[..., tuple[Result, Result]], probs: Predictions | Array, labels: Array | None = ..., **options: Any
) -> tuple[Result, Result]: ...
def bootstrap(
    metric: Metric,
    probs: Predictions | Array,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Result | tuple[Result, Result]:
    """Measure a metric and find the interval that holds its true value.

    Args:
        metric: `ece`, `aece`, `classwise_ece`, `over_under`, `signed_ece`, `accuracy`, `nll` or `brier`.
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        level: how often the interval should hold the true value.
        resamples: how many resamples to draw; 10,000 by default, 1,000 for class-wise errors.
        seed: of the random numbers; equal seeds give equal intervals.
        options: passed on to the metric.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; a share between 0 and 1 is needed, such as 0.95")
    found = metric(probs, labels, **options)
    rng = np.random.default_rng(seed)
    if isinstance(found, tuple):
        gaps = gaps_of(metric, probs, labels, **options)
        world = gaps.resample(resamples, rng)
        over, under = _inverted(world, "over", level), _inverted(world, "under", level)
        return found[0].with_interval(over), found[1].with_interval(under)
    if metric is scoring.accuracy:
        return _one(found, wilson(float(found), found.n, level))
    if metric in PER_SAMPLE:
        values = _numpy(exact(PER_SAMPLE[metric](probs, labels, **options)))
        low, high = mean_interval(values, level, resamples or 10_000, rng)
        return _one(found, Interval(low, high, level, "bootstrap, bias-corrected and accelerated"))
    gaps = gaps_of(metric, probs, labels, **options)
    interval = _inverted(gaps.resample(resamples, rng), "both", level)
    return _one(found, interval, noise_floor=gaps.noise_floor())


def noise_floor(
    probs: Predictions | Array,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Find the calibration error that a perfectly calibrated model with these confidences would show on average."""
    way = Binning(bins, binning)
    table = (
        rows(probs, labels, scope, ignore_index)
        if scope in {"class-wise", "multi-label"}
        else pairs(probs, labels, scope, ignore_index)
    )
    gaps = gaps_of(calibration.over_under, probs, labels, bins, binning=binning, scope=scope, ignore_index=ignore_index)
    about = replace(way.define(table.about), estimator="expected ECE of a calibrated model", norm="L1")
    return Result(gaps.noise_floor(), about)


def clopper_pearson(
    hits: Shaped[Tensor, " bins"], counts: Shaped[Tensor, " bins"], level: float = 0.95
) -> tuple[Float64[Tensor, " bins"], Float64[Tensor, " bins"]]:
    """Find for each bin the range of accuracies that its hits do not contradict; 0 to 1 where a bin is empty."""
    quantile = optional_module("scipy.special").betaincinv
    k, n = _numpy(exact(hits)), _numpy(exact(counts))
    tail = (1 - level) / 2
    low = np.where(k > 0, quantile(np.maximum(k, 0.5), n - k + 1, tail), 0.0)
    high = np.where(k < n, quantile(k + 1, np.maximum(n - k, 0.5), 1 - tail), 1.0)
    return torch.from_numpy(low), torch.from_numpy(high)


def wilson(share: float, n: int, level: float = 0.95) -> Interval:
    """Find the interval of a share of n samples."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach), level, "Wilson")


def gaps_of(
    metric: Metric,
    probs: Predictions | Array,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    compat: Compat | None = None,
    ignore_index: int | None = None,
) -> Gaps:
    """Find the bin and the gap of every sample, for a metric that is a sum of absolute gaps."""
    if metric not in {calibration.ece, calibration.aece, calibration.classwise_ece, calibration.over_under}:
        raise ValueError(f"no interval with known coverage exists for {getattr(metric, '__name__', metric)}")
    way = Binning(bins, "mass" if metric is calibration.aece else binning, compat)
    scope = "class-wise" if metric is calibration.classwise_ece else scope
    if scope in {"class-wise", "multi-label"}:
        return _class_gaps(probs, labels, way, scope, ignore_index)
    found = pairs(probs, labels, scope, ignore_index)
    index = way.index(found.confidence)
    outside = (index < 0) | (index >= bins)
    confidence = exact(found.confidence).masked_fill(outside.to(index.device), 0)
    correct = exact(found.correct).masked_fill(outside, 0)
    soft = found.correct.dtype != torch.bool
    return Gaps(_numpy(index.masked_fill(outside, 0)), _numpy(confidence), _numpy(confidence - correct), bins, soft)


def _class_gaps(
    probs: Predictions | Array, labels: Array | None, way: Binning, scope: Scope, ignore_index: int | None
) -> Gaps:
    if way.kind == "mass" or way.compat is not None:
        raise ValueError("intervals of class-wise errors exist for equal-width bins of our own rule only")
    table = rows(probs, labels, scope, ignore_index)
    index = way.index(table.probs.reshape(-1)).view(table.probs.shape)
    gap = exact(table.probs).clone()
    if table.labels.ndim == 2:
        gap -= exact(table.labels)
    else:
        gap.scatter_add_(1, table.labels[:, None], torch.full_like(gap[:, :1], -1))
    soft = "soft" in (table.about.scope or "")
    return Gaps(_numpy(index), _numpy(exact(table.probs)), _numpy(gap), way.bins, soft)


def _inverted(world: World, part: Part, level: float) -> Interval:
    low, high = inverted_interval(world, part, level)
    return Interval(low, high, level, "bootstrap, test inversion")


def _one(found: Any, interval: Interval, **details: float) -> Result:
    result: Result = found.with_interval(interval, **details)
    return result


def _signed_values(probs: Predictions | Array, labels: Array | None, bins: int = 15, **options: Any) -> Tensor:
    gaps = gaps_of(calibration.over_under, probs, labels, bins, **options)
    return torch.from_numpy(gaps.gap if gaps.gap.ndim == 1 else gaps.gap.mean(1))


def nll_values(probs: Predictions | Array, labels: Array | None, **options: Any) -> Tensor:
    """Find the negative log-likelihood of each sample."""
    return scoring.losses_of(probs, labels, **options)[0].values


def brier_values(
    probs: Predictions | Array, labels: Array | None, bins: int = 15, ignore_index: int | None = None
) -> Tensor:
    """Find the squared error of each sample; only the parts of the score have bins."""
    del bins
    table = rows(probs, labels, ignore_index=ignore_index)
    return scoring.squared_errors(table.probs, table.labels)


PER_SAMPLE: dict[Metric, Callable[..., Tensor]] = {
    calibration.signed_ece: _signed_values,
    scoring.nll: nll_values,
    scoring.brier: brier_values,
}


def _numpy(values: Tensor) -> Any:
    return values.cpu().numpy()
