"""The base class of calibrators (`calibrator`) and their optimisers (`solvers`)."""

from fedlas.posthoc.base.calibrator import (
    AbstractCalibrator,
    DoubtfulFit,
    Fit,
    Samples,
    check_count,
    check_floor,
    check_text,
    learned_like,
    log_probs_of,
    mean_nll,
    read,
    with_logits,
)

__all__ = [
    "AbstractCalibrator",
    "DoubtfulFit",
    "Fit",
    "Samples",
    "check_count",
    "check_floor",
    "check_text",
    "learned_like",
    "log_probs_of",
    "mean_nll",
    "read",
    "with_logits",
]
