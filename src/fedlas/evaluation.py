"""Evaluate predictions: all metrics before and after post-hoc calibration, and OOD detection, in one `Report`.

`evaluate` passes over the logits once. Each part is transformed by every calibrator while it is in the cache, and added
to an `EvaluationAccumulator`, which keeps the few numbers per sample that all metrics are computed from. OOD data is
read once too.

A calibrator that is not fitted yet is fitted on `calibration`, predictions of the same model on other samples. Without
those it is cross-fitted: the samples are split into folds, five by default, and each fold is transformed by a
calibrator that was fitted on the others. That costs a fit for each fold, so further passes. OOD detection uses one
calibrator fitted on all samples, because it looks at no labels.

A confidence interval is about the evaluated samples: it takes the calibrator as fixed, and ignores that another
calibration set would have given another one.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from fedlas.alignment import samples_in_both, warn_about_repeated_samples
from fedlas.errors import UserError, UserTypeError
from fedlas.evaluation_report import UNCALIBRATED, Report, State
from fedlas.io import as_predictions, frame_columns
from fedlas.io.columns import ColumnOptions, check_options, find_roles
from fedlas.metrics.base import Resampling
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.ood.detection import Detection, as_ood_predictions, detect_scores
from fedlas.ood.scores import OF_LOGITS, OF_PROBS, available_scores, score_of
from fedlas.posthoc import AbstractCalibrator, build_calibrator
from fedlas.posthoc.cross_fit import Calibration, assign_folds, check_folds, cross_fit, fit_on_other_samples
from fedlas.predictions import AnyPredictions, Predictions, with_every_class
from fedlas.predictions.arrays import Array
from fedlas.predictions.probabilities import slices_of
from fedlas.progress import Progress

FOLDS = 5
MOST_BINS = 1_000  # intervals need a table of resamples and bins


def evaluate(
    predictions: Any,
    labels: Array | str | Path | None = None,
    *,
    logits: bool = False,
    ood: Mapping[str, Any] | None = None,
    posthoc: str | AbstractCalibrator | Iterable[str | AbstractCalibrator] | None = (),
    calibration: Any = None,
    folds: int = FOLDS,
    bins: int = 15,
    intervals: bool = True,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **columns: Unpack[ColumnOptions],
) -> Report:
    """Evaluate predictions: accuracy, calibration, proper scores, selective prediction, OOD detection.

    Args:
        predictions: an array of probabilities, one row per sample; or the name of a file, a DataFrame of pandas or
            polars, a mapping of arrays, a `PredictionOutput` of Hugging Face (whose predictions are logits), or
            `Predictions`.
        labels: class numbers, or soft labels; a file may hold them, too. Not for what has its own labels.
        logits: whether arrays hold logits.
        ood: predictions on OOD data, by the name of the data set: files and tables as `predictions`; an array holds
            what `predictions` were built from, logits or probabilities.
        posthoc: names of calibrators, or built ones; fitted ones are used as they are.
        calibration: predictions of the same model on other samples, on which calibrators are fitted; without it,
            they are cross-fitted.
        folds: number of folds for cross-fitting.
        bins: number of bins of calibration errors.
        intervals: whether to compute confidence intervals and paired tests.
        level: confidence level.
        resamples: number of bootstrap resamples; by default that of each method.
        seed: random seed for bootstrap intervals and cross-fitting.
        progress: called with "evaluating" and the fraction that is done.
        columns: roles of the columns of a file or table, as in `read_predictions`; `normalize=True` divides rows of
            probabilities by their sums.
    """
    check_options(columns, evaluate)
    declared = not isinstance(predictions, AnyPredictions)
    predictions = as_predictions(predictions, labels, logits=logits, **columns)
    predictions.correct  # noqa: B018 - an error where there are no labels, before anything is fitted
    warn_about_repeated_samples(predictions)
    calibrators = _as_calibrators([posthoc] if isinstance(posthoc, str | AbstractCalibrator) else posthoc or ())
    if calibration is not None and not calibrators:
        raise UserError('calibration is used to fit calibrators: add posthoc=["temperature"], or leave it out')
    if calibration is not None:
        calibration = _read_calibration(calibration, columns, logits=logits)
    if ood is not None and not isinstance(ood, Mapping):
        raise UserTypeError('ood is a mapping from names to predictions or arrays, such as {"svhn": probs}')
    normalize = columns.get("normalize", False)
    ood_data = {
        name: as_ood_predictions(
            name,
            _read_ood(name, data, columns, logits=logits, declared=declared),
            predictions,
            declared=declared,
            normalize=normalize,
        )
        for name, data in (ood or {}).items()
    }
    if not 1 <= bins <= MOST_BINS:
        raise UserError(f"bins is {bins}; a number from 1 to {MOST_BINS:,} is needed")
    check_folds(folds, seed)
    how = Resampling(level, resamples, seed) if intervals else None

    unfitted = sum(calibrator.fitted is None for calibrator in calibrators)
    fits = unfitted * (1 if calibration is not None else folds + bool(ood_data))
    steps = _Steps(fits + 1 + len(ood_data) + 1 + 2 * len(calibrators), progress)
    steps.within(0.0)
    calibrations = _fit(calibrators, predictions, calibration, folds, seed, whole=bool(ood_data), on_fit=steps.done)

    all_sets = [predictions, *ood_data.values()]
    scores = available_scores(all_sets) if ood_data else []
    # What a calibrator returns are log-probabilities up to a constant, so only scores of probabilities mean anything.
    after = tuple(score for score in scores if score in OF_PROBS)
    runs = [_Run(UNCALIBRATED, None, EvaluationAccumulator(bins), tuple(scores))]
    runs += [_Run(name, fitted, EvaluationAccumulator(bins), after) for name, fitted in _named(calibrations).items()]
    id_scores = _accumulate(predictions, runs, steps, is_id=True)
    ood_scores = {name: _accumulate(data, runs, steps, is_id=False) for name, data in ood_data.items()}

    states: dict[str, State] = {}
    for run in runs:
        detection = None
        if run.scores:
            of_run = {name: scores_of_runs[run.name] for name, scores_of_runs in ood_scores.items()}
            split = predictions.split or "ID"
            detection = detect_scores(id_scores[run.name], of_run, level=level, seed=seed, split=split)
        states[run.name] = run.state(how, detection)
        steps.done()
    before = states.pop(UNCALIBRATED)
    if not calibrators:  # a fitted temperature explains such an accuracy itself
        _warn_if_worse_than_guessing(float(before["accuracy"]), len(predictions), predictions.num_classes)
    for run in runs[1:]:
        if how is not None:
            state = states[run.name]
            tests = runs[0].accumulator.compare(run.accumulator, before.results, state.results, how)
            states[run.name] = replace(state, comparisons=tests)
        steps.done()
    return Report(before, states, len(predictions), predictions.num_classes, predictions.split)


def _warn_if_worse_than_guessing(accuracy: float, n: int, classes: int) -> None:
    """Warn if the accuracy is four standard errors below that of guessing, which hints at exchanged classes or rows."""
    guessing = 1 / max(classes, 1)
    if classes > 1 and accuracy < guessing - 4 * math.sqrt(guessing * (1 - guessing) / n):
        warnings.warn(
            f"the accuracy of {accuracy:.1%} is below the {guessing:.1%} of guessing one of {classes:,} classes: are "
            "labels numbered from 1 instead of 0, or classes or rows in another order than the labels?",
            UserWarning,
            stacklevel=3,
        )


def calibrate(
    predictions: Any,
    labels: Array | str | Path | None = None,
    *,
    logits: bool = False,
    posthoc: str | AbstractCalibrator = "temperature",
    calibration: Any = None,
    folds: int = FOLDS,
    seed: int = 0,
    **columns: Unpack[ColumnOptions],
) -> Predictions:
    """Return predictions after post-hoc calibration.

    Args:
        predictions: predictions in any form that `evaluate` takes.
        labels: class indices; needed for cross-fitting, where the predictions have none.
        logits: whether arrays hold logits.
        posthoc: name of a calibrator, or a built one; a fitted one is used as it is.
        calibration: predictions of the same model on other samples, on which the calibrator is fitted; without it, it
            is cross-fitted: each fold of the samples is transformed by a calibrator fitted on the others.
        folds: number of folds for cross-fitting.
        seed: random seed of the assignment of samples to folds.
        columns: roles of the columns of a file or table, as in `read_predictions`.
    """
    check_options(columns, calibrate)
    calibrators = _as_calibrators([posthoc])
    check_folds(folds, seed)
    labelled = calibration is None and calibrators[0].fitted is None
    predictions = as_predictions(predictions, labels, logits=logits, labelled=labelled, **columns)
    if calibration is not None:
        calibration = _read_calibration(calibration, columns, logits=logits)
    (fitted,) = _fit(calibrators, predictions, calibration, folds, seed)
    return fitted.transform(predictions, slice(0, len(predictions)))


def _read_calibration(calibration: Any, columns: ColumnOptions, *, logits: bool) -> AnyPredictions:
    """Return calibration data, which has labels."""
    if isinstance(calibration, AnyPredictions):
        return calibration
    if isinstance(calibration, tuple | list | np.ndarray | Tensor) and not hasattr(calibration, "label_ids"):
        raise UserTypeError(
            "calibration needs predictions with labels: pass Predictions.from_probs(probs, labels) or "
            f"Predictions(logits, labels), not {type(calibration).__name__}"
        )
    return as_predictions(calibration, logits=logits, **columns)


def _read_ood(name: str, data: Any, columns: ColumnOptions, *, logits: bool, declared: bool) -> Any:
    """Return the predictions in a file or table of OOD data, which has no labels; return other data unchanged."""
    options: Any = {option: value for option, value in columns.items() if option not in {"label_column", "class_names"}}
    if not isinstance(data, AnyPredictions) and hasattr(data, "columns"):
        # A table without known columns has one for each class; beside `Predictions` it may hold logits.
        if not declared or not find_roles(frame_columns(data), options, name).has_scores:
            return data
    elif not isinstance(data, str | Path | Mapping):
        return data
    return as_predictions(data, logits=logits, labelled=False, **options)


def _as_calibrators(posthoc: Iterable[Any]) -> list[AbstractCalibrator]:
    entries = list(posthoc)
    for entry in entries:
        if not isinstance(entry, str | AbstractCalibrator):
            raise UserTypeError(f"posthoc takes names or built calibrators, such as Temperature(), not {entry!r}")
    return [build_calibrator(entry) if isinstance(entry, str) else entry for entry in entries]


def _fit(
    calibrators: Sequence[AbstractCalibrator],
    predictions: AnyPredictions,
    calibration: AnyPredictions | None,
    folds: int,
    seed: int,
    *,
    whole: bool = False,
    on_fit: Callable[[], None] = lambda: None,
) -> list[Calibration]:
    """Fit calibrators on calibration data, or cross-fit them without."""
    if not calibrators:
        return []
    evaluated = with_every_class(predictions, "calibration")
    other = None if calibration is None else with_every_class(calibration, "calibration")
    leaked = 0
    if (
        other is not None
        and evaluated.given_labels is not None
        and any(calibrator.fitted is None for calibrator in calibrators)
    ):
        leaked = samples_in_both(evaluated, other)
    fold = assign_folds(len(evaluated), folds, seed)
    calibrations = []
    for calibrator in calibrators:
        if calibrator.fitted is None and other is None:
            calibrations.append(cross_fit(calibrator, evaluated, fold, whole=whole, on_fit=on_fit))
            continue
        calibrations.append(fit_on_other_samples(calibrator, evaluated, other, leaked))
        if calibrator.fitted is None:
            on_fit()
    return calibrations


class _Steps:
    """Reports progress: fits, passes over the data and intervals count the same.

    Args:
        total: how many steps there are.
        progress: called with "evaluating" and the fraction that is done.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.finished, self.progress = total, 0, progress

    def within(self, fraction: float) -> None:
        """Report the fraction of the present step that is done."""
        if self.progress is not None:
            self.progress("evaluating", min(1.0, (self.finished + fraction) / self.total))

    def done(self) -> None:
        """Finish a step."""
        self.finished += 1
        self.within(0.0)


@dataclass(frozen=True)
class _Run:
    """The accumulator of one state.

    Args:
        name: name of the state.
        calibration: the calibrator of the state; None before calibration.
        accumulator: the metrics.
        scores: names of the OOD scores.
    """

    name: str
    calibration: Calibration | None
    accumulator: EvaluationAccumulator
    scores: tuple[str, ...]

    def transform(self, part: AnyPredictions, rows: slice) -> AnyPredictions:
        """Return the predictions of this state at some rows of the labelled samples."""
        if self.calibration is None:
            return part
        return self.calibration.transform(with_every_class(part, "calibration"), rows)

    def transform_unlabelled(self, part: AnyPredictions) -> AnyPredictions:
        """Return the predictions of this state by one calibrator for ID and OOD data, so that scores are comparable."""
        if self.calibration is None:
            return part
        return self.calibration.whole.transform(with_every_class(part, "calibration"))

    def state(self, how: Resampling | None, detection: Detection | None) -> State:
        """Compute the state."""
        results, bins = self.accumulator.compute(how), self.accumulator.histograms()
        pairs = replace(self.accumulator.top)  # a copy without what metrics have computed of the pairs
        if self.calibration is None:
            return State(self.name, results, bins, detection, pairs=pairs)
        fits, parameters = self.calibration.fits, self.calibration.parameters
        return State(self.name, results, bins, detection, fits, parameters, self.calibration.leaked, pairs=pairs)


def _accumulate(
    predictions: AnyPredictions, runs: Sequence[_Run], steps: _Steps, *, is_id: bool
) -> dict[str, dict[str, Tensor]]:
    """Pass over predictions once: update accumulators of ID data, and return the OOD scores of every run."""
    parts: dict[str, dict[str, list[Tensor]]] = {
        run.name: {score: [] for score in run.scores if score in OF_LOGITS} for run in runs
    }
    for rows in slices_of(predictions.scores):
        part = predictions[rows]
        for run in runs:
            if is_id:
                run.accumulator.update(run.transform(part, rows))
            if parts[run.name]:
                transformed = run.transform_unlabelled(part)
                for score, values in parts[run.name].items():
                    values.append(score_of(transformed, score))
        if rows.stop < len(predictions):
            steps.within(rows.stop / len(predictions))
    steps.done()
    scores = {name: {score: torch.cat(values) for score, values in of_run.items()} for name, of_run in parts.items()}
    for run in runs:
        scores[run.name] |= {score: score_of(predictions, score) for score in run.scores if score not in OF_LOGITS}
    return scores


def _named(calibrations: Sequence[Calibration]) -> dict[str, Calibration]:
    """Return calibrators by name; equal names are numbered."""
    by_name: dict[str, Calibration] = {}
    for calibration in calibrations:
        number = 1
        while (name := calibration.name if number == 1 else f"{calibration.name} {number}") in by_name:
            number += 1
        by_name[name] = calibration
    return by_name
