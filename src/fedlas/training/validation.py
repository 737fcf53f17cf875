"""Validation metrics of an epoch, and the two halves of the validation split."""

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from fedlas.data.base import Split
from fedlas.errors import UserError
from fedlas.metrics.calibration_error import aece, ece, over_ece, under_ece
from fedlas.metrics.proper_scores import accuracy, nll
from fedlas.predictions import Predictions
from fedlas.training.run_folder import Run

METRICS = (accuracy, ece, aece, over_ece, under_ece, nll)  # of an epoch
HALVES_SEED = 2026  # the same for all runs, so that their halves are the same


def validation_metrics(validation: Predictions) -> dict[str, float]:
    """Return the validation metrics that the log records for an epoch."""
    return {metric.name: float(metric(validation)) for metric in METRICS}


def second_half(validation: Predictions | Split, seed: int = HALVES_SEED) -> Bool[Tensor, " n"]:
    """Return a random mask of half of the samples; it depends on their index, not on the order of the rows."""
    if validation.index is None:
        raise UserError("predictions need an index, the positions of the samples, to be divided into halves")
    ordered = validation.index.argsort().cpu()
    shuffled = torch.from_numpy(np.random.RandomState(seed).permutation(len(ordered)))
    selected = torch.zeros(len(ordered), dtype=torch.bool)
    selected[ordered[shuffled[len(ordered) // 2 :]]] = True
    return selected


def halves(validation: Predictions) -> tuple[Predictions, Predictions]:
    """Split validation predictions into V1 (feedback, best epoch) and V2 (temperature, selection)."""
    selected = second_half(validation).to(validation.logits.device)
    return validation[~selected], validation[selected]


def with_first_half(train: Split, validation: Split) -> Split:
    """Append V1 to the training samples."""
    return train.joined(validation.picked((~second_half(validation)).nonzero()[:, 0]))


def feedback_samples(train: Split, count: int) -> Split:
    """Draw training samples that replace V1 as feedback (ablation)."""
    permutation = np.random.RandomState(HALVES_SEED).permutation(len(train))[:count]
    return train.picked(torch.from_numpy(permutation))


def tuning_predictions(run: Run) -> Predictions:
    """Read the validation predictions of a run for temperature and hyperparameters: V2 if halved."""
    recipe = run.recipe
    validation = run.predictions(f"{recipe.evaluated}-val")
    return halves(validation)[1] if recipe.halve_validation else validation
