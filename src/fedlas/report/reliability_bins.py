"""Bins of confidence as rows of plain numbers: what reliability diagrams, tables and words are made of."""

from typing import NamedTuple

import torch

from fedlas.metrics.bins import Bins
from fedlas.metrics.intervals.binomial import clopper_pearson


class Place(NamedTuple):
    """One bin of confidence: its edges, its samples, and the range that its accuracy is in."""

    lower: float
    upper: float
    samples: int
    confidence: float
    accuracy: float
    low: float
    high: float
    weighted_gap: float

    @property
    def fits(self) -> bool:
        """Whether the confidence lies in the range of the accuracy."""
        return self.low <= self.confidence <= self.high


def non_empty_bins(bins: Bins, level: float = 0.95) -> list[Place]:
    """List the bins that hold samples, each with the Clopper-Pearson range of its accuracy; empty bins are left out."""
    kept = (bins.counts > 0).nonzero()[:, 0]
    low, high = clopper_pearson(bins.correct_sum[kept], bins.counts[kept], level)
    lower, upper = bins.edges[:-1][kept], bins.edges[1:][kept]
    columns = (lower, upper, bins.counts[kept], bins.confidence[kept], bins.accuracy[kept], low, high)
    rows = zip(*(torch.as_tensor(column).tolist() for column in (*columns, bins.weighted_gap[kept])), strict=True)
    return [Place(*row) for row in rows]
