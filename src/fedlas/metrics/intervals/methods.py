"""Methods for confidence intervals, and `bootstrap`, which computes a metric with its interval.

A binned error is a sum of absolute gaps, T = sum_b |g_b|, so noise makes it too large: even a perfectly calibrated
model shows the `noise_floor`. Plain percentile intervals add that bias a second time and miss the true value about half
of the time. `GapInversion` inverts a test instead:

1. Resampling gives deviations Z of the gaps (`resampling.py`).
2. The candidates for the true gaps are a one-parameter family: mu_b(t) is g_b moved towards zero, or away from it, by
   a multiple of its standard error, such that sum_b |mu_b(t)| = t.
3. The interval contains every t for which the observed T lies in the central 95 % of sum_b |mu_b(t) + Z_b|.

The noise of sparse bins, with few expected or observed errors, is binomial at the supposed rate, so that intervals are
valid for few samples too; they are then wide. The root of the mean squared gap is treated in the same way; its interval
is also that of the debiased error, since both estimate the same quantity.

Means over samples (`MeanBootstrap`: NLL, Brier score, signed ECE) have bias-corrected and accelerated intervals, and so
do the areas under risk-coverage curves, as means of influence values. If large losses are few, the Clopper-Pearson
interval of their fraction is part of the interval. Accuracy has a Wilson interval, which is valid even if every
prediction is correct; with soft labels it has the interval of other means.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.base import (
    AbstractBinned,
    AbstractIntervalMethod,
    AbstractMetric,
    AbstractTopLabel,
    Resampling,
    check_is_no_name,
)
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.inputs import MetricInput, Pairs
from fedlas.metrics.intervals.binomial import clopper_pearson_interval, wilson
from fedlas.metrics.intervals.classwise import ClassGaps
from fedlas.metrics.intervals.inversion import inverted_interval
from fedlas.metrics.intervals.resampling import (
    SPARSE,
    AbstractGaps,
    BootstrapDistribution,
    Bounds,
    Part,
    mean_interval,
)
from fedlas.metrics.result import Interval, Result
from fedlas.predictions.arrays import Array

SIDES: tuple[Part, Part] = ("over", "under")
DEFAULT_RESAMPLES = 10_000


def bootstrap(
    metric: AbstractMetric,
    probs: MetricInput,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Result:
    """Compute a metric with its confidence interval.

    Args:
        metric: a metric with an interval, such as `ece`, `accuracy`, `nll` or `aurc`.
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        level: confidence level.
        resamples: number of bootstrap resamples; 10,000 by default, 1,000 for class-wise errors.
        seed: random seed; equal seeds give equal intervals.
        options: passed on to the metric.
    """
    check_is_no_name(metric)
    how = Resampling(level, resamples, seed)
    method = getattr(metric, "interval", None)
    if method is None:
        name = getattr(metric, "name", getattr(metric, "__name__", metric))
        raise UserError(f"no interval with known coverage exists for {name}")
    result: Result = method.measure(metric, probs, labels, how, **options)
    return result


@dataclass(frozen=True)
class GapInversion(AbstractIntervalMethod):
    """Interval of a sum of absolute or squared gaps, by test inversion.

    Args:
        part: "both" for all bins, "over" or "under" for bins with gaps of one sign, "rms" for the root mean square.
    """

    part: Part = "both"

    def measure(
        self, metric: AbstractMetric, probs: MetricInput, labels: Array | None, how: Resampling, **options: Any
    ) -> Result:
        result = metric(probs, labels, **options)
        assert isinstance(metric, AbstractBinned)
        gaps = metric.gaps(probs, labels, **options)
        if self.part == "rms" and isinstance(gaps, ClassGaps):
            raise UserError("no interval with known coverage exists for the root of class-wise squares")
        interval = self._interval(gaps, _resampled(gaps, probs, how), how.level)
        return result.with_interval(interval, **({"noise_floor": gaps.noise_floor()} if self.part == "both" else {}))

    def _interval(self, gaps: AbstractGaps, distribution: BootstrapDistribution, level: float) -> Interval:
        low, high = inverted_interval(distribution, self.part, level)
        below, above = gaps.unseen(level)
        if (self.part in SIDES and gaps.samples < SPARSE) or high + above <= low - below:
            # Samples of confidence 1 cannot be under-confident, but unobserved samples can be.
            above += clopper_pearson_interval(0, gaps.samples, level)[1]
        low, high = low - below, high + above
        return Interval(min(1.0, max(0.0, low)), min(1.0, max(0.0, high)), level, gaps.method)


def _resampled(gaps: AbstractGaps, probs: MetricInput, how: Resampling) -> BootstrapDistribution:
    """Return the bootstrap distribution of gaps, cached for all metrics of the same pairs."""

    def resample() -> BootstrapDistribution:
        return gaps.resample(how.resamples, how.rng())

    # The pairs hold a reference to their gaps, so that the id of the gaps is not reused.
    return probs.once((id(gaps), how.resamples, how.seed), resample) if isinstance(probs, Pairs) else resample()


@dataclass(frozen=True)
class AbstractMeanInterval(AbstractIntervalMethod):
    """Interval of a mean over samples: bias-corrected and accelerated bootstrap.

    Args:
        bounds: smallest and largest possible value of a sample, and the threshold between small and large values.
    """

    bounds: Bounds | None = None

    def measure(
        self, metric: AbstractMetric, probs: MetricInput, labels: Array | None, how: Resampling, **options: Any
    ) -> Result:
        result = metric(probs, labels, **options)
        return self.of_mean(result, exact(metric.contributions(probs, labels, **options)), how)

    def of_mean(self, result: Result, values: Float64[Tensor, " n"], how: Resampling) -> Result:
        check_mean(result, values)
        low, high = mean_interval(
            values.cpu().numpy(), how.level, how.resamples or DEFAULT_RESAMPLES, how.rng(), self.bounds
        )
        method = "bootstrap, bias-corrected and accelerated"
        return result.with_interval(Interval(low, high, how.level, method, self.note(values, how.level)))

    def note(self, values: Float64[Tensor, " n"], level: float) -> str:
        """Return a note that explains an unusual width of the interval."""
        del values, level
        return ""


@dataclass(frozen=True)
class MeanBootstrap(AbstractMeanInterval):
    """Interval of a mean of the metric's values per sample."""


@dataclass(frozen=True)
class LossBootstrap(AbstractMeanInterval):
    """Interval of a mean loss without an upper bound, with a note if no large loss was observed."""

    def note(self, values: Float64[Tensor, " n"], level: float) -> str:
        assert self.bounds is not None
        if bool((values > self.bounds.split).any()):
            return ""
        rate = clopper_pearson_interval(0, len(values), level)[1]
        return (
            f"no label has a probability below one half; the upper end allows for {100 * rate:.2g} % of labels, which "
            f"{len(values):,} samples do not exclude, with the smallest probability of float32"
        )


@dataclass(frozen=True)
class AreaBootstrap(AbstractMeanInterval):
    """Interval of an area under a risk-coverage curve, from influence values.

    Args:
        bounds: as in `AbstractMeanInterval`.
        min_samples: smallest number of errors and of correct predictions; with fewer, single samples dominate.
    """

    min_samples: int = 20

    def is_applicable(self, samples: Pairs) -> bool:
        correct = float(exact(samples.correct).sum())
        return self.min_samples <= correct <= len(samples.correct) - self.min_samples

    def measure(
        self, metric: AbstractMetric, probs: MetricInput, labels: Array | None, how: Resampling, **options: Any
    ) -> Result:
        assert isinstance(metric, AbstractTopLabel)
        samples = metric.read(probs, labels, **options)
        if not self.is_applicable(samples):
            correct = float(exact(samples.correct).sum())
            raise UserError(
                f"no interval with known coverage exists for the {metric.name} of {len(samples.correct) - correct:g} "
                f"errors and {correct:g} correct predictions; {self.min_samples} of each are needed"
            )
        values = metric.values_of(samples)
        by_confidence = values[samples.ranking[0].to(values.device)]  # stored intervals were drawn in this order
        measured = self.of_mean(metric.of_pairs(samples), exact(by_confidence), how)
        interval = measured.interval
        assert interval is not None
        return measured.with_interval(replace(interval, low=max(0.0, interval.low), high=min(1.0, interval.high)))


@dataclass(frozen=True)
class WilsonInterval(AbstractMeanInterval):
    """Wilson interval of the accuracy; with soft labels, the interval of a mean."""

    def measure(
        self, metric: AbstractMetric, probs: MetricInput, labels: Array | None, how: Resampling, **options: Any
    ) -> Result:
        result, correct = metric(probs, labels, **options), metric.contributions(probs, labels, **options)
        if correct.dtype == torch.bool:
            return result.with_interval(wilson(float(result), result.n, how.level))
        return self.of_mean(result, exact(correct), how)


def check_mean(result: Result, values: Float64[Tensor, " n"]) -> None:
    """Raise if a mean is not finite, and name the sample that adds the most to it."""
    if not math.isfinite(float(result)):
        row = int(values.abs().argmax())
        raise UserError(
            f"{result.definition.estimator} is beyond the largest number: row {row} alone has "
            f"{float(values[row]):.3g}; its logits are too far apart"
        )
