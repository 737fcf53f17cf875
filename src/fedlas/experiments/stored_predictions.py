"""Compact predictions stored beside the ledger, from which the numbers of its lines are computed.

    labels              of the test samples
    logits              of the test samples, up to 10 classes
    confidence, ...     of more classes: what an `EvaluationAccumulator` keeps, and the predicted class
    val/...             logits and labels of the validation samples, and which of them the temperature is fitted on
    folds               of validation samples: temperatures are cross-fitted in these parts
    ood/NAME/...        two scores of each OOD sample
    scaled/...          the same after temperature scaling: the accumulator, and the scores of OOD samples

Test logits are float32: with float16 the AURC and AECE of losses that compress confidences change by 1e-4. Stored
confidences are float64 and log(1 - confidence) is float32, because float32 confidences near 1 are equal, which changes
the AURC. Validation logits of more classes are float16: only temperatures and the selection of hyperparameters depend
on them. All other floats have 17 significant bits.

Numbers of a line are computed from its file, not from what the file was made of, so that anyone can compute them again.
Zipped arrays without pickles or clock times: equal predictions give equal bytes. Older files have logits as float16, or
no validation logits, or hold only what is after the calibrator, or have validation logits with 17 bits.
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
from fedlas.metrics.base import Resampling
from fedlas.metrics.calibration_error import aece, ece
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.metrics.paired import EachSample
from fedlas.metrics.result import Result
from fedlas.metrics.selective import area_values
from fedlas.ood.detection import auroc
from fedlas.ood.scores import score_of
from fedlas.posthoc import AbstractCalibrator, build_calibrator
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.training.run_folder import MACHINE, Run
from fedlas.training.validation import second_half, tuning_predictions

FEW_CLASSES = 10
SCORES = ("entropy", "max_probability")
ROUNDED = ("loss", "squared_error", "label_square")  # columns of an accumulator; confidences are not
SCALED = "scaled/"
LARGEST_FILE = 64 * 2**20  # unpacked; a file that claims more is not one of ours
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
FOLDS_SEED = 2027  # of the two parts of V2 in which temperatures are cross-fitted
SAME = 1e-5  # numbers that differ by less are equal: of ten thousand confidences a few change places by processor
SAME_ENDS = 2e-3  # ends of intervals: draws that fall on the other side of a tie
DIGITS = 5  # significant digits of a run's log


@dataclass(frozen=True, eq=False)
class StoredPredictions:
    """The stored predictions of one run, as trained or after temperature scaling.

    Args:
        arrays: by name, as they lie in the file.
        posthoc: the calibrator and what it learned; None as trained.
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
        """Select what the metrics need, as trained and, with validation logits, after temperature scaling.

        Args:
            predictions: of the samples to evaluate.
            ood: predictions of OOD data, by name.
            validation: predictions of the validation split.
            fitted_on: mask of the validation samples that the temperature is fitted on; None for all.
        """
        arrays, ood = _selected(predictions, ood or {}), ood or {}
        if validation is None:
            return cls(arrays)
        arrays |= {"val/logits": _validation_logits(validation), "val/labels": _small_ints(validation.labels)}
        arrays |= {} if fitted_on is None else {"val/fitted_on": fitted_on.cpu().numpy()}
        scaling = cls(arrays)._fitted()
        if scaling is None:
            return cls(arrays)
        after = _selected(scaling.transform(predictions), {name: scaling.transform(one) for name, one in ood.items()})
        shared = ("labels", "logits", "prediction")  # logits are divided by the temperature when they are read
        return cls(arrays | {f"{SCALED}{name}": array for name, array in after.items() if name not in shared})

    @classmethod
    def of_validation(cls, validation: Predictions, folds: Tensor) -> "StoredPredictions":
        """Select all logits of validation samples, and the part to which each belongs when temperatures are fitted."""
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
        """Divide the logits of each part by the temperature of the other part."""
        given, folds = self.predictions(), self._tensor("folds")
        assert given is not None
        logits, temperatures = given.logits.clone(), []
        for fold in folds.unique():
            scaling = build_calibrator(TEMPERATURE).fit(given[folds != fold])
            if scaling.fitted is None or scaling.fitted.doubt:
                return None
            logits[folds == fold] = scaling.transform(given.logits[folds == fold])
            temperatures.append(float(scaling.learned[TEMPERATURE]))
        about = {"name": TEMPERATURE, "fitted_on": "V2, the other half", TEMPERATURE: fmean(temperatures)}
        return StoredPredictions({"labels": self.arrays["labels"], "logits": logits.numpy()}, about)

    def _fitted(self) -> AbstractCalibrator | None:
        """Fit a temperature on the stored validation logits; None without them, and if it has no optimum."""
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
        top = accumulator.top
        found = accumulator.compute(intervals, top)
        found |= {f"{metric.name}_official": metric(top, compat="official") for metric in (ece, aece)}
        return {name: _measure(result) for name, result in found.items()}

    def detection(self) -> dict[str, dict[str, Measure]]:
        """Compute the AUROC of OOD detection, for each score and OOD data set."""
        places = sorted({name.split("/")[1] for name in self.arrays if name.startswith("ood/")})
        if not places:
            return {}
        known = self._known_scores()
        return {
            place: {score: _measure(auroc(known[score], self._tensor(f"ood/{place}/{score}"))) for score in SCORES}
            for place in places
        }

    def predictions(self) -> Predictions | None:
        """Return the predictions; None where logits were not stored.

        In float64: in float32 a tenth of the confidences are equal to others, or not, by processor, and samples at the
        edges of bins of equal mass change places.
        """
        return self._predictions

    @cached_property
    def _predictions(self) -> Predictions | None:
        if "logits" not in self.arrays:
            return None
        split = V2 if "folds" in self.arrays else TEST
        return Predictions(self._tensor("logits").double(), self._tensor("labels").long(), split=split)

    def tops(self) -> AnyPredictions:
        """Return the predictions, or the predicted classes and their confidences without logits."""
        given = self.predictions()
        if given is not None:
            return given
        confidence, prediction, labels = map(self._tensor, ("confidence", "prediction", "labels"))
        return TopLabelPredictions(confidence, prediction=prediction, labels=labels, split="test")

    def of_each_sample(self) -> dict[str, EachSample]:
        """Return NLL, Brier score and AURC sample by sample, where these were stored in place of logits."""
        if "logits" in self.arrays:
            return {}
        accumulator = self._accumulator()
        top = accumulator.top
        found, names = accumulator.compute(top=top), {"nll": "loss", "brier": "squared_error"}
        each = {name: EachSample(found[name], self._tensor(column).double()) for name, column in names.items()}
        return each | {"aurc": EachSample(found["aurc"], area_values(top, "aurc"))}

    def pack(self) -> bytes:
        """Write everything as one zipped file."""
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
        """Read what `pack` wrote; nothing in it is unpickled."""
        with file_errors(name), zipfile.ZipFile(io.BytesIO(content)) as folder:
            size = sum(entry.file_size for entry in folder.infolist())
            if size > LARGEST_FILE:
                raise UserError(f"it would unpack to {size:,} bytes; stored predictions are small")
            arrays = {entry.filename.removesuffix(".npy"): _read_array(folder, entry) for entry in folder.infolist()}
        if "labels" not in arrays or not {"logits", "confidence"} & set(arrays):
            raise UserError(f"{name} holds no predictions; it has {', '.join(sorted(arrays)) or 'nothing'}")
        return cls(arrays)

    def _accumulator(self) -> EvaluationAccumulator:
        given = self.predictions()
        if given is None:
            columns = {name: self._tensor(name) for name in self.arrays if "/" not in name}
            return EvaluationAccumulator.from_state_dict(
                columns | {name: columns[name].double() for name in ROUNDED}, split="test"
            )
        accumulator = EvaluationAccumulator()
        accumulator.update(given)
        return accumulator

    def _known_scores(self) -> dict[str, Tensor]:
        given = self.predictions()
        if given is not None:
            return {score: score_of(given, score).float() for score in SCORES}
        return {score: self._tensor(f"known/{score}") for score in SCORES}

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.arrays[name]).copy())


def _read_array(folder: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[np.generic]:
    """Read an array that is not of Python objects; unpacking takes most of the time, so it is done once."""
    file = io.BytesIO(folder.read(entry))
    check_array(entry, file)
    file.seek(0)
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _selected(predictions: Predictions, ood: Mapping[str, Predictions]) -> dict[str, NDArray[np.generic]]:
    """Select what the metrics need of test samples and OOD samples."""
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
    seen = {f"ood/{name}": one for name, one in ood.items()} | ({} if few or not ood else {"known": predictions})
    return arrays | {
        f"{n}/{score}": _rounded_floats(score_of(one, score)) for n, one in seen.items() for score in SCORES
    }


def _rounded_floats(values: Tensor) -> NDArray[np.float32]:
    """Round to float32 with 17 significant bits: the last byte is zero, and takes no space in a zipped file."""
    exact = values.float().clamp(-1e38, 1e38).cpu().numpy()  # rounded up, larger ones would be infinite
    return ((exact.view(np.uint32) + 0x80) & 0xFFFFFF00).view(np.float32)


def _validation_logits(validation: Predictions) -> NDArray[np.floating]:
    """Round logits, to finite numbers."""
    if validation.num_classes <= FEW_CLASSES:
        return _rounded_floats(validation.logits)
    most = torch.finfo(torch.float16).max
    return validation.logits.float().clamp(-most, most).cpu().numpy().astype(np.float16)


def load_stored_predictions(line: Line, ledger: Ledger) -> StoredPredictions:
    """Read the stored predictions of a line."""
    return _of_line(line, _stored(line, ledger))


def _stored(line: Line, ledger: Ledger) -> StoredPredictions:
    """Read the file of a line, which the lines of a run share."""
    return StoredPredictions.unpack(ledger.content_of(line), str(ledger.file_of(line)))


def _of_line(line: Line, stored: StoredPredictions) -> StoredPredictions:
    """Return the stored predictions as trained, or after temperature scaling, as the line evaluates them."""
    scaled = None if line.posthoc is None else stored.scaled()
    return stored if scaled is None else scaled


def record(run: Run, protocol: str, ledger: Ledger, split: str = TEST) -> None:
    """Evaluate a finished run, as trained and after temperature scaling, and write both lines into the ledger.

    Args:
        run: the run; if it has no validation predictions, there is one line.
        protocol: of its recipe.
        ledger: where the lines go.
        split: what to evaluate; "V2" of a run without test predictions.
    """
    recipe, state = run.recipe, run.recipe.evaluated
    validation = run.predictions_file(f"{state}-val").exists()
    there = [ledger.find(recipe, posthoc, split) for posthoc in ((None, TEMPERATURE) if validation else (None,))]
    if all(line is not None and set(recipe.ood) <= set(line.ood) for line in there):
        return
    kept = _stored_validation(run) if split == V2 else _stored_test(run, split, validation=validation)
    content = kept.pack()
    stored = {
        "file": f"predictions/{line_id(recipe, None, split)}.npz",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    date, about = datetime.now(UTC).date().isoformat(), _about(run)
    lines = [
        Line(
            id=line_id(recipe, None if one.posthoc is None else TEMPERATURE, split),
            recipe=recipe,
            protocol=protocol,
            metrics=one.metrics(Resampling()),
            ood=one.detection(),
            posthoc=one.posthoc,
            split=split,
            predictions=stored,
            date=date,
            **about,
        )
        for one in (kept, kept.scaled())
        if one is not None
    ]
    ledger.add(lines, content)


def _stored_test(run: Run, split: str, *, validation: bool) -> StoredPredictions:
    recipe, state = run.recipe, run.recipe.evaluated
    made = run.predictions(f"{state}-{split}")
    ood = {name: run.predictions(f"{state}-ood-{name}") for name in recipe.ood}
    if not validation:
        return StoredPredictions.of(made, ood)
    held_out = run.predictions(f"{state}-val")
    return StoredPredictions.of(made, ood, held_out, second_half(held_out) if recipe.halve_validation else None)


def _stored_validation(run: Run) -> StoredPredictions:
    if not run.recipe.halve_validation:
        raise UserError(f"{run.folder} has no V2: its recipe does not set halve_validation")
    made = tuning_predictions(run)
    return StoredPredictions.of_validation(made, second_half(made, FOLDS_SEED))


def problems(ledger: Ledger, *, intervals: bool = False) -> Iterator[str]:
    """Recompute every line and yield its differences.

    Args:
        ledger: the lines.
        intervals: whether to compute intervals too, which takes longer.
    """
    named = {line.predictions.get("file") for line in ledger.lines.values()}
    for path in sorted((ledger.folder / "predictions").glob("*")):
        if f"predictions/{path.name}" not in named:
            yield f"{path} belongs to no line"
    for _, lines in groupby(ledger.lines.values(), key=attrgetter("predictions")):
        yield from _problems_of(list(lines), ledger, intervals)


def _problems_of(lines: Sequence[Line], ledger: Ledger, intervals: bool) -> Iterator[str]:
    """Yield the differences of lines with the same file of predictions."""
    stored = None
    for line in lines:
        try:
            stored = _stored(line, ledger) if stored is None else stored
            kept = _of_line(line, stored)
        except ValueError as error:
            yield f"{line.id}: {error}"
            continue
        yield from (f"{line.id}: {problem}" for problem in _differences(line, kept, intervals))


def _differences(line: Line, kept: StoredPredictions, intervals: bool) -> Iterator[str]:
    """Yield the numbers of a line that its stored predictions do not reproduce."""
    learned, said = ((one or {}).get(TEMPERATURE) for one in (kept.posthoc, line.posthoc))
    if learned is not None and not _agree(learned, said, SAME):
        yield f"the temperature is {said} in the ledger and {learned} now"
    now = {"": kept.metrics(Resampling() if intervals else None), **kept.detection()}
    for place in dict.fromkeys((*now, *line.ood)):  # also what only the line knows of
        found = now.get(place, {})
        written = line.metrics if not place else line.ood.get(place, {})
        if unknown := set(written) - set(found):  # a metric that is younger than the line is not in it
            yield f"{place or 'it'} has metrics that its predictions do not give: {sorted(unknown)}"
        for name in set(found) & set(written):
            pairs = list(zip(found[name], written[name], strict=True))
            if not _agree(*pairs[0], SAME) or (intervals and not all(_agree(*p, SAME_ENDS) for p in pairs[1:])):
                yield f"{place} {name} is {written[name]} in the ledger and {found[name]} now".strip()


def _about(run: Run) -> dict[str, Any]:
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
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _agree(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)


def _measure(result: Result) -> Measure:
    if result.interval is None:
        return float(result), None, None
    return float(result), result.interval.low, result.interval.high


def _small_ints(values: Tensor) -> NDArray[np.generic]:
    """Convert class numbers to the smallest sufficient integer type."""
    most = int(values.max()) if len(values) else 0
    kind = np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int64
    return values.cpu().numpy().astype(kind)
