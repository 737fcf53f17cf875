"""Metrics of the validation split that the log of an epoch holds, and its two halves."""

import numpy as np
import torch

from fedlas.metrics.calibration import aece, ece, over_under
from fedlas.metrics.scoring import accuracy, nll
from fedlas.predictions import Predictions

HALVES_SEED = 2026  # of all runs; another one is another experiment


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


def halves(validation: Predictions) -> tuple[Predictions, Predictions]:
    """Divide predictions of the validation split into V1 (feedback, best epoch) and V2 (temperature, selection).

    The division depends on the positions of the samples in the data set alone, not on the order of the rows.
    """
    if validation.index is None:
        raise ValueError("predictions need an index, the positions of the samples, to be divided into halves")
    ordered = validation.index.argsort().cpu()
    shuffled = torch.from_numpy(np.random.RandomState(HALVES_SEED).permutation(len(ordered)))
    middle = len(ordered) // 2
    first, second = (ordered[rows.sort().values] for rows in (shuffled[:middle], shuffled[middle:]))
    return validation[first], validation[second]
