"""Predictions of a model for the samples of one split: logits or probabilities, labels, optional further fields.

Everything after training (metrics, post-hoc calibration, OOD scores, tables, pages) reads `Predictions` and nothing
else. They come from a training run, from arrays, or from files (`fedlas.io`). Nothing is guessed from values: logits
enter by `Predictions(logits=...)`, probabilities by `Predictions.from_probs`.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import RowError, UserError, UserTypeError, choose_advice, short_list


@runtime_checkable
class SupportsArray(Protocol):
    """An array of another library, such as JAX, pandas or polars."""

    def __array__(self) -> NDArray[Any]: ...

    def __len__(self) -> int: ...


Array: TypeAlias = Tensor | NDArray[Any] | Sequence[Any] | SupportsArray
Labels: TypeAlias = Int[Tensor, " n"] | Float[Tensor, "n classes"]

# Largest difference of the sum of a row of probabilities from one.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Number of logits whose softmax is computed at a time: 16 MiB on a CPU, a gigabyte on other devices. Smaller parts
# would fit a cache, but all threads wait for each other after each part, which is slow on a busy machine.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**22, 2**28
CLASS_LIMIT = 2**31 - 1  # of class numbers, if classes have no names
ENOUGH = 20  # number of rows that are not all distributions by chance
MAX_MISSING = 2e-2  # a row of rounded probabilities whose sum is further from one is normalized
# Advice about logits whose rows all have this sum.
SUSPICIOUS_SUMS = {
    1: "If these are probabilities, their softmax says nothing: give them as such, ",
    100: "If these are percentages, their softmax says nothing: divide them by 100, and give them as probabilities, ",
}
PERCENTAGES = "these look like percentages: divide them by 100"
NO_FLOAT64 = {"mps"}  # devices
SCORE_ROLES = ("logit_", "prob_", "logits", "probs", "confidence")  # prefixes of the roles of columns with scores


class RowLimits(NamedTuple):
    """How far the sums of rows of rounded probabilities may lie below and above one.

    Attributes:
        below: limit of each row below one; the larger one, because small probabilities are rounded to zero.
        above: limit of each row above one.
        unit: unit of the last digit of each row.
    """

    below: Float[Tensor, " n"]
    above: Float[Tensor, " n"]
    unit: Float[Tensor, " n"]


class ColumnRoles(NamedTuple):
    """Which columns of a table predictions were read from.

    Attributes:
        names: for each column that was read, the name that fedlas uses for it, such as `prob_cat` or `label`.
        unread: columns without a known role.
    """

    names: Mapping[str, str]
    unread: Sequence[str]

    @property
    def has_scores(self) -> bool:
        """Whether scores of all classes, or confidences, were found."""
        return any(role.startswith(SCORE_ROLES) for role in self.names.values())

    def __str__(self) -> str:
        kinds = {
            "probabilities": ("prob_", "probs"),
            "logits": ("logit_", "logits"),
            "confidence": ("confidence",),
            "prediction": ("prediction",),
            "correctness": ("correct",),
            "labels": ("label",),
        }
        parts = []
        for kind, prefixes in kinds.items():
            columns = [column for column, role in self.names.items() if role.startswith(prefixes)]
            if columns:
                parts.append(f"{kind} from {short_list(columns, 6)}")
        if self.unread:
            parts.append(f"not read: {short_list(self.unread, 6)}")
        return "; ".join(parts)


class OptionalFields(TypedDict, total=False):
    """Optional fields of predictions."""

    features: Array | None
    index: Array | None
    class_names: Sequence[str] | None
    split: str | None
    ids: Sequence[object] | None
    paths: Sequence[object] | None
    metadata: Mapping[str, Sequence[object]] | None


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Predictions:
    """Predictions of a model for the samples of one split, with labels if they are known.

    Args:
        logits: one row of logits per sample. A single column, or a vector, is a binary classifier and becomes the two
            columns `[0, z]`, which have the same probabilities.
        labels: one class number per sample, or one row of class probabilities per sample (several annotators); one-hot
            rows become class numbers. None if labels are unknown, or none of the classes: OOD data.
        features: the input of the last linear layer.
        index: position of each sample in the data set.
        class_names: one name per class.
        split: the split that the samples belong to, such as "test".
        ids: the name of each sample.
        paths: the image file of each sample.
        metadata: further columns by name, with one value per sample.

    Attributes:
        columns: the columns of the file that predictions were read from; None if they were made of arrays.
    """

    has_all_classes = True  # whether the probabilities of all classes are known

    given_logits: Float[Tensor, "n classes"] | None
    given_labels: Labels | None
    features: Float[Tensor, "n width"] | None
    index: Int[Tensor, " n"] | None
    class_names: tuple[str, ...] | None
    split: str | None
    ids: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    metadata: Mapping[str, tuple[object, ...]] | None
    given_probs: Float[Tensor, "n classes"] | None
    decimals: int | None
    columns: ColumnRoles | None

    def __init__(self, logits: Array, labels: Array | None = None, **fields: Unpack[OptionalFields]) -> None:
        scores = two_columns(as_floats(logits, "logits"), "logits")
        check_finite(scores)
        warn_about_probabilities(scores)
        self._fill(scores, labels, fields)

    @classmethod
    def from_probs(
        cls,
        probs: Array,
        labels: Array | None = None,
        *,
        normalize: bool = False,
        limits: RowLimits | None = None,
        **fields: Unpack[OptionalFields],
    ) -> "Predictions":
        """Build predictions from probabilities; the logits are their logarithms.

        The sum of a row may differ from one by rounding: the precision of the type, or the decimals that the table is
        rounded to. Rounding to few decimals turns small probabilities into zeros. If the sum of a row then differs from
        one by more than 0.02, it is normalized with a warning: the missing probability is spread over its zeros.

        A probability of zero is allowed. Its logit, and the NLL of such a label, are those of half of the last decimal
        if probabilities are rounded, which is detected (`decimals`), else of the smallest number of the type.

        Args:
            probs: rows that sum to one; a vector or single column is the probability of class 1.
            labels: as in the constructor.
            normalize: divide every row by its sum, whatever it is.
            limits: how far the sums of rows may be from one, if text shows it better than numbers.
            fields: features, index, class_names, split, ids, paths and metadata, as in the constructor.
        """
        table = as_floats(probs, "probs")
        _check_transposed(table, labels)
        given = _normalize(table) if normalize else two_columns(table, "probs")
        decimals = decimals_of(given)
        try:
            top = top_of_probs(given)
        except ValueError:
            limits = rounding_limits(given) if limits is None else limits
            if limits is None:
                raise
            check_probs(given, limits)
            given = _complete(given, limits)
            top = largest(given)
        made = cls.__new__(cls)
        made._fill(None, labels, fields, given, decimals=decimals)
        made.__dict__["_top"] = top  # found while the table was checked
        return made

    def _fill(
        self,
        logits: Tensor | None,
        labels: Array | None,
        fields: OptionalFields,
        given_probs: Tensor | None = None,
        *,
        decimals: int | None = None,
    ) -> None:
        """Check and set all fields."""
        for name in fields:
            if name not in OptionalFields.__annotations__:
                raise UserTypeError(
                    f"Predictions takes no {name!r}; it takes {', '.join(OptionalFields.__annotations__)}"
                )
        table = given_probs if logits is None else logits
        assert table is not None
        n, classes = table.shape
        # Labels come first: of a transposed table, nothing else fits either.
        truth = None if labels is None else check_labels(as_tensor(labels, "labels").to(table.device), n, classes)
        names = check_class_names(fields.get("class_names"))
        if names is not None and len(names) != classes:
            raise UserError(f"class_names has {len(names)} names for {classes} classes")
        given_features = fields.get("features")
        features = None if given_features is None else as_floats(given_features, "features")
        if features is not None and features.numel():
            check_finite(features, "features")
        if features is not None and len(features) != n:
            raise UserError(f"features has {len(features)} rows, logits have {n}")
        samples = _check_samples(fields, n, "logits have")
        _set_fields(
            self,
            given_logits=logits,
            given_labels=truth,
            features=features,
            class_names=names,
            split=fields.get("split"),
            given_probs=given_probs,
            decimals=decimals,
            columns=None,
            **samples,
        )

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def scores(self) -> Float[Tensor, "n classes"]:
        """The given table: logits, or probabilities."""
        table = self.given_probs if self.given_logits is None else self.given_logits
        assert table is not None
        return table

    @cached_property
    def logits(self) -> Float[Tensor, "n classes"]:
        """The logits, or the logarithms of the given probabilities."""
        if self.given_logits is not None:
            return self.given_logits
        probs = self.scores
        logs = probs.to(torch.promote_types(probs.dtype, torch.float32)).log()
        if self.decimals is None:
            return logs.clamp_min_(least_log_prob(probs.dtype))
        return logs.masked_fill_(logs == -math.inf, math.log(0.5 * 10.0**-self.decimals))

    def __getitem__(self, rows: slice | Tensor | NDArray[Any] | list[Any]) -> "Predictions":
        """Return some of the samples, by a slice, their numbers or a mask."""
        selection = _selection(rows, len(self))
        taken = _take_samples(self, selection)
        if self.given_logits is None and "logits" in self.__dict__:
            taken.__dict__["logits"] = _take(self.logits, selection)
        return taken

    def __repr__(self) -> str:
        split = f"split={self.split!r}, " if self.split else ""
        dtype = str(self.scores.dtype).removeprefix("torch.")
        return f"Predictions({split}n={len(self):,}, classes={self.num_classes}, {dtype})"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.scores.shape[1]

    @property
    def labels(self) -> Labels:
        """One class number, or one row of class probabilities, per sample."""
        if self.given_labels is None:
            raise UserError("these predictions have no labels (in a file: a column `label` or `labels`)")
        return self.given_labels

    @property
    def probs(self) -> Float[Tensor, "n classes"]:
        """Probability of each class: the given ones, or the softmax of the logits in float32 or better."""
        return self.given_probs if self.given_probs is not None else softmax(self.logits)

    @property
    def zeros(self) -> Bool[Tensor, "n classes"] | None:
        """Which probabilities were given as zero, so that their logarithms are unknown; None if there are none."""
        if self.given_probs is None or bool((self.given_probs > 0).all()):
            return None
        return self.given_probs <= 0

    def scores_only(self) -> "Predictions":
        """Return the same scores and labels without optional fields."""
        return replace_fields(self[:], **dict.fromkeys(OptionalFields.__annotations__))

    @cached_property
    def _top(self) -> tuple[Tensor, Tensor]:
        if self.given_probs is None:
            return top_of_logits(self.logits)
        return largest(self.given_probs)

    @property
    def confidence(self) -> Float[Tensor, " n"]:
        """The largest probability of each row."""
        return self._top[0]

    @property
    def prediction(self) -> Int[Tensor, " n"]:
        """The class with the largest probability; of equal ones the first."""
        return self._top[1]

    @cached_property
    def log_uncertainty(self) -> Float[Tensor, " n"] | None:
        """Logarithm of 1 - confidence in float64, computed from the logits; None if only probabilities are known.

        Near a confidence of 1, float32 confidences of different samples are equal; these values are not.
        """
        return None if self.given_probs is not None else log_uncertainty(self.logits, self.prediction)

    @property
    def correct(self) -> Bool[Tensor, " n"] | Float[Tensor, " n"]:
        """Whether the predicted class is the label; with soft labels, the probability of that class."""
        hard = self.labels.ndim == 1
        return self.prediction == self.labels if hard else self.labels.gather(1, self.prediction[:, None])[:, 0]

    def with_split(self, split: str | None) -> "Predictions":
        """Return the same predictions under another name of the split."""
        return replace_fields(self[:], split=split)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TopLabelPredictions:
    """Confidence and correctness of the predicted class of each sample, if nothing is known of other classes.

    Args:
        confidence: probability of the predicted class.
        correct: whether the predicted class is the label; not needed beside `labels` and `prediction`.
        labels: class numbers, if they are known.
        prediction: predicted class numbers, if they are known.
        class_names: one name per class.
        split: the split that the samples belong to, such as "test".
        index: position of each sample in the data set.
        ids: the name of each sample.
        paths: the image file of each sample.
        metadata: further columns by name, with one value per sample.
    """

    has_all_classes = False  # whether the probabilities of all classes are known

    confidence: Float[Tensor, " n"]
    correct: Bool[Tensor, " n"]
    given_labels: Int[Tensor, " n"] | None
    prediction: Int[Tensor, " n"] | None
    index: Int[Tensor, " n"] | None
    class_names: tuple[str, ...] | None
    split: str | None
    ids: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    metadata: Mapping[str, tuple[object, ...]] | None
    columns: ColumnRoles | None

    def __init__(
        self,
        confidence: Array,
        correct: Array | None = None,
        *,
        labels: Array | None = None,
        prediction: Array | None = None,
        class_names: Sequence[str] | None = None,
        split: str | None = None,
        index: Array | None = None,
        ids: Sequence[object] | None = None,
        paths: Sequence[object] | None = None,
        metadata: Mapping[str, Sequence[object]] | None = None,
    ) -> None:
        scores = as_floats(confidence, "confidence")
        if scores.ndim != 1:
            raise UserError(f"confidence has shape {tuple(scores.shape)}; one number per sample is expected")
        percent = "; percentages are divided by 100 before" if scores.numel() and bool(scores.amax() > 1) else ""
        check_rows("confidence", scores, (scores > 0) & (scores <= 1), f"is not above 0 and at most 1{percent}")
        n, names = len(scores), check_class_names(class_names)
        truth, predicted = (
            None if given is None else _check_class_numbers(name, as_tensor(given, name), n, names)
            for name, given in (("labels", labels), ("prediction", prediction))
        )
        flags = None if correct is None else _check_correctness(as_tensor(correct, "correct"), n)
        if truth is not None and predicted is not None:
            equal = truth == predicted
            if flags is not None and not torch.equal(flags, equal):
                row = int((flags != equal).nonzero()[0])
                raise UserError(f"correct: row {row} contradicts its label and prediction; leave one of them out")
            flags = equal
        if flags is None:
            raise UserError("correct is missing, or labels and prediction: nothing says which predictions are correct")
        fields: OptionalFields = {"index": index, "ids": ids, "paths": paths, "metadata": metadata}
        _set_fields(
            self,
            confidence=scores,
            correct=flags,
            given_labels=truth,
            prediction=predicted,
            class_names=names,
            split=split,
            columns=None,
            **_check_samples(fields, n, "confidence has"),
        )

    def __len__(self) -> int:
        return len(self.confidence)

    def __getitem__(self, rows: slice | Tensor | NDArray[Any] | list[Any]) -> "TopLabelPredictions":
        """Return some of the samples, by a slice, their numbers or a mask."""
        return _take_samples(self, _selection(rows, len(self)))

    def __repr__(self) -> str:
        split = f"split={self.split!r}, " if self.split else ""
        return f"TopLabelPredictions({split}n={len(self):,}, classes={self.num_classes or 'unknown'})"

    @property
    def scores(self) -> Float[Tensor, " n"]:
        """The confidences."""
        return self.confidence

    @property
    def num_classes(self) -> int:
        """Number of classes that labels or predictions name; 0 if both are unknown."""
        if self.class_names is not None:
            return len(self.class_names)
        return max(
            (int(given.max()) + 1 for given in (self.given_labels, self.prediction) if given is not None), default=0
        )

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """The label of each sample."""
        if self.given_labels is None:
            raise UserError("these predictions have no labels, only which predictions are correct")
        return self.given_labels

    @property
    def features(self) -> None:
        """None: top-label predictions have no features."""

    def with_split(self, split: str | None) -> "TopLabelPredictions":
        """Return the same predictions under another name of the split."""
        return replace_fields(copy(self), split=split)


AnyPredictions: TypeAlias = Predictions | TopLabelPredictions


AnyOne = TypeVar("AnyOne", bound=AnyPredictions)


def _set_fields(made: AnyPredictions, **values: Any) -> None:
    """Set all fields of predictions, which are frozen."""
    assert values.keys() == type(made).__dataclass_fields__.keys()
    for name, value in values.items():
        object.__setattr__(made, name, value)


def replace_fields(made: AnyOne, **values: Any) -> AnyOne:
    """Set some fields of new predictions, which are frozen for everybody else."""
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def check_class_names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return class names; raise if two are equal."""
    if names is None:
        return None
    listed = tuple(map(str, names))
    name, count = next(iter(Counter(listed).most_common(1)), ("", 0))
    if count > 1:
        raise UserError(f"two classes have the same name, {name!r}; each needs a different one")
    return listed


def _check_samples(fields: OptionalFields, n: int, other: str) -> dict[str, Any]:
    """Return the fields that have one value per sample; raise if there are not n of them.

    Args:
        fields: optional fields of predictions.
        n: number of samples.
        other: what has n rows, for errors.
    """
    index, ids, paths = fields.get("index"), fields.get("ids"), fields.get("paths")
    samples = {
        "index": None if index is None else as_tensor(index, "index").long(),
        "ids": None if ids is None else tuple(map(str, ids)),
        "paths": None if paths is None else tuple(map(str, paths)),
    }
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UserTypeError(f"metadata is {type(metadata).__name__}; a column for each name is expected")
    columns = None if metadata is None else {str(name): tuple(values) for name, values in metadata.items()}
    for name, rows in {**samples, **(columns or {})}.items():
        if rows is not None and len(rows) != n:
            raise UserError(f"{name} has {len(rows)} rows, {other} {n}")
    return {**samples, "metadata": columns}


def _selection(rows: Any, n: int) -> slice | Tensor:
    """Return a selection of samples that torch supports: slices with a positive step, numbers or a mask."""
    if isinstance(rows, slice):
        return rows if (rows.step or 1) > 0 else torch.tensor(range(*rows.indices(n)), dtype=torch.long)
    if isinstance(rows, Tensor | np.ndarray | list):
        return torch.as_tensor(rows)
    raise UserTypeError(f"samples are taken by a slice, their numbers or a mask, not by {type(rows).__name__}")


def _take(values: Tensor, selection: slice | Tensor) -> Tensor:
    return values[selection.to(values.device) if isinstance(selection, Tensor) else selection]


def _take_samples(predictions: AnyOne, selection: slice | Tensor) -> AnyOne:
    """Return some of the samples."""

    def take_texts(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(selection, slice):
            return values[selection]
        return tuple(values[row] for row in torch.arange(len(predictions))[selection].tolist())

    made = type(predictions).__new__(type(predictions))
    for name in type(predictions).__dataclass_fields__:
        value = getattr(predictions, name)
        if isinstance(value, Tensor):
            value = _take(value, selection)
        elif name in {"ids", "paths"} and value is not None:
            value = take_texts(value)
        elif name == "metadata" and value is not None:
            value = {column: take_texts(values) for column, values in value.items()}
        object.__setattr__(made, name, value)
    if not len(made):
        raise UserError("no sample is left")
    return made


def _check_class_numbers(name: str, given: Tensor, n: int, names: Sequence[str] | None) -> Int[Tensor, " n"]:
    """Return one class number per sample; raise if there are others."""
    given = _class_numbers(given)
    if given.is_floating_point() or given.shape != (n,):
        raise UserError(f"{name} is {given.dtype} of shape {tuple(given.shape)}; expected {n} integers")
    most = CLASS_LIMIT if names is None else len(names)
    check_rows(name, given, (given >= 0) & (given < most), f"is outside 0..{most - 1} (classes count from 0)")
    return given.long()


def _check_correctness(given: Tensor, n: int) -> Bool[Tensor, " n"]:
    """Return whether each sample is correct; raise if a value is neither 0 nor 1."""
    if given.shape != (n,):
        raise UserError(f"correct has shape {tuple(given.shape)}; expected {n} values of 0 or 1")
    if given.dtype != torch.bool:
        check_rows("correct", given, (given == 0) | (given == 1), "is neither 0 nor 1")
    return given.bool()


def with_every_class(given: AnyPredictions, what: str) -> Predictions:
    """Return predictions for all classes; raise if only the top class of each sample is known.

    Args:
        given: predictions.
        what: what needs all classes, for the error.
    """
    if isinstance(given, TopLabelPredictions):
        needed = "the logits or probabilities of every class"
        raise UserError(f"only the top confidence of each sample is known; {what} needs {needed}")
    return given


def check_every_class(given: AnyPredictions, name: str, other: AnyPredictions, others: str) -> None:
    """Raise if one of two predictions that do not fit each other has top labels only.

    Args:
        given: predictions.
        name: their name, for the error.
        other: predictions that do not fit.
        others: the name of these.
    """
    for predictions, label in ((given, name), (other, others)):
        if not predictions.has_all_classes:
            needed = "the logits or probabilities of every class are needed"
            raise UserError(f"{label}: only the top confidence of each sample is known; {needed}")


def as_tensor(values: Array, name: str) -> Tensor:
    """Return an array of torch, NumPy or another library as a tensor, without a copy if possible."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            kind = "on the device meta, which holds no numbers" if values.is_meta else f"of layout {values.layout}"
            raise UserTypeError(f"{name} is a tensor {kind}; a dense one is needed (to_dense)")
        if values.is_complex():
            raise UserTypeError(f"{name} holds {values.dtype}; real numbers are expected")
        return values.detach()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise UserTypeError(f"{name} is a masked array; remove the masked values first, or they would count")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UserError(f"{name} is no table of numbers ({error})") from error
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind not in "fiub":
        names = "; names of classes go with a table that has a column for each class, or with class_names, such as "
        names += '{"probs": ..., "labels": ..., "class_names": [...]}'
        raise UserTypeError(f"{name} holds {array.dtype}, not numbers{names if name == 'labels' else ''}")
    plain = array.dtype.isnative and all(stride >= 0 for stride in array.strides)  # torch can share it
    # Not ascontiguousarray: one number with a negative stride counts as contiguous and would stay as it is.
    array = array if plain else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_floats(values: Array, name: str) -> Float[Tensor, "..."]:
    """Return an array as a tensor of floating-point numbers; raise if it holds other numbers."""
    tensor = as_tensor(values, name)
    if not tensor.is_floating_point():
        advice = f"; {PERCENTAGES}" if name in {"probs", "logits"} and _are_percentages(tensor) else ""
        advice += ", and give them as probs" if advice and name == "logits" else ""
        raise UserTypeError(f"{name} holds {tensor.dtype}; floating-point numbers are expected{advice}")
    if tensor.dtype.itemsize == 1:
        raise UserTypeError(f"{name} holds {tensor.dtype}; convert it to float16 or wider, such as {name}.half()")
    if tensor.ndim == 0:
        raise UserError(f"{name} is a single number; one row per sample is expected")
    return tensor


def two_columns(values: Float[Tensor, "..."], name: str) -> Float[Tensor, "n classes"]:
    """Return two columns for the single one of a binary classifier: logits [0, z] for z, [1 - p, p] for p."""
    if values.ndim == 1 or values.shape[1:] == (1,):
        second = values.reshape(-1)
        return torch.stack([1 - second if name == "probs" else torch.zeros_like(second), second], dim=1)
    if values.ndim != 2:
        raise UserError(f"{name} have shape {tuple(values.shape)}; one row of classes per sample is expected")
    if not values.shape[1]:
        raise UserError(f"{name} have shape {tuple(values.shape)}; at least one class is needed")
    return values


def softmax(logits: Float[Tensor, "n classes *space"]) -> Float[Tensor, "n classes *space"]:
    """Return the probabilities of logits, in float32 or better."""
    return logits.softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))


def least_prob(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a type: the floor of probabilities whose logarithm is taken."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def least_log_prob(dtype: torch.dtype) -> float:
    """Return the logarithm of `least_prob`, also if such small numbers are flushed to zero (`set_flush_denormal`)."""
    return math.log(torch.finfo(dtype).tiny) + math.log(torch.finfo(dtype).eps)


def decimals_of(probs: Float[Tensor, "n classes"]) -> int | None:
    """Return the number of decimals that probabilities are rounded to; None if they are not, or too few.

    Rounded numbers are multiples of one unit, and none lies between zero and half a unit, as small probabilities of a
    softmax do. The first rows rule out nearly all tables that are not rounded.
    """
    if probs.dtype not in {torch.float32, torch.float64}:
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = [count for count in range(1, 13) if precision * 10**count <= 0.2]
    between = 0
    for part in (probs[:ENOUGH], *parts_of(probs)):
        # Multiples of a unit are multiples of a tenth of it as well: only the largest unit has to be checked.
        while digits and not _are_multiples(part, 10.0 ** digits[0], precision):
            del digits[0]
        if not digits:
            return None
        between += int(((part > 0) & (part < 1)).sum())
    return digits[0] if between >= 2 * ENOUGH else None


def _are_multiples(part: Tensor, scale: float, precision: float) -> bool:
    part = part.cpu() if part.device.type in NO_FLOAT64 else part
    scaled = part.double() * scale
    whole = scaled.round()
    return bool(((scaled - whole).abs() <= precision * scale).all() & ((part <= 0) | (whole >= 1)).all())


def slices_of(table: Tensor) -> list[slice]:
    """Return slices of the rows of a table, each small enough for a copy in another type."""
    at_once = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    size = max(1, at_once // max(1, table[:1].numel()))
    return [slice(start, min(start + size, len(table))) for start in range(0, max(1, len(table)), size)]


def parts_of(table: Tensor) -> list[Tensor]:
    """Return the parts of a table, each small enough for a copy in another type."""
    return [table[rows] for rows in slices_of(table)]


def largest(table: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "n *space"], Int[Tensor, "n *space"]]:
    """Return the largest value of every row and its column; of equal values the first."""
    if table.device.type == "cpu" and table.ndim == 2 and table.dtype in {torch.float32, torch.float64} and len(table):
        column = torch.from_numpy(table.numpy().argmax(1))  # five times as fast as torch
        return table.gather(1, column[:, None])[:, 0], column
    largest_values = table.max(dim=1)
    return largest_values.values, largest_values.indices


def top_of_logits(logits: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Return confidence and predicted class of every row, without the probabilities of all rows at once."""
    confidence, prediction, lowest = [], [], []
    for part in parts_of(logits):
        value, column = largest(softmax(part))
        confidence.append(value)
        prediction.append(column)
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    largest_probs = torch.cat(confidence)
    # NaN and plus infinity make a confidence NaN; minus infinity shows in the lowest logit alone.
    if not bool(torch.isfinite(largest_probs).all() & torch.isfinite(torch.stack(lowest)).all()):
        check_finite(logits)
    return largest_probs, torch.cat(prediction)


def log_uncertainty(
    logits: Float[Tensor, "n classes *space"], prediction: Int[Tensor, "n *space"]
) -> Float[Tensor, "n *space"]:
    """Return the log-probability of all classes but the predicted one, in float64 if the device has it."""
    parts = []
    for rows in slices_of(logits):
        part = logits[rows]
        part = part.float() if part.device.type in NO_FLOAT64 else part.double()
        column = prediction[rows].unsqueeze(1)
        margins = part - part.gather(1, column)
        others = margins.scatter_(1, column, -math.inf).logsumexp(1)
        parts.append(others - torch.logaddexp(others, torch.zeros_like(others)))
    return torch.cat(parts)


def top_of_probs(
    probs: Float[Tensor, "n classes *space"], ignored: Bool[Tensor, "n *space"] | None = None
) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Return confidence and predicted class of every row; raise if a row is not a distribution."""
    confidence, prediction, sums, lowest = [], [], [], []
    for part in parts_of(probs):
        value, column = largest(part)
        confidence.append(value)
        prediction.append(column)
        sums.append(_row_sums(part))
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    # Only a failure takes a second pass, which finds the reason.
    near_one = ((torch.cat(sums) - 1).abs() <= TOLERANCE[probs.dtype]).all()
    if not len(probs) or not bool(near_one & (torch.stack(lowest) >= 0).all()):
        check_probs(probs, ignored=ignored)
    return torch.cat(confidence), torch.cat(prediction)


def check_finite(logits: Float[Tensor, "..."], name: str = "logits") -> None:
    """Raise if a row holds NaN or infinity."""
    # The extremes are NaN or infinite if any number is; this takes one pass and no mask.
    if logits.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
        good = torch.isfinite(logits)
        check_rows(name, logits, good if good.ndim == 1 else good.flatten(1).all(dim=1), "holds NaN or infinity")


def check_rows(name: str, values: Tensor, good: Bool[Tensor, "n *space"], fault: str) -> None:
    """Raise if a row is not good, with the first such row."""
    if good.numel() == 0:
        raise UserError(f"{name} has no rows; at least one sample is needed")
    if bool(good.all()):
        return
    row, *place = [int(i) for i in (~good).nonzero()[0]]
    shown = values[row].movedim(0, -1)[tuple(place)] if place and values.ndim > good.ndim else values[(row, *place)]
    raise RowError(f"{name}: ", row, f"{f' at {tuple(place)}' if place else ''} {fault}: {_shown(shown)}")


def check_probs(
    probs: Float[Tensor, "n classes *space"],
    limits: RowLimits | None = None,
    ignored: Bool[Tensor, "n *space"] | None = None,
    name: str = "probs",
) -> None:
    """Raise unless every row is a probability distribution, up to rounding."""
    sums, precision = _row_sums(probs), TOLERANCE[probs.dtype]
    below, above = (limits.below, limits.above) if limits is not None else (precision, precision)
    good = (sums >= 1 - below) & (sums <= 1 + above)
    good &= (probs.amin(dim=1) >= 0) & (probs.amax(dim=1) <= 1 + precision)
    if ignored is not None:
        good |= ignored
    if bool(good.all()) and good.numel():
        return
    place = tuple(int(i) for i in (~good).nonzero()[0]) if good.numel() else ()
    found = float(sums[place]) if place else 1.0
    advice = ""
    if name == "probs":
        advice = "; " + choose_advice(
            "logits are given as logits=..., probabilities with other sums with normalize=True",
            "logits are given with --logits (logits=True), probabilities with other sums with --normalize "
            "(normalize=True)",
        )
    near = abs(found - 100) < 2 and bool((probs > 1).any())
    if near or _is_percentage(probs, place) or _are_percentages(probs):
        advice = f"; {PERCENTAGES}"
    spread = f", the sums of all rows are {float(sums.min()):.4g} to {float(sums.max()):.4g}" if len(sums) > 1 else ""
    rule = "is not a distribution (entries from 0 to 1, sum 1)"
    check_rows(name, probs, good, f"{rule}: it sums to {found:.6g}{spread}{advice}")


def _are_percentages(table: Tensor) -> bool:
    """Return whether rows are percentages, some above 1; rounding moves the sums of many classes from 100."""
    if table.ndim != 2 or not table.numel() or table.is_complex():
        return False
    numbers = table.double()
    if bool((numbers.amin() < 0) | (numbers.amax() > 100) | (numbers.amax() <= 1)):
        return False
    return bool((numbers.sum(dim=1).median() - 100).abs() <= 10)


def _is_percentage(probs: Tensor, place: tuple[int, ...]) -> bool:
    """Return whether a row was made of one percentage of a binary classifier."""
    if probs.ndim != 2 or probs.shape[1] != 2 or not place:
        return False
    other, given = probs[place].tolist()
    return bool(1 < given <= 100 and other == 1 - given)


def _check_transposed(probs: Tensor, labels: Array | None) -> None:
    """Raise if probabilities have a column and not a row for each label: the table may be transposed."""
    shape = getattr(labels, "shape", None)
    count = shape[0] if shape else len(labels) if isinstance(labels, Sequence) else 0
    if probs.ndim == 2 and count == probs.shape[1] != probs.shape[0]:
        rows = "1 row" if len(probs) == 1 else f"{len(probs)} rows"
        raise UserError(f"probs has {rows} for {count} labels; is it transposed?")


def rounding_limits(probs: Float[Tensor, "n classes"]) -> RowLimits | None:
    """Return how far rounding to decimals can move the sums of rows; None if a table is not rounded to decimals.

    The errors of the entries above zero add up as independent ones do: four standard deviations, and at most half a
    unit each. Entries that were rounded to zero have all lost something, at most half a unit each.
    """
    if probs.dtype not in {torch.float32, torch.float64} or not bool(torch.isfinite(probs).all()):
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = (d for d in range(1, 7) if precision * 10.0**d <= 0.01)
    fitting = (d for d in digits if all(_are_multiples(part, 10.0**d, precision) for part in parts_of(probs)))
    decimals = next(fitting, None)
    if decimals is None:
        return None
    positive = (probs > 0).sum(dim=1).to(torch.promote_types(probs.dtype, torch.float32))
    unit = torch.full_like(positive, 10.0**-decimals)
    above = unit * torch.minimum(4 * (positive / 12).sqrt(), positive / 2) * 1.000002 + TOLERANCE[probs.dtype]
    return RowLimits(above + unit / 2 * (probs.shape[1] - positive), above, unit)


def _complete(probs: Float[Tensor, "n classes"], limits: RowLimits) -> Float[Tensor, "n classes"]:
    """Normalize the rows of rounded probabilities whose sum differs from one by more than 0.02.

    The missing probability is spread over the zeros, at most half a unit each: dividing by the sum would raise every
    confidence. The rest is divided out.
    """
    sums = _row_sums(probs)
    off = (sums - 1).abs() > MAX_MISSING
    if not bool(off.any()):
        return probs
    rows, totals, unit = probs[off], sums[off], limits.unit.to(sums)[off]
    zero = rows <= 0
    missing = torch.minimum((1 - totals).clamp_min(0) / zero.sum(dim=1).clamp_min(1), unit / 2)
    rows = torch.where(zero, missing[:, None].to(rows.dtype), rows)
    warnings.warn(
        f"{len(rows):,} of {len(probs):,} rows of rounded probabilities sum to {float(totals.min()):.4g} to "
        f"{float(totals.max()):.4g} and were normalized: below one, the zeros of a row take up the rest; above one, it "
        "is divided by its sum",
        stacklevel=3,
    )
    completed = probs.clone()
    completed[off] = rows / _row_sums(rows)[:, None].to(rows.dtype)
    return completed


def _normalize(table: Tensor) -> Float[Tensor, "n classes"]:
    """Divide every row by its sum."""
    if table.ndim != 2 or table.shape[1] < 2:
        raise UserError(f"normalize needs a column for each class, not a table of shape {tuple(table.shape)}")
    sums = _row_sums(table)
    good = torch.isfinite(sums) & (sums > 0) & (table.amin(dim=1) >= 0)
    check_rows("probs", table, good, "cannot be divided by its sum (entries of 0 or more, sum above 0)")
    return table / sums[:, None].to(table.dtype)


def warn_about_probabilities(logits: Tensor) -> None:
    """Warn of logits that are probabilities or percentages."""
    for total, remedy in SUSPICIOUS_SUMS.items():
        # The first rows rule out nearly all tables.
        if _have_sum(logits[:ENOUGH], total) and _have_sum(logits, total):
            about = f"{total}" if total == 1 else f"about {total}"  # percentages are rounded
            way = choose_advice(
                "by Predictions.from_probs or as probs in a file",
                "as an array called probs or columns called prob_...",
            )
            warnings.warn(
                f"every row of the logits lies between 0 and {total} and sums to {about}. {remedy}{way}",
                stacklevel=3,
            )


def _have_sum(logits: Tensor, total: int) -> bool:
    """Return whether rows are not negative and have one sum, and are too many for chance."""
    fewest = ENOUGH if total == 1 else 3
    if len(logits) < fewest or bool((logits.amin() < 0) | (logits.amax() > total)):
        return False
    if total > 1 and bool(logits.amax() <= 1):  # many small numbers
        return False
    near = TOLERANCE[logits.dtype] if total == 1 else 0.01 * total
    if not bool(((_row_sums(logits) - total).abs() <= near).all()):
        return False
    # One-hot rows may be logits; most rows of percentages have several classes.
    return total == 1 or bool((logits.amax(1) < 0.999 * total).double().mean() > 0.5)


def _row_sums(probs: Tensor) -> Tensor:
    return probs.sum(dim=1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)


def check_labels(labels: Tensor, n: int, classes: int) -> Labels:
    """Return one label per sample, hard ones as int64; raise if they are not valid."""
    if len(labels) != n:
        question = "; is the table transposed?" if len(labels) == classes else ""
        raise UserError(f"labels has {len(labels)} rows for {n} samples{question}")
    # One-hot labels of a wrong width are an error below, not class numbers.
    labels = _class_numbers(labels) if labels.ndim != 2 or labels.shape[1] in {1, classes} else labels
    if labels.ndim == 1 and not labels.is_floating_point():
        check_rows(
            "labels", labels, (labels >= 0) & (labels < classes), f"is outside 0..{classes - 1} (classes count from 0)"
        )
        return labels.long()
    if labels.ndim != 2 or not labels.is_floating_point() or labels.shape[1] != classes:
        given = f"labels are {labels.dtype} of shape {tuple(labels.shape)}"
        raise UserError(f"{given}; expected {n} integers, or soft labels: ({n}, {classes}) floats")
    check_probs(labels, name="labels")
    return labels


def _class_numbers(labels: Tensor) -> Tensor:
    """Return class numbers of labels that are unsigned, whole floating-point numbers, a column, or one-hot."""
    if labels.dtype in {torch.uint16, torch.uint32, torch.uint64, torch.bool}:
        labels = labels.long()  # few operations know these types
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim == 1 and labels.is_floating_point() and bool((labels == labels.round()).all()):
        return labels.long()
    if labels.ndim == 2:
        one_hot = (labels.amin(dim=1) == 0) & (labels.amax(dim=1) == 1) & ((labels != 0).sum(dim=1) == 1)
        if labels.is_floating_point() and not bool(one_hot.all()):
            return labels  # soft labels
        check_rows("labels", labels, one_hot, "is not one-hot (a single 1, zeros otherwise)")
        return labels.argmax(dim=1)
    return labels


def _shown(row: Tensor) -> str:
    values = row.reshape(-1)[:6].tolist()
    text = ", ".join(f"{value:.6g}" for value in values) + (", ..." if row.numel() > 6 else "")
    return text if row.ndim == 0 else f"[{text}]"
