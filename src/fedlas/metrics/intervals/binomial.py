"""Confidence intervals of a binomial proportion."""

import math
from statistics import NormalDist

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from fedlas.extras import optional_module
from fedlas.metrics.base import check_level
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.result import Interval


def clopper_pearson(
    correct: Shaped[Tensor, " bins"], counts: Shaped[Tensor, " bins"], level: float = 0.95
) -> tuple[Float64[Tensor, " bins"], Float64[Tensor, " bins"]]:
    """Return the Clopper-Pearson interval of the accuracy of each bin; 0 to 1 if a bin is empty."""
    check_level(level)
    quantile = optional_module("scipy.special").betaincinv
    k, n = (exact(values).cpu().numpy() for values in (correct, counts))
    tail = (1 - level) / 2
    low = np.where(k > 0, quantile(np.maximum(k, 0.5), n - k + 1, tail), 0.0)
    high = np.where(k < n, quantile(k + 1, np.maximum(n - k, 0.5), 1 - tail), 1.0)
    return torch.from_numpy(low), torch.from_numpy(high)


def wilson(fraction: float, n: int, level: float = 0.95) -> Interval:
    """Return the Wilson interval of a fraction of n samples."""
    check_level(level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (fraction + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(fraction * (1 - fraction) / n + z**2 / (4 * n**2))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach), level, "Wilson")
