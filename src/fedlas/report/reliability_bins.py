"""Non-empty bins of confidence with the confidence interval of their accuracy."""

from typing import NamedTuple

import torch

from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.intervals.binomial import clopper_pearson


class ReliabilityBin(NamedTuple):
    """One bin of confidence: edges, number of samples, and accuracy with its confidence interval."""

    lower: float
    upper: float
    samples: int
    confidence: float
    accuracy: float
    low: float
    high: float
    weighted_gap: float

    @property
    def is_calibrated(self) -> bool:
        """Whether the confidence lies in the confidence interval of the accuracy."""
        return self.low <= self.confidence <= self.high


def non_empty_bins(bins: Bins, level: float = 0.95) -> list[ReliabilityBin]:
    """Return the non-empty bins, each with the Clopper-Pearson interval of its accuracy."""
    non_empty = (bins.counts > 0).nonzero()[:, 0]
    low, high = clopper_pearson(bins.correct_sum[non_empty], bins.counts[non_empty], level)
    lower, upper = bins.edges[:-1][non_empty], bins.edges[1:][non_empty]
    columns = (lower, upper, bins.counts[non_empty], bins.confidence[non_empty], bins.accuracy[non_empty], low, high)
    rows = zip(*(torch.as_tensor(column).tolist() for column in (*columns, bins.weighted_gap[non_empty])), strict=True)
    return [ReliabilityBin(*row) for row in rows]
