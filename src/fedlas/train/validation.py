"""Metrics of the validation split that the log of an epoch holds."""

from fedlas.metrics.calibration import aece, ece, over_under
from fedlas.metrics.scoring import accuracy, nll
from fedlas.predictions import Predictions


def judged(validation: Predictions) -> dict[str, float]:
    """Give the numbers of an epoch."""
    over, under = over_under(validation)
    return {
        "accuracy": float(accuracy(validation)),
        "ece": float(ece(validation)),
        "aece": float(aece(validation)),
        "over_ece": float(over),
        "under_ece": float(under),
        "nll": float(nll(validation)),
    }
