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
    kept = (bins.counts > 0).nonzero()[:, 0]
    low, high = clopper_pearson(bins.correct_sum[kept], bins.counts[kept], level)
    lower, upper = bins.edges[:-1][kept], bins.edges[1:][kept]
    columns = (lower, upper, bins.counts[kept], bins.confidence[kept], bins.accuracy[kept], low, high)
    rows = zip(*(torch.as_tensor(column).tolist() for column in (*columns, bins.weighted_gap[kept])), strict=True)
    return [ReliabilityBin(*row) for row in rows]
