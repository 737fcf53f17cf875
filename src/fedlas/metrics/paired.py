"""Paired comparison of two models on the same samples.

Both models are resampled with the same samples, so that the variance due to easy and hard samples cancels. For sums of
absolute gaps, the intervals of both models (`intervals/inversion.py`) are combined by the correlation of the resampled
totals, because the difference of two biased errors is biased as well.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.alignment import check_same_samples
from fedlas.errors import UserError
from fedlas.metrics.base import (
    AbstractBinned,
    AbstractMetric,
    AbstractPairedMethod,
    EachSample,
    Resampling,
    check_is_no_name,
)
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.inputs import MetricInput
from fedlas.metrics.intervals.inversion import confidence_curve, difference_interval, unbiased_totals
from fedlas.metrics.intervals.methods import check_mean
from fedlas.metrics.intervals.resampling import (
    AbstractGaps,
    Bounds,
    Gaps,
    mean_deviations,
    mean_interval,
    sample_deviations,
    signed_range,
)
from fedlas.metrics.result import Comparison, Definition, Interval, Result
from fedlas.predictions import AnyPredictions
from fedlas.predictions.arrays import Array

RESAMPLES = 2_000
METHOD = "paired bootstrap"
SAME_OVER_SEEDS = ("estimator", "bins", "edges", "scope")  # parts of a definition
ROUNDING = 1e-6  # largest relative difference of a value that is computed from probabilities and from logits in float32


def paired_bootstrap(
    metric: AbstractMetric,
    first: AnyPredictions | Array,
    second: AnyPredictions | Array,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Compare two models on the same samples by a paired test.

    Args:
        metric: a metric with a paired method, such as `ece`, `accuracy`, `nll`, `brier` or `aurc`.
        first: predictions of the first model, or rows of class probabilities.
        second: predictions of the second model, with the samples in the same order.
        labels: class numbers or soft labels of the samples; not needed with predictions.
        level: confidence level of the interval of the difference.
        resamples: number of bootstrap resamples.
        seed: random seed; equal seeds give equal results.
        options: passed on to the metric.
    """
    how = Resampling(level, resamples, seed)
    check_same_samples(first, second)
    return paired_method(metric).compare(metric, first, second, labels, how, **options)


def paired_method(metric: AbstractMetric) -> AbstractPairedMethod:
    """Return the paired method of a metric."""
    check_is_no_name(metric)
    method = getattr(metric, "paired", None)
    if method is None:
        name = getattr(metric, "title", getattr(metric, "__name__", metric))
        raise UserError(f"models cannot be compared by {name}: there is no paired test for it")
    paired: AbstractPairedMethod = method
    return paired


def of_each_sample(
    metric: AbstractMetric, model: MetricInput, labels: Array | None = None, **options: Any
) -> EachSample:
    """Compute a mean over samples together with its values per sample (AURC: influence values)."""
    each_sample = EachSample(metric(model, labels, **options), exact(metric.contributions(model, labels, **options)))
    check_mean(*each_sample)
    return each_sample


@dataclass(frozen=True)
class PairedGaps(AbstractPairedMethod):
    """Paired comparison of sums of absolute gaps, such as the ECE."""

    def compare(
        self,
        metric: AbstractMetric,
        first: MetricInput,
        second: MetricInput,
        labels: Array | None,
        how: Resampling,
        **options: Any,
    ) -> Comparison:
        assert isinstance(metric, AbstractBinned)
        values = metric(first, labels, **options), metric(second, labels, **options)
        gaps = [metric.gaps(model, labels, **options) for model in (first, second)]
        resamples = how.resamples or RESAMPLES
        low, high, p_value = _gap_difference(gaps, how.level, resamples, how.rng())
        better, interval = _better(metric, low, high), Interval(low, high, how.level, METHOD)
        return Comparison(*values, interval, p_value, better, _is_bound(p_value, resamples))


@dataclass(frozen=True)
class PairedMeans(AbstractPairedMethod):
    """Paired comparison of means over samples.

    Args:
        largest: largest possible difference of two models on one sample.
        bounds: bounds of the values if differences are unbounded. The largest observed value then replaces `largest`;
            if no observed value is large, the upper bound does.
    """

    largest: float = 0.0
    bounds: Bounds | None = None

    def compare(
        self,
        metric: AbstractMetric,
        first: MetricInput,
        second: MetricInput,
        labels: Array | None,
        how: Resampling,
        **options: Any,
    ) -> Comparison:
        first_samples, second_samples = (of_each_sample(metric, model, labels, **options) for model in (first, second))
        return self.compare_means(metric, first_samples, second_samples, how)

    def compare_means(
        self,
        metric: AbstractMetric,
        first: EachSample,
        second: EachSample,
        how: Resampling,
    ) -> Comparison:
        level, resamples, rng = how.level, how.resamples or RESAMPLES, how.rng()
        (first_mean, first_values), (second_mean, second_values) = first, second
        difference = (first_values - second_values).cpu().numpy()
        # The same model stored as probabilities and as logits differs by rounding only, always in the same direction.
        if bool((np.abs(difference) <= ROUNDING * (1 + first_values.abs().cpu().numpy())).all()):
            difference = np.zeros_like(difference)
        low, high = mean_interval(difference, level, resamples, rng)
        noise, observed = mean_deviations(difference, resamples, rng), float(difference.mean())
        # Add one to the count and to the number of resamples, so that the p-value is never zero.
        tails = [(1 + int((side * noise >= side * observed).sum())) / (1 + resamples) for side in (1, -1)]
        p_value = min(1.0, 2 * min(tails))
        # If few samples differ, or none, unobserved samples may still differ.
        least, most = signed_range(difference, level, self._largest(first_values, second_values))
        # If the difference is due to few samples, this interval is too short. Extend it by quantiles of the noise, so
        # that it agrees with the p-value.
        above, below = (observed - float(np.quantile(noise, tail)) for tail in ((1 - level) / 2, (1 + level) / 2))
        of_means = float(first_mean) - float(second_mean)  # rounding may leave it outside by its last digit
        low, high = min(low, least, below, of_means), max(high, most, above, of_means)
        if p_value >= 1 - level:  # the p-value and the interval may disagree by one resample
            low, high = min(low, 0.0), max(high, 0.0)
        p_value = max(p_value, 1 - level) if low <= 0 <= high else p_value
        better = _better(metric, low, high)
        winner = {"first": first_mean, "second": second_mean}.get(better or "")
        if winner is not None and winner.details.get("floored"):
            better = None  # some labels have probability zero, so this NLL is only a lower bound
        is_bound = _is_bound(p_value, resamples)
        return Comparison(first_mean, second_mean, Interval(low, high, level, METHOD), p_value, better, is_bound)

    def _largest(self, first: Float64[Tensor, " n"], second: Float64[Tensor, " n"]) -> float:
        if self.bounds is None:
            return self.largest
        observed = float(torch.stack([first.max(), second.max()]).max())
        return observed if observed > self.bounds.split else self.bounds.high


def _better(metric: AbstractMetric, low: float, high: float) -> Literal["first", "second"] | None:
    if low <= 0 <= high or metric.higher_is_better is None:
        return None
    return "first" if (low > 0) == metric.higher_is_better else "second"


def _is_bound(p_value: float, resamples: int) -> bool:
    """Return whether a p-value is the smallest one of a number of resamples, up to rounding."""
    return p_value < 2.000001 / (1 + resamples)


def _gap_difference(
    gaps: Sequence[AbstractGaps], level: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Find the interval of the difference of two sums of absolute gaps, and the p-value of no difference."""
    model_gaps = [model for model in gaps if isinstance(model, Gaps)]
    if len(model_gaps) < len(gaps):
        raise UserError("two models are compared by their top-label or binary errors, not by class-wise ones")
    bins = model_gaps[0].bins
    index, gap = np.stack([model.index for model in model_gaps]), np.stack([model.gap for model in model_gaps])
    deviations = sample_deviations(index, gap, bins, resamples, rng)
    parts = (deviations[:, :bins], deviations[:, bins:])
    distributions = [model.distribution(part, rng, joint=True) for model, part in zip(model_gaps, parts, strict=True)]
    first, second = (confidence_curve(model) for model in distributions)
    totals = np.stack([unbiased_totals(model) for model in distributions])
    varied = float(totals.std(1).min()) > 0
    correlation = float(np.asarray(np.corrcoef(totals))[0, 1]) if varied else 0.0
    low, high = difference_interval(first, second, correlation, level)
    # The p-value is one minus the smallest level at which the interval contains zero.
    outside, inside = 0.0, 1 - 2 / (1 + resamples)
    for _ in range(30):
        middle = (outside + inside) / 2
        ends = difference_interval(first, second, correlation, middle)
        outside, inside = (outside, middle) if ends[0] <= 0 <= ends[1] else (middle, inside)
    return low, high, 1 - inside


def check_draws(how: Resampling) -> None:
    """Raise if the resamples are too few for any difference to be significant."""
    resamples, needed = how.resamples or RESAMPLES, round(2 / (1 - how.level), 6)
    if resamples + 1 <= needed:  # the smallest p-value is 2 / (resamples + 1)
        raise UserError(
            f"{resamples:,} resamples show no difference at a level of {how.level:g}, however large it is; "
            f"take at least {math.floor(needed):,} for a comparison"
        )


def across_seeds(results: Sequence[float]) -> Result:
    """Average a metric over runs that differ by their seed; `details` hold the standard deviation."""
    if not results:
        raise UserError("no runs to average")
    first = results[0]
    definition = first.definition if isinstance(first, Result) else Definition(estimator="mean over seeds", unit="")
    for other in results[1:]:
        other_definition = other.definition if isinstance(other, Result) else definition
        if any(getattr(other_definition, name) != getattr(definition, name) for name in SAME_OVER_SEEDS):
            raise UserError(
                f"runs measured by different metrics cannot be averaged: {definition} and {other_definition}"
            )
    values = [float(value) for value in results]
    deviation = stdev(values) if len(values) > 1 else math.nan
    return Result(fmean(values), definition, None, {"std": deviation, "seeds": len(values), "values": tuple(values)})
