"""The difference of two methods that were trained with several seeds and evaluated on the same test samples.

    d_k = difference of the metric with seed k,   d = mean of d_1 ... d_K
    var(d) = s^2 / K + v,   d / sqrt(var(d)) ~ t with K - 1 degrees of freedom

s^2 is the variance of d_1 ... d_K. v is the variance of d over test samples: each metric is a mean of one value per
sample, so v is the variance of the seed-averaged difference of these values, divided by n. The values are the losses of
NLL and Brier score, and the correctness for accuracy. For AURC and ECE they are influence values, whose mean is the
metric and whose variance is that of a bootstrap to first order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import scipy
import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import EdgeRule, add_up, bin_index, equal_width_edges, exact
from fedlas.metrics.result import Interval
from fedlas.predictions import AnyPredictions

METHOD = "t over seeds and test samples"


@dataclass(frozen=True)
class SeedComparison:
    """The mean difference of two methods over seeds.

    Args:
        differences: first minus second, for each seed.
        test_variance: variance of the mean difference over test samples.
    """

    differences: tuple[float, ...]
    test_variance: float

    def __post_init__(self) -> None:
        if len(self.differences) < 2:
            raise UserError(f"a comparison over seeds needs at least two seeds, not {len(self.differences)}")

    @property
    def difference(self) -> float:
        """Mean over seeds."""
        return fmean(self.differences)

    @property
    def standard_error(self) -> float:
        """Standard error over seeds and test samples."""
        return math.sqrt(stdev(self.differences) ** 2 / len(self.differences) + self.test_variance)

    @property
    def degrees(self) -> int:
        """Degrees of freedom."""
        return len(self.differences) - 1

    @property
    def p_value(self) -> float:
        """Two-sided p-value of no difference."""
        if self.standard_error == 0:
            return 1.0 if self.difference == 0 else 0.0
        below = scipy.special.stdtr(self.degrees, -abs(self.difference) / self.standard_error)
        return 2 * float(below)

    def interval(self, level: float = 0.95) -> Interval:
        """Return the two-sided interval; its ends are one-sided bounds at the level (1 + level) / 2."""
        width = float(scipy.special.stdtrit(self.degrees, (1 + level) / 2)) * self.standard_error
        return Interval(self.difference - width, self.difference + width, level, METHOD)

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """Convert to types that JSON can store."""
        ends = self.interval(level)
        return {
            "difference": self.difference,
            "standard_error": self.standard_error,
            "interval": [ends.low, ends.high],
            "level": level,
            "p_value": self.p_value,
            "differences": list(self.differences),
            "test_variance": self.test_variance,
        }


def over_seeds(first: Sequence[Float64[Tensor, " n"]], second: Sequence[Float64[Tensor, " n"]]) -> SeedComparison:
    """Compare two methods over seeds.

    Args:
        first: for each seed, the values of all test samples by the first method; their mean is the metric.
        second: values by the second method, with the same seeds and samples in the same order.
    """
    differences = [value - other_value for value, other_value in zip(first, second, strict=True)]
    if len({len(values) for values in differences}) > 1:
        raise UserError("seeds were evaluated on different numbers of samples; a comparison needs the same test set")
    averaged = torch.stack(differences).mean(0)
    variance = float(averaged.var()) / len(averaged) if len(averaged) > 1 else math.nan
    return SeedComparison(tuple(float(values.mean()) for values in differences), variance)


def ece_values(predictions: AnyPredictions, bins: int = 15) -> Float64[Tensor, " n"]:
    """Return each sample's gap between confidence and correctness with the sign of its bin: their mean is the ECE."""
    edges = equal_width_edges(bins)
    index = bin_index(predictions.confidence, edges, EdgeRule.RIGHT)
    gap = exact(predictions.confidence) - exact(predictions.correct)
    return gap * add_up(gap, index, bins).sign()[index]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of a family of tests by Holm's step-down method."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
