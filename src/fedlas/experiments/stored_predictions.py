"""Compact predictions stored beside the ledger, from which the numbers of its lines are computed.

    labels              labels of the test samples
    logits              logits of the test samples, for up to 10 classes
    confidence, ...     for more classes: the columns of an `EvaluationAccumulator`, and the predicted class
    val/...             logits and labels of the validation samples, and a mask of those used to fit the temperature
    folds               fold of each validation sample, if temperatures are cross-fitted
    ood/NAME/...        two scores of each OOD sample
    scaled/...          columns of the accumulator and OOD scores after temperature scaling

Test logits are float32: with float16 the AURC and AECE of losses that compress confidences change by 1e-4. Stored
confidences are float64 and log(1 - confidence) is float32, because float32 confidences near 1 would be tied, which
changes the AURC. With more than 10 classes, validation logits are float16, because only temperatures and the selection
of hyperparameters depend on them. All other floats have 17 significant bits.

The metrics of a line are computed from its file, not from the original predictions, so that anyone can recompute them.
Files are zip archives without pickles or timestamps, so equal predictions give equal bytes. In older files logits may
be float16, validation logits may be missing or have 17 bits, or only the predictions after calibration are stored.
"""

import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import UserError
from fedlas.experiments.ledger import TEMPERATURE, TEST, V2, Ledger, Line, Measure, line_id
from fedlas.io.npz import check_array
from fedlas.io.untrusted import file_errors
from fedlas.metrics.base import EachSample, Resampling
from fedlas.metrics.calibration_error import aece, ece
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.metrics.proper_scores import brier, nll
from fedlas.metrics.result import Result
from fedlas.metrics.selective import aurc
from fedlas.ood.detection import auroc
from fedlas.ood.scores import score_of
from fedlas.posthoc import AbstractCalibrator, build_calibrator
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.training.run_folder import MACHINE, Run
from fedlas.training.validation import second_half, tuning_predictions

FEW_CLASSES = 10
SCORES = ("entropy", "max_probability")
ROUNDED = ("loss", "squared_error", "label_square")  # accumulator columns that are rounded
SCALED = "scaled/"
LARGEST_FILE = 64 * 2**20  # bytes after unpacking; files written by this module are smaller
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
FOLDS_SEED = 2027  # seed of the two folds of V2 for cross-fitting temperatures
SAME = 1e-5  # tolerance of metrics: on another processor a few of ten thousand confidences change their order
SAME_ENDS = 2e-3  # tolerance of interval ends: resamples may break ties differently
DIGITS = 5  # significant digits of logged values


@dataclass(frozen=True, eq=False)
class StoredPredictions:
    """The stored predictions of one run, as trained or after temperature scaling.

    Args:
        arrays: the arrays of the file, by name.
        posthoc: the calibrator and its fitted parameters; None before calibration.
    """

    arrays: Arrays
    posthoc: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        predictions: Predictions,
        ood: Mapping[str, Predictions] | None = None,
        validation: Predictions | None = None,
        fitted_on: Tensor | None = None,
    ) -> "StoredPredictions":
        """Select the arrays that the metrics need, before and, with validation logits, after temperature scaling.

        Args:
            predictions: predictions of the samples to evaluate.
            ood: predictions of OOD data, by name.
            validation: predictions of the validation split.
            fitted_on: mask of the validation samples used to fit the temperature; None for all.
        """
        arrays, ood = _selected(predictions, ood or {}), ood or {}
        if validation is None:
            return cls(arrays)
        arrays |= {"val/logits": _validation_logits(validation), "val/labels": _small_ints(validation.labels)}
        arrays |= {} if fitted_on is None else {"val/fitted_on": fitted_on.cpu().numpy()}
        scaling = cls(arrays)._fitted()
        if scaling is None:
            return cls(arrays)
        after = _selected(
            scaling.transform(predictions),
            {name: scaling.transform(ood_predictions) for name, ood_predictions in ood.items()},
        )
        shared = ("labels", "logits", "prediction")  # logits are divided by the temperature when they are read
        return cls(arrays | {f"{SCALED}{name}": array for name, array in after.items() if name not in shared})

    @classmethod
    def of_validation(cls, validation: Predictions, folds: Tensor) -> "StoredPredictions":
        """Select all logits of validation samples, and the fold of each sample for cross-fitting the temperature."""
        arrays = {"labels": _small_ints(validation.labels), "logits": _validation_logits(validation)}
        return cls(arrays | {"folds": _small_ints(folds)})

    def scaled(self) -> "StoredPredictions | None":
        """Return the predictions after temperature scaling; None if no temperature can be fitted."""
        if "folds" in self.arrays:
            return self._cross_fitted()
        scaling = self._fitted()
        if scaling is None:
            return None
        arrays = {name: self.arrays[name] for name in ("labels", "prediction") if name in self.arrays}
        arrays |= {n.removeprefix(SCALED): array for n, array in self.arrays.items() if n.startswith(SCALED)}
        if "logits" in self.arrays:
            arrays["logits"] = scaling.transform(self._tensor("logits").double()).numpy()
        learned = {name: float(value) for name, value in scaling.learned.items() if bool(value.isfinite())}
        part = "V2" if "val/fitted_on" in self.arrays else "val"
        return StoredPredictions(arrays, {"name": TEMPERATURE, "fitted_on": part, **learned})

    def _cross_fitted(self) -> "StoredPredictions | None":
        """Divide the logits of each fold by the temperature fitted on the other fold."""
        validation, folds = self.predictions, self._tensor("folds")
        assert validation is not None
        logits, temperatures = validation.logits.clone(), []
        for fold in folds.unique():
            scaling = build_calibrator(TEMPERATURE).fit(validation[folds != fold])
            if scaling.fitted is None or scaling.fitted.doubt:
                return None
            logits[folds == fold] = scaling.transform(validation.logits[folds == fold])
            temperatures.append(float(scaling.learned[TEMPERATURE]))
        posthoc = {"name": TEMPERATURE, "fitted_on": "V2, the other half", TEMPERATURE: fmean(temperatures)}
        return StoredPredictions({"labels": self.arrays["labels"], "logits": logits.numpy()}, posthoc)

    def _fitted(self) -> AbstractCalibrator | None:
        """Fit a temperature on the stored validation logits; return None without logits or without an optimum."""
        if not {"val/logits", "val/labels"} <= set(self.arrays):
            return None
        logits, labels = self._tensor("val/logits").double(), self._tensor("val/labels").long()
        if "val/fitted_on" in self.arrays:
            used = self._tensor("val/fitted_on")
            logits, labels = logits[used], labels[used]
        scaling = build_calibrator(TEMPERATURE).fit(Predictions(logits, labels, split="val"))
        return None if scaling.fitted is None or scaling.fitted.doubt else scaling

    def metrics(self, intervals: Resampling | None = None) -> dict[str, Measure]:
        """Compute every metric, and the ECE and AECE of the official code."""
        accumulator = self._accumulator()
        results = accumulator.compute(intervals)
        results |= {f"{metric.name}_official": metric(accumulator.top, compat="official") for metric in (ece, aece)}
        return {name: _measure(result) for name, result in results.items()}

    def detection(self) -> dict[str, dict[str, Measure]]:
        """Compute the AUROC of OOD detection, for each score and OOD data set."""
        ood_sets = sorted({name.split("/")[1] for name in self.arrays if name.startswith("ood/")})
        if not ood_sets:
            return {}
        id_scores = self._known_scores()
        return {
            ood: {score: _measure(auroc(id_scores[score], self._tensor(f"ood/{ood}/{score}"))) for score in SCORES}
            for ood in ood_sets
        }

    @cached_property
    def predictions(self) -> Predictions | None:
        """The predictions; None where logits were not stored.

        Logits are converted to float64. In float32 a tenth of the confidences are tied, which ones depends on the
        processor, and samples at the edges of equal-mass bins would change bins.
        """
        if "logits" not in self.arrays:
            return None
        split = V2 if "folds" in self.arrays else TEST
        return Predictions(self._tensor("logits").double(), self._tensor("labels").long(), split=split)

    def tops(self) -> AnyPredictions:
        """Return the predictions; without stored logits, only predicted classes and confidences."""
        if self.predictions is not None:
            return self.predictions
        confidence, prediction, labels = map(self._tensor, ("confidence", "prediction", "labels"))
        return TopLabelPredictions(confidence, prediction=prediction, labels=labels, split="test")

    def of_each_sample(self) -> dict[str, EachSample]:
        """Return NLL, Brier score and AURC of each sample if they were stored instead of logits; else nothing."""
        if "logits" in self.arrays:
            return {}
        accumulator = self._accumulator()
        results = accumulator.compute()
        samples = {
            metric.name: EachSample(results[metric.name], self._tensor(metric.column).double())
            for metric in (nll, brier)
        }
        return samples | {"aurc": EachSample(results["aurc"], aurc.values_of(accumulator.top))}

    def pack(self) -> bytes:
        """Return the arrays as the bytes of one zip file."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as folder:
            for name in sorted(self.arrays):
                inside = io.BytesIO()
                np.lib.format.write_array(inside, np.ascontiguousarray(self.arrays[name]), allow_pickle=False)
                entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                folder.writestr(entry, inside.getvalue(), zipfile.ZIP_BZIP2, 9)  # a tenth smaller than deflated
        return buffer.getvalue()

    @classmethod
    def unpack(cls, content: bytes, name: str = "a file of stored predictions") -> "StoredPredictions":
        """Read the output of `pack`, without pickle."""
        with file_errors(name), zipfile.ZipFile(io.BytesIO(content)) as folder:
            size = sum(entry.file_size for entry in folder.infolist())
            if size > LARGEST_FILE:
                raise UserError(f"it would unpack to {size:,} bytes; stored predictions are small")
            arrays = {entry.filename.removesuffix(".npy"): _read_array(folder, entry) for entry in folder.infolist()}
        if "labels" not in arrays or not {"logits", "confidence"} & set(arrays):
            raise UserError(f"{name} holds no predictions; it has {', '.join(sorted(arrays)) or 'nothing'}")
        return cls(arrays)

    def _accumulator(self) -> EvaluationAccumulator:
        if self.predictions is None:
            columns = {name: self._tensor(name) for name in self.arrays if "/" not in name}
            return EvaluationAccumulator.from_state_dict(
                columns | {name: columns[name].double() for name in ROUNDED}, split="test"
            )
        accumulator = EvaluationAccumulator()
        accumulator.update(self.predictions)
        return accumulator

    def _known_scores(self) -> dict[str, Tensor]:
        if self.predictions is not None:
            return {score: score_of(self.predictions, score).float() for score in SCORES}
        return {score: self._tensor(f"known/{score}") for score in SCORES}

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.arrays[name]).copy())


def _read_array(folder: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[np.generic]:
    """Read an array; raise for Python objects. The entry is decompressed once, because that takes most of the time."""
    file = io.BytesIO(folder.read(entry))
    check_array(entry, file)
    file.seek(0)
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _selected(predictions: Predictions, ood: Mapping[str, Predictions]) -> dict[str, NDArray[np.generic]]:
    """Return the arrays that the metrics need, for test samples and OOD samples."""
    arrays: dict[str, NDArray[np.generic]] = {"labels": _small_ints(predictions.labels)}
    few = predictions.num_classes <= FEW_CLASSES
    if few:
        arrays["logits"] = predictions.logits.float().cpu().numpy()
    else:
        accumulator = EvaluationAccumulator()
        accumulator.update(Predictions(predictions.logits.double(), predictions.labels))
        columns = accumulator.state_dict()
        columns["log_uncertainty"] = columns["log_uncertainty"].float()
        arrays |= {name: _rounded_floats(c) if name in ROUNDED else c.numpy() for name, c in columns.items()}
        arrays["prediction"] = _small_ints(predictions.logits.argmax(1))
    scored = {f"ood/{name}": samples for name, samples in ood.items()} | (
        {} if few or not ood else {"known": predictions}
    )
    return arrays | {
        f"{n}/{score}": _rounded_floats(score_of(samples, score)) for n, samples in scored.items() for score in SCORES
    }


def _rounded_floats(values: Tensor) -> NDArray[np.float32]:
    """Round to float32 with 17 significant bits: the last byte is zero and compresses well."""
    exact = values.float().clamp(-1e38, 1e38).cpu().numpy()  # rounding up larger values would give infinity
    return ((exact.view(np.uint32) + 0x80) & 0xFFFFFF00).view(np.float32)


def _validation_logits(validation: Predictions) -> NDArray[np.floating]:
    """Round validation logits; clamp them so that they stay finite."""
    if validation.num_classes <= FEW_CLASSES:
        return _rounded_floats(validation.logits)
    most = torch.finfo(torch.float16).max
    return validation.logits.float().clamp(-most, most).cpu().numpy().astype(np.float16)


def load_stored_predictions(line: Line, ledger: Ledger) -> StoredPredictions:
    """Read the stored predictions of a line."""
    return _of_line(line, _stored(line, ledger))


def _stored(line: Line, ledger: Ledger) -> StoredPredictions:
    """Read the file of a line; both lines of a run share one file."""
    return StoredPredictions.unpack(ledger.content_of(line), str(ledger.file_of(line)))


def _of_line(line: Line, stored: StoredPredictions) -> StoredPredictions:
    """Return the stored predictions, after temperature scaling if the line evaluates a calibrator."""
    scaled = None if line.posthoc is None else stored.scaled()
    return stored if scaled is None else scaled


def record(run: Run, protocol: str, ledger: Ledger, split: str = TEST, *, state: str | None = None) -> None:
    """Evaluate a finished run, as trained and after temperature scaling, and write both lines into the ledger.

    Args:
        run: the run; without validation predictions, only the line before calibration is written.
        protocol: protocol of the recipe.
        ledger: ledger to which the lines are added.
        split: split to evaluate; "V2" for a run without test predictions.
        state: weights to evaluate, "best" or "last"; by default those that the recipe evaluates.
    """
    recipe, state = run.recipe, state or run.recipe.evaluated
    validation = run.predictions_file(f"{state}-val").exists()
    existing = [ledger.find(recipe, posthoc, split) for posthoc in ((None, TEMPERATURE) if validation else (None,))]
    if all(line is not None and set(recipe.ood) <= set(line.ood) for line in existing):
        return
    predictions = _stored_validation(run) if split == V2 else _stored_test(run, split, state, validation=validation)
    content = predictions.pack()
    file = {
        "file": f"predictions/{line_id(recipe, None, split)}.npz",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    date, run_fields = datetime.now(UTC).date().isoformat(), _describe_run(run)
    lines = [
        Line(
            id=line_id(recipe, None if stored.posthoc is None else TEMPERATURE, split),
            recipe=recipe,
            protocol=protocol,
            metrics=stored.metrics(Resampling()),
            ood=stored.detection(),
            posthoc=stored.posthoc,
            split=split,
            predictions=file,
            date=date,
            **run_fields,
        )
        for stored in (predictions, predictions.scaled())
        if stored is not None
    ]
    ledger.add(lines, content)


def _stored_test(run: Run, split: str, state: str, *, validation: bool) -> StoredPredictions:
    recipe = run.recipe
    test = run.predictions(f"{state}-{split}")
    ood = {name: run.predictions(f"{state}-ood-{name}") for name in recipe.ood}
    if not validation:
        return StoredPredictions.of(test, ood)
    held_out = run.predictions(f"{state}-val")
    return StoredPredictions.of(test, ood, held_out, second_half(held_out) if recipe.halve_validation else None)


def _stored_validation(run: Run) -> StoredPredictions:
    if not run.recipe.halve_validation:
        raise UserError(f"{run.folder} has no V2: its recipe does not set halve_validation")
    v2 = tuning_predictions(run)
    return StoredPredictions.of_validation(v2, second_half(v2, FOLDS_SEED))


def problems(ledger: Ledger, *, intervals: bool = False) -> Iterator[str]:
    """Recompute every line of a ledger and yield a message for each difference.

    Args:
        ledger: ledger to check.
        intervals: whether to compute intervals too, which takes longer.
    """
    named = {line.predictions.get("file") for line in ledger.lines.values()}
    for path in sorted((ledger.folder / "predictions").glob("*")):
        if f"predictions/{path.name}" not in named:
            yield f"{path} belongs to no line"
    for _, lines in groupby(ledger.lines.values(), key=attrgetter("predictions")):
        yield from _problems_of(list(lines), ledger, intervals)


def _problems_of(lines: Sequence[Line], ledger: Ledger, intervals: bool) -> Iterator[str]:
    """Yield the differences of lines that share a file of predictions."""
    of_file = None
    for line in lines:
        try:
            of_file = _stored(line, ledger) if of_file is None else of_file
            stored = _of_line(line, of_file)
        except ValueError as error:
            yield f"{line.id}: {error}"
            continue
        yield from (f"{line.id}: {problem}" for problem in _differences(line, stored, intervals))


def _differences(line: Line, stored: StoredPredictions, intervals: bool) -> Iterator[str]:
    """Yield the numbers of a line that its stored predictions do not reproduce."""
    learned, recorded = ((posthoc or {}).get(TEMPERATURE) for posthoc in (stored.posthoc, line.posthoc))
    if learned is not None and not _agree(learned, recorded, SAME):
        yield f"the temperature is {recorded} in the ledger and {learned} now"
    now = {"": stored.metrics(Resampling() if intervals else None), **stored.detection()}
    for ood in dict.fromkeys((*now, *line.ood)):  # also OOD data sets that only the line has
        computed = now.get(ood, {})
        written = line.metrics if not ood else line.ood.get(ood, {})
        if unknown := set(written) - set(computed):  # a new metric may be missing in an old line, but not the reverse
            yield f"{ood or 'it'} has metrics that its predictions do not give: {sorted(unknown)}"
        for name in set(computed) & set(written):
            value, *ends = zip(computed[name], written[name], strict=True)
            recorded_ends = intervals and written[name][1] is not None  # a metric may have had no interval at that time
            if not _agree(*value, SAME) or (recorded_ends and not all(_agree(*pair, SAME_ENDS) for pair in ends)):
                yield f"{ood} {name} is {written[name]} in the ledger and {computed[name]} now".strip()


def _describe_run(run: Run) -> dict[str, Any]:
    """Return the fields of a line that describe the run."""
    log, environment = run.log, dict(run.environment)
    speeds = [record[MACHINE]["images_per_second"] for record in log if not record[MACHINE]["continued_at_step"]]
    return {
        "curve": tuple(_shortened(record) for record in log),
        "best_epoch": log[-1]["best_epoch"],
        "seconds": round(sum(record[MACHINE]["seconds"] for record in log), 2),
        "images_per_second": round(median(speeds), 1) if speeds else 0.0,
        "data": environment.pop("data", {}),
        "environment": environment,
    }


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an epoch that figures use."""
    gate = {name: value for name, value in record["gate"].items() if not isinstance(value, Mapping)}
    shown = {name: record[name] for name in ("epoch", "lr", "train", "val")} | {"gate": gate}
    shown |= {"loss_state": record["loss_state"]} if "loss_state" in record else {}
    return {name: _rounded(value) for name, value in shown.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _agree(first: float | None, second: float | None, tolerance: float) -> bool:
    if first is None or second is None:
        return first is second
    return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)


def _measure(result: Result) -> Measure:
    if result.interval is None:
        return float(result), None, None
    return float(result), result.interval.low, result.interval.high


def _small_ints(values: Tensor) -> NDArray[np.generic]:
    """Convert class numbers to the smallest sufficient integer type."""
    most = int(values.max()) if len(values) else 0
    kind = np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int64
    return values.cpu().numpy().astype(kind)
