"""Confidence intervals of a binomial proportion."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import scipy
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from fedlas.metrics.bin_sums import exact
from fedlas.metrics.result import Interval, check_level


def clopper_pearson(
    correct: Shaped[Tensor, " bins"], counts: Shaped[Tensor, " bins"], level: float = 0.95
) -> tuple[Float64[Tensor, " bins"], Float64[Tensor, " bins"]]:
    """Return the Clopper-Pearson interval of the accuracy of each bin; 0 to 1 if a bin is empty."""
    check_level(level)
    k, n = (exact(values).cpu().numpy() for values in (correct, counts))
    low, high = _clopper_pearson(k, n, level)
    return torch.from_numpy(low), torch.from_numpy(high)


def clopper_pearson_interval(count: int, n: int, level: float) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a single proportion."""
    low, high = _clopper_pearson(np.float64(count), np.float64(n), level)
    return float(low), float(high)


def _clopper_pearson(k: Any, n: Any, level: float) -> tuple[Any, Any]:
    tail = (1 - level) / 2
    low = np.where(k > 0, scipy.special.betaincinv(np.maximum(k, 0.5), n - k + 1, tail), 0.0)
    high = np.where(k < n, scipy.special.betaincinv(k + 1, np.maximum(n - k, 0.5), 1 - tail), 1.0)
    return low, high


def wilson(fraction: float, n: int, level: float = 0.95) -> Interval:
    """Return the Wilson interval of a fraction of n samples."""
    check_level(level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (fraction + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(fraction * (1 - fraction) / n + z**2 / (4 * n**2))
    return Interval(max(0.0, centre - reach), min(1.0, centre + reach), level, "Wilson")
