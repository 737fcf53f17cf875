"""Metrics of calibration, accuracy and selective prediction.

A metric is an object that is called with probabilities and labels, `ece(probs, labels)`; `ece.accumulator()` takes them
batch by batch, and `bootstrap(ece, probs, labels)` adds a confidence interval. `registry.all_metrics()` lists them.
"""

from fedlas.metrics.accumulators import AbstractAccumulator
from fedlas.metrics.base import AbstractMetric
from fedlas.metrics.bin_sums import Bins, EdgeRule, bin_statistics, equal_mass_edges, equal_width_edges
from fedlas.metrics.binning import Histogram, histogram
from fedlas.metrics.calibration_error import (
    aece,
    classwise_ece,
    debiased_l2,
    ece,
    lp_error,
    mce,
    over_ece,
    rms_error,
    signed_ece,
    under_ece,
)
from fedlas.metrics.calibration_tests import ks_test, kuiper_test, spiegelhalter_test
from fedlas.metrics.intervals.binomial import clopper_pearson
from fedlas.metrics.intervals.gaps import noise_floor
from fedlas.metrics.intervals.methods import bootstrap
from fedlas.metrics.paired import across_seeds, paired_bootstrap
from fedlas.metrics.proper_scores import accuracy, brier, nll, top_5, top_k
from fedlas.metrics.result import Comparison, Definition, Interval, Result
from fedlas.metrics.selective import (
    RiskCoverage,
    augrc,
    aurc,
    coverage_at_risk,
    e_aurc,
    risk_at_coverage,
    risk_coverage,
)
from fedlas.metrics.smooth import SmoothCurve, smooth_curve, smooth_ece

__all__ = [
    "AbstractAccumulator",
    "AbstractMetric",
    "Bins",
    "Comparison",
    "Definition",
    "EdgeRule",
    "Histogram",
    "Interval",
    "Result",
    "RiskCoverage",
    "SmoothCurve",
    "accuracy",
    "across_seeds",
    "aece",
    "augrc",
    "aurc",
    "bin_statistics",
    "bootstrap",
    "brier",
    "classwise_ece",
    "clopper_pearson",
    "coverage_at_risk",
    "debiased_l2",
    "e_aurc",
    "ece",
    "equal_mass_edges",
    "equal_width_edges",
    "histogram",
    "ks_test",
    "kuiper_test",
    "lp_error",
    "mce",
    "nll",
    "noise_floor",
    "over_ece",
    "paired_bootstrap",
    "risk_at_coverage",
    "risk_coverage",
    "rms_error",
    "signed_ece",
    "smooth_curve",
    "smooth_ece",
    "spiegelhalter_test",
    "top_5",
    "top_k",
    "under_ece",
]
