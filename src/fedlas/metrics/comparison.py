"""Which of several models is better, and how sure that is.

Two models on the same samples are compared by a paired bootstrap: both are resampled together, so what makes samples
easy or hard cancels. For sums of absolute gaps the two intervals of `interval.py` are put together with the correlation
that the joint resampling shows, because the difference of two biased errors is biased as well.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.alignment import check_same_samples
from fedlas.errors import UserError
from fedlas.metrics import scoring
from fedlas.metrics.bins import exact
from fedlas.metrics.interval import BOUNDS, Metric, brier_values, check_level, check_mean, gaps_of, nll_values
from fedlas.metrics.inversion import confidence_curve, difference_interval, unbiased_totals
from fedlas.metrics.resampling import (
    AbstractGaps,
    Gaps,
    mean_deviations,
    mean_interval,
    sample_deviations,
    signed_range,
)
from fedlas.metrics.result import Definition, Interval, Result
from fedlas.metrics.samples import Given, pairs
from fedlas.metrics.selective import area_values, aurc, ranked_answers
from fedlas.predictions import AnyPredictions, Array

METHOD = "paired bootstrap"


@dataclass(frozen=True)
class Comparison:
    """The difference of two models on the same samples.

    Args:
        first: the metric of the first model.
        second: the metric of the second model.
        interval: range of the difference, first minus second.
        p_value: how often a difference this large would be seen if there were none.
        better: "first", "second", or None where the interval holds zero, and where the smaller NLL is a lower bound
            because labels have probability zero.
    """

    first: Result
    second: Result
    interval: Interval
    p_value: float
    better: Literal["first", "second"] | None

    @property
    def difference(self) -> float:
        """The first model's value minus the second's."""
        return float(self.first) - float(self.second)

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values that JSON knows."""
        fields = {"first": self.first.to_dict(), "second": self.second.to_dict(), "difference": self.difference}
        return fields | {"interval": asdict(self.interval), "p_value": self.p_value, "better": self.better}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Comparison":
        """Return the comparison that `to_dict` described."""
        first, second = (Result.from_dict(fields[name]) for name in ("first", "second"))
        return cls(first, second, Interval(**fields["interval"]), fields["p_value"], fields["better"])

    def _repr_html_(self) -> str:
        """Show the comparison in a notebook."""
        return f"<p>{html.escape(str(self))}</p>"

    def __str__(self) -> str:
        """Say it in a sentence."""
        unit = 100 if self.first.definition.unit == "fraction" else 1
        points, digits = (" points", 2) if unit == 100 else ("", 4)
        low, high, gap = (unit * v for v in (self.interval.low, self.interval.high, self.difference))
        verdict = "no difference is shown" if self.better is None else f"the {self.better} model is better"
        return (
            f"{self.first.definition.estimator} differs by {gap:+.{digits}f}{points} (first minus second), "
            f"[{low:+.{digits}f}, {high:+.{digits}f}] at {100 * self.interval.level:g} %, "
            f"p = {self.p_value:.3g}: {verdict}"
        )


def paired_bootstrap(
    metric: Metric,
    first: AnyPredictions | Array,
    second: AnyPredictions | Array,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Say whether one of two models is better on the same samples, and how sure that is.

    Args:
        metric: `ece`, `aece`, `accuracy`, `nll`, `brier` or `aurc`.
        first: predictions of the first model, or rows of class probabilities.
        second: the same of the second model, in the same order.
        labels: of both; not needed with predictions.
        level: how often the interval should hold the true difference.
        resamples: how many resamples to draw.
        seed: of the random numbers; equal seeds give equal answers.
        options: passed on to the metric.
    """
    check_level(level, resamples)
    check_same_samples(first, second)
    if metric in PER_SAMPLE:
        each = [of_each_sample(metric, model, labels, **options) for model in (first, second)]
        return paired_means(metric, *each, level=level, resamples=resamples, seed=seed)
    return paired_gaps(metric, first, second, labels, level=level, resamples=resamples, seed=seed, **options)


def paired_gaps(
    metric: Metric,
    first: Given,
    second: Given,
    labels: Array | None = None,
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Compare two models by `ece` or `aece`, which pairs of confidence and correctness suffice for.

    Args:
        metric: `ece` or `aece`.
        first: predictions, probabilities, or pairs of the first model.
        second: the same of the second model, in the same order.
        labels: of both; not needed with predictions or pairs.
        level: confidence level of the interval.
        resamples: number of bootstrap resamples.
        seed: random seed.
        options: passed on to the metric.
    """
    check_level(level, resamples)
    values = metric(first, labels, **options), metric(second, labels, **options)
    gaps = [gaps_of(metric, model, labels, **options) for model in (first, second)]
    low, high, p_value = _gap_difference(gaps, level, resamples, np.random.default_rng(seed))
    return Comparison(*values, Interval(low, high, level, METHOD), p_value, _better(metric, low, high))


class EachSample(NamedTuple):
    """A mean over samples, and what it is the mean of."""

    mean: Result
    values: Float64[Tensor, " n"]


def of_each_sample(
    metric: Metric, model: AnyPredictions | Array, labels: Array | None = None, **options: Any
) -> EachSample:
    """Measure `accuracy`, `nll`, `brier` or `aurc`, in all and sample by sample (AURC: by influence values)."""
    found = EachSample(metric(model, labels, **options), exact(PER_SAMPLE[metric](model, labels, **options)))
    check_mean(*found)
    return found


def paired_means(
    metric: Metric, first: EachSample, second: EachSample, *, level: float = 0.95, resamples: int = 2_000, seed: int = 0
) -> Comparison:
    """Compare two models by what is known of each sample; see `paired_bootstrap`.

    Args:
        metric: what was measured.
        first: by the first model.
        second: by the second model, of the same samples in the same order.
        level: how often the interval should hold the true difference.
        resamples: how many resamples to draw.
        seed: of the random numbers.
    """
    check_level(level, resamples)
    rng = np.random.default_rng(seed)
    difference = (first.values - second.values).cpu().numpy()
    low, high = mean_interval(difference, level, resamples, rng)
    noise, observed = mean_deviations(difference, resamples, rng), float(difference.mean())
    # One more draw than there are, so that a finite number of draws never claims certainty.
    tails = [(1 + int((side * noise >= side * observed).sum())) / (1 + resamples) for side in (1, -1)]
    p_value = min(1.0, 2 * min(tails))
    # Few differences, or none, are no sign that the next sample will show none.
    least, most = signed_range(difference, level, _largest_difference(metric, first, second))
    # Where few samples make most of the difference, the interval alone is too short: it holds what p does not exclude.
    above, below = (observed - float(np.quantile(noise, share)) for share in ((1 - level) / 2, (1 + level) / 2))
    low, high = min(low, least, below), max(high, most, above)
    if p_value >= 1 - level:  # a matter of one draw
        low, high = min(low, 0.0), max(high, 0.0)
    p_value = max(p_value, 1 - level) if low <= 0 <= high else p_value
    better = _better(metric, low, high)
    winner = {"first": first.mean, "second": second.mean}.get(better or "")
    if winner is not None and winner.details.get("floored"):
        better = None  # labels of probability zero: this NLL is only a lower bound
    return Comparison(first.mean, second.mean, Interval(low, high, level, METHOD), p_value, better)


def _largest_difference(metric: Metric, first: EachSample, second: EachSample) -> float:
    """Return how far the models may differ on a sample unlike those seen.

    There is no largest log-loss: the largest one seen stands for it, or without any large one that of `BOUNDS`.
    """
    if metric is not scoring.nll:
        return LARGEST.get(metric, 0.0)
    seen = float(torch.stack([first.values.max(), second.values.max()]).max())
    return seen if seen > BOUNDS["NLL"].split else BOUNDS["NLL"].high


def _better(metric: Metric, low: float, high: float) -> Literal["first", "second"] | None:
    if low <= 0 <= high:
        return None
    return "first" if (low > 0) == (metric is scoring.accuracy) else "second"


def _gap_difference(
    gaps: Sequence[AbstractGaps], level: float, resamples: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Find the interval of the difference of two sums of absolute gaps, and the p-value of no difference."""
    single = [one for one in gaps if isinstance(one, Gaps)]
    if len(single) < len(gaps):
        raise UserError("two models are compared by their top-label or binary errors, not by class-wise ones")
    bins = single[0].bins
    index, gap = np.stack([one.index for one in single]), np.stack([one.gap for one in single])
    drawn = sample_deviations(index, gap, bins, resamples, rng)
    parts = (drawn[:, :bins], drawn[:, bins:])
    worlds = [one.world(part, rng, joint=True) for one, part in zip(single, parts, strict=True)]
    first, second = (confidence_curve(world) for world in worlds)
    totals = np.stack([unbiased_totals(world) for world in worlds])
    varied = float(totals.std(1).min()) > 0
    correlation = float(np.asarray(np.corrcoef(totals))[0, 1]) if varied else 0.0
    low, high = difference_interval(first, second, correlation, level)
    # The p-value is one minus the level at which the interval just reaches zero.
    outside, inside = 0.0, 1 - 2 / (1 + resamples)
    for _ in range(30):
        middle = (outside + inside) / 2
        ends = difference_interval(first, second, correlation, middle)
        outside, inside = (outside, middle) if ends[0] <= 0 <= ends[1] else (middle, inside)
    return low, high, 1 - inside


def _aurc_values(probs: AnyPredictions | Array, labels: Array | None, **options: Any) -> Tensor:
    return area_values(ranked_answers(probs, labels, **options), "aurc")


def _correct(probs: AnyPredictions | Array, labels: Array | None, **options: Any) -> Tensor:
    return scoring.correctness(pairs(probs, labels, **options))


# Largest difference of one sample; influence values of the AURC are below 2 but for a vanishing fraction.
LARGEST: dict[Metric, float] = {scoring.accuracy: 1.0, scoring.brier: 2.0, aurc: 2.0}
PER_SAMPLE: dict[Metric, Callable[..., Tensor]] = {
    scoring.accuracy: _correct,
    scoring.nll: nll_values,
    scoring.brier: brier_values,
    aurc: _aurc_values,
}


def check_draws(level: float, resamples: int) -> None:
    """Refuse so few resamples that no difference, however large, could be told from chance."""
    check_level(level, resamples)
    needed = round(2 / (1 - level), 6)  # p-values end at 2 / (resamples + 1)
    if resamples + 1 <= needed:
        raise UserError(
            f"{resamples:,} resamples show no difference at a level of {level:g}, however large it is; "
            f"take at least {math.floor(needed):,} for a comparison"
        )


def across_seeds(results: Sequence[float]) -> Result:
    """Average a metric over runs that differ by their seed; `details` hold the standard deviation."""
    if not results:
        raise UserError("no runs to average")
    first = results[0]
    about = first.definition if isinstance(first, Result) else Definition(estimator="mean over seeds", unit="")
    for other in results[1:]:
        theirs = other.definition if isinstance(other, Result) else about
        if (theirs.estimator, theirs.bins, theirs.edges, theirs.scope) != (
            about.estimator,
            about.bins,
            about.edges,
            about.scope,
        ):
            raise UserError(f"runs measured by different metrics cannot be averaged: {about} and {theirs}")
    values = [float(value) for value in results]
    spread = stdev(values) if len(values) > 1 else math.nan
    return Result(fmean(values), about, None, {"std": spread, "seeds": len(values), "values": tuple(values)})
