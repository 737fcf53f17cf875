"""Metrics of the validation split that the log of an epoch holds, and its two halves."""

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from fedlas.data.base import Split
from fedlas.errors import UserError
from fedlas.metrics.calibration import aece, ece, over_under
from fedlas.metrics.scoring import accuracy, nll
from fedlas.predictions import Predictions
from fedlas.training.run_folder import Run

HALVES_SEED = 2026  # of all runs; another one is another experiment


def judged(validation: Predictions) -> dict[str, float]:
    """Return the numbers of an epoch."""
    over, under = over_under(validation)
    return {
        "accuracy": float(accuracy(validation)),
        "ece": float(ece(validation)),
        "aece": float(aece(validation)),
        "over_ece": float(over),
        "under_ece": float(under),
        "nll": float(nll(validation)),
    }


def second_half(validation: Predictions | Split, seed: int = HALVES_SEED) -> Bool[Tensor, " n"]:
    """Select half of the samples at random, by their positions in the data set and not by the order of the rows."""
    if validation.index is None:
        raise UserError("predictions need an index, the positions of the samples, to be divided into halves")
    ordered = validation.index.argsort().cpu()
    shuffled = torch.from_numpy(np.random.RandomState(seed).permutation(len(ordered)))
    selected = torch.zeros(len(ordered), dtype=torch.bool)
    selected[ordered[shuffled[len(ordered) // 2 :]]] = True
    return selected


def halves(validation: Predictions) -> tuple[Predictions, Predictions]:
    """Divide predictions of the validation split into V1 (feedback, best epoch) and V2 (temperature, selection)."""
    selected = second_half(validation).to(validation.logits.device)
    return validation[~selected], validation[selected]


def with_first_half(train: Split, validation: Split) -> Split:
    """Append V1 to the samples to train on."""
    return train.joined(validation.picked((~second_half(validation)).nonzero()[:, 0]))


def feedback_samples(train: Split, count: int, seed: int = HALVES_SEED) -> Split:
    """Draw training samples that take the place of V1 as feedback, an ablation."""
    drawn = np.random.RandomState(seed).permutation(len(train))[:count]
    return train.picked(torch.from_numpy(drawn))


def tuning_predictions(run: Run) -> Predictions:
    """Read the validation predictions of a run that temperature and hyperparameters are fitted on: V2 if halved."""
    recipe = run.recipe
    validation = run.predictions(f"{recipe.evaluated}-val")
    return halves(validation)[1] if recipe.halve_validation else validation
