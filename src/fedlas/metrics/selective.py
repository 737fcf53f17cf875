"""Selective prediction: risk-coverage curves of a model that abstains on its least confident samples.

The k most confident samples are accepted. Their coverage is k / n, their risk R_k the error rate among them, and their
generalised risk G_k the number of errors among them divided by n.

    AURC    mean of R_k over k = 1 .. n
    E-AURC  AURC minus the smallest value at this accuracy (all errors last)
    AUGRC   mean of G_k over k = 1 .. n (Traub et al., 2024)

If logits are known, samples are ranked by log(1 - confidence) in float64, because near 1 many float32 confidences are
equal. R_k and G_k are averaged over all orders of ties.

The influence of a sample on these areas, with w_i = 1 for an error, c_i the confidence, q_i the fraction of samples
that are at least as confident, e the mean of w, and sums over other samples j divided by n:

    AURC    w_i log(1 / q_i) - sum_{c_j < c_i} w_j / q_j + e - AURC
    E-AURC  influence on the AURC + log(1 - e) (w_i - e)
    AUGRC   w_i (1 - q_i) + sum_{c_j > c_i} w_j - 2 AUGRC
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.base import AbstractTopLabel
from fedlas.metrics.bin_sums import add_up, count_up, exact
from fedlas.metrics.inputs import MetricInput, Pairs, Which, binary_predictions
from fedlas.metrics.intervals.methods import AreaBootstrap
from fedlas.metrics.paired import PairedMeans
from fedlas.metrics.result import Result
from fedlas.predictions.arrays import Array

MANY_TIES = 0.05  # fraction of samples that rank as equal, from which a result has a note


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at each coverage from 1 / n to 1."""

    coverage: Float64[Tensor, " n"]
    risk: Float64[Tensor, " n"]

    @property
    def generalised(self) -> Float64[Tensor, " n"]:
        """Errors among the accepted samples, as a fraction of all samples."""
        return self.risk * self.coverage


def risk_coverage(
    probs: MetricInput,
    labels: Array | None = None,
    **which: Unpack[Which],
) -> RiskCoverage:
    """Return the risk-coverage curve."""
    return curve(aurc.read(probs, labels, **which))


def curve(samples: Pairs) -> RiskCoverage:
    """Return the risk-coverage curve of validated samples."""
    return samples.once("risk-coverage curve", lambda: _curve(samples))


def _curve(samples: Pairs) -> RiskCoverage:
    order, group = samples.ranking
    wrong = 1 - exact(samples.correct[order.to(samples.correct.device)])
    n, group = len(wrong), group.to(wrong.device)
    groups = int(group[-1]) + 1
    # Each sample of a group of ties has the mean error of the group: the average over all orders.
    mean = add_up(wrong, group, groups) / count_up(group, groups)
    accepted = torch.arange(1, n + 1, dtype=torch.float64, device=wrong.device)
    return RiskCoverage(accepted / n, mean[group].cumsum(0) / accepted)


class AbstractArea(AbstractTopLabel):
    """An area under a risk-coverage curve."""

    ranked = True
    interval = AreaBootstrap()

    def result(self, samples: Pairs, value: float, **details: Any) -> Result:
        """Return an area with its definition."""
        definition = replace(samples.definition, estimator=self.title, norm="mean over k = 1..n")
        saturated = saturated_fraction(samples)
        if saturated > MANY_TIES:
            details["saturated"] = saturated
        return Result(value, definition, None, details)

    def values_of(self, samples: Pairs) -> Tensor:
        return area_values(samples, self.name)


class AURC(AbstractArea):
    """Area under the risk-coverage curve, which depends on the accuracy and on the ranking by confidence."""

    name = "aurc"
    title = "AURC"
    explanation = (
        "Error rate averaged over all coverages: whether confidence separates correct from incorrect predictions."
    )
    in_summary = True
    is_compared = True
    order = 90
    paired = PairedMeans(largest=2.0)  # nearly all influence values are below 2

    def of_pairs(self, samples: Pairs) -> Result:
        traced = curve(samples)
        value, generalised = float(traced.risk.mean()), float(traced.generalised.mean())
        return self.result(samples, value, e_aurc=value - _best_aurc(samples), augrc=generalised)


class EAURC(AbstractArea):
    """Excess AURC: the part of the AURC that is due to the ranking rather than to the accuracy."""

    name = "e_aurc"
    title = "E-AURC"
    explanation = "The AURC minus the lowest one that this accuracy allows."
    order = 150

    def of_pairs(self, samples: Pairs) -> Result:
        best = _best_aurc(samples)
        return self.result(samples, float(curve(samples).risk.mean()) - best, best_aurc=best)


class AUGRC(AbstractArea):
    """Area under the generalised risk-coverage curve: mean rate of silent failures."""

    name = "augrc"
    title = "AUGRC"
    explanation = "Errors among the covered samples as a fraction of all samples, averaged over all coverages."
    order = 160

    def of_pairs(self, samples: Pairs) -> Result:
        return self.result(samples, float(curve(samples).generalised.mean()))


aurc, e_aurc, augrc = AURC(), EAURC(), AUGRC()


def risk_at_coverage(
    probs: MetricInput,
    labels: Array | None = None,
    coverage: float = 0.8,
    **which: Unpack[Which],
) -> Result:
    """Return the error rate among the most confident fraction of samples."""
    if not 0 < coverage <= 1:
        raise UserError(f"coverage is {coverage}; it must be above 0 and at most 1")
    samples = aurc.read(probs, labels, **which)
    # 0.7 * 10 is 7.000000000000001, which would round up to 8 samples.
    index = max(math.ceil(coverage * len(samples.confidence) - 1e-9), 1) - 1
    traced = curve(samples)
    definition = replace(samples.definition, estimator=f"risk at {100 * coverage:g} % coverage")
    return Result(float(traced.risk[index]), definition, None, {"coverage": float(traced.coverage[index])})


def coverage_at_risk(
    probs: MetricInput,
    labels: Array | None = None,
    risk: float = 0.05,
    **which: Unpack[Which],
) -> Result:
    """Return the largest fraction of samples that can be accepted with at most a given error rate."""
    samples = aurc.read(probs, labels, **which)
    traced = curve(samples)
    enough = (traced.risk <= risk + 1e-12).nonzero()
    value = float(traced.coverage[enough[-1]]) if len(enough) else 0.0
    return Result(value, replace(samples.definition, estimator=f"coverage at {100 * risk:g} % risk"))


def saturated_fraction(samples: Pairs) -> float:
    """Return the fraction of samples whose confidence is 1, so that they rank as equal."""
    order, group = samples.ranking
    if float(samples.confidence[order[0].to(samples.confidence.device)]) < 1:
        return 0.0
    tied = int((group == 0).sum())
    return tied / len(group) if tied > 1 else 0.0


def area_values(samples: Pairs, area: str) -> Float64[Tensor, " n"]:
    """Return the influence of each sample on an area plus the area itself, so that their mean is the area.

    The values are in the order of the samples, so that the values of two models can be paired.
    """
    samples = binary_predictions(samples)
    if area == "augrc":
        influence, value = _influence(samples, area)
    else:  # AURC and E-AURC differ by a function of the accuracy
        influence, value = samples.once("influence on the AURC", lambda: _influence(samples, area))
    if area == "e_aurc":
        wrong = 1 - exact(samples.correct[samples.ranking[0].to(samples.correct.device)])
        error_rate = float(wrong.mean())
        value -= _best_aurc(samples)
        influence = influence + math.log(max(1 - error_rate, torch.finfo(torch.float64).tiny)) * (wrong - error_rate)
    values = torch.empty_like(influence)
    values[samples.ranking[0].to(values.device)] = influence - influence.mean() + value
    return values


def _influence(samples: Pairs, area: str) -> tuple[Float64[Tensor, " n"], float]:
    """Return the influence of each sample on an area up to a constant, the most confident first, and the area."""
    order, group = samples.ranking
    wrong = 1 - exact(samples.correct[order.to(samples.correct.device)])
    n, group = len(wrong), group.to(wrong.device)
    rank = torch.arange(1, n + 1, dtype=torch.float64, device=wrong.device)
    groups = int(group[-1]) + 1
    sizes = count_up(group, groups)

    def averaged(values: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
        return (add_up(values, group, groups) / sizes)[group]

    if area == "augrc":
        weight = averaged((n - rank + 1) / n)
        errors = averaged(wrong)
        influence = wrong * weight + averaged(errors.cumsum(0) - errors / 2) / n
    else:
        weight = averaged(_suffix_sums(1 / rank))
        errors = averaged(wrong * n / rank)
        influence = wrong * weight - averaged(_suffix_sums(errors) - errors / 2) / n
    return influence, float((wrong * weight).mean())


def _suffix_sums(values: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return the sum of each value and all following ones."""
    return values.flip(0).cumsum(0).flip(0)


def _best_aurc(samples: Pairs) -> float:
    """Return the AURC of the best ranking, with all errors last."""
    wrong = 1 - exact(samples.correct)
    if samples.correct.dtype == torch.bool:  # faster than sorting
        wrong = (torch.arange(len(wrong), device=wrong.device) >= int(samples.correct.sum())).to(wrong.dtype)
    else:
        wrong = wrong.sort().values
    accepted = torch.arange(1, len(wrong) + 1, dtype=torch.float64, device=wrong.device)
    return float((wrong.cumsum(0) / accepted).mean())
