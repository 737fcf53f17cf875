"""Fit calibrators for an evaluation: on other samples, or on folds of the evaluated samples (cross-fitting)."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.posthoc.base import AbstractCalibrator, Fit, with_logits
from fedlas.predictions import Predictions


@dataclass(frozen=True)
class Calibration:
    """A fitted calibrator, or after cross-fitting one per fold, and one for samples without labels.

    Args:
        calibrators: one calibrator, or one per fold after cross-fitting.
        whole: calibrator for samples without labels; after cross-fitting, one that is fitted on all samples.
        fold: fold of each sample after cross-fitting; otherwise None.
        leaked: number of evaluated samples that are in the calibration data too.
    """

    calibrators: tuple[AbstractCalibrator, ...]
    whole: AbstractCalibrator
    fold: Int64[Tensor, " n"] | None = None
    leaked: int = 0

    @property
    def name(self) -> str:
        """Name of the calibrator."""
        return self.whole.name

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Record of each fit: one, or one per fold."""
        return tuple(calibrator.fitted for calibrator in self.calibrators if calibrator.fitted is not None)

    @property
    def parameters(self) -> Mapping[str, float]:
        """Scalar parameters that all folds have, averaged over folds; without non-finite ones."""
        learned = [calibrator.learned for calibrator in self.calibrators]
        scalars = sorted({name for values in learned for name, value in values.items() if value.numel() == 1})
        common = [
            name for name in scalars if all(name in values for values in learned)
        ]  # a fold without zeros has no log_floor
        means = {name: math.fsum(float(values[name]) for values in learned) / len(learned) for name in common}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def transform(self, part: Predictions, rows: slice) -> Predictions:
        """Calibrate the samples at some rows, each by a calibrator that was not fitted on it."""
        if self.fold is None:
            return self.whole.transform(part)
        fold = self.fold[rows].to(part.scores.device)
        rows_of_folds = [(fold == number).nonzero()[:, 0] for number in range(len(self.calibrators))]
        samples = part.scores_only()
        calibrated = [
            calibrator.transform(samples[fold_rows]).logits
            for calibrator, fold_rows in zip(self.calibrators, rows_of_folds, strict=True)
            if len(fold_rows)
        ]
        return with_logits(part, torch.cat(calibrated)[torch.cat(rows_of_folds).argsort()])


def check_folds(folds: int, seed: int) -> None:
    """Raise if folds cannot be assigned."""
    if folds < 2:
        raise UserError(f"folds is {folds}; a calibrator is cross-fitted in two parts or more")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}; a whole number from 0 to 2**63 - 1 is needed")


def assign_folds(samples: int, folds: int, seed: int) -> Int64[Tensor, " n"]:
    """Assign samples to folds at random."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) % folds


def fit_on_other_samples(
    calibrator: AbstractCalibrator, predictions: Predictions, calibration: Predictions | None, leaked: int
) -> Calibration:
    """Fit a calibrator on other samples unless it is fitted; warn if evaluated samples were used to fit it.

    Args:
        calibrator: a fitted calibrator, or an unfitted one, of which a copy is fitted.
        predictions: the evaluated samples.
        calibration: samples to fit on; None for a fitted calibrator.
        leaked: number of evaluated samples in `calibration`; not used for a fitted calibrator, which knows its samples.
    """
    if calibrator.fitted is not None:
        leaked = len(predictions) if calibrator.was_fitted_on(predictions) else 0
    else:
        assert calibration is not None
        calibrator = _copy(calibrator).fit(calibration)
    assert calibrator.fitted is not None
    split = calibrator.fitted.split
    fitted_on = ""
    if leaked:
        fitted_on = f"{'' if leaked == len(predictions) else f'{leaked:,} of '}the very samples it is evaluated on"
    elif split is not None and split == predictions.split:
        fitted_on = f"{split!r}, the split it is evaluated on"
    if fitted_on:
        warnings.warn(
            f"{calibrator.name} was fitted on {fitted_on}: its results are optimistic", UserWarning, stacklevel=4
        )
    return Calibration((calibrator,), calibrator, leaked=leaked)


def cross_fit(
    calibrator: AbstractCalibrator,
    predictions: Predictions,
    fold: Int64[Tensor, " n"],
    *,
    whole: bool,
    on_fit: Callable[[], None],
) -> Calibration:
    """Fit a calibrator for each fold, on the samples of all other folds.

    Args:
        calibrator: an unfitted calibrator.
        predictions: the evaluated samples.
        fold: fold of each sample.
        whole: whether to fit another calibrator on all samples, for samples without labels.
        on_fit: called after each fit.
    """
    folds = int(fold.max()) + 1
    if len(predictions) < 2 * folds:
        few = f"{len(predictions)} samples are too few to cross-fit {calibrator.name} in {folds} parts"
        raise UserError(f"{few}; give calibration=...")
    fold_of_rows, samples = fold.to(predictions.scores.device), predictions.scores_only()
    calibrators = []
    for number in range(folds):
        fitted = _copy(calibrator).fit(samples[fold_of_rows != number])
        assert fitted.fitted is not None
        fitted.fitted = replace(fitted.fitted, split=f"{predictions.split or 'the same split'}, other folds")
        calibrators.append(fitted)
        on_fit()
    fitted_on_all = calibrators[0]
    if whole:
        fitted_on_all = _copy(calibrator).fit(samples)
        on_fit()
    return Calibration(tuple(calibrators), fitted_on_all, fold)


def _copy(calibrator: AbstractCalibrator) -> AbstractCalibrator:
    return type(calibrator)(**calibrator.options)
