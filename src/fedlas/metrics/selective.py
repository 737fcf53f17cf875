"""Selective prediction: what is gained when the model may leave its least confident samples unanswered.

Let the k most confident samples be answered. Their coverage is k / n, their risk R_k the share of errors among them,
and their generalised risk G_k the number of errors among them divided by n.

    AURC    mean of R_k over k = 1 .. n
    E-AURC  AURC minus the least value that this accuracy allows (all errors at the end)
    AUGRC   mean of G_k over k = 1 .. n (Traub et al., 2024)

Samples of equal confidence have no order, so R_k and G_k are averages over all orders they could have.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.metrics.bins import add_up, exact
from fedlas.metrics.result import Result
from fedlas.metrics.samples import Pairs, Scope, pairs
from fedlas.predictions import Array, Predictions


@dataclass(frozen=True)
class RiskCoverage:
    """The risk at every coverage, from the most confident sample alone to all samples."""

    coverage: Float64[Tensor, " n"]
    risk: Float64[Tensor, " n"]

    @property
    def generalised(self) -> Float64[Tensor, " n"]:
        """Errors among the answered samples, as a share of all samples."""
        return self.risk * self.coverage


def risk_coverage(
    probs: Predictions | Array,
    labels: Array | None = None,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> RiskCoverage:
    """Trace the share of errors while the model answers ever more samples, most confident first."""
    return curve(pairs(probs, labels, scope, ignore_index))


def curve(found: Pairs) -> RiskCoverage:
    """Trace the risk over coverage of samples that are already checked."""
    confidence, order = found.confidence.sort(descending=True)
    wrong = 1 - exact(found.correct)[order]
    n = len(wrong)
    new = torch.cat([torch.ones(1, dtype=torch.bool, device=wrong.device), confidence[1:] != confidence[:-1]])
    group = new.to(wrong.device).long().cumsum(0) - 1
    groups = int(group[-1]) + 1
    # Each sample of a group of equal confidence counts as the group's mean error: the average over all orders.
    mean = add_up(wrong, group, groups) / torch.bincount(group, minlength=groups)
    answered = torch.arange(1, n + 1, dtype=torch.float64, device=wrong.device)
    return RiskCoverage(answered / n, mean[group].cumsum(0) / answered)


def aurc(
    probs: Predictions | Array,
    labels: Array | None = None,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure the mean risk over all coverages: how often the model is wrong, and whether it knows when."""
    found = pairs(probs, labels, scope, ignore_index)
    return aurc_result(found)


def e_aurc(
    probs: Predictions | Array,
    labels: Array | None = None,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure how much of the AURC is due to the ranking alone, beyond what this accuracy makes unavoidable."""
    found = pairs(probs, labels, scope, ignore_index)
    best = _best_aurc(found)
    value = float(curve(found).risk.mean()) - best
    return Result(value, replace(found.about, estimator="E-AURC", norm="mean over k = 1..n"), None, {"best_aurc": best})


def augrc(
    probs: Predictions | Array,
    labels: Array | None = None,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure the mean number of silent failures over all coverages, as a share of all samples."""
    found = pairs(probs, labels, scope, ignore_index)
    value = float(curve(found).generalised.mean())
    return Result(value, replace(found.about, estimator="AUGRC", norm="mean over k = 1..n"))


def risk_at_coverage(
    probs: Predictions | Array,
    labels: Array | None = None,
    coverage: float = 0.8,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure the share of errors among the most confident samples that make up a given share of all."""
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}; a share above 0 and up to 1 is needed")
    found = pairs(probs, labels, scope, ignore_index)
    # 0.7 * 10 is 7.000000000000001, which would round up to 8 samples.
    place = max(math.ceil(coverage * len(found.confidence) - 1e-9), 1) - 1
    traced = curve(found)
    about = replace(found.about, estimator=f"risk at {100 * coverage:g} % coverage")
    return Result(float(traced.risk[place]), about, None, {"coverage": float(traced.coverage[place])})


def coverage_at_risk(
    probs: Predictions | Array,
    labels: Array | None = None,
    risk: float = 0.05,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure the largest share of samples that can be answered while at most a given share of them is wrong."""
    found = pairs(probs, labels, scope, ignore_index)
    traced = curve(found)
    enough = (traced.risk <= risk + 1e-12).nonzero()
    value = float(traced.coverage[enough[-1]]) if len(enough) else 0.0
    return Result(value, replace(found.about, estimator=f"coverage at {100 * risk:g} % risk"))


def aurc_result(found: Pairs) -> Result:
    """Average the risk over all coverages of samples that are already checked."""
    traced = curve(found)
    value = float(traced.risk.mean())
    best = _best_aurc(found)
    details = {"e_aurc": value - best, "augrc": float(traced.generalised.mean())}
    return Result(value, replace(found.about, estimator="AURC", norm="mean over k = 1..n"), None, details)


def _best_aurc(found: Pairs) -> float:
    """Find the AURC of an order that has every error after every right answer."""
    wrong = (1 - exact(found.correct)).sort().values
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64, device=wrong.device)
    return float((wrong.cumsum(0) / answered).mean())
