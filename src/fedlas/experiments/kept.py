"""Predictions small enough to be kept beside the ledger, and the numbers of its lines, computed from them.

    up to 10 classes    logits as float16, labels
    more, and           confidence, correctness, loss and squared error of each sample, and one histogram per class:
    after a calibrator  a `Digest`, from which every metric is read; and the predicted class
    foreign data        two scores of each sample

Numbers of a line are computed from its file, not from what the file was made of, so that anyone can compute them again.
Zipped arrays without pickles or clock times: equal predictions give equal bytes.
"""

import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.experiments.ledger import TEST, Ledger, Line, Measure, line_id
from fedlas.metrics.calibration import aece, ece
from fedlas.metrics.comparison import EachSample
from fedlas.metrics.digest import Digest, Intervals
from fedlas.metrics.result import Result
from fedlas.ood.detection import detect_scores
from fedlas.ood.scores import score_of
from fedlas.posthoc import build_calibrator
from fedlas.predictions import Predictions
from fedlas.storage import check_arrays, readable
from fedlas.train.runs import MACHINE, Run

FEW_CLASSES = 10
SCORES = ("entropy", "max_probability")
ROUNDED = ("loss", "squared_error", "label_square")  # kept in half the size
LARGEST_FILE = 64 * 2**20  # unpacked; a file that claims more is not one of ours
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
STATE = "best"  # the weights of the epoch with the best validation accuracy, as published
SAME = 1e-5  # numbers that differ by less are equal: of ten thousand confidences a few change places by processor
SAME_ENDS = 2e-3  # ends of intervals: draws that fall on the other side of a tie
DIGITS = 5  # of what is kept of a run's log


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of one run's predictions.

    Args:
        arrays: by name, as they lie in the file.
    """

    arrays: Arrays

    @classmethod
    def of(
        cls, predictions: Predictions, ood: Mapping[str, Predictions] | None = None, *, calibrated: bool = False
    ) -> "Kept":
        """Take of predictions what the metrics need."""
        arrays: dict[str, NDArray[np.generic]] = {"labels": _small_ints(predictions.labels)}
        few = predictions.num_classes <= FEW_CLASSES and not calibrated
        if few:
            arrays["logits"] = _halves(predictions.logits)
        else:
            digest = Digest()
            digest.take(predictions)
            columns = digest.columns()
            arrays |= {n: (c.float() if n in ROUNDED else c).numpy() for n, c in columns.items()}
            arrays["prediction"] = _small_ints(predictions.logits.argmax(1))
        for place, foreign in (ood or {}).items():
            # Rounded like the known ones, or rounding alone would tell them apart.
            seen = Predictions(_halves(foreign.logits).astype(np.float32)) if few else foreign
            for score in SCORES:
                arrays[f"ood/{place}/{score}"] = score_of(seen, score).float().cpu().numpy()
        if ood and not few:
            arrays |= {f"known/{score}": score_of(predictions, score).float().cpu().numpy() for score in SCORES}
        return cls(arrays)

    def metrics(self, intervals: Intervals | None = None) -> dict[str, Measure]:
        """Compute every metric, and those of the paper's code beside ours."""
        digest = self._digest()
        found = digest.results(intervals)
        found |= {f"{metric.__name__}_official": metric(digest.top, compat="official") for metric in (ece, aece)}
        return {name: _measure(result) for name, result in found.items()}

    def detection(self) -> dict[str, dict[str, Measure]]:
        """Compute how well foreign data is told apart: the AUROC of each score on each foreign data set."""
        places = sorted({name.split("/")[1] for name in self.arrays if name.startswith("ood/")})
        if not places:
            return {}
        foreign = {place: {score: self._tensor(f"ood/{place}/{score}") for score in SCORES} for place in places}
        found = detect_scores(self._known_scores(), foreign)
        return {place: {score: _measure(found[place][score].auroc) for score in SCORES} for place in places}

    def predictions(self) -> Predictions | None:
        """Give the predictions back, where logits were kept.

        In float64: in float32 a tenth of the confidences are equal to others, or not, by processor, and samples at the
        edges of bins of equal mass change places.
        """
        if "logits" not in self.arrays:
            return None
        return Predictions(self._tensor("logits").double(), self._tensor("labels").long(), split="test")

    def tops(self) -> Predictions:
        """Give the predicted classes and their confidences back, which are always kept."""
        given = self.predictions()
        if given is not None:
            return given
        names = {"confidence": "confidence", "prediction": "prediction", "label": "labels"}
        columns = {name: np.asarray(self.arrays[place]) for name, place in names.items()}
        return Predictions.from_columns(columns, "kept predictions", "test")

    def of_each_sample(self) -> dict[str, EachSample]:
        """Give NLL and Brier score sample by sample, where not the logits but these were kept."""
        if "logits" in self.arrays:
            return {}
        found = self._digest().results()
        names = {"nll": "loss", "brier": "squared_error"}
        return {name: EachSample(found[name], self._tensor(column).double()) for name, column in names.items()}

    def pack(self) -> bytes:
        """Write everything as one zipped file."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as folder:
            for name in sorted(self.arrays):
                inside = io.BytesIO()
                np.lib.format.write_array(inside, np.ascontiguousarray(self.arrays[name]), allow_pickle=False)
                entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                folder.writestr(entry, inside.getvalue(), zipfile.ZIP_DEFLATED, 9)
        return buffer.getvalue()

    @classmethod
    def unpack(cls, content: bytes, name: str = "a file of kept predictions") -> "Kept":
        """Read what `pack` wrote; nothing in it is unpickled."""
        with readable(name), zipfile.ZipFile(io.BytesIO(content)) as folder:
            size = sum(entry.file_size for entry in folder.infolist())
            if size > LARGEST_FILE:
                raise ValueError(f"it would unpack to {size:,} bytes; kept predictions are small")
            check_arrays(folder)
            arrays = {
                entry.filename.removesuffix(".npy"): np.lib.format.read_array(
                    io.BytesIO(folder.read(entry)), allow_pickle=False
                )
                for entry in folder.infolist()
            }
        if "labels" not in arrays or not {"logits", "confidence"} & set(arrays):
            raise ValueError(f"{name} holds no predictions; it has {', '.join(sorted(arrays)) or 'nothing'}")
        return cls(arrays)

    def _digest(self) -> Digest:
        given = self.predictions()
        if given is None:
            columns = {name: self._tensor(name) for name in self.arrays if "/" not in name}
            return Digest.from_columns(columns | {name: columns[name].double() for name in ROUNDED}, split="test")
        digest = Digest()
        digest.take(given)
        return digest

    def _known_scores(self) -> dict[str, Tensor]:
        given = self.predictions()
        if given is not None:
            seen = Predictions(given.logits.float())  # as the foreign ones are
            return {score: score_of(seen, score).float() for score in SCORES}
        return {score: self._tensor(f"known/{score}") for score in SCORES}

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(np.asarray(self.arrays[name]).copy())


def _halves(logits: Tensor) -> NDArray[np.float16]:
    """Round logits to float16; the likeliest class of each row stays what it is."""
    largest = float(np.finfo(np.float16).max)
    rounded = logits.clamp(-largest, largest).cpu().numpy().astype(np.float16)
    rows, likeliest = np.arange(len(rounded)), logits.argmax(1).cpu().numpy()
    others = rounded.copy()
    others[rows, likeliest] = -np.inf
    least = np.nextafter(others.max(1), np.float16(np.inf))
    rounded[rows, likeliest] = np.maximum(rounded[rows, likeliest], least)
    return rounded


def kept_of(line: Line, ledger: Ledger) -> Kept:
    """Read the predictions of a line."""
    return Kept.unpack(ledger.content_of(line), str(ledger.file_of(line)))


def record(run: Run, protocol: str, posthoc: str | None, ledger: Ledger, split: str = TEST) -> Line:
    """Judge a finished run, as trained or after a calibrator, and write its line into the ledger.

    Args:
        run: the run.
        protocol: of its recipe.
        posthoc: the calibrator; it is fitted on the validation split.
        ledger: where the line goes.
        split: what to judge.
    """
    recipe = run.recipe
    there = ledger.find(recipe, posthoc, split)
    if there is not None and set(recipe.ood) <= set(there.ood):
        return there
    predictions, foreign, learned = _judged(run, posthoc, split)
    kept = Kept.of(predictions, foreign, calibrated=posthoc is not None)
    content, name = kept.pack(), line_id(recipe, posthoc, split)
    line = Line(
        id=name,
        recipe=recipe,
        protocol=protocol,
        metrics=kept.metrics(Intervals()),
        ood=kept.detection(),
        posthoc=learned,
        split=split,
        predictions={"file": f"predictions/{name}.npz", "sha256": hashlib.sha256(content).hexdigest()},
        date=datetime.now(UTC).date().isoformat(),
        **_about(run),
    )
    return ledger.add(line, content)


def problems(ledger: Ledger, *, intervals: bool = False) -> Iterator[str]:
    """Compute the numbers of every line again, and name what does not agree.

    Args:
        ledger: the lines.
        intervals: whether to compute intervals too, which takes longer.
    """
    named = {line.predictions.get("file") for line in ledger.lines.values()}
    for path in sorted((ledger.folder / "predictions").glob("*")):
        if f"predictions/{path.name}" not in named:
            yield f"{path} belongs to no line"
    for line in ledger.lines.values():
        yield from (f"{line.id}: {problem}" for problem in _problems_of(line, ledger, intervals))


def _problems_of(line: Line, ledger: Ledger, intervals: bool) -> Iterator[str]:
    try:
        kept = kept_of(line, ledger)
    except ValueError as error:
        yield str(error)
        return
    now = {"": kept.metrics(Intervals() if intervals else None), **kept.detection()}
    for place in dict.fromkeys((*now, *line.ood)):  # also what only the line knows of
        found = now.get(place, {})
        written = line.metrics if not place else line.ood.get(place, {})
        if set(found) != set(written):
            yield f"{place or 'it'} has other metrics than its predictions: {sorted(set(found) ^ set(written))}"
        for name in set(found) & set(written):
            pairs = list(zip(found[name], written[name], strict=True))
            if not _agree(*pairs[0], SAME) or (intervals and not all(_agree(*p, SAME_ENDS) for p in pairs[1:])):
                yield f"{place} {name} is {written[name]} in the ledger and {found[name]} now".strip()


def _judged(
    run: Run, posthoc: str | None, split: str
) -> tuple[Predictions, dict[str, Predictions], dict[str, Any] | None]:
    """Give the predictions of a run on known and foreign data, repaired where a calibrator is named."""
    known = run.predictions(f"{STATE}-{split}")
    foreign = {name: run.predictions(f"{STATE}-ood-{name}") for name in run.recipe.ood}
    if posthoc is None:
        return known, foreign, None
    calibrator = build_calibrator(posthoc).fit(run.predictions(f"{STATE}-val"))
    fixed = {name: calibrator.transform(one) for name, one in {"": known, **foreign}.items()}
    learned = {name: float(value) for name, value in calibrator.learned.items() if value.numel() == 1}
    return fixed.pop(""), fixed, {"name": posthoc, "fitted_on": "val", **learned}


def _about(run: Run) -> dict[str, Any]:
    """Take from a run folder what a line tells about the run."""
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
    """Keep of an epoch what figures show."""
    gate = {name: value for name, value in record["gate"].items() if not isinstance(value, Mapping)}
    kept = {"epoch": record["epoch"], "lr": record["lr"], "train": record["train"], "val": record["val"], "gate": gate}
    return {name: _rounded(value) for name, value in kept.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
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
    """Take the smallest type that holds class numbers."""
    most = int(values.max()) if len(values) else 0
    kind = np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int64
    return values.cpu().numpy().astype(kind)
