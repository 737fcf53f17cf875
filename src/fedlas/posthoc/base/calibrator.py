"""The base class of calibrators: input shapes, checks, and files.

A calibrator learns from logits and labels of one split and maps logits to logits, so calibrated
logits can replace logits everywhere. `fit` and `transform` accept

    (n, classes)            rows of logits
    (n,) or (n, 1)          logits of class 1 of a binary classifier: z means the logits [0, z]
    (n, classes, ...)       maps of logits; each position is a sample
    Predictions             `fit` records their split, and `transform` returns Predictions

as torch tensors or NumPy arrays. `transform` returns the same type and shape, in float32 or better. A calibrator
that computes probabilities clamps them to its `floor` and returns their logarithms.
"""

import hashlib
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from fedlas.alignment import row_hashes
from fedlas.catalog import keywords
from fedlas.errors import UserError, UserTypeError, warn_caller
from fedlas.io.atomic import write_atomic
from fedlas.io.safetensors import read_safetensors, to_safetensors
from fedlas.io.untrusted import check_file, file_errors
from fedlas.predictions import (
    AnyPredictions,
    OptionalFields,
    Predictions,
    describe_class_difference,
    with_every_class,
)
from fedlas.predictions.arrays import (
    Array,
    as_floats,
    as_tensor,
    check_labels,
    check_row_names,
    check_rows,
    float32_or_better,
    two_columns,
    warn_about_probabilities,
)
from fedlas.predictions.probabilities import slices_of

FORMAT = "fedlas.calibrator/1"
# Fitted parameters that may be non-finite: an unknown standard error, the value of an empty bin.
UNKNOWN: Mapping[str, Callable[[Tensor], Tensor]] = {"standard_error": torch.isposinf, "values": torch.isnan}
KIND = "a calibrator is a .safetensors file that `fedlas calibrate fit` or its own save() wrote"
Kind = TypeVar("Kind", bound="AbstractCalibrator")
EXACT_BELOW = 20_000_000  # number of logits up to which they are copied to float64
ENORMOUS = 1e100
MOST_ZEROS = 0.002  # largest fraction of labels with an input probability of zero in a reliable fit


class Samples(NamedTuple):
    """Validated samples to fit on.

    Args:
        logits: one row per sample.
        labels: class indices, or rows of class probabilities.
        zeros: mask of the unknown logits, whose input probability was zero; None if there are none.
    """

    logits: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    zeros: Bool[Tensor, "n classes"] | None = None

    @property
    def label_probs(self) -> Float[Tensor, "n classes"]:
        """The labels as rows of class probabilities, one-hot for class indices."""
        if self.labels.ndim == 2:
            return self.labels.to(self.logits.dtype)
        return torch.zeros_like(self.logits).scatter_(1, self.labels[:, None], 1)


class DoubtfulFit(UserWarning):
    """A warning that a fitted calibrator is unreliable."""


@dataclass(frozen=True)
class Fit:
    """Record of how a calibrator was fitted.

    Args:
        n: number of samples.
        classes: number of classes.
        split: split of the samples.
        before: mean negative log-likelihood of the samples before calibration, in nats.
        after: mean negative log-likelihood after calibration.
        class_names: one name per class, if the predictions had names.
        doubt: reason why the fit is unreliable; empty if it is reliable.
        digest: checksum of the samples in any order.
    """

    n: int
    classes: int
    split: str | None
    before: float
    after: float
    class_names: tuple[str, ...] | None
    doubt: str
    digest: str

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Fit":
        """Restore from the fields of a file."""
        names, split = fields["class_names"], fields["split"]
        if names is not None and not isinstance(names, list | tuple):
            raise UserError(f"class_names is {names!r:.100}; a list of strings is expected")
        return cls(
            n=check_count(fields["n"], "n"),
            classes=check_count(fields["classes"], "classes"),
            split=None if split is None else check_text(split, "split"),
            before=_check_real(fields["before"], "before"),
            after=_check_real(fields["after"], "after"),
            class_names=None if names is None else tuple(check_text(name, "class_names") for name in names),
            doubt=check_text(fields["doubt"], "doubt"),
            digest=check_text(fields["digest"], "digest"),
        )


def check_text(value: object, name: str) -> str:
    """Return a string from a file; raise on any other type."""
    if not isinstance(value, str):
        raise UserError(f"{name} is {value!r:.100}; a string is expected")
    return value


def check_count(value: object, name: str) -> int:
    """Return a count from a file; raise on any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{name} is {value!r:.100}; an integer of at least 0 is expected")
    return value


def _check_real(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{name} is {value!r:.100}; a number is expected")
    return value


class AbstractCalibrator(ABC):
    """Base class of calibrators, which map logits to calibrated logits.

    A subclass stores its keywords as attributes of the same names, and its fitted parameters in `learned`; `save` and
    `load` store exactly these.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    keeps_order: ClassVar[bool] = False
    """Whether the order of the classes, and hence accuracy, is preserved."""
    by_class: ClassVar[bool] = True
    """Whether the map differs between classes, so that a fit depends on the order of the columns."""

    learned: dict[str, Tensor]
    fitted: Fit | None = None

    @abstractmethod
    def learn(self, samples: Samples) -> dict[str, Tensor]:
        """Return the parameters that `apply` needs."""

    @abstractmethod
    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        """Map rows of logits to calibrated ones with the parameters in `learned`."""

    def fill_zeros(
        self, logits: Float[Tensor, "n classes"], zeros: Bool[Tensor, "n classes"] | None
    ) -> Float[Tensor, "n classes"]:
        """Replace the logits of zero probabilities by the fitted value; the default returns logits unchanged.

        Args:
            logits: one row per sample.
            zeros: mask of the logits whose input probability was zero.
        """
        del zeros
        return logits

    def doubt(self, samples: Samples) -> str:
        """Return the reason why a fit on these samples is unreliable; empty if it is reliable."""
        absent = (samples.label_probs.sum(0) == 0).nonzero().flatten().tolist() if self.by_class else []
        if absent:
            return (
                f"{len(absent):,} of {samples.logits.shape[1]:,} classes have no sample in the calibration data, the "
                f"first is class {absent[0]}: {self.name} is not fitted to them. Add samples, or use temperature."
            )
        if samples.zeros is None:
            return ""
        labels = float((samples.label_probs * samples.zeros).sum())
        if labels <= MOST_ZEROS * len(samples.logits):
            return ""
        return (
            f"{labels:,.0f} of {len(samples.logits):,} labels have probability zero, and {self.name} depends on the "
            "number that stands for zero. Give logits, or probabilities with more digits; temperature needs no "
            "such number."
        )

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of the constructor and their values."""
        return {name: getattr(self, name) for name in keywords(type(self))}

    def fit(
        self: Kind,
        logits: AnyPredictions | Array,
        labels: Array | None = None,
        *,
        split: str | None = None,
        ignore_index: int | None = None,
    ) -> Kind:
        """Fit to logits and their labels.

        Args:
            logits: predictions, or logits of a shape that the module docstring lists.
            labels: class indices, or rows of class probabilities; not needed with predictions.
            split: name of the split; by default that of the predictions.
            ignore_index: label of samples that are ignored.
        """
        samples, split = _samples(logits, labels, split, ignore_index)
        if split is not None and re.search(r"(?<![a-z])test(?![a-z])", split.lower()):
            warnings.warn(
                f"{self.name} is fitted on the split {split!r}: metrics on it will be too optimistic. "
                "Fit on held-out validation data.",
                UserWarning,
                stacklevel=2,
            )
        before = mean_nll(samples.logits, samples.labels)
        self.learned = self.learn(samples)
        after = mean_nll(self.apply(self.fill_zeros(samples.logits, samples.zeros)), samples.labels)
        n, classes = samples.logits.shape
        names = logits.class_names if isinstance(logits, Predictions) else None
        doubt = self.doubt(samples)
        if doubt:
            warnings.warn(doubt, DoubtfulFit, stacklevel=2)
        self.fitted = Fit(n, classes, split, before, after, names, doubt, _digest(samples))
        return self

    @overload
    def transform(self, logits: Predictions) -> Predictions: ...
    @overload
    def transform(self, logits: Tensor) -> Tensor: ...
    @overload
    def transform(self, logits: NDArray[Any]) -> NDArray[Any]: ...
    def transform(self, logits: AnyPredictions | Tensor | NDArray[Any]) -> Predictions | Tensor | NDArray[Any]:
        """Calibrate logits; the result has the type and shape of the input.

        Raise if the class names of the predictions, or their order, differ from the fit. This is not checked if the map
        is the same for all classes (`by_class` is False) or if the fit or the predictions have no names.
        """
        if isinstance(logits, AnyPredictions):
            logits = with_every_class(logits, "calibration")
            self.check_names(logits.class_names)
            return with_logits(logits, self._calibrated(self.fill_zeros(logits.logits, logits.zeros)))
        scores = as_floats(logits, "logits")
        calibrated = self._calibrated(scores)
        if scores.device.type == "cpu":
            warn_about_probabilities(_table(scores))
        return calibrated if isinstance(logits, Tensor) else calibrated.numpy()

    def _calibrated(self, scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        table = _table(scores)
        if self.fitted is None:
            raise RuntimeError(f"{self.name} is not fitted yet; call fit(logits, labels) first, or load it from a file")
        if scores.ndim == 1 and self.fitted.classes > 2:
            raise UserError(
                f"{self.name} was fitted on {self.fitted.classes} classes and takes one row per sample; for a single "
                "sample pass logits[None]"
            )
        if scores.ndim == 1 and len(scores) == 2:
            warn_caller(
                "two numbers are read as two samples of one logit; for one sample of two classes pass logits[None]"
            )
        if table.shape[1] != self.fitted.classes:
            raise UserError(f"logits have {table.shape[1]} classes; {self.name} was fitted on {self.fitted.classes}")
        check_rows("logits", table, torch.isfinite(table).all(1), "holds NaN or infinity")
        largest = torch.finfo(scores.dtype).max  # keeps logits finite
        return _as_given(self.apply(float32_or_better(table)).clamp(-largest, largest), scores)

    def was_fitted_on(self, predictions: Predictions) -> bool:
        """Return whether predictions hold exactly the samples of the fit, in any order."""
        if self.fitted is None or predictions.given_labels is None:
            return False
        if (len(predictions), predictions.num_classes) != (self.fitted.n, self.fitted.classes):
            return False
        return self.fitted.digest == _digest(_samples(predictions, None, None, None)[0])

    def check_names(self, names: Sequence[str] | None) -> None:
        """Raise if the class names differ from those of the fit and the map depends on the class."""
        expected = None if self.fitted is None else self.fitted.class_names
        if not self.by_class or expected is None or names is None or expected == tuple(names):
            return
        if len(expected) != len(names):
            raise UserError(f"there are {len(names)} classes; {self.name} was fitted on {len(expected)}")
        difference = describe_class_difference(expected, names, ("the fit", "these predictions"))
        raise UserError(
            f"{self.name} was fitted on {difference}. Its map differs between classes; put the columns in the order of "
            "the fit, or fit it again."
        )

    def save(self, path: str | Path) -> None:
        """Write the calibrator to a safetensors file, atomically."""
        if self.fitted is None:
            raise RuntimeError(f"{self.name} is not fitted yet; there is nothing to save")
        content = {"format": FORMAT, "name": self.name, "options": self.options, "fitted": asdict(self.fitted)}
        metadata = {key: json.dumps(value) for key, value in content.items()}
        write_atomic(Path(path), to_safetensors(metadata, self.learned))

    @classmethod
    def load(cls: type[Kind], path: str | Path) -> Kind:
        """Read a file that `save` wrote; `fedlas.posthoc.load_calibrator` reads files of any calibrator."""
        metadata, tensors = read(path)
        if metadata.get("name") != cls.name:
            raise UserError(f"{path} holds a {metadata.get('name')!r} calibrator, not {cls.name!r}")
        with file_errors(path):
            return cls.restore(metadata, tensors)

    @classmethod
    def restore(cls: type[Kind], metadata: Mapping[str, Any], tensors: dict[str, Tensor]) -> Kind:
        """Build a fitted calibrator from the content of a file."""
        for name, value in tensors.items():
            valid = value.isfinite() | UNKNOWN[name](value) if name in UNKNOWN else value.isfinite()
            if name == "temperature":
                valid &= value > 0
            if not bool(valid.all()):
                above = " and above 0" if name == "temperature" else ""
                raise UserError(f"{name} is {float(value[~valid].flatten()[0]):g}; it must be finite{above}")
        calibrator = cls(**metadata["options"])
        calibrator.learned, calibrator.fitted = tensors, Fit.from_dict(metadata["fitted"])
        return calibrator

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        state = "not fitted"
        if self.fitted is not None:
            numbers = {name: float(value) for name, value in self.learned.items() if value.numel() == 1}
            parameters = "".join(f", {name}={value:.4g}" for name, value in numbers.items())
            state = f"fitted on {self.fitted.n:,} samples{parameters}"
        return f"<{type(self).__name__}({options}), {state}>"


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the metadata and the tensors of a calibrator's file."""
    check_file(path)
    with Path(path).open("rb") as file:
        start = file.read(9)
    if start[8:] != b"{":  # safetensors: eight bytes of length, then JSON
        raise UserError(f"{path} is {'no calibrator' if start else 'empty'}; {KIND}")
    texts, tensors = read_safetensors(path)
    if texts.get("format") != json.dumps(FORMAT):
        content = " but holds predictions" if {"logits", "probs"} & set(tensors) else ""
        raise UserError(f"{path} is no calibrator{content}; {KIND}")
    with file_errors(path):
        return {key: json.loads(value) for key, value in texts.items()}, tensors


def with_logits(predictions: Predictions, logits: Float[Tensor, "n classes"]) -> Predictions:
    """Return predictions with new logits and all other fields unchanged."""
    fields: Any = {name: getattr(predictions, name) for name in OptionalFields.__annotations__}
    return Predictions(logits, predictions.given_labels, **fields)


def mean_nll(logits: Float[Tensor, "n classes"], labels: Tensor) -> float:
    """Return the mean negative log-likelihood of labels, in nats."""
    total = 0.0
    for rows in slices_of(logits):
        logs, truth = logits[rows].log_softmax(1), labels[rows]
        label_logs = logs.gather(1, truth[:, None]) if truth.ndim == 1 else (logs * truth).sum(1)
        total -= float(label_logs.sum(dtype=torch.float64))
    return total / len(logits)


def learned_like(value: Tensor, logits: Tensor) -> Tensor:
    """Return a learned tensor in the dtype and on the device of the logits."""
    return value.to(device=logits.device, dtype=logits.dtype)


def log_probs_of(probs: Float[Tensor, "n classes"], fallback: Float[Tensor, "n classes"], floor: float) -> Tensor:
    """Return log-probabilities of non-negative rows; a row of zeros is replaced by its fallback."""
    total = probs.sum(1, keepdim=True)
    normalised = torch.where(total > 0, probs / torch.where(total > 0, total, 1), fallback)
    clamped = normalised.clamp_min(floor)
    return (clamped / clamped.sum(1, keepdim=True)).log()


def check_floor(floor: float) -> float:
    """Return the floor of probabilities; raise if it is invalid."""
    if not 0 < floor < 0.1:
        raise UserError(f"floor is {floor}; a small positive probability is needed, such as 1e-7")
    return float(floor)


def _samples(
    logits: AnyPredictions | Array, labels: Array | None, split: str | None, ignore_index: int | None
) -> tuple[Samples, str | None]:
    if isinstance(logits, AnyPredictions):
        logits = with_every_class(logits, "calibration")
        if labels is not None or ignore_index is not None:
            raise UserTypeError("Predictions carry their own labels; give neither labels nor ignore_index with them")
        return Samples(exact(logits.logits), logits.labels, logits.zeros), split or logits.split
    if labels is None:
        raise UserTypeError("labels are missing; only Predictions carry their own")
    check_row_names(logits, labels)
    scores = as_floats(logits, "logits")
    table, truth = _table(scores), as_tensor(labels, "labels").to(scores.device)
    if scores.ndim > 2 or truth.ndim > 2:
        soft = truth.is_floating_point()
        truth = truth.movedim(1, -1).reshape(-1, truth.shape[1]) if soft else truth.reshape(-1)
    if truth.is_floating_point() and truth.numel() == len(table) and table.shape[1] == 2:
        truth = two_columns(truth, "probs")  # probability of class 1 of a binary classifier
    elif not truth.is_floating_point():
        truth = truth.reshape(-1)
    if len(truth) != len(table):
        raise UserError(f"labels has {len(truth)} rows for {len(table)} samples")
    if ignore_index is not None and truth.ndim == 1:
        table, truth = table[truth != ignore_index], truth[truth != ignore_index]
    if len(table) == 0:
        raise UserError("there is no sample to fit on")
    check_rows("logits", table, torch.isfinite(table).all(1), "holds NaN or infinity")
    warn_about_probabilities(table)
    return Samples(exact(table), check_labels(truth, *table.shape)), split


def _digest(samples: Samples) -> str:
    """Return a checksum of logits and labels that does not depend on the order of the samples."""
    hashes = row_hashes(samples.logits, samples.labels).sort().values
    return hashlib.sha256(hashes.numpy().tobytes()).hexdigest()[:16]


def exact(logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
    """Return logits in float64 if the device supports it and memory allows, else in float32 or better.

    Huge float64 logits are clamped, so that products stay finite; their probabilities remain zero and one.
    """
    if logits.dtype == torch.float64:
        logits = logits.clamp(-ENORMOUS, ENORMOUS)
    if logits.numel() > EXACT_BELOW or logits.device.type == "mps":
        return float32_or_better(logits)
    return logits.double()


def _table(logits: Float[Tensor, "..."]) -> Float[Tensor, "rows classes"]:
    if logits.ndim == 0:
        raise UserError("logits are a single number; one row per sample is expected")
    if logits.ndim <= 2:
        return two_columns(logits, "logits")
    if logits.shape[1] == 1:
        return two_columns(logits.reshape(-1), "logits")
    return logits.movedim(1, -1).reshape(-1, logits.shape[1])


def _as_given(table: Float[Tensor, "rows classes"], scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    if scores.ndim == 1 or scores.shape[1] == 1:
        return (table[:, 1] - table[:, 0]).reshape(scores.shape)
    if scores.ndim == 2:
        return table
    return table.reshape(len(scores), *scores.shape[2:], scores.shape[1]).movedim(-1, 1)
