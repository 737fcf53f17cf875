"""Numbers that can be trusted: every metric is a function of probabilities and labels and knows its definition.

Lower-case names are functions of all data at once; the same names in CamelCase are fed piece by piece.
"""

from fedlas.metrics.bins import Bins, EdgeRule, bin_statistics, equal_mass_edges, equal_width_edges
from fedlas.metrics.calibration import (
    Histogram,
    aece,
    classwise_ece,
    debiased_l2,
    ece,
    histogram,
    lp_error,
    mce,
    over_under,
    per_image,
    rms_error,
    signed_ece,
)
from fedlas.metrics.comparison import Comparison, across_seeds, paired_bootstrap
from fedlas.metrics.interval import bootstrap, clopper_pearson, noise_floor
from fedlas.metrics.mean_rank import MeanRanks, mean_ranks
from fedlas.metrics.result import Definition, Interval, Result
from fedlas.metrics.scoring import accuracy, brier, nll, top_k
from fedlas.metrics.selective import (
    RiskCoverage,
    augrc,
    aurc,
    coverage_at_risk,
    e_aurc,
    risk_at_coverage,
    risk_coverage,
)
from fedlas.metrics.significance import ks_test, kuiper_test, spiegelhalter_test
from fedlas.metrics.smooth import SmoothCurve, kde_ece, smooth_curve, smooth_ece
from fedlas.metrics.streaming import (
    AECE,
    AURC,
    ECE,
    MCE,
    NLL,
    Accuracy,
    Brier,
    ClasswiseECE,
    OverUnder,
    SignedECE,
    SmoothECE,
)

__all__ = [
    "AECE",
    "AURC",
    "ECE",
    "MCE",
    "NLL",
    "Accuracy",
    "Bins",
    "Brier",
    "ClasswiseECE",
    "Comparison",
    "Definition",
    "EdgeRule",
    "Histogram",
    "Interval",
    "MeanRanks",
    "OverUnder",
    "Result",
    "RiskCoverage",
    "SignedECE",
    "SmoothCurve",
    "SmoothECE",
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
    "kde_ece",
    "ks_test",
    "kuiper_test",
    "lp_error",
    "mce",
    "mean_ranks",
    "nll",
    "noise_floor",
    "over_under",
    "paired_bootstrap",
    "per_image",
    "risk_at_coverage",
    "risk_coverage",
    "rms_error",
    "signed_ece",
    "smooth_curve",
    "smooth_ece",
    "spiegelhalter_test",
    "top_k",
]
