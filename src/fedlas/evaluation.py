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

import base64
import html
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from fedlas.alignment import samples_in_both, warn_about_repeated_samples
from fedlas.catalog import nearest
from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module
from fedlas.io import as_predictions, frame_columns
from fedlas.io.atomic import write_atomic
from fedlas.io.columns import ColumnOptions, check_options, find_roles
from fedlas.io.untrusted import file_errors
from fedlas.metrics.base import Resampling
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.registry import summary_metrics
from fedlas.metrics.result import Comparison, Definition, Result, aligned, html_table, latex_table
from fedlas.ood.detection import Detection, as_ood_predictions, detect_scores
from fedlas.ood.scores import OF_LOGITS, OF_PROBS, available_scores, score_of
from fedlas.posthoc import AbstractCalibrator, Fit, build_calibrator
from fedlas.posthoc.base import check_count, check_text
from fedlas.posthoc.cross_fit import Calibration, assign_folds, check_folds, cross_fit, fit_on_other_samples
from fedlas.predictions import AnyPredictions, Predictions, with_every_class
from fedlas.predictions.arrays import Array
from fedlas.predictions.probabilities import slices_of
from fedlas.progress import Progress

FORMAT = "fedlas.report/1"
UNCALIBRATED = "uncalibrated"
FOLDS = 5
MOST_BINS = 1_000  # intervals need a table of resamples and bins
PAIR_COLUMNS = ("confidence", "correct", "log_uncertainty")
PAIR_DTYPES = {"bool": "|b1", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True, eq=False)
class State:
    """The results of predictions before calibration, or after one calibrator: `state["ece"]`.

    Args:
        name: "uncalibrated", or the calibrator's name.
        results: every metric, by its name in `fedlas.metrics`.
        bins: bins of reliability diagrams: "width" and "mass".
        detection: results of OOD detection, if there is OOD data.
        fits: how the calibrator was fitted: once, or once for each fold.
        parameters: its scalar parameters, averaged over folds.
        leaked: number of evaluated samples that it was also fitted on, as far as is known.
        comparisons: paired tests by metric: the first model is without calibration, the second with the calibrator.
            Empty for the state before calibration and without intervals.
        pairs: confidence and correctness of each sample, in the order of the predictions, for curves and histograms.
    """

    name: str
    results: Mapping[str, Result]
    bins: Mapping[str, Bins]
    detection: Detection | None = None
    fits: tuple[Fit, ...] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    leaked: int = 0
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    pairs: Pairs | None = None

    def __getitem__(self, metric: str) -> Result:
        if metric not in self.results:
            raise KeyError(f"there is no {metric!r} here; {nearest(str(metric), list(self.results))}")
        return self.results[metric]

    def to_dict(self, *, samples: bool = True) -> dict[str, Any]:
        """Return plain values for JSON, with or without `pairs`."""
        return {
            "name": self.name,
            "results": {name: result.to_dict() for name, result in self.results.items()},
            "bins": {name: bins.to_dict() for name, bins in self.bins.items()},
            "detection": None if self.detection is None else self.detection.to_dict(),
            "fits": [asdict(fit) for fit in self.fits],
            "parameters": dict(self.parameters),
            "leaked": self.leaked,
            "comparisons": {name: test.to_dict() for name, test in self.comparisons.items()},
            "pairs": _pairs_to_dict(self.pairs) if samples and self.pairs is not None else None,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "State":
        """Return the state that `to_dict` described."""
        detection, pairs = fields["detection"], fields["pairs"]
        return cls(
            name=check_text(fields["name"], "name"),
            results={name: Result.from_dict(result) for name, result in fields["results"].items()},
            bins={name: Bins.from_dict(bins) for name, bins in fields["bins"].items()},
            detection=None if detection is None else Detection.from_dict(detection),
            fits=tuple(Fit.from_dict(fit) for fit in fields["fits"]),
            parameters=fields["parameters"],
            leaked=check_count(fields["leaked"], "leaked"),
            comparisons={name: Comparison.from_dict(test) for name, test in fields["comparisons"].items()},
            pairs=None if pairs is None else _pairs_from_dict(pairs),
        )


def _pairs_to_dict(pairs: Pairs) -> dict[str, Any]:
    """Return plain values for JSON; columns are little-endian arrays in base64."""
    columns = {name: getattr(pairs, name) for name in PAIR_COLUMNS}
    return {"definition": asdict(pairs.definition)} | {
        name: None if values is None else _encode(values.cpu()) for name, values in columns.items()
    }


def _encode(values: Tensor) -> dict[str, str]:
    plain = values if values.dtype in {torch.bool, torch.float64} else values.float()
    array = plain.numpy()
    array = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": str(plain.dtype).removeprefix("torch."), "base64": base64.b64encode(array.tobytes()).decode()}


def _decode(fields: Mapping[str, str]) -> Tensor:
    if fields["dtype"] not in PAIR_DTYPES:
        raise UserError(f"pairs have the type {fields['dtype']!r:.100}; one of {sorted(PAIR_DTYPES)} is needed")
    array = np.frombuffer(base64.b64decode(fields["base64"], validate=True), PAIR_DTYPES[fields["dtype"]])
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _pairs_from_dict(fields: Mapping[str, Any]) -> Pairs:
    columns = {name: None if fields[name] is None else _decode(fields[name]) for name in PAIR_COLUMNS}
    confidence, correct, log_uncertainty = (columns[name] for name in PAIR_COLUMNS)
    if confidence is None or correct is None or not confidence.is_floating_point():
        raise UserError("pairs have no confidence or no correctness")
    if len({len(column) for column in columns.values() if column is not None}) > 1:
        raise UserError("the columns of pairs differ in length")
    if not all(bool(((x >= 0) & (x <= 1)).all()) for x in (confidence, correct.double())):
        raise UserError("pairs hold a confidence or correctness that is not in [0, 1]")
    if log_uncertainty is not None and bool(log_uncertainty.isnan().any()):
        raise UserError("pairs hold a log_uncertainty that is not a number")
    return Pairs(confidence, correct, Definition(**fields["definition"]), log_uncertainty)


@dataclass(frozen=True, eq=False)
class Report:
    """The evaluation of one set of predictions: `report["ece"]`, `report.after["temperature"]["ece"]`.

    Args:
        before: the results before calibration.
        after: the results after each calibrator, by its name.
        n: number of samples.
        classes: number of classes; 0 if unknown.
        split: name of the split.
    """

    before: State
    after: Mapping[str, State]
    n: int
    classes: int
    split: str | None = None

    def __getitem__(self, metric: str) -> Result:
        return self.before[metric]

    def __contains__(self, metric: object) -> bool:
        return metric in self.before.results

    def __iter__(self) -> Iterator[str]:
        return iter(self.before.results)

    def __len__(self) -> int:
        return len(self.before.results)

    def keys(self) -> KeysView[str]:
        """Return the names of the metrics, so that `dict(report)` works."""
        return self.before.results.keys()

    @property
    def states(self) -> tuple[State, ...]:
        """The state before calibration, then those after each calibrator."""
        return (self.before, *self.after.values())

    def to_dict(self, *, samples: bool = True) -> dict[str, Any]:
        """Return plain values for JSON.

        Args:
            samples: whether to include confidence and correctness of each sample, from which `from_dict` restores the
                report exactly; without them, a page or figures of the report lack curves and histograms.
        """
        fields = {"format": FORMAT, "n": self.n, "classes": self.classes, "split": self.split}
        return fields | {"states": [state.to_dict(samples=samples) for state in self.states]}

    def to_json(self) -> str:
        """Return the report as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with a row for each state and metric: value and interval, as fractions."""
        rows = [
            {
                "state": state.name,
                "metric": name,
                "value": float(result),
                "low": math.nan if result.interval is None else result.interval.low,
                "high": math.nan if result.interval is None else result.interval.high,
                "n": self.n,
            }
            for state in self.states
            for name, result in state.results.items()
        ]
        return optional_module("pandas").DataFrame(rows)

    def to_latex(self) -> str:
        """Return the table of `str(report)` as a LaTeX tabular with a row for each state."""
        names = self._shown
        head = ["", *(self.before[name].heading() for name in names)]
        rows = [[state.name, *(state[name].to_latex() for name in names)] for state in self.states]
        return latex_table(head, rows)

    def plot(self) -> Any:
        """Draw the reliability diagram of each state, side by side; return the matplotlib figure."""
        figure = optional_module("matplotlib.pyplot").figure(
            figsize=(3.2 * len(self.states), 3.4), layout="constrained"
        )
        for panel, state in zip(figure.subplots(1, len(self.states), squeeze=False)[0], self.states, strict=True):
            bins = state.bins["width"]
            filled = (bins.counts > 0).nonzero()[:, 0]
            lower, width = bins.edges[:-1][filled].tolist(), bins.edges.diff()[filled].tolist()
            panel.bar(lower, bins.accuracy[filled].tolist(), width, align="edge", edgecolor="white", label="accuracy")
            panel.plot(bins.confidence[filled].tolist(), bins.accuracy[filled].tolist(), "ko", markersize=3)
            panel.plot([0, 1], [0, 1], "k--", linewidth=0.8, label="calibrated")
            panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=f"{state.name}: ECE {state['ece']:.2%}")
        figure.axes[0].set_ylabel("accuracy")
        return figure

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Report":
        """Return the report that `to_dict` described."""
        if fields.get("format") != FORMAT:
            raise UserError(
                f"Report.load reads what Report.save wrote; the format of this is {fields.get('format')!r:.100}"
            )
        before, *after = (State.from_dict(state) for state in fields["states"])
        n, classes = (check_count(fields[name], name) for name in ("n", "classes"))
        split = None if fields["split"] is None else check_text(fields["split"], "split")
        if any(state.pairs is not None and len(state.pairs.confidence) != n for state in (before, *after)):
            raise UserError(f"the report is about {n} samples, but holds pairs of another number")
        return cls(before, {state.name: state for state in after}, n, classes, split)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, atomically."""
        write_atomic(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read a file that `save` wrote."""
        with file_errors(path):
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @property
    def _shown(self) -> list[str]:
        return [name for name in summary_metrics() if name in self.before.results]

    def _rows(self) -> list[list[str]]:
        names = self._shown
        head = ["", *(self.before[name].heading() for name in names)]
        return [head, *([state.name, *(state[name].cell() for name in names)] for state in self.states)]

    @property
    def notes(self) -> list[str]:
        """Notes about the intervals of the table."""
        states_of: dict[tuple[str, str], list[str]] = {}
        for state in self.states:
            for result in (state.results[name] for name in summary_metrics() if name in state.results):
                if result.note:
                    states_of.setdefault((result.definition.estimator, result.note), []).append(state.name)
        return [f"{metric} ({', '.join(states)}): {note}." for (metric, note), states in states_of.items()]

    @property
    def _title(self) -> str:
        classes = f", {self.classes} classes" if self.classes else ""
        return f"{f'split {self.split}, ' if self.split else ''}n={self.n:,}{classes}"

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        numbers = html_table(self._rows(), self._title)
        numbers += "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self.notes)
        return numbers + "".join(
            html_table(state.detection.rows(), f"OOD detection, {state.name}")
            for state in self.states
            if state.detection is not None
        )

    def __repr__(self) -> str:
        numbers = [f"{name}={float(self.before[name]):.4g}" for name in ("accuracy", "ece", "nll") if name in self]
        after = f", after={list(self.after)}" if self.after else ""
        return f"Report({self._title}, {', '.join(numbers)}{after})"

    def __str__(self) -> str:
        lines = [*aligned(self._rows()), *self.notes]
        detections = [f"\n{state.name}\n{state.detection}" for state in self.states if state.detection is not None]
        return "\n".join([self._title, *lines, *detections])


def evaluate(
    predictions: Any,
    labels: Array | str | Path | None = None,
    *,
    logits: bool = False,
    ood: Mapping[str, Any] | None = None,
    posthoc: str | AbstractCalibrator | Iterable[str | AbstractCalibrator] | None = (),
    calibration: Any = None,
    train_features: Array | None = None,
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
        train_features: features of the training set, for the "knn" score.
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
    scores = available_scores(all_sets, train_features) if ood_data else []
    # What a calibrator returns are log-probabilities up to a constant, so only scores of probabilities mean anything.
    after = tuple(score for score in scores if score in OF_PROBS)
    runs = [_Run(UNCALIBRATED, None, EvaluationAccumulator(bins), tuple(scores))]
    runs += [_Run(name, fitted, EvaluationAccumulator(bins), after) for name, fitted in _named(calibrations).items()]
    id_scores = _accumulate(predictions, runs, train_features, steps, is_id=True)
    ood_scores = {name: _accumulate(data, runs, train_features, steps, is_id=False) for name, data in ood_data.items()}

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
    predictions: AnyPredictions,
    runs: Sequence[_Run],
    train_features: Array | None,
    steps: _Steps,
    *,
    is_id: bool,
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
        scores[run.name] |= {
            score: score_of(predictions, score, train_features) for score in run.scores if score not in OF_LOGITS
        }
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
