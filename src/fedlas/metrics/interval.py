"""How sure a number is: intervals, and the error that chance alone would show.

A binned error is a sum of absolute gaps, T = sum_b |g_b|, so noise makes it too large: even a perfectly calibrated
model shows the `noise_floor`. Plain percentile intervals add that bias a second time and miss the true value about half
of the time. Here the bootstrap is turned around instead (test inversion):

1. Resampling gives deviations Z of the gaps (`resampling.py`).
2. A one-parameter family of possible truths is laid through the observed gaps: mu_b(t) is g_b moved towards zero, or
   away from it, by a multiple of its standard error, such that sum_b |mu_b(t)| = t.
3. The interval holds every t for which the observed T lies in the middle 95 % of sum_b |mu_b(t) + Z_b|.

Where a bin expects or shows few errors, as most bins of a saturated model do, its noise is that of binomial errors at
the rate supposed, so that intervals hold for few samples too; they are then wide. A truth far from the observed gap is
reckoned with where there is room for it.

The root of the mean squared gap is treated in the same way, and its interval is that of the debiased error too: both
estimate one thing.

Means over samples (NLL, Brier score, signed ECE) get bias-corrected and accelerated intervals, and so do the areas
under risk-coverage curves, as means of what each sample adds to them. Where large losses are few, the exact range of
their share is part of the interval. Accuracy gets a Wilson interval, which holds even when every prediction is
correct; with soft labels it is a mean like the others.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import NormalDist
from typing import Any, overload

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.metrics import calibration, scoring, selective
from fedlas.metrics.bins import EdgeRule, exact
from fedlas.metrics.class_gaps import ClassGaps
from fedlas.metrics.inversion import inverted_interval
from fedlas.metrics.presets import Binning, Compat, Kind
from fedlas.metrics.resampling import RARE, AbstractGaps, Bounds, Gaps, Part, World, few_range, mean_interval
from fedlas.metrics.result import Interval, Result
from fedlas.metrics.samples import Given, Pairs, Scope, pairs, rows
from fedlas.predictions import Array

Metric = Callable[..., Any]
PARTS: tuple[Part, Part] = ("over", "under")
ROOTS: set[Metric] = {calibration.rms_error, calibration.debiased_l2}
# A loss above log 2 is that of a label with less than half of the probability; there is no largest one, so that of the
# smallest normal float32 stands for losses never seen; no loss is cut to it.
BOUNDS = {
    "NLL": Bounds(0.0, math.log(2), -math.log(torch.finfo(torch.float32).tiny)),
    "Brier score": Bounds(0.0, 0.5, 2.0),
    "signed ECE": Bounds(-1.0, 0.0, 1.0),
    "accuracy": Bounds(0.0, 0.5, 1.0),  # of soft labels
}
AREAS: set[Metric] = {selective.aurc, selective.e_aurc, selective.augrc}
FEWEST = 20  # errors and correct predictions; below, an area hangs on so few samples that resampling says little
FEWEST_RESAMPLES = 20


@overload
def bootstrap(metric: Callable[..., Result], probs: Given, labels: Array | None = ..., **options: Any) -> Result: ...
@overload
def bootstrap(
    metric: Callable[..., tuple[Result, Result]], probs: Given, labels: Array | None = ..., **options: Any
) -> tuple[Result, Result]: ...
def bootstrap(
    metric: Metric,
    probs: Given,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Result | tuple[Result, Result]:
    """Measure a metric and find the interval that holds its true value.

    Args:
        metric: `ece`, `aece`, `classwise_ece`, `over_under`, `signed_ece`, `rms_error`, `debiased_l2`, `accuracy`,
            `nll`, `brier`, `aurc`, `e_aurc` or `augrc`.
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        level: how often the interval should hold the true value.
        resamples: how many resamples to draw; 10,000 by default, 1,000 for class-wise errors.
        seed: of the random numbers; equal seeds give equal intervals.
        options: passed on to the metric.
    """
    check_level(level, resamples)
    found = metric(probs, labels, **options)
    rng = np.random.default_rng(seed)
    if isinstance(found, tuple):
        gaps = gaps_of(metric, probs, labels, **options)
        distribution = _resampled(gaps, probs, resamples, seed)
        over, under = (_inverted(gaps, distribution, part, level) for part in PARTS)
        return found[0].with_interval(over), found[1].with_interval(under)
    if metric is scoring.accuracy:
        hits = scoring.correctness(pairs(probs, labels, **options))
        if hits.dtype == torch.bool:
            return _one(found, wilson(float(found), found.n, level))
        return mean_with_interval(found, exact(hits), level, resamples, rng)
    if metric in PER_SAMPLE:
        values = exact(PER_SAMPLE[metric](probs, labels, **options))
        measured = mean_with_interval(found, values, level, resamples, rng)
        return within_one(measured) if metric in AREAS else measured
    gaps = gaps_of(metric, probs, labels, **options)
    distribution = _resampled(gaps, probs, resamples, seed)
    if metric in ROOTS:
        return _one(found, _inverted(gaps, distribution, "rms", level))
    return _one(found, _inverted(gaps, distribution, "both", level), noise_floor=gaps.noise_floor())


def _resampled(gaps: AbstractGaps, probs: Given, resamples: int | None, seed: int) -> World:
    """Resample gaps; once for all metrics of the same pairs that have the same gaps."""

    def resample() -> World:
        return gaps.resample(resamples, np.random.default_rng(seed))

    # The pairs hold their gaps, so that no other gaps can have the same id.
    return probs.once((id(gaps), resamples, seed), resample) if isinstance(probs, Pairs) else resample()


def within_one(found: Result) -> Result:
    """Cut an interval to what a share can be."""
    interval = found.interval
    assert interval is not None
    return found.with_interval(replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high)))


def _inverted(gaps: AbstractGaps, distribution: World, part: Part, level: float) -> Interval:
    low, high = inverted_interval(distribution, part, level)
    below, above = gaps.unseen(level)
    if (part in PARTS and gaps.samples < RARE) or high + above <= low - below:
        # Samples of confidence 1 cannot be under-confident, but samples that were not seen can be.
        above += few_range(0, gaps.samples, level)[1]
    low, high = low - below, high + above
    return Interval(min(1.0, max(0.0, low)), min(1.0, max(0.0, high)), level, gaps.method)


def check_level(level: float, resamples: int | None = None) -> None:
    """Refuse a level in percent, no level at all, and too few resamples for the tails that the level asks for."""
    if not 0 < level < 1:
        raise UserError(f"level is {level}; a share between 0 and 1 is needed, such as 0.95")
    if resamples is not None and resamples < FEWEST_RESAMPLES:
        raise UserError(f"resamples is {resamples}; at least {FEWEST_RESAMPLES} are needed, better a thousand")


def mean_with_interval(
    found: Result, values: Float64[Tensor, " n"], level: float, resamples: int | None, rng: np.random.Generator
) -> Result:
    """Give the mean of some values its interval."""
    check_mean(found, values)
    bounds = BOUNDS.get(found.definition.estimator)
    low, high = mean_interval(_numpy(values), level, resamples or 10_000, rng, bounds)
    note = ""
    if found.definition.estimator == "NLL" and not bool((values > BOUNDS["NLL"].split).any()):
        rate = few_range(0, len(values), level)[1]
        note = (
            f"no label has a probability below one half; the upper end allows for {100 * rate:.2g} % of labels, which "
            f"{len(values):,} samples do not exclude, with the smallest probability of float32"
        )
    return _one(found, Interval(low, high, level, "bootstrap, bias-corrected and accelerated", note))


def check_mean(found: Result, values: Float64[Tensor, " n"]) -> None:
    """Refuse a mean that is beyond the largest number, and name the sample that adds the most to it."""
    if not math.isfinite(float(found)):
        row = int(values.abs().argmax())
        raise UserError(
            f"{found.definition.estimator} is beyond the largest number: row {row} alone has {float(values[row]):.3g}; "
            "its logits are too far apart"
        )


def noise_floor(
    probs: Given,
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
    check_level(level)
    quantile = optional_module("scipy.special").betaincinv
    k, n = _numpy(exact(hits)), _numpy(exact(counts))
    tail = (1 - level) / 2
    low = np.where(k > 0, quantile(np.maximum(k, 0.5), n - k + 1, tail), 0.0)
    high = np.where(k < n, quantile(k + 1, np.maximum(n - k, 0.5), 1 - tail), 1.0)
    return torch.from_numpy(low), torch.from_numpy(high)


def wilson(share: float, n: int, level: float = 0.95) -> Interval:
    """Find the interval of a share of n samples."""
    check_level(level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach), level, "Wilson")


def gaps_of(
    metric: Metric,
    probs: Given,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind | None = None,
    scope: Scope = "top-label",
    compat: Compat | None = None,
    ignore_index: int | None = None,
) -> AbstractGaps:
    """Find the bin and the gap of every sample, for a metric that is a sum of absolute or squared gaps."""
    sums: set[Metric] = {calibration.ece, calibration.aece, calibration.classwise_ece, calibration.over_under}
    if metric not in sums | ROOTS:
        raise UserError(f"no interval with known coverage exists for {getattr(metric, '__name__', metric)}")
    usual: Kind = "mass" if metric in {calibration.aece, calibration.debiased_l2} else "width"
    way = Binning(bins, binning or usual, compat)
    scope = "class-wise" if metric is calibration.classwise_ece else scope
    if scope in {"class-wise", "multi-label"}:
        if metric in ROOTS:
            raise UserError("no interval with known coverage exists for the root of class-wise squares")
        return _class_gaps(probs, labels, way, scope, ignore_index)
    found = pairs(probs, labels, scope, ignore_index)
    return found.once(("gaps", way), lambda: _pair_gaps(found, way))


def _pair_gaps(found: Pairs, way: Binning) -> Gaps:
    index = way.index(found.confidence)
    confidence, correct = exact(found.confidence), exact(found.correct)
    # Where a device has no float64, the values are on the CPU by now, but the index is not.
    index = index.to(confidence.device)
    filled = way.bins + (way.rule == EdgeRule.LEFT_OPEN)
    outside = (index < 0) | (index >= filled)
    confidence, correct = confidence.masked_fill(outside, 0), correct.masked_fill(outside, 0)
    # Floats of 0 and 1 alone are hard labels; how much those vary follows from their rate.
    soft = found.correct.dtype != torch.bool and not bool(((correct == 0) | (correct == 1)).all())
    return Gaps(_numpy(index.masked_fill(outside, 0)), _numpy(confidence), _numpy(confidence - correct), filled, soft)


def _class_gaps(probs: Given, labels: Array | None, way: Binning, scope: Scope, ignore_index: int | None) -> ClassGaps:
    if way.kind == "mass" or way.compat is not None:
        raise UserError("intervals of class-wise errors exist for equal-width bins with the rule of this package only")
    table = rows(probs, labels, scope, ignore_index)
    return ClassGaps(table.probs, table.labels, way.bins, "soft" in (table.about.scope or ""))


def _one(found: Any, interval: Interval, **details: float) -> Result:
    result: Result = found.with_interval(interval, **details)
    return result


def _signed_values(probs: Given, labels: Array | None, bins: int = 15, **options: Any) -> Tensor:
    gaps = gaps_of(calibration.over_under, probs, labels, bins, **options)
    return torch.from_numpy(gaps.sample_gaps)


def nll_values(probs: Given, labels: Array | None, **options: Any) -> Tensor:
    """Find the negative log-likelihood of each sample."""
    return scoring.losses_of(probs, labels, **options)[0].values


def brier_values(
    probs: Given, labels: Array | None, bins: int | None = None, ignore_index: int | None = None
) -> Tensor:
    """Return the squared error of each sample; only the parts of the score have bins."""
    del bins
    table = rows(probs, labels, ignore_index=ignore_index)
    return scoring.squared_errors(table.probs, table.labels)


def _area_values(area: selective.Area, probs: Given, labels: Array | None, **options: Any) -> Tensor:
    found = selective.ranked_answers(probs, labels, **options)
    if not has_area_interval(found):
        correct = float(exact(found.correct).sum())
        raise UserError(
            f"no interval with known coverage exists for the {area} of {len(found.correct) - correct:g} errors and "
            f"{correct:g} correct predictions; {FEWEST} of each are needed"
        )
    values = selective.area_values(found, area)
    return values[found.ranking[0].to(values.device)]  # by confidence: stored intervals were drawn in this order


def has_area_interval(found: Pairs) -> bool:
    """Return whether there are enough errors and correct predictions for an interval of an area (AURC, AUGRC)."""
    correct = float(exact(found.correct).sum())
    return FEWEST <= correct <= len(found.correct) - FEWEST


PER_SAMPLE: dict[Metric, Callable[..., Tensor]] = {
    calibration.signed_ece: _signed_values,
    scoring.nll: nll_values,
    scoring.brier: brier_values,
    selective.aurc: partial(_area_values, "aurc"),
    selective.e_aurc: partial(_area_values, "e_aurc"),
    selective.augrc: partial(_area_values, "augrc"),
}


def _numpy(values: Tensor) -> Any:
    return values.cpu().numpy()
