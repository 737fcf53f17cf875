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
from collections.abc import Callable, Iterator, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from fedlas.alignment import samples_in_both
from fedlas.catalog import nearest
from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module
from fedlas.io import as_predictions
from fedlas.io.atomic import write_atomic
from fedlas.io.columns import ColumnOptions
from fedlas.io.untrusted import file_errors
from fedlas.metrics.base import Resampling
from fedlas.metrics.bin_sums import Bins
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.metrics.inputs import Pairs
from fedlas.metrics.registry import summary_metrics
from fedlas.metrics.result import Comparison, Definition, Result, aligned, html_table, latex_table
from fedlas.ood.detection import Detection, as_ood_predictions, detect_scores
from fedlas.ood.scores import OF_LOGITS, OF_PROBS, missing, score_names, score_of
from fedlas.posthoc import AbstractCalibrator, Fit, build_calibrator
from fedlas.posthoc.base import check_count, check_text, with_logits
from fedlas.predictions import AnyPredictions, Array, Predictions, TopLabelPredictions, slices_of, with_every_class

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
        found, pairs = fields["detection"], fields["pairs"]
        return cls(
            name=check_text(fields["name"], "name"),
            results={name: Result.from_dict(one) for name, one in fields["results"].items()},
            bins={name: Bins.from_dict(one) for name, one in fields["bins"].items()},
            detection=None if found is None else Detection.from_dict(found),
            fits=tuple(Fit.from_dict(one) for one in fields["fits"]),
            parameters=fields["parameters"],
            leaked=check_count(fields["leaked"], "leaked"),
            comparisons={name: Comparison.from_dict(one) for name, one in fields["comparisons"].items()},
            pairs=None if pairs is None else _pairs_from_dict(pairs),
        )


def _pairs_to_dict(pairs: Pairs) -> dict[str, Any]:
    """Return plain values for JSON; columns are little-endian arrays in base64."""
    columns = {name: getattr(pairs, name) for name in PAIR_COLUMNS}
    return {"about": asdict(pairs.about)} | {
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
    return Pairs(confidence, correct, Definition(**fields["about"]), log_uncertainty)


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
        about = {"format": FORMAT, "n": self.n, "classes": self.classes, "split": self.split}
        return about | {"states": [state.to_dict(samples=samples) for state in self.states]}

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
            raise UserError(f"this is not a report that fedlas wrote: its format is {fields.get('format')!r}")
        before, *after = (State.from_dict(one) for one in fields["states"])
        n, classes = (check_count(fields[name], name) for name in ("n", "classes"))
        split = None if fields["split"] is None else check_text(fields["split"], "split")
        if any(state.pairs is not None and len(state.pairs.confidence) != n for state in (before, *after)):
            raise UserError(f"the report is about {n} samples, but holds pairs of another number")
        return cls(before, {one.name: one for one in after}, n, classes, split)

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
        found: dict[tuple[str, str], list[str]] = {}
        for state in self.states:
            for result in (state.results[name] for name in summary_metrics() if name in state.results):
                if result.note:
                    found.setdefault((result.definition.estimator, result.note), []).append(state.name)
        return [f"{metric} ({', '.join(states)}): {note}." for (metric, note), states in found.items()]

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
        found = [f"\n{state.name}\n{state.detection}" for state in self.states if state.detection is not None]
        return "\n".join([self._title, *lines, *found])


def evaluate(
    predictions: Any = None,
    labels: Array | str | Path | None = None,
    *,
    logits: Array | bool | None = None,
    ood: Mapping[str, AnyPredictions | Array] | None = None,
    posthoc: str | AbstractCalibrator | Sequence[str | AbstractCalibrator] = (),
    calibration: Any = None,
    train_features: Array | None = None,
    folds: int = FOLDS,
    bins: int = 15,
    intervals: bool = True,
    level: float = 0.95,
    resamples: int | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    **columns: Unpack[ColumnOptions],
) -> Report:
    """Evaluate predictions: accuracy, calibration, proper scores, selective prediction, OOD detection.

    Args:
        predictions: an array of probabilities, one row per sample; or the name of a file, a DataFrame of pandas or
            polars, a mapping of arrays, a `PredictionOutput` of Hugging Face (whose predictions are logits), or
            `Predictions`.
        labels: class numbers, or soft labels; a file may hold them, too. Not for what has its own labels.
        logits: an array of logits instead of `predictions`, or True where `predictions` holds logits.
        ood: predictions or logits on OOD data, by the name of the data set.
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
        progress: called with the fraction of the work that is done.
        columns: roles of the columns of a file or table, as in `read_predictions`; `normalize=True` divides rows of
            probabilities by their sums.
    """
    predictions = as_predictions(predictions, labels, logits=logits, **columns)
    predictions.correct  # noqa: B018 - an error where there are no labels, before anything is fitted
    if calibration is not None and not isinstance(calibration, Predictions | TopLabelPredictions):
        calibration = as_predictions(calibration, logits=logits if isinstance(logits, bool) else None, **columns)
    chosen = [posthoc] if isinstance(posthoc, str | AbstractCalibrator) else list(posthoc)
    for one in chosen:
        if not isinstance(one, str | AbstractCalibrator):
            raise UserTypeError(f"posthoc holds names or built calibrators, such as Temperature(), not {one!r}")
    if ood is not None and not isinstance(ood, Mapping):
        raise UserTypeError('ood is a mapping from names to predictions or logits, such as {"svhn": logits}')
    if not 1 <= bins <= MOST_BINS:
        raise UserError(f"bins is {bins}; a number from 1 to {MOST_BINS:,} is needed")
    _check_cross_fit(folds, seed)
    way = Resampling(level, resamples, seed) if intervals else None
    fits = [0 if _is_fitted(one) else 1 if calibration is not None else folds + bool(ood) for one in chosen]
    steps = _Steps(sum(fits) + 1 + len(ood or {}) + 1 + 2 * len(chosen), progress)
    steps.within(0.0)
    fitted = []
    if chosen:
        full = with_every_class(predictions, "calibration")
        other = None if calibration is None else with_every_class(calibration, "calibration")
        both = 0 if other is None or all(map(_is_fitted, chosen)) else samples_in_both(full, other)
        about: dict[str, Any] = {"whole": bool(ood), "leaked": both}
        fold_of = _assign_folds(len(predictions), folds, seed)
        fitted = [_fit_calibrator(one, full, other, fold_of, steps, **about) for one in chosen]
    calibrations = _named(fitted)
    ood_predictions = {name: as_ood_predictions(name, given, predictions) for name, given in (ood or {}).items()}
    every = [predictions, *ood_predictions.values()]
    scores = [
        s for s in score_names() if ood_predictions and all(missing(one, s, train_features) is None for one in every)
    ]
    runs = [
        _Run(UNCALIBRATED, None, EvaluationAccumulator(bins), tuple(scores)),
        # What a calibrator returns are log-probabilities up to a constant, so only scores of those mean anything.
        *(
            _Run(name, one, EvaluationAccumulator(bins), tuple(s for s in scores if s in OF_PROBS))
            for name, one in calibrations.items()
        ),
    ]
    known = _read(predictions, runs, train_features, steps, is_id=True)
    others = {name: _read(one, runs, train_features, steps, is_id=False) for name, one in ood_predictions.items()}
    states = {}
    for run in runs:
        found = None
        if run.scores:
            theirs = {name: held[run.name] for name, held in others.items()}
            split = predictions.split or "ID"
            found = detect_scores(known[run.name], theirs, level=level, seed=seed, split=split)
        states[run.name] = run.state(way, found)
        steps.done()
    before = states.pop(UNCALIBRATED)
    for run in runs[1:]:
        if way is not None:
            after = states[run.name]
            tests = runs[0].accumulator.compare(run.accumulator, before.results, after.results, way)
            states[run.name] = replace(after, comparisons=tests)
        steps.done()
    return Report(before, states, len(predictions), predictions.num_classes, predictions.split)


def calibrate(
    predictions: Any = None,
    labels: Array | str | Path | None = None,
    *,
    logits: Array | bool | None = None,
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
        logits: an array of logits instead of `predictions`, or True if `predictions` holds logits.
        posthoc: name of a calibrator, or a built one; a fitted one is used as it is.
        calibration: predictions of the same model on other samples, on which the calibrator is fitted; without it, it
            is cross-fitted: each fold of the samples is transformed by a calibrator fitted on the others.
        folds: number of folds for cross-fitting.
        seed: random seed of the assignment of samples to folds.
        columns: roles of the columns of a file or table, as in `read_predictions`.
    """
    if not isinstance(posthoc, str | AbstractCalibrator):
        raise UserTypeError(f"posthoc is a name or a built calibrator, such as Temperature(), not {posthoc!r}")
    _check_cross_fit(folds, seed)
    cross_fit = calibration is None and not _is_fitted(posthoc)
    full = with_every_class(
        as_predictions(predictions, labels, logits=logits, labelled=cross_fit, **columns), "calibration"
    )
    other = None
    if calibration is not None and not _is_fitted(posthoc):
        other = with_every_class(
            as_predictions(calibration, logits=logits if isinstance(logits, bool) else None, **columns)
            if not isinstance(calibration, AnyPredictions)
            else calibration,
            "calibration",
        )
    leaked = 0 if other is None or full.given_labels is None else samples_in_both(full, other)
    steps, fold_of = _Steps(folds, None), _assign_folds(len(full), folds, seed)
    fitted = _fit_calibrator(posthoc, full, other, fold_of, steps, whole=False, leaked=leaked)
    return fitted.transform(full, slice(0, len(full)))


def _check_cross_fit(folds: int, seed: int) -> None:
    if folds < 2:
        raise UserError(f"folds is {folds}; a calibrator is cross-fitted in two parts or more")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}; a whole number from 0 to 2**63 - 1 is needed")


def _assign_folds(samples: int, folds: int, seed: int) -> Int64[Tensor, " n"]:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)) % folds


class _Steps:
    """Reports progress: fits, passes over the data and intervals count the same.

    Args:
        total: how many steps there are.
        progress: called with the fraction that is done.
    """

    def __init__(self, total: int, progress: Callable[[float], None] | None) -> None:
        self.total, self.finished, self.progress = total, 0, progress

    def within(self, fraction: float) -> None:
        """Report the fraction of the present step that is done."""
        if self.progress is not None:
            self.progress(min(1.0, (self.finished + fraction) / self.total))

    def done(self) -> None:
        """Finish a step."""
        self.finished += 1
        self.within(0.0)


@dataclass(frozen=True)
class _Calibration:
    """A fitted calibrator, or one for each fold and one fitted on all samples.

    Args:
        calibrators: one, or one for each fold.
        whole: the one for samples without labels.
        fold: the fold of each sample.
        leaked: number of evaluated samples that it was also fitted on.
    """

    calibrators: tuple[AbstractCalibrator, ...]
    whole: AbstractCalibrator
    fold: Tensor | None = None
    leaked: int = 0

    def transform(self, part: Predictions, rows: slice) -> Predictions:
        """Calibrate labelled samples, each by a calibrator that was not fitted on it."""
        if self.fold is None:
            return self.whole.transform(part)
        fold = self.fold[rows].to(part.scores.device)
        rows_of = [(fold == number).nonzero()[:, 0] for number in range(len(self.calibrators))]
        filled = [(one, place) for one, place in zip(self.calibrators, rows_of, strict=True) if len(place)]
        samples = part.scores_only()
        calibrated = torch.cat([one.transform(samples[place]).logits for one, place in filled])
        return with_logits(part, calibrated[torch.cat(rows_of).argsort()])


@dataclass(frozen=True)
class _Run:
    """The accumulator of one state."""

    name: str
    calibration: _Calibration | None
    accumulator: EvaluationAccumulator
    scores: tuple[str, ...]

    def state(self, intervals: Resampling | None, detection: Detection | None) -> State:
        """Compute the state."""
        fitted = () if self.calibration is None else self.calibration.calibrators
        single = sorted({name for one in fitted for name, value in one.learned.items() if value.numel() == 1})
        single = [name for name in single if all(name in one.learned for one in fitted)]  # some folds may lack zeros
        means = {name: math.fsum(float(one.learned[name]) for one in fitted) / len(fitted) for name in single}
        means = {name: value for name, value in means.items() if math.isfinite(value)}
        fits = tuple(one.fitted for one in fitted if one.fitted is not None)
        top = self.accumulator.top
        found, bins = self.accumulator.compute(intervals, top), self.accumulator.histograms(top)
        leaked = 0 if self.calibration is None else self.calibration.leaked
        # The copy is without what metrics have computed of the pairs.
        return State(self.name, found, bins, detection, fits, means, leaked, pairs=replace(top))


def _read(
    given: AnyPredictions,
    runs: Sequence[_Run],
    train_features: Array | None,
    steps: _Steps,
    *,
    is_id: bool,
) -> dict[str, dict[str, Tensor]]:
    """Pass over predictions once: update accumulators of ID data, and return the OOD scores of every run."""
    kept: dict[str, dict[str, list[Tensor]]] = {
        run.name: {score: [] for score in run.scores if score in OF_LOGITS} for run in runs
    }
    for rows in slices_of(given.scores):
        taken = given[rows]
        for run in runs:
            if is_id:
                run.accumulator.update(
                    taken
                    if run.calibration is None
                    else run.calibration.transform(with_every_class(taken, "calibration"), rows)
                )
            if kept[run.name]:
                # One calibrator for ID and OOD samples: scores of different calibrators cannot be compared.
                part = (
                    taken
                    if run.calibration is None
                    else run.calibration.whole.transform(with_every_class(taken, "calibration"))
                )
                for score, found in kept[run.name].items():
                    found.append(score_of(part, score))
        if rows.stop < len(given):
            steps.within(rows.stop / len(given))
    steps.done()
    scores = {name: {score: torch.cat(found) for score, found in held.items()} for name, held in kept.items()}
    for run in runs:
        scores[run.name] |= {s: score_of(given, s, train_features) for s in run.scores if s not in OF_LOGITS}
    return scores


def _fit_calibrator(
    wanted: str | AbstractCalibrator,
    predictions: Predictions,
    calibration: Predictions | None,
    fold_of: Int64[Tensor, " n"],
    steps: _Steps,
    *,
    whole: bool,
    leaked: int,
) -> _Calibration:
    calibrator = build_calibrator(wanted) if isinstance(wanted, str) else wanted
    if calibrator.fitted is None and calibration is not None:
        calibrator = _copy(calibrator).fit(calibration)
        steps.done()
    else:
        leaked = 0
    if calibrator.fitted is not None:
        split = calibrator.fitted.split
        same = f"{split!r}, the split it is evaluated on" if split is not None and split == predictions.split else ""
        if leaked:
            of = "" if leaked == len(predictions) else f"{leaked:,} of "
            same = f"{of}the very samples it is evaluated on"
        if same:
            warnings.warn(
                f"{calibrator.name} was fitted on {same}: its results are optimistic", UserWarning, stacklevel=3
            )
        return _Calibration((calibrator,), calibrator, leaked=leaked)
    folds = int(fold_of.max()) + 1
    if len(predictions) < 2 * folds:
        few = f"{len(predictions)} samples are too few to cross-fit {calibrator.name} in {folds} parts"
        raise UserError(f"{few}; give calibration=...")
    place, samples = fold_of.to(predictions.scores.device), predictions.scores_only()
    fitted = []
    for fold in range(folds):
        one = _copy(calibrator).fit(samples[place != fold])
        assert one.fitted is not None
        one.fitted = replace(one.fitted, split=f"{predictions.split or 'the same split'}, other folds")
        fitted.append(one)
        steps.done()
    every = fitted[0]
    if whole:
        every = _copy(calibrator).fit(samples)
        steps.done()
    return _Calibration(tuple(fitted), every, fold_of)


def _is_fitted(wanted: str | AbstractCalibrator) -> bool:
    return not isinstance(wanted, str) and wanted.fitted is not None


def _copy(calibrator: AbstractCalibrator) -> AbstractCalibrator:
    return type(calibrator)(**calibrator.options)


def _named(calibrations: Sequence[_Calibration]) -> dict[str, _Calibration]:
    """Return calibrators by name; equal names are numbered."""
    found: dict[str, _Calibration] = {}
    for one in calibrations:
        name, number = one.calibrators[0].name, 1
        while (unique := name if number == 1 else f"{name} {number}") in found:
            number += 1
        found[unique] = one
    return found
