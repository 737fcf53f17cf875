"""Predictions small enough to be kept beside the ledger, and the numbers that can be computed from them again.

    up to 10 classes    logits as float16, labels
    more, and           confidence, correctness, loss and squared error of each sample, and one histogram per class:
    after a calibrator  a `Digest`, from which every metric is read; and the predicted class
    foreign data        two scores of each sample

Numbers of a line are computed from its file, not from what the file was made of, so that anyone can compute them again.
Zipped arrays without pickles or clock times: equal predictions give equal bytes.
"""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.metrics.calibration import aece, ece
from fedlas.metrics.digest import Digest, Intervals
from fedlas.metrics.result import Result
from fedlas.ood.detection import detect_scores
from fedlas.ood.scores import score_of
from fedlas.predictions import Predictions

FEW_CLASSES = 10
SCORES = ("entropy", "max_probability")
ROUNDED = ("loss", "squared_error", "label_square")  # kept in half the size
LARGEST_FILE = 64 * 2**20  # unpacked; a file that claims more is not one of ours
Arrays: TypeAlias = Mapping[str, NDArray[np.generic]]
Measure: TypeAlias = tuple[float, float | None, float | None]  # value, and the ends of its interval


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
        """Give the predictions back, where logits were kept."""
        if "logits" not in self.arrays:
            return None
        return Predictions(self._tensor("logits").float(), self._tensor("labels").long(), split="test")

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
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as folder:
                size = sum(entry.file_size for entry in folder.infolist())
                if size > LARGEST_FILE:
                    raise ValueError(f"{name} would unpack to {size:,} bytes; kept predictions are small")
                arrays = {
                    entry.filename.removesuffix(".npy"): np.lib.format.read_array(
                        io.BytesIO(folder.read(entry)), allow_pickle=False
                    )
                    for entry in folder.infolist()
                }
        except (zipfile.BadZipFile, EOFError, KeyError) as error:
            raise ValueError(f"{name} is damaged: {error}") from error
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
            return {score: score_of(given, score).float() for score in SCORES}
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


def sha256(path: Path) -> str:
    """Give the checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _measure(result: Result) -> Measure:
    if result.interval is None:
        return float(result), None, None
    return float(result), result.interval.low, result.interval.high


def _small_ints(values: Tensor) -> NDArray[np.generic]:
    """Take the smallest type that holds class numbers."""
    most = int(values.max()) if len(values) else 0
    kind = np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int64
    return values.cpu().numpy().astype(kind)
