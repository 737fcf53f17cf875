"""Predictions of a model for the samples of one split: logits or probabilities, labels, optional further fields.

Everything after training (metrics, post-hoc calibration, OOD scores, tables, pages) reads `Predictions` and nothing
else. They come from a training run, from arrays, or from files (`fedlas.io`). Nothing is guessed from values: logits
enter by `Predictions(logits=...)`, probabilities by `Predictions.from_probs`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import UserError, UserTypeError, short_list
from fedlas.predictions.arrays import (
    Array,
    Labels,
    RowLimits,
    as_floats,
    as_tensor,
    check_class_numbers,
    check_correctness,
    check_finite,
    check_labels,
    check_probs,
    check_row_names,
    check_rows,
    check_transposed,
    float32_or_better,
    two_columns,
    warn_about_probabilities,
)
from fedlas.predictions.probabilities import (
    complete_rows,
    decimals_of,
    largest,
    least_log_prob,
    log_uncertainty,
    normalize_rows,
    rounding_limits,
    softmax,
    top_of_logits,
    top_of_probs,
)

SCORE_ROLES = ("logit_", "prob_", "logits", "probs", "confidence")  # prefixes of the roles of columns with scores


class ColumnRoles(NamedTuple):
    """Which columns of a table predictions were read from.

    Attributes:
        names: for each column that was read, the name that fedlas uses for it, such as `prob_cat` or `label`.
        unread: columns without a known role.
        metadata: columns without a known role that became metadata.
    """

    names: Mapping[str, str]
    unread: Sequence[str]
    metadata: Sequence[str] = ()

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
        if self.metadata:
            parts.append(f"metadata from {short_list(self.metadata, 6)}")
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
            columns `[0, z]`, which have the same probabilities. Texts that name the columns of a DataFrame are class
            names.
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
        check_row_names(logits, labels)
        scores = two_columns(as_floats(logits, "logits"), "logits")
        check_finite(scores)
        warn_about_probabilities(scores)
        self._fill(scores, labels, _frame_names(logits) | fields)

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
        check_row_names(probs, labels)
        table = as_floats(probs, "probs")
        check_transposed(table, labels)
        rows = normalize_rows(table) if normalize else two_columns(table, "probs")
        decimals = decimals_of(rows)
        try:
            top = top_of_probs(rows)
        except ValueError:
            limits = rounding_limits(rows) if limits is None else limits
            if limits is None:
                raise
            check_probs(rows, limits)
            rows = complete_rows(rows, limits)
            top = largest(rows)
        made = cls.__new__(cls)
        made._fill(None, labels, _frame_names(probs) | fields, rows, decimals=decimals)
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
        logs = float32_or_better(probs).log()
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
            None if values is None else check_class_numbers(name, as_tensor(values, name), n, names)
            for name, values in (("labels", labels), ("prediction", prediction))
        )
        flags = None if correct is None else check_correctness(as_tensor(correct, "correct"), n)
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
            (int(numbers.max()) + 1 for numbers in (self.given_labels, self.prediction) if numbers is not None),
            default=0,
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


def _frame_names(scores: Array) -> OptionalFields:
    """Return the column names of a DataFrame without `prob_` or `logit_` as class names, if there are several texts."""
    names = list(getattr(scores, "columns", ()))
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        return {}
    prefix = next((prefix for prefix in ("prob_", "logit_") if all(name.startswith(prefix) for name in names)), "")
    return {"class_names": [name.removeprefix(prefix) for name in names]}


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
        "ids": None if ids is None else tuple(map(str, _plain_values(ids))),
        "paths": None if paths is None else tuple(map(str, paths)),
    }
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UserTypeError(f"metadata is {type(metadata).__name__}; a column for each name is expected")
    columns = (
        None if metadata is None else {str(name): tuple(_plain_values(values)) for name, values in metadata.items()}
    )
    for name, rows in {**samples, **(columns or {})}.items():
        if rows is not None and len(rows) != n:
            raise UserError(f"{name} has {len(rows)} rows, {other} {n}")
    return {**samples, "metadata": columns}


def _plain_values(column: Iterable[object]) -> Iterable[object]:
    """Return the elements of a column; those of a tensor as numbers, which are equal where their values are."""
    return column.tolist() if isinstance(column, Tensor) else column


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


def with_every_class(predictions: AnyPredictions, what: str) -> Predictions:
    """Return predictions for all classes; raise if only the top class of each sample is known.

    Args:
        predictions: predictions.
        what: what needs all classes, for the error.
    """
    if isinstance(predictions, TopLabelPredictions):
        needed = "the logits or probabilities of every class"
        raise UserError(f"only the top confidence of each sample is known; {what} needs {needed}")
    return predictions


def check_same_classes(first: AnyPredictions, first_name: str, second: AnyPredictions, second_name: str) -> None:
    """Raise unless two predictions of one model have the same classes in the same order.

    Args:
        first: predictions.
        first_name: their name, for the error.
        second: predictions of the same model.
        second_name: their name, in the plural.
    """
    if not (first.has_all_classes or second.has_all_classes):
        return  # each names the classes that occur in it
    for predictions, name in ((first, first_name), (second, second_name)):
        if not predictions.has_all_classes:
            needed = "the logits or probabilities of every class are needed"
            raise UserError(f"{name}: only the top confidence of each sample is known; {needed}")
    if first.num_classes != second.num_classes:
        raise UserError(f"{first_name} has {first.num_classes} classes, {second_name} have {second.num_classes}")
    names, others = first.class_names, second.class_names
    if names is not None and others is not None and names != others:
        difference = describe_class_difference(names, others, (first_name, second_name))
        raise UserError(f"{difference}; both need the same classes in the same order")


def describe_class_difference(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> str:
    """Describe how the names of equally many classes differ."""
    order = "the same classes in another order" if sorted(first) == sorted(second) else "other classes"
    number, one, other = next((n, a, b) for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    return f"{order}: class {number} is {one!r} in {names[0]} and {other!r} in {names[1]}"
