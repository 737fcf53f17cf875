"""Predictions are the hinge of the house: what a model said about one split, and what was true.

Everything after training (metrics, post-hoc calibration, OOD scores, tables, pages) reads `Predictions` and nothing
else. They come from a training run, or from anywhere: arrays, or files of many kinds.

Nothing is guessed from values: logits enter by `Predictions(logits=...)`, probabilities by `Predictions.from_probs`,
and the columns of a file are recognised by their names:

    logits or probs           one array (npz), one list column (parquet)
    logit_NAME or prob_NAME   one column per class (csv, parquet); NAME becomes the class name
    label                     class name, or number where no class is called so; `label_NAME` hold soft labels
    confidence, prediction    instead of probabilities, when only the top class is known; `correct` (0 or 1) may replace
                              `label`, `prediction` or both
    index, feature_NAME       optional; `features`, `class_names`, `split` in npz
    id, path                  optional: the name of each sample, and its image file

If these names are missing, those of other tools are found (`fedlas.column_names`). `fedlas.files` reads and writes
further kinds of files, and finds the kind by the file's ending.
"""

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fedlas.column_names import SCORES, LabelFile, ReadOptions, Roles, find_roles, is_number, option, short_list
from fedlas.errors import UserError, UserTypeError

Array: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
Labels: TypeAlias = Int[Tensor, " n"] | Float[Tensor, "n classes"]

FORMAT = "fedlas.predictions/1"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# How many logits are made probabilities at a time: on a CPU 16 MiB, elsewhere a gigabyte. Smaller parts would fit a
# cache, but all threads wait for each other after each, which takes far longer where other programs run.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**22, 2**28
CLASS_LIMIT = 2**31 - 1  # class numbers are below this where classes have no names
ENOUGH = 20  # rows that are not all distributions by chance
INCOMPLETE = 2e-2  # a row of rounded probabilities whose sum is further from one is normalized
# What rows of logits sum to that are none, and what to do then.
LOOK_ALIKES = {
    1: "If these are probabilities, their softmax says nothing: give them as such, ",
    100: "If these are percentages, their softmax says nothing: divide them by 100, and give them as probabilities, ",
}
CALLED = "as an array called {} or columns called {}..."  # in a file
PERCENTAGES = "these look like percentages: divide them by 100"
WORDS = ("ids", "paths")  # words for each sample
NO_FLOAT64 = {"mps"}  # devices


class RowLimits(NamedTuple):
    """How far the sums of rows of rounded probabilities may lie below and above one.

    Attributes:
        below: limit of each row below one. Small probabilities are rounded to zero, so it is the larger one.
        above: limit of each row above one.
        unit: unit of the last digit of each row.
    """

    below: Float[Tensor, " n"]
    above: Float[Tensor, " n"]
    unit: Float[Tensor, " n"]


class Rest(TypedDict, total=False):
    """What may come with logits and labels."""

    features: Array | None
    index: Array | None
    class_names: Sequence[str] | None
    split: str | None
    ids: Sequence[object] | None
    paths: Sequence[object] | None


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Predictions:
    """What a model said about the samples of one split, and the truth beside it.

    Args:
        logits: one row of raw scores per sample. A single column, or a vector, is a binary head and becomes the two
            columns `[0, z]`, which have the same probabilities.
        labels: one class number per sample, or one row of class probabilities per sample (several annotators); one-hot
            rows become class numbers. None where the truth is unknown, or none of the classes: OOD predictions.
        features: the input of the last linear layer.
        index: position of each sample in the data set's own order.
        class_names: one name per class.
        split: where the samples come from, such as "test".
        ids: the name of each sample.
        paths: the image file of each sample.

    Attributes:
        columns: which columns of a file were read as what; None where predictions were made of arrays.
    """

    given_logits: Float[Tensor, "n classes"] | None
    given_labels: Labels | None
    features: Float[Tensor, "n width"] | None
    index: Int[Tensor, " n"] | None
    class_names: tuple[str, ...] | None
    split: str | None
    ids: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    given_probs: Float[Tensor, "n classes"] | None
    decimals: int | None
    columns: Roles | None

    def __init__(self, logits: Array, labels: Array | None = None, **rest: Unpack[Rest]) -> None:
        scores = two_columns(as_floats(logits, "logits"), "logits")
        check_finite(scores)
        for total, advice in LOOK_ALIKES.items():
            # The first rows tell nearly all tables.
            if _look_like_shares(scores[:ENOUGH], total) and _look_like_shares(scores, total):
                about = f"{total}" if total == 1 else f"about {total}"  # percentages are rounded
                way = _advice("by Predictions.from_probs or as probs in a file", CALLED.format("probs", "prob_"))
                warnings.warn(
                    f"every row of the logits lies between 0 and {total} and sums to {about}. {advice}{way}",
                    stacklevel=2,
                )
        self._fill(scores, labels, rest)

    @classmethod
    def from_probs(
        cls,
        probs: Array,
        labels: Array | None = None,
        *,
        normalize: bool = False,
        limits: RowLimits | None = None,
        **rest: Unpack[Rest],
    ) -> "Predictions":
        """Start from probabilities; the logits are their logarithms.

        The sum of a row may differ from one by what rounding explains: the precision of the type, or the decimals that
        the table is rounded to. Rounding to few decimals turns small probabilities into zeros. Where a row then
        misses one by more than 0.02, it is normalized with a warning: the missing probability is spread over its zeros.

        A probability of zero is legal. Its logit, and the NLL of such a label, are those of half of the last decimal if
        probabilities are rounded, which is detected (`decimals`), else of the smallest number of its type.

        Args:
            probs: rows that sum to one; a vector or single column is the probability of class 1.
            labels: as in the constructor.
            normalize: divide every row by its sum, whatever it is.
            limits: how far the sums of rows may be from one, where text shows it better than numbers.
            rest: features, index, class_names, split, ids and paths, as in the constructor.
        """
        table = as_floats(probs, "probs")
        _check_turned(table, labels)
        given = _normalized(table) if normalize else two_columns(table, "probs")
        decimals = decimals_of(given)
        try:
            top = top_of_probs(given)
        except ValueError:
            limits = rounding_limits(given) if limits is None else limits
            if limits is None:
                raise
            check_probs(given, limits)
            given = _completed(given, limits)
            top = largest(given)
        made = cls.__new__(cls)
        made._fill(None, labels, rest, given, decimals=decimals)
        made.__dict__["_top"] = top  # found while the table was checked
        return made

    def _fill(
        self,
        logits: Tensor | None,
        labels: Array | None,
        rest: Rest,
        given_probs: Tensor | None = None,
        *,
        decimals: int | None = None,
    ) -> None:
        for name in rest:
            if name not in Rest.__annotations__:
                raise UserTypeError(f"Predictions takes no {name!r}; it takes {', '.join(Rest.__annotations__)}")
        table = given_probs if logits is None else logits
        assert table is not None
        n, classes = table.shape
        # Labels come first: of a transposed table, nothing else fits either.
        truth = None if labels is None else check_labels(as_tensor(labels, "labels").to(table.device), n, classes)
        names, features, index = rest.get("class_names"), rest.get("features"), rest.get("index")
        if names is not None and len(names) != classes:
            raise UserError(f"class_names has {len(names)} names for {classes} classes")
        called = None if names is None else tuple(map(str, names))
        check_distinct(called)
        width = None if features is None else as_floats(features, "features")
        if width is not None and width.numel():
            check_finite(width, "features")
        order = None if index is None else as_tensor(index, "index").long()
        ids, paths = (
            None if words is None else tuple(map(str, words)) for words in (rest.get("ids"), rest.get("paths"))
        )
        for name, rows in {"features": width, "index": order, "ids": ids, "paths": paths}.items():
            if rows is not None and len(rows) != n:
                raise UserError(f"{name} has {len(rows)} rows, logits have {n}")
        given: tuple[Any, ...] = (logits, truth, width, order, called, rest.get("split"), ids, paths, given_probs)
        values = (*given, decimals, None)
        for field, value in zip(type(self).__dataclass_fields__, values, strict=True):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def scores(self) -> Float[Tensor, "n classes"]:
        """The table as it was given: logits, or probabilities."""
        table = self.given_probs if self.given_logits is None else self.given_logits
        assert table is not None
        return table

    @cached_property
    def logits(self) -> Float[Tensor, "n classes"]:
        """The logits, or the logarithms of the probabilities where those were given."""
        if self.given_logits is not None:
            return self.given_logits
        probs = self.scores
        logs = probs.to(torch.promote_types(probs.dtype, torch.float32)).log()
        if self.decimals is None:
            return logs.clamp_min_(least_log_prob(probs.dtype))
        return logs.masked_fill_(logs == -math.inf, math.log(0.5 * 10.0**-self.decimals))

    def __getitem__(self, rows: slice | Tensor | NDArray[Any] | list[Any]) -> "Predictions":
        """Take some of the samples, by a slice, their numbers or a mask."""
        place = _selection(rows, len(self))
        made = type(self).__new__(type(self))
        for field in type(self).__dataclass_fields__:
            value = getattr(self, field)
            where = place.to(value.device) if isinstance(value, Tensor) and isinstance(place, Tensor) else place
            taken = value[where] if isinstance(value, Tensor) else value
            if field in WORDS and value is not None:
                taken = tuple(value[row] for row in torch.arange(len(self))[place].tolist())
            object.__setattr__(made, field, taken)
        if self.given_logits is None and "logits" in self.__dict__:
            made.__dict__["logits"] = self.logits[place.to(self.logits.device) if isinstance(place, Tensor) else place]
        if not len(made):
            raise UserError("no sample is left")
        return made

    def __repr__(self) -> str:
        split = f"split={self.split!r}, " if self.split else ""
        dtype = str(self.scores.dtype).removeprefix("torch.")
        return f"Predictions({split}n={len(self):,}, classes={self.num_classes}, {dtype})"

    @property
    def num_classes(self) -> int:
        """How many classes the model knows."""
        return self.scores.shape[1]

    @property
    def labels(self) -> Labels:
        """The truth: one class number, or one row of class probabilities, per sample."""
        if self.given_labels is None:
            raise UserError("these predictions have no labels (in a file: a column `label` or `labels`)")
        return self.given_labels

    @property
    def probs(self) -> Float[Tensor, "n classes"]:
        """Probability of each class: the ones given, or the softmax of the logits in float32 or better."""
        return self.given_probs if self.given_probs is not None else softmax(self.logits)

    @property
    def zeros(self) -> Bool[Tensor, "n classes"] | None:
        """Which probabilities were given as zero, so that their logarithms are unknown; None where there are none."""
        if self.given_probs is None or bool((self.given_probs > 0).all()):
            return None
        return self.given_probs <= 0

    def scores_only(self) -> "Predictions":
        """Return the same scores and labels without features, names and split."""
        made = self[:]
        for field in Rest.__annotations__:
            object.__setattr__(made, field, None)
        return made

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
        """Logarithm of 1 - confidence in float64, computed from the logits; None where only probabilities are known.

        Near a confidence of 1, float32 confidences of different samples are equal; these values are not.
        """
        return None if self.given_probs is not None else log_uncertainty(self.logits, self.prediction)

    @property
    def correct(self) -> Bool[Tensor, " n"] | Float[Tensor, " n"]:
        """Whether the predicted class is the label; with soft labels, the share of the label on that class."""
        hard = self.labels.ndim == 1
        return self.prediction == self.labels if hard else self.labels.gather(1, self.prediction[:, None])[:, 0]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        from fedlas.storage import write_whole

        write_whole(Path(path), self.to_bytes())

    def to_bytes(self, *, probs: bool = False) -> bytes:
        """Give the content of a safetensors file; with probabilities where only those are known, or asked for."""
        from fedlas.storage import to_safetensors

        scores = {"probs": self.probs} if probs or self.given_probs is not None else {"logits": self.logits}
        optional = {"labels": self.given_labels, "features": self.features, "index": self.index}
        tensors = scores | {k: v for k, v in optional.items() if v is not None}
        return to_safetensors(_about(self), tensors)

    def with_split(self, split: str | None) -> "Predictions":
        """Make the same predictions of a split that has a name."""
        made = self[:]
        object.__setattr__(made, "split", split)
        return made

    @classmethod
    def load(cls, path: str | Path, **options: Unpack[ReadOptions]) -> "AnyPredictions":
        """Read a file that `save` wrote."""
        from fedlas.storage import read_safetensors, readable

        words, tensors = read_safetensors(path)
        columns: dict[str, Any] = dict(tensors)
        kind = words.get("format", "")
        if kind.startswith('"fedlas.') and kind != json.dumps(FORMAT):
            raise UserError(f"{path} holds no predictions: it is a file of another kind ({kind[:80]})")
        with readable(path):
            about = {k: json.loads(v) for k, v in words.items()} if kind == json.dumps(FORMAT) else {}
        columns |= {name: about[name] for name in ("class_names", *WORDS) if about.get(name) is not None}
        return cls.from_columns(columns, path, about.get("split"), **options)

    @classmethod
    def from_npz(cls, path: str | Path, split: str | None = None, **options: Unpack[ReadOptions]) -> "AnyPredictions":
        """Read `logits` or `probs`, `labels`, and optionally `features`, `index`, `class_names` from an npz file."""
        from fedlas.columns import read_npz

        columns = read_npz(path)
        split = split or (str(columns["split"]) if "split" in columns else None)
        return cls.from_columns(columns, path, split, **options)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        split: str | None = None,
        *,
        watch: Callable[[float], None] | None = None,
        **options: Unpack[ReadOptions],
    ) -> "AnyPredictions":
        """Read a table with a header; see the module's text for the names of its columns.

        Args:
            path: the file.
            split: where the samples come from.
            watch: called now and then with the share of the file that has been read.
            options: which columns hold what, as in `ReadOptions`.
        """
        from fedlas.columns import read_csv, with_labels

        options = with_labels(options)
        table = read_csv(path, watch, options)
        limits = RowLimits(*torch.from_numpy(table.rounding).T) if len(table.rounding) else None
        return cls.from_columns(table.columns, path, split, limits=limits, lines=table.lines, **options)

    @classmethod
    def from_parquet(
        cls, path: str | Path, split: str | None = None, **options: Unpack[ReadOptions]
    ) -> "AnyPredictions":
        """Read a parquet table; list columns `logits` or `probs`, or one column per class as in `from_csv`."""
        from fedlas.columns import read_parquet, with_labels

        options = with_labels(options)
        return cls.from_columns(read_parquet(path, options), path, split, **options)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        path: str | Path,
        split: str | None = None,
        limits: RowLimits | None = None,
        *,
        lines: Sequence[int] | None = None,
        **options: Unpack[ReadOptions],
    ) -> "AnyPredictions":
        """Make predictions of named columns; the module's text lists the names that are known.

        Columns that hold the confidence of the predicted class alone make `TopLabelPredictions`.

        Args:
            columns: an array, or a list of words, for each name.
            path: the file that they come from, for errors.
            split: where the samples come from.
            limits: how far the sum of each row of probabilities may be from one.
            lines: of a text file, the line of each row, for errors.
            options: which columns hold what, as in `ReadOptions`.
        """
        from fedlas.columns import labels_for, no_labels, no_scores, renamed, understood, with_labels
        from fedlas.storage import named

        options = with_labels(options)
        labels, source = options.get("labels"), None
        with named(path, lines):
            roles = find_roles(columns, options, path)
            if not roles.has_scores:
                raise no_scores(columns, roles, options, path)
            held = renamed(columns, roles)
            if "confidence" in held and labels is None and not held.keys() & {"label", "labels", "correct"}:
                raise no_labels(roles, path)
            if isinstance(labels, LabelFile):
                n = len(held[next(role for role in roles.names.values() if role.startswith(SCORES))])
                source = f"{labels.path} (labels of {path})"
                held["label"] = labels_for(labels, n, source)
                roles = roles._replace(names={**roles.names, labels.path.name: "label"})
            elif labels is not None:
                held["label"] = labels
            found = understood(held, path, source)
            if source is not None and found.top is None:
                with named(source):
                    check_labels(as_tensor(found.labels, "labels"), n, max(2, *np.shape(found.scores)[1:], 0))
            rest = {**found.rest, "split": split}
            if found.are_logits:
                made: AnyPredictions = cls(found.scores, found.labels, **rest)
            elif found.top is not None:
                made = TopLabelPredictions(found.scores, labels=found.labels, **found.top, **rest)
            else:
                how: dict[str, Any] = {"normalize": options.get("normalize", False), "limits": limits}
                with _naming_unread(columns, roles.unread, found.scores):
                    made = cls.from_probs(found.scores, found.labels, **how, **rest)
            object.__setattr__(made, "columns", roles)
            return made


@contextmanager
def _naming_unread(columns: Mapping[str, Any], unread: Sequence[str], scores: Any) -> Iterator[None]:
    """Name the columns of numbers that were not read, where the sum of a row is too small: they may be classes."""
    from fedlas.storage import RowError

    try:
        yield
    except RowError as error:
        numbers = [name for name in unread if is_number(columns[name])]
        total = float(scores[error.row].sum()) if np.ndim(scores) == 2 else 1.0
        if error.before != "probs: " or not numbers or not total < 1:
            raise
        way = f"if they are classes, name the columns of all classes with {option('prob_columns')}"
        after = f" sums to {total:.6g}, and columns of numbers were not read: {short_list(numbers)}; {way}"
        raise RowError(error.before, error.row, after) from error


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TopLabelPredictions:
    """Confidence and correctness of the predicted class of each sample, where nothing is known of other classes.

    Args:
        confidence: probability of the predicted class.
        correct: whether the predicted class is the label; not needed beside `labels` and `prediction`.
        labels: class numbers, if they are known.
        prediction: predicted class numbers, if they are known.
        class_names: one name per class.
        split: where the samples come from, such as "test".
        index: position of each sample in the data set's own order.
        ids: the name of each sample.
        paths: the image file of each sample.
    """

    confidence: Float[Tensor, " n"]
    correct: Bool[Tensor, " n"]
    given_labels: Int[Tensor, " n"] | None
    prediction: Int[Tensor, " n"] | None
    index: Int[Tensor, " n"] | None
    class_names: tuple[str, ...] | None
    split: str | None
    ids: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    columns: Roles | None

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
    ) -> None:
        scores = as_floats(confidence, "confidence")
        if scores.ndim != 1:
            raise UserError(f"confidence has shape {tuple(scores.shape)}; one number per sample is expected")
        percent = "; percentages are divided by 100 before" if scores.numel() and bool(scores.amax() > 1) else ""
        check_rows("confidence", scores, (scores > 0) & (scores <= 1), f"is not above 0 and at most 1{percent}")
        n, called = len(scores), None if class_names is None else tuple(map(str, class_names))
        check_distinct(called)
        truth, said = (
            None if given is None else _check_numbers(name, as_tensor(given, name), n, called)
            for name, given in (("labels", labels), ("prediction", prediction))
        )
        right = None if correct is None else _check_flags(as_tensor(correct, "correct"), n)
        if truth is not None and said is not None:
            equal = truth == said
            if right is not None and not torch.equal(right, equal):
                row = int((right != equal).nonzero()[0])
                raise UserError(f"correct: row {row} contradicts its label and prediction; leave one of them out")
            right = equal
        if right is None:
            raise UserError("correct is missing, or labels and prediction: nothing says which predictions are correct")
        order = None if index is None else as_tensor(index, "index").long()
        samples, files = (None if given is None else tuple(map(str, given)) for given in (ids, paths))
        for name, rows in {"index": order, "ids": samples, "paths": files}.items():
            if rows is not None and len(rows) != n:
                raise UserError(f"{name} has {len(rows)} rows, confidence has {n}")
        values = (scores, right, truth, said, order, called, split, samples, files, None)
        for field, value in zip(type(self).__dataclass_fields__, values, strict=True):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.confidence)

    def __getitem__(self, rows: slice | Tensor | NDArray[Any] | list[Any]) -> "TopLabelPredictions":
        """Take some of the samples, by a slice, their numbers or a mask."""
        place = _selection(rows, len(self))
        made = type(self).__new__(type(self))
        for field in type(self).__dataclass_fields__:
            value = getattr(self, field)
            taken = value[place] if isinstance(value, Tensor) else value
            if field in WORDS and value is not None:
                taken = tuple(value[row] for row in torch.arange(len(self))[place].tolist())
            object.__setattr__(made, field, taken)
        if not len(made):
            raise UserError("no sample is left")
        return made

    def __repr__(self) -> str:
        split = f"split={self.split!r}, " if self.split else ""
        return f"TopLabelPredictions({split}n={len(self):,}, classes={self.num_classes or 'unknown'})"

    @property
    def scores(self) -> Float[Tensor, " n"]:
        """The confidences."""
        return self.confidence

    @property
    def num_classes(self) -> int:
        """Number of classes that labels or predictions name; 0 where both are unknown."""
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
        """Make the same predictions of a split that has a name."""
        made = copy(self)
        object.__setattr__(made, "split", split)
        return made

    def save(self, path: str | Path) -> None:
        """Write a safetensors file atomically."""
        from fedlas.storage import write_whole

        write_whole(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the content of a safetensors file."""
        from fedlas.storage import to_safetensors

        optional = {"labels": self.given_labels, "prediction": self.prediction, "index": self.index}
        tensors = {"confidence": self.confidence, "correct": self.correct}
        return to_safetensors(_about(self), tensors | {k: v for k, v in optional.items() if v is not None})


AnyPredictions: TypeAlias = Predictions | TopLabelPredictions


def _about(predictions: AnyPredictions) -> dict[str, str]:
    """Return the texts of predictions as they stand in a safetensors file."""
    about = {"format": FORMAT, "class_names": predictions.class_names, "split": predictions.split}
    about |= {name: getattr(predictions, name) for name in WORDS if getattr(predictions, name) is not None}
    return {name: json.dumps(value) for name, value in about.items()}


def _selection(rows: Any, n: int) -> slice | Tensor:
    """Return a selection of samples as torch takes it; it knows no slices with a negative step."""
    if isinstance(rows, slice):
        return rows if (rows.step or 1) > 0 else torch.tensor(range(*rows.indices(n)), dtype=torch.long)
    if isinstance(rows, Tensor | np.ndarray | list):
        return torch.as_tensor(rows)
    raise UserTypeError(f"samples are taken by a slice, their numbers or a mask, not by {type(rows).__name__}")


def _check_numbers(name: str, given: Tensor, n: int, names: Sequence[str] | None) -> Int[Tensor, " n"]:
    """Raise an error unless there is one class number per sample."""
    given = _class_numbers(given)
    if given.is_floating_point() or given.shape != (n,):
        raise UserError(f"{name} is {given.dtype} of shape {tuple(given.shape)}; expected {n} integers")
    most = CLASS_LIMIT if names is None else len(names)
    check_rows(name, given, (given >= 0) & (given < most), f"is outside 0..{most - 1} (classes count from 0)")
    return given.long()


def _check_flags(given: Tensor, n: int) -> Bool[Tensor, " n"]:
    """Raise an error unless each sample is correct (1, true) or incorrect (0, false)."""
    if given.shape != (n,):
        raise UserError(f"correct has shape {tuple(given.shape)}; expected {n} values of 0 or 1")
    if given.dtype != torch.bool:
        check_rows("correct", given, (given == 0) | (given == 1), "is neither 0 nor 1")
    return given.bool()


def with_every_class(given: AnyPredictions, what: str) -> Predictions:
    """Return predictions that know every class; raise an error if only the top class of each sample is known.

    Args:
        given: predictions.
        what: what needs every class, for the error.
    """
    if isinstance(given, TopLabelPredictions):
        needed = "the logits or probabilities of every class"
        raise UserError(f"only the top confidence of each sample is known; {what} needs {needed}")
    return given


def check_every_class(given: AnyPredictions, name: str, other: AnyPredictions, others: str) -> None:
    """Raise an error if one of two predictions that do not fit each other has top labels only.

    Args:
        given: some predictions.
        name: how they are called.
        other: those that they do not fit to.
        others: how those are called.
    """
    for one, called in ((given, name), (other, others)):
        if isinstance(one, TopLabelPredictions):
            needed = "the logits or probabilities of every class are needed"
            raise UserError(f"{called}: only the top confidence of each sample is known; {needed}")


def as_tensor(values: Array, name: str) -> Tensor:
    """Take a torch, numpy or other array as a tensor, without a copy where that is possible."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            kind = "on the device meta, which holds no numbers" if values.is_meta else f"of layout {values.layout}"
            raise UserTypeError(f"{name} is a tensor {kind}; a dense one is needed (to_dense)")
        if values.is_complex():
            raise UserTypeError(f"{name} holds {values.dtype}; real numbers are expected")
        return values.detach()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise UserTypeError(f"{name} is a masked array; leave out what is masked before, or it would count")
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
    plain = array.dtype.isnative and all(stride >= 0 for stride in array.strides)  # what torch can share
    # Not ascontiguousarray: one number that is read backwards counts as contiguous and would stay as it is.
    array = array if plain else array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_floats(values: Array, name: str) -> Float[Tensor, "..."]:
    """Take an array as a tensor of floating-point numbers; other numbers are no logits, probabilities or features."""
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
    """Give the single column of a binary classifier its second one: z becomes logits [0, z], p becomes [1 - p, p]."""
    if values.ndim == 1 or values.shape[1:] == (1,):
        one = values.reshape(-1)
        return torch.stack([1 - one if name == "probs" else torch.zeros_like(one), one], dim=1)
    if values.ndim != 2:
        raise UserError(f"{name} have shape {tuple(values.shape)}; one row of classes per sample is expected")
    if not values.shape[1]:
        raise UserError(f"{name} have shape {tuple(values.shape)}; at least one class is needed")
    return values


def softmax(logits: Float[Tensor, "n classes *space"]) -> Float[Tensor, "n classes *space"]:
    """Turn logits into probabilities, in float32 or better."""
    return logits.softmax(dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))


def least_prob(dtype: torch.dtype) -> float:
    """Give the smallest positive number of a type: the one floor of probabilities that a logarithm is taken of."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def least_log_prob(dtype: torch.dtype) -> float:
    """Give the logarithm of that number, also where numbers as small are taken for zero (`set_flush_denormal`)."""
    return math.log(torch.finfo(dtype).tiny) + math.log(torch.finfo(dtype).eps)


def decimals_of(probs: Float[Tensor, "n classes"]) -> int | None:
    """Return the number of decimals that probabilities are rounded to; None where they are not, or too few to tell.

    Rounded numbers are multiples of one unit, and none lies between zero and half a unit, as small probabilities of a
    softmax do. The first rows rule out nearly all tables that are not rounded.
    """
    if probs.dtype not in {torch.float32, torch.float64}:
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = [count for count in range(1, 13) if precision * 10**count <= 0.2]
    between = 0
    for part in (probs[:ENOUGH], *parts_of(probs)):
        # Multiples of a unit are multiples of a tenth of it as well: only the largest unit has to be looked at.
        while digits and not _are_multiples(part, 10.0 ** digits[0], precision):
            del digits[0]
        if not digits:
            return None
        between += int(((part > 0) & (part < 1)).sum())
    return digits[0] if between >= 2 * ENOUGH else None


def _are_multiples(part: Tensor, scale: float, precision: float) -> bool:
    part = part.cpu() if part.device.type == "mps" else part  # which has no float64
    scaled = part.double() * scale
    whole = scaled.round()
    return bool(((scaled - whole).abs() <= precision * scale).all() & ((part <= 0) | (whole >= 1)).all())


def slices_of(table: Tensor) -> list[slice]:
    """Cut the rows of a table into parts that are small enough for a copy of each in another type."""
    at_once = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    size = max(1, at_once // max(1, table[:1].numel()))
    return [slice(start, min(start + size, len(table))) for start in range(0, max(1, len(table)), size)]


def parts_of(table: Tensor) -> list[Tensor]:
    """Give a table in parts that are small enough for a copy of each in another type."""
    return [table[rows] for rows in slices_of(table)]


def largest(table: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "n *space"], Int[Tensor, "n *space"]]:
    """Return the largest value of every row and its column; of equal values the first."""
    if table.device.type == "cpu" and table.ndim == 2 and table.dtype in {torch.float32, torch.float64} and len(table):
        place = torch.from_numpy(table.numpy().argmax(1))  # five times as fast as torch
        return table.gather(1, place[:, None])[:, 0], place
    found = table.max(dim=1)
    return found.values, found.indices


def top_of_logits(logits: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Find the largest probability of every row and its class, without making the probabilities of all rows at once."""
    confidence, prediction, lowest = [], [], []
    for part in parts_of(logits):
        value, place = largest(softmax(part))
        confidence.append(value)
        prediction.append(place)
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    found = torch.cat(confidence)
    # NaN and plus infinity make a confidence NaN; minus infinity shows in the lowest logit alone.
    if not bool(torch.isfinite(found).all() & torch.isfinite(torch.stack(lowest)).all()):
        check_finite(logits)
    return found, torch.cat(prediction)


def log_uncertainty(
    logits: Float[Tensor, "n classes *space"], prediction: Int[Tensor, "n *space"]
) -> Float[Tensor, "n *space"]:
    """Return the logarithm of the probability of all classes but the predicted one, in float64 where there is any."""
    found = []
    for rows in slices_of(logits):
        part = logits[rows]
        part = part.float() if part.device.type in NO_FLOAT64 else part.double()
        place = prediction[rows].unsqueeze(1)
        lead = part - part.gather(1, place)
        others = lead.scatter_(1, place, -math.inf).logsumexp(1)
        found.append(others - torch.logaddexp(others, torch.zeros_like(others)))
    return torch.cat(found)


def top_of_probs(
    probs: Float[Tensor, "n classes *space"], ignored: Bool[Tensor, "n *space"] | None = None
) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Find the largest probability of every row and its class, and check that rows are distributions while at it."""
    confidence, prediction, sums, lowest = [], [], [], []
    for part in parts_of(probs):
        value, place = largest(part)
        confidence.append(value)
        prediction.append(place)
        sums.append(_row_sums(part))
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    # The reason of a failure is looked for in a second reading; most tables are right.
    near_one = ((torch.cat(sums) - 1).abs() <= TOLERANCE[probs.dtype]).all()
    if not len(probs) or not bool(near_one & (torch.stack(lowest) >= 0).all()):
        check_probs(probs, ignored=ignored)
    return torch.cat(confidence), torch.cat(prediction)


def check_finite(logits: Float[Tensor, "..."], name: str = "logits") -> None:
    """Raise an error that names the first row that holds NaN or infinity."""
    # The extremes are NaN or infinite if any number is: one reading, where a mask would be written as well.
    if logits.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
        good = torch.isfinite(logits)
        check_rows(name, logits, good if good.ndim == 1 else good.flatten(1).all(dim=1), "holds NaN or infinity")


def check_rows(name: str, values: Tensor, good: Bool[Tensor, "n *space"], fault: str) -> None:
    """Raise an error that names the first row that is not good."""
    if good.numel() == 0:
        raise UserError(f"{name} has no rows; at least one sample is needed")
    if bool(good.all()):
        return
    from fedlas.storage import RowError

    row, *place = [int(i) for i in (~good).nonzero()[0]]
    shown = values[row].movedim(0, -1)[tuple(place)] if place and values.ndim > good.ndim else values[(row, *place)]
    raise RowError(f"{name}: ", row, f"{f' at {tuple(place)}' if place else ''} {fault}: {_shown(shown)}")


def check_probs(
    probs: Float[Tensor, "n classes *space"],
    limits: RowLimits | None = None,
    ignored: Bool[Tensor, "n *space"] | None = None,
    name: str = "probs",
) -> None:
    """Raise an error unless every row is a probability distribution, up to rounding."""
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
        advice = "; " + _advice(
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


def _advice(in_python: str, in_file: str) -> str:
    """Choose what to do by where numbers come from: who gives a file need not know Python."""
    from fedlas.storage import FROM_FILE

    return in_file if FROM_FILE.get() else in_python


def _are_percentages(table: Tensor) -> bool:
    """Say whether rows are percentages, some above 1; whole ones of many classes miss 100 by their rounding."""
    if table.ndim != 2 or not table.numel() or table.is_complex():
        return False
    numbers = table.double()
    if bool((numbers.amin() < 0) | (numbers.amax() > 100) | (numbers.amax() <= 1)):
        return False
    return bool((numbers.sum(dim=1).median() - 100).abs() <= 10)


def _is_percentage(probs: Tensor, place: tuple[int, ...]) -> bool:
    """Say whether a row was made of one percentage of a binary classifier."""
    if probs.ndim != 2 or probs.shape[1] != 2 or not place:
        return False
    rest, own = probs[place].tolist()
    return bool(1 < own <= 100 and rest == 1 - own)


def _check_turned(probs: Tensor, labels: Array | None) -> None:
    """Ask whether a table of probabilities is transposed, where it has a column and not a row for each label."""
    shape = getattr(labels, "shape", None)
    count = shape[0] if shape else len(labels) if isinstance(labels, Sequence) else 0
    if probs.ndim == 2 and count == probs.shape[1] != probs.shape[0]:
        rows = "1 row" if len(probs) == 1 else f"{len(probs)} rows"
        raise UserError(f"probs has {rows} for {count} labels; is it transposed?")


def rounding_limits(probs: Float[Tensor, "n classes"]) -> RowLimits | None:
    """Return how far rounding to decimals can move the sums of rows; None where a table is not rounded to decimals.

    The errors of the entries above zero add up as independent ones do: four standard deviations, and at most half a
    unit each. Entries that were rounded to zero have all lost something, at most half a unit each.
    """
    if probs.dtype not in {torch.float32, torch.float64} or not bool(torch.isfinite(probs).all()):
        return None
    precision = torch.finfo(probs.dtype).eps
    digits = (d for d in range(1, 7) if precision * 10.0**d <= 0.01)
    found = (d for d in digits if all(_are_multiples(part, 10.0**d, precision) for part in parts_of(probs)))
    decimals = next(found, None)
    if decimals is None:
        return None
    positive = (probs > 0).sum(dim=1).to(torch.promote_types(probs.dtype, torch.float32))
    unit = torch.full_like(positive, 10.0**-decimals)
    above = unit * torch.minimum(4 * (positive / 12).sqrt(), positive / 2) * 1.000002 + TOLERANCE[probs.dtype]
    return RowLimits(above + unit / 2 * (probs.shape[1] - positive), above, unit)


def _completed(probs: Float[Tensor, "n classes"], limits: RowLimits) -> Float[Tensor, "n classes"]:
    """Make those rows of rounded probabilities sum to one that miss it by more than 0.02.

    The missing probability is spread over the zeros, at most half a unit each: dividing by the sum would raise every
    confidence. The rest is divided out.
    """
    sums = _row_sums(probs)
    off = (sums - 1).abs() > INCOMPLETE
    if not bool(off.any()):
        return probs
    rows, own, unit = probs[off], sums[off], limits.unit.to(sums)[off]
    zero = rows <= 0
    share = torch.minimum((1 - own).clamp_min(0) / zero.sum(dim=1).clamp_min(1), unit / 2)
    rows = torch.where(zero, share[:, None].to(rows.dtype), rows)
    warnings.warn(
        f"{len(rows):,} of {len(probs):,} rows of rounded probabilities sum to {float(own.min()):.4g} to "
        f"{float(own.max()):.4g} and were normalized: below one, the zeros of a row take up the rest; above one, it is "
        "divided by its sum",
        stacklevel=3,
    )
    completed = probs.clone()
    completed[off] = rows / _row_sums(rows)[:, None].to(rows.dtype)
    return completed


def _normalized(table: Tensor) -> Float[Tensor, "n classes"]:
    """Divide every row by its sum."""
    if table.ndim != 2 or table.shape[1] < 2:
        raise UserError(f"normalize needs a column for each class, not a table of shape {tuple(table.shape)}")
    sums = _row_sums(table)
    good = torch.isfinite(sums) & (sums > 0) & (table.amin(dim=1) >= 0)
    check_rows("probs", table, good, "cannot be divided by its sum (entries of 0 or more, sum above 0)")
    return table / sums[:, None].to(table.dtype)


def _look_like_shares(logits: Tensor, total: int) -> bool:
    """Say whether so many rows as cannot be chance are shares of a total; a table of ones and zeros may be made so."""
    fewest = ENOUGH if total == 1 else 3
    if len(logits) < fewest or bool((logits.amin() < 0) | (logits.amax() > total)):
        return False
    if total > 1 and bool(logits.amax() <= 1):  # many small numbers
        return False
    near = TOLERANCE[logits.dtype] if total == 1 else 0.01 * total
    return bool(((_row_sums(logits) - total).abs() <= near).all()) and (total == 1 or bool(_is_shared(logits, total)))


def _is_shared(logits: Tensor, total: int) -> Bool[Tensor, ""]:
    """Say whether most rows give something to more than one class."""
    return (logits.amax(1) < 0.999 * total).double().mean() > 0.5


def _row_sums(probs: Tensor) -> Tensor:
    return probs.sum(dim=1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)


def check_distinct(names: Sequence[str] | None) -> None:
    """Refuse two classes of one name."""
    name, count = next(iter(Counter(names or ()).most_common(1)), ("", 0))
    if count > 1:
        raise UserError(f"two classes have the same name, {name!r}; each needs one of its own")


def check_labels(labels: Tensor, n: int, classes: int) -> Labels:
    """Raise an error unless there is one valid label per sample; hard labels come back as int64."""
    if len(labels) != n:
        turned = "; is the table transposed?" if len(labels) == classes else ""
        raise UserError(f"labels has {len(labels)} rows for {n} samples{turned}")
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
    """Return class numbers where labels hold them as unsigned or whole floating-point numbers, a column, or one-hot."""
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
