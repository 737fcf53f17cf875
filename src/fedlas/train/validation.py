"""What becomes of predictions on the validation split: numbers for the log, and what a loss learns between epochs."""

import copy

from fedlas.losses import AbstractLoss
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


def learns_from_validation(loss: AbstractLoss) -> bool:
    """Say whether a loss cannot do without validation data; such a loss must never see test labels there."""
    try:
        copy.deepcopy(loss).end_epoch(None)
    except ValueError:
        return True
    return False
