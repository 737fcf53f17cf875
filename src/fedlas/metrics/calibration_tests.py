"""Hypothesis tests of perfect calibration.

With samples in the order of their confidence c, d_k = (1/n) sum_{i <= k} (correct_i - c_i) and
s^2 = (1/n^2) sum_i c_i (1 - c_i), under perfect calibration d_k / s is asymptotically a Brownian motion, so

    KS             max_k |d_k|, compared with the maximum of |Brownian motion| on [0, 1]
    Kuiper         max_k d_k - min_k d_k (both with d_0 = 0), compared with the range of Brownian motion on [0, 1]
    Spiegelhalter  z = sum_i (correct_i - c_i)(1 - 2 c_i) / sqrt(sum_i (1 - 2 c_i)^2 c_i (1 - c_i)), like N(0, 1)

d_k is computed only after the last sample of a tie, so that the order of ties does not matter.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.base import AbstractTopLabel
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.result import Result


class KSTest(AbstractTopLabel):
    """Kolmogorov-Smirnov test: the largest cumulative gap between confidence and accuracy, with its p-value."""

    name = "ks_test"
    title = "KS calibration error"
    explanation = "Largest cumulative difference of confidence and correctness, from low to high confidence."
    needs_hard_labels = True
    order = 190

    def of_pairs(self, samples: Pairs) -> Result:
        walk, scale = _walk(_hard(samples))
        value = float(walk.abs().max())
        definition = replace(samples.definition, estimator=self.title, norm="maximum")
        return Result(value, definition, None, _p_value(value, scale, _ks_tail))


class KuiperTest(AbstractTopLabel):
    """Kuiper test: the largest cumulative gap over any range of confidence, with its p-value."""

    name = "kuiper_test"
    title = "Kuiper calibration error"
    explanation = "Range of the cumulative difference of confidence and correctness."
    needs_hard_labels = True
    order = 200

    def of_pairs(self, samples: Pairs) -> Result:
        walk, scale = _walk(_hard(samples))
        value = float(walk.max() - walk.min())
        definition = replace(samples.definition, estimator=self.title, norm="range")
        return Result(value, definition, None, _p_value(value, scale, _kuiper_tail))


class SpiegelhalterTest(AbstractTopLabel):
    """Spiegelhalter's test: the Brier score against its expectation under calibration, as a z-score."""

    name = "spiegelhalter_test"
    title = "Spiegelhalter z"
    explanation = "Brier score minus its expectation for a calibrated model, in standard deviations."
    unit = ""
    higher_is_better = None
    needs_hard_labels = True
    order = 210

    def of_pairs(self, samples: Pairs) -> Result:
        _hard(samples)
        c, correct = exact(samples.confidence), exact(samples.correct)
        deviation = float(((1 - 2 * c).square() * c * (1 - c)).sum().sqrt())
        total = float(((correct - c) * (1 - 2 * c)).sum())
        definition = replace(samples.definition, estimator=self.title, norm=None, unit=self.unit)
        # If all confidences are 0, 1/2 or 1, the variance is zero.
        limit = 0.0 if total == 0 else math.copysign(math.inf, total)
        z = limit if deviation == 0 else total / deviation
        return Result(z, definition, None, {"p_value": _two_sided(z)})


ks_test, kuiper_test, spiegelhalter_test = KSTest(), KuiperTest(), SpiegelhalterTest()


def _hard(samples: Pairs) -> Pairs:
    if samples.correct.dtype != torch.bool:
        raise UserError("tests of calibration need hard labels: soft ones vary less than the tests assume")
    return samples


def _walk(samples: Pairs) -> tuple[Float64[Tensor, " steps"], float]:
    return samples.once("calibration walk", lambda: _compute_walk(samples))


def _compute_walk(samples: Pairs) -> tuple[Float64[Tensor, " steps"], float]:
    c, correct = exact(samples.confidence), exact(samples.correct)
    order = (samples.ranking[0].flip(0) if samples.log_uncertainty is None else c.argsort()).to(c.device)
    c, correct = c[order], correct[order]
    sums = torch.cumsum(correct - c, 0) / len(c)
    ends = torch.cat([c[1:] != c[:-1], torch.ones(1, dtype=torch.bool, device=c.device)])
    walk = torch.cat([torch.zeros(1, dtype=c.dtype, device=c.device), sums[ends]])
    return walk, float((c * (1 - c)).sum().sqrt()) / len(c)


def _p_value(value: float, scale: float, tail: Callable[[float], float]) -> dict[str, float]:
    if scale == 0:
        return {"statistic": 0.0 if value == 0 else math.inf, "p_value": 1.0 if value == 0 else 0.0}
    return {"statistic": value / scale, "p_value": min(1.0, max(0.0, tail(value / scale)))}


def _ks_tail(x: float) -> float:
    """Return the probability that |Brownian motion| on [0, 1] exceeds x."""
    if x > 1:
        return math.fsum(2 * (-1) ** k * _two_sided((2 * k + 1) * x) for k in range(6))
    if x < 0.2:
        return 1.0
    odd = range(1, 42, 2)
    inside = math.fsum((-1) ** (k // 2) / k * math.exp(-((k * math.pi) ** 2) / (8 * x * x)) for k in odd)
    return 1 - 4 / math.pi * inside


def _kuiper_tail(x: float) -> float:
    """Return the probability that the range of Brownian motion on [0, 1] exceeds x."""
    if x > 1:
        return math.fsum(4 * (-1) ** (k + 1) * k * _two_sided(k * x) for k in range(1, 12))
    if x < 0.4:
        return 1.0
    halves = [(k + 0.5) * math.pi for k in range(40)]
    return 1 - sum((8 / x**2 + 2 / h**2) * math.exp(-2 * h**2 / x**2) for h in halves)


def _two_sided(z: float) -> float:
    """Return the two-sided p-value of a standard normal statistic."""
    return math.erfc(abs(z) / math.sqrt(2))
