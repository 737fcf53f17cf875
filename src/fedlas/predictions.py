"""Predictions are the hinge of the house: what a model said about one split, and what was true.

Everything after training (metrics, post-hoc calibration, OOD scores, tables, pages) reads `Predictions` and nothing
else. They come from a training run, or from anywhere: arrays, or files of many kinds.

Nothing is guessed from values: logits enter by `Predictions(logits=...)`, probabilities by `Predictions.from_probs`,
and the columns of a file are recognised by their names:

    logits or probs           one array (npz), one list column (parquet)
    logit_NAME or prob_NAME   one column per class (csv, parquet); NAME becomes the class name
    label                     class name, or number where no class is called so; `label_NAME` hold soft labels
    confidence, prediction    instead of probabilities, when only the top class is known
    index, feature_NAME       optional; `features`, `class_names`, `split` in npz
    id, path                  optional: the name of each sample, and its image file

`fedlas.files` reads and writes further kinds of files, and finds the kind by the file's ending.
"""

import csv
import importlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import warnings
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
Labels: TypeAlias = Int[Tensor, " n"] | Float[Tensor, "n classes"]

FORMAT = "fedlas.predictions/1"
# Names a CRC-32 among the words of a file. It finds every single flipped bit, as a SHA-256 would; that takes three
# times as long, and would not keep out somebody who can write it anew either.
CHECKSUM = "fedlas.crc32"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# How many logits are made probabilities at a time: on a CPU 16 MiB, elsewhere a gigabyte. Smaller parts would fit a
# cache, but all threads wait for each other after each, which takes far longer where other programs run.
AT_ONCE, AT_ONCE_ON_DEVICE = 2**22, 2**28
MOST_CLASSES = 2**20  # of a file: the metrics of each take a kilobyte, and a small file can claim any number
ENOUGH = 20  # rows that are not all distributions by chance
# What rows of logits sum to that are none, and what to do then.
LOOK_ALIKES = {
    1: "If these are probabilities, their softmax says nothing: give them as such, ",
    100: "If these are percentages, their softmax says nothing: divide them by 100, and give them as probabilities, ",
}
CALLED = "as an array called {} or columns called {}..."  # in a file
PERCENTAGES = "these look like percentages: divide them by 100"
FROM_FILE: ContextVar[bool] = ContextVar("from_file", default=False)  # whether arrays come from a file that is read


LABELS = ("label", "labels")  # what the truth is called in a file
WORDS = ("ids", "paths")  # words for each sample
ALLOCATOR = "DefaultCPUAllocator: "  # who in torch says that there is no memory
PART = ".part"  # ends the name of a file that is being written
FILLING = "(other"  # begins the name of a class that only fills a row up to one
MOST_FILLED = 2**29  # numbers in a table that is made of confidences alone
# A file may hold more than it is long; one that holds more than both of these is made to fill a memory.
MOST_UNPACKED, MOST_TIMES = 2**28, 100
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")  # of a class that is called by one
LONGEST_WHOLE = 40  # digits of a number with leading zeros
WHOLE = re.compile(r"[+-]?\d+")  # a number as text
NUMBERS = ("logit_", "prob_", "feature_", "label_")  # columns that hold numbers in a text file


class RowError(ValueError):
    """An error about one row, which is counted from 0; who reads a text file says which line that is.

    Args:
        before: what is said before the row.
        row: which one.
        after: what is said after it.
    """

    def __init__(self, before: str, row: int, after: str) -> None:
        super().__init__(f"{before}row {row}{after}")
        self.before, self.row, self.after = before, row, after

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, int, str]]:
        return type(self), (self.before, self.row, self.after)  # an error is copied and pickled by its words otherwise

    def at_line(self, lines: Sequence[int]) -> ValueError:
        """Make the same error that names the line of the file, as editors count them."""
        return ValueError(f"{self.before}line {lines[self.row]}{self.after}")


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
        labels: one class number per sample, or one row of class probabilities per sample (several annotators). None
            where the truth is unknown, or none of the classes: predictions on foreign data.
        features: the input of the last linear layer.
        index: position of each sample in the data set's own order.
        class_names: one name per class.
        split: where the samples come from, such as "test".
        ids: the name of each sample.
        paths: the image file of each sample.
    """

    logits: Float[Tensor, "n classes"]
    given_labels: Labels | None
    features: Float[Tensor, "n width"] | None
    index: Int[Tensor, " n"] | None
    class_names: tuple[str, ...] | None
    split: str | None
    ids: tuple[str, ...] | None
    paths: tuple[str, ...] | None
    given_probs: Float[Tensor, "n classes"] | None
    top_only: bool

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
        tolerance: float | Tensor | None = None,
        top_only: bool = False,
        **rest: Unpack[Rest],
    ) -> "Predictions":
        """Start from probabilities; they are kept exactly as given, and the logits are their logarithms.

        A probability of zero is legal; its logit is the logarithm of the smallest number of its type (`least_prob`),
        which is also what the NLL of such a label is made of.

        Args:
            probs: rows that sum to one; a vector or single column is the probability of class 1.
            labels: as in the constructor.
            tolerance: how far a row may be from one; by default what rounding in its type explains.
            top_only: only the largest probability of each row is known, the rest of the row is filling.
            rest: features, index, class_names, split, ids and paths, as in the constructor.
        """
        given = two_columns(as_floats(probs, "probs"), "probs")
        check_probs(given, tolerance)
        made = cls.__new__(cls)
        exact = given if given.dtype == torch.float64 else given.float()
        made._fill(exact.log().clamp_min(least_log_prob(given.dtype)), labels, rest, given, top_only)
        return made

    def _fill(
        self,
        logits: Tensor,
        labels: Array | None,
        rest: Rest,
        given_probs: Tensor | None = None,
        top_only: bool = False,
    ) -> None:
        for name in rest:
            if name not in Rest.__annotations__:
                raise TypeError(f"Predictions takes no {name!r}; it takes {', '.join(Rest.__annotations__)}")
        n, classes = logits.shape
        names, features, index = rest.get("class_names"), rest.get("features"), rest.get("index")
        if names is not None and len(names) != classes:
            raise ValueError(f"class_names has {len(names)} names for {classes} classes")
        called = None if names is None else tuple(map(str, names))
        check_distinct(called)
        width = None if features is None else as_floats(features, "features")
        order = None if index is None else as_tensor(index, "index").long()
        ids, paths = (
            None if given is None else tuple(map(str, given)) for given in (rest.get("ids"), rest.get("paths"))
        )
        for name, rows in {"features": width, "index": order, "ids": ids, "paths": paths}.items():
            if rows is not None and len(rows) != n:
                raise ValueError(f"{name} has {len(rows)} rows, logits have {n}")
        truth = None if labels is None else check_labels(as_tensor(labels, "labels").to(logits.device), n, classes)
        values = (logits, truth, width, order, called, rest.get("split"), ids, paths, given_probs, top_only)
        for field, value in zip(type(self).__dataclass_fields__, values, strict=True):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, rows: slice | Tensor | NDArray[Any] | list[Any]) -> "Predictions":
        """Take some of the samples, by a slice, their numbers or a mask."""
        if isinstance(rows, slice):
            place = rows if (rows.step or 1) > 0 else torch.arange(len(self))[list(range(*rows.indices(len(self))))]
        elif isinstance(rows, Tensor | np.ndarray | list):
            place = torch.as_tensor(rows)
        else:
            raise TypeError(f"samples are taken by a slice, their numbers or a mask, not by {type(rows).__name__}")
        made = type(self).__new__(type(self))
        for field in type(self).__dataclass_fields__:
            value = getattr(self, field)
            where = place.to(value.device) if isinstance(value, Tensor) and isinstance(place, Tensor) else place
            taken = value[where] if isinstance(value, Tensor) else value
            if field in WORDS and value is not None:
                taken = tuple(value[row] for row in torch.arange(len(self))[place].tolist())
            object.__setattr__(made, field, taken)
        if not len(made):
            raise ValueError("no sample is left")
        return made

    def __repr__(self) -> str:
        split = f"split={self.split!r}, " if self.split else ""
        return f"Predictions({split}n={len(self):,}, classes={self.num_classes}, {str(self.logits.dtype)[6:]})"

    @property
    def num_classes(self) -> int:
        """How many classes the model knows."""
        return self.logits.shape[1]

    @property
    def named_classes(self) -> int:
        """How many classes there are; where only the top class is known, those that a label or an answer named."""
        named = () if not self.top_only else self.class_names or ()
        return self.num_classes - sum(name.startswith(FILLING) for name in named)

    @property
    def labels(self) -> Labels:
        """The truth: one class number, or one row of class probabilities, per sample."""
        if self.given_labels is None:
            raise ValueError("these predictions have no labels (in a file: a column `label` or `labels`)")
        return self.given_labels

    @property
    def probs(self) -> Float[Tensor, "n classes"]:
        """Probability of each class: the ones given, or the softmax of the logits in float32 or better."""
        return self.given_probs if self.given_probs is not None else softmax(self.logits)

    @cached_property
    def _top(self) -> tuple[Tensor, Tensor]:
        if self.given_probs is None:
            return top_of_logits(self.logits)
        confidence, prediction = self.given_probs.max(dim=1)
        return confidence, prediction

    @property
    def confidence(self) -> Float[Tensor, " n"]:
        """The largest probability of each row."""
        return self._top[0]

    @property
    def prediction(self) -> Int[Tensor, " n"]:
        """The class with the largest probability; of equal ones the first."""
        return self._top[1]

    @property
    def correct(self) -> Bool[Tensor, " n"] | Float[Tensor, " n"]:
        """Whether the predicted class is the label; with soft labels, the share of the label on that class."""
        hard = self.labels.ndim == 1
        return self.prediction == self.labels if hard else self.labels.gather(1, self.prediction[:, None])[:, 0]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        write_whole(Path(path), self.to_bytes())

    def to_bytes(self, *, probs: bool = False) -> bytes:
        """Give the content of a safetensors file; with probabilities where only those are known, or asked for."""
        scores = {"probs": self.probs} if probs or self.given_probs is not None else {"logits": self.logits}
        optional = {"labels": self.given_labels, "features": self.features, "index": self.index}
        tensors = scores | {k: v for k, v in optional.items() if v is not None}
        about = {"format": FORMAT, "top_only": self.top_only, "class_names": self.class_names, "split": self.split}
        about |= {name: getattr(self, name) for name in WORDS if getattr(self, name) is not None}
        words = {name: json.dumps(value) for name, value in about.items()}
        content = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        return _in_order(optional_module("safetensors.torch").save(content, metadata=sealed(words, content)))

    def with_split(self, split: str | None) -> "Predictions":
        """Make the same predictions of a split that has a name."""
        made = self[:]
        object.__setattr__(made, "split", split)
        return made

    @classmethod
    def load(cls, path: str | Path) -> "Predictions":
        """Read a file that `save` wrote."""
        words, tensors = read_safetensors(path)
        columns: dict[str, Any] = dict(tensors)
        kind = words.get("format", "")
        if kind.startswith('"fedlas.') and kind != json.dumps(FORMAT):
            raise ValueError(f"{path} holds no predictions: it is a file of another kind ({kind[:80]})")
        with readable(path):
            about = {k: json.loads(v) for k, v in words.items()} if kind == json.dumps(FORMAT) else {}
        columns |= {name: about[name] for name in ("class_names", *WORDS) if about.get(name) is not None}
        return cls.from_columns(columns, path, about.get("split"), about.get("top_only", False))

    @classmethod
    def from_npz(cls, path: str | Path, split: str | None = None) -> "Predictions":
        """Read `logits` or `probs`, `labels`, and optionally `features`, `index`, `class_names` from an npz file."""
        with readable(path), np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
                raise ValueError("it holds one array alone; named ones are expected (numpy.savez)")
            check_unpacked(path, sum(int(entry.file_size) for entry in file.zip.infolist()))
            check_arrays(file.zip)
            columns = dict(file)
        return cls.from_columns(columns, path, split or (str(columns["split"]) if "split" in columns else None))

    @classmethod
    def from_csv(
        cls, path: str | Path, split: str | None = None, *, watch: Callable[[float], None] | None = None
    ) -> "Predictions":
        """Read a table with a header; see the module's text for the names of its columns.

        Args:
            path: the file.
            split: where the samples come from.
            watch: called now and then with the share of the file that has been read.
        """
        check_file(path)
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines = read_lines(file, path, watch)
            first = next(lines, "")
            # Programs of countries that write 0,5 separate columns by semicolons.
            mark = next((one for one in (",", ";", "\t") if one in first), ",")
            table = _read_text(_cells(csv.reader(chain([first], lines), delimiter=mark), path), path, mark)
        return cls.from_columns(table.columns, path, split, tolerance=table.tolerance, lines=table.lines)

    @classmethod
    def from_parquet(cls, path: str | Path, split: str | None = None) -> "Predictions":
        """Read a parquet table; list columns `logits` or `probs`, or one column per class as in `from_csv`."""
        with readable(path):
            file = optional_module("pyarrow.parquet").ParquetFile(str(path))
            check_unpacked(path, 8 * _arrow_count(file.metadata))
            columns = _arrow_numbers(file)
            rest = file.read([name for name in file.schema_arrow.names if name not in columns])
        columns |= {name: _arrow_column(rest[name], name, path) for name in rest.column_names}
        return cls.from_columns({name: columns[name] for name in file.schema_arrow.names}, path, split)

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        path: str | Path,
        split: str | None = None,
        top_only: bool = False,
        tolerance: Tensor | None = None,
        *,
        lines: Sequence[int] | None = None,
    ) -> "Predictions":
        """Make predictions of named columns; the module's text lists the names that are known.

        Args:
            columns: an array, or a list of words, for each name.
            path: the file that they come from, for errors.
            split: where the samples come from.
            top_only: whether only the top class is known.
            tolerance: how far each row of probabilities may be from one.
            lines: of a text file, the line of each row, for errors.
        """
        with named(path, lines):
            return cls._from_columns(columns, path, split, top_only, tolerance)

    @classmethod
    def _from_columns(
        cls, columns: Mapping[str, Any], path: str | Path, split: str | None, top_only: bool, tolerance: Tensor | None
    ) -> "Predictions":
        found = [kind for kind in ("logits", "probs") if kind in columns]
        found += [kind for kind in ("logit_", "prob_") if any(name.startswith(kind) for name in columns)]
        if not found and {"confidence", "prediction"} <= columns.keys():
            return cls._from_confidence(columns, path, split)
        if len(found) != 1:
            wanted = "logits, probs, logit_NAME, prob_NAME, or confidence and prediction"
            held = f"its columns are {some_of(columns)}" if columns else "it is empty"
            raise ValueError(f"{path}: expected exactly one of {wanted}; {held}")
        kind = found[0]
        given, scores = columns.get("class_names"), columns.get(kind)
        names = None if given is None else [str(name) for name in given]
        if scores is None:
            names = [name.removeprefix(kind) for name in columns if name.startswith(kind)]
            scores = _numbers(columns, kind, names, path)
            if len(names) == 1:  # a binary classifier, of which one column says everything
                names = ["0" if names[0] == "1" else f"not {names[0]}", names[0]]
        classes = np.shape(scores)[-1] if np.ndim(scores) > 1 else 0
        if classes > MOST_CLASSES:
            raise ValueError(f"{path}: it has {classes:,} classes; from a file at most {MOST_CLASSES:,} are read")
        if names is not None and _has_numbers(columns):
            names = _told_apart(names)
        check_distinct(names)
        tell_twins(names)
        soft = names is not None and all(f"label_{name}" in columns for name in names)
        if soft and any(name in columns for name in LABELS):
            raise ValueError(f"{path}: it has both a column of labels and label_NAME; leave one of them out")
        by_column = kind.endswith("_")
        labels = _numbers(columns, "label_", names or (), path) if soft else _classes(columns, names, path, by_column)
        wide = [name.removeprefix("feature_") for name in columns if name.startswith("feature_")]
        rest = Rest(
            features=_numbers(columns, "feature_", wide, path) if wide else columns.get("features"),
            index=_whole(columns["index"], "index") if "index" in columns else None,
            class_names=names,
            split=split,
            ids=_one_of(columns, ("id", "ids"), path),
            paths=_one_of(columns, ("path", "paths"), path),
        )
        if kind.startswith("logit"):
            return cls(scores, labels, **rest)
        allowed = _decimal_rounding(scores) if tolerance is None else tolerance
        return cls.from_probs(scores, labels, tolerance=allowed, top_only=top_only, **rest)

    @classmethod
    def _from_confidence(cls, columns: Mapping[str, Any], path: str | Path, split: str | None) -> "Predictions":
        truth, said = ([_word(value) for value in columns[name]] for name in (_label(columns, path), "prediction"))
        kinds = [{WHOLE.fullmatch(word) is not None for word in words} for words in (truth, said)]
        if kinds in ([{True}, {False}], [{False}, {True}]):
            raise ValueError(
                f"{path}: one of label and prediction holds numbers, the other names: {truth[0]}, {said[0]}"
            )
        names = sorted(set(truth) | set(said), key=lambda name: (not name.isdecimal(), name.zfill(20), name))
        tell_twins(names)
        confidence = as_tensor(_numbers(columns, "", ["confidence"], path), "confidence")
        good = (confidence[:, 0] >= 0.001) & (confidence[:, 0] <= 1)
        if len(names) == 2 and len(said) >= ENOUGH and bool((confidence < 0.5).any()):
            warnings.warn(
                f"{path}: the larger of two probabilities is never below 0.5, and some confidences are; if they are "
                f"probabilities of one class, call their column prob_NAME after it, such as prob_{names[1]}",
                stacklevel=2,
            )
        percent = "; percentages are divided by 100 before" if bool((confidence > 1).any()) else ""
        check_rows(f"{path}: confidence", confidence, good, f"is not between 0.001 and 1{percent}")
        # Classes that nobody named share what is left, enough of them that the predicted class is the largest.
        least = float(confidence.min())
        names += [f"{FILLING} {i})" for i in range(max(1, int((1 - least) / least) + 2 - len(names)))]
        if len(names) * len(said) > MOST_FILLED:
            raise ValueError(
                f"{path}: {len(said):,} rows with a confidence of {least:g} among them need a table of {len(names):,} "
                "classes each, which is too large; give the probabilities of all classes, or fewer rows"
            )
        place = {name: i for i, name in enumerate(names)}
        predicted = torch.as_tensor([[place[name]] for name in said])
        probs = ((1 - confidence) / (len(names) - 1)).repeat(1, len(names)).scatter(1, predicted, confidence)
        rest = Rest(
            index=_whole(columns["index"], "index") if "index" in columns else None,
            class_names=names,
            split=split,
            ids=_one_of(columns, ("id", "ids"), path),
            paths=_one_of(columns, ("path", "paths"), path),
        )
        return cls.from_probs(probs, [place[name] for name in truth], top_only=True, **rest)


def as_tensor(values: Array, name: str) -> Tensor:
    """Take a torch, numpy or other array as a tensor, without a copy where that is possible."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            kind = "on the device meta, which holds no numbers" if values.is_meta else f"of layout {values.layout}"
            raise TypeError(f"{name} is a tensor {kind}; a dense one is needed (to_dense)")
        if values.is_complex():
            raise TypeError(f"{name} holds {values.dtype}; real numbers are expected")
        return values.detach()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise TypeError(f"{name} is a masked array; leave out what is masked before, or it would count")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} is no table of numbers ({error})") from error
    if array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{name} holds {array.dtype}, not numbers")
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
        raise TypeError(f"{name} holds {tensor.dtype}; floating-point numbers are expected{advice}")
    if tensor.ndim == 0:
        raise ValueError(f"{name} is a single number; one row per sample is expected")
    return tensor


def two_columns(values: Float[Tensor, "..."], name: str) -> Float[Tensor, "n classes"]:
    """Give the single column of a binary classifier its second one: z becomes logits [0, z], p becomes [1 - p, p]."""
    if values.ndim == 1 or values.shape[1:] == (1,):
        one = values.reshape(-1)
        return torch.stack([1 - one if name == "probs" else torch.zeros_like(one), one], dim=1)
    if values.ndim != 2:
        raise ValueError(f"{name} have shape {tuple(values.shape)}; one row of classes per sample is expected")
    if not values.shape[1]:
        raise ValueError(f"{name} have shape {tuple(values.shape)}; at least one class is needed")
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


def slices_of(table: Tensor) -> list[slice]:
    """Cut the rows of a table into parts that are small enough for a copy of each in another type."""
    at_once = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    size = max(1, at_once // max(1, table[:1].numel()))
    return [slice(start, min(start + size, len(table))) for start in range(0, max(1, len(table)), size)]


def parts_of(table: Tensor) -> list[Tensor]:
    """Give a table in parts that are small enough for a copy of each in another type."""
    return [table[rows] for rows in slices_of(table)]


def top_of_logits(logits: Float[Tensor, "n classes *space"]) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Find the largest probability of every row and its class, without making the probabilities of all rows at once."""
    confidence, prediction, lowest = [], [], []
    for part in parts_of(logits):
        top = softmax(part).max(dim=1)
        confidence.append(top.values)
        prediction.append(top.indices)
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    largest = torch.cat(confidence)
    # NaN and plus infinity make a confidence NaN; minus infinity shows in the lowest logit alone.
    if not bool(torch.isfinite(largest).all() & torch.isfinite(torch.stack(lowest)).all()):
        check_finite(logits)
    return largest, torch.cat(prediction)


def top_of_probs(
    probs: Float[Tensor, "n classes *space"],
    tolerance: float | Tensor | None = None,
    ignored: Bool[Tensor, "n *space"] | None = None,
) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
    """Find the largest probability of every row and its class, and check that rows are distributions while at it."""
    confidence, prediction, sums, lowest = [], [], [], []
    for part in parts_of(probs):
        top = part.max(dim=1)
        confidence.append(top.values)
        prediction.append(top.indices)
        sums.append(_row_sums(part))
        lowest.append(part.amin() if part.numel() else part.new_zeros(()))
    # The reason of a failure is looked for in a second reading; most tables are right.
    near_one = ((torch.cat(sums) - 1).abs() <= _allowed(probs, tolerance)).all()
    if not len(probs) or not bool(near_one & (torch.stack(lowest) >= 0).all()):
        check_probs(probs, tolerance, ignored)
    return torch.cat(confidence), torch.cat(prediction)


def check_finite(logits: Float[Tensor, "..."]) -> None:
    """Raise an error that names the first row of logits that holds NaN or infinity."""
    # The extremes are NaN or infinite if any number is: one reading, where a mask would be written as well.
    if logits.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
        good = torch.isfinite(logits)
        check_rows("logits", logits, good if good.ndim == 1 else good.flatten(1).all(dim=1), "holds NaN or infinity")


def check_rows(name: str, values: Tensor, good: Bool[Tensor, "n *space"], fault: str) -> None:
    """Raise an error that names the first row that is not good."""
    if good.numel() == 0:
        raise ValueError(f"{name} has no rows; at least one sample is needed")
    if bool(good.all()):
        return
    row, *place = [int(i) for i in (~good).nonzero()[0]]
    shown = values[row].movedim(0, -1)[tuple(place)] if place and values.ndim > good.ndim else values[(row, *place)]
    raise RowError(f"{name}: ", row, f"{f' at {tuple(place)}' if place else ''} {fault}: {_shown(shown)}")


def check_probs(
    probs: Float[Tensor, "n classes *space"],
    tolerance: float | Tensor | None = None,
    ignored: Bool[Tensor, "n *space"] | None = None,
    name: str = "probs",
) -> None:
    """Raise an error unless every row is a probability distribution, up to rounding."""
    good = ((_row_sums(probs) - 1).abs() <= _allowed(probs, tolerance)) & (probs.amin(dim=1) >= 0)
    if ignored is not None:
        good |= ignored
    if bool(good.all()) and good.numel():
        return
    place = tuple(int(i) for i in (~good).nonzero()[0]) if good.numel() else ()
    found = float(_row_sums(probs)[place]) if place else 1.0
    advice = ""
    if name == "probs":
        advice = "; " + _advice(
            "logits enter by Predictions(logits=...), rounded probabilities by from_probs(..., tolerance=...)",
            f"give logits {CALLED.format('logits', 'logit_')}, and rounded probabilities with more digits",
        )
    if abs(found - 100) < 2 or _is_percentage(probs, place) or _are_percentages(probs):
        advice = f"; {PERCENTAGES}"
    check_rows(name, probs, good, f"is not a distribution (no negative entry, sum 1): it sums to {found:.6g}{advice}")


def _advice(in_python: str, in_file: str) -> str:
    """Choose what to do by where numbers come from: who gives a file need not know Python."""
    return in_file if FROM_FILE.get() else in_python


def _are_percentages(table: Tensor) -> bool:
    """Say whether rows are percentages; whole ones of many classes miss 100 by their rounding."""
    if table.ndim != 2 or not table.numel() or table.is_complex():
        return False
    numbers = table.double()
    if bool((numbers.amin() < 0) | (numbers.amax() > 100)):
        return False
    return bool((numbers.sum(dim=1).median() - 100).abs() <= 10)


def _is_percentage(probs: Tensor, place: tuple[int, ...]) -> bool:
    """Say whether a row was made of one percentage of a binary classifier."""
    if probs.ndim != 2 or probs.shape[1] != 2 or not place:
        return False
    rest, own = probs[place].tolist()
    return bool(1 < own <= 100 and rest == 1 - own)


def _allowed(probs: Tensor, tolerance: float | Tensor | None) -> float | Tensor:
    return TOLERANCE[probs.dtype] if tolerance is None else torch.as_tensor(tolerance).to(probs.device).clamp_min(1e-6)


def _look_like_shares(logits: Tensor, total: int) -> bool:
    """Say whether so many rows as cannot be chance are shares of a total; a table of ones and zeros may be made so."""
    fewest = ENOUGH if total == 1 else 3
    if len(logits) < fewest or bool((logits.amin() < 0) | (logits.amax() > total)):
        return False
    near = TOLERANCE[logits.dtype] if total == 1 else 0.01 * total
    return bool(((_row_sums(logits) - total).abs() <= near).all()) and (total == 1 or bool(_is_shared(logits, total)))


def _is_shared(logits: Tensor, total: int) -> Bool[Tensor, ""]:
    """Say whether most rows give something to more than one class."""
    return (logits.amax(1) < 0.999 * total).double().mean() > 0.5


def _row_sums(probs: Tensor) -> Tensor:
    return probs.sum(dim=1, dtype=torch.float64 if probs.dtype == torch.float64 else torch.float32)


def check_labels(labels: Tensor, n: int, classes: int) -> Labels:
    """Raise an error unless there is one valid label per sample; hard labels come back as int64."""
    if len(labels) != n:
        raise ValueError(f"labels has {len(labels)} rows for {n} samples")
    if labels.ndim == 1 and not labels.is_floating_point():
        check_rows("labels", labels, (labels >= 0) & (labels < classes), f"is outside 0..{classes - 1}")
        return labels.long()
    if labels.ndim != 2 or not labels.is_floating_point() or labels.shape[1] != classes:
        given = f"labels are {labels.dtype} of shape {tuple(labels.shape)}"
        raise ValueError(f"{given}; expected {n} integers, or soft labels: ({n}, {classes}) floats")
    check_probs(labels, name="labels")
    return labels


def optional_module(name: str, extra: str = "report") -> Any:
    """Import a package that only some functions need, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(needed(name, extra, error)) from error


def needed(name: str, extra: str, error: ImportError) -> str:
    """Say which package is needed and how to install it; also where it is there, and one is missing that it needs."""
    package, missing = name.partition(".")[0], (error.name or name).partition(".")[0]
    why = "" if missing == package else f", which needs {missing},"
    return f"{package}{why} is needed for this: pip install 'fedlas[{extra}]'"


def check_file(path: str | Path) -> None:
    """Refuse what is there and no file: a pipe keeps who reads it waiting, and a device may have no end."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # who opens it says why it cannot
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise ValueError(f"{path} is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


def own_file(folder: Path, name: str | Path, whose: str) -> Path:
    """Give the path of a file that belongs to a folder, and refuse what leads elsewhere: `..`, or a link on the way.

    Whoever made the folder could have any file read, or written over. The folder itself may be a link.

    Args:
        folder: a run folder, say.
        name: of the file, in the folder or below it.
        whose: what the folder is, for errors.
    """
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise ValueError(f"{folder / name} lies outside of {folder}")
    path = folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise ValueError(f"{path} is a link; {whose}'s own files are never links: remove it, or copy what it names")
    return path


def no_memory(error: BaseException) -> str | None:
    """Give what torch says in a RuntimeError about the machine's memory that ran out; None where it did not."""
    _, allocator, said = str(error).partition(ALLOCATOR)
    return said.strip() if allocator and isinstance(error, RuntimeError) else None


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a MemoryError where torch says in a RuntimeError that the machine's memory ran out."""
    try:
        yield
    except RuntimeError as error:
        said = no_memory(error)
        if said is None:
            raise
        raise MemoryError(said) from error


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Refuse what is no file, and name the file in whatever error a reader raises about it."""
    check_file(path)
    try:
        with memory_errors():
            yield
    except MemoryError:
        raise  # which is no fault of the file
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise  # a file that is not there says so itself; a plain one without a number is a reader's word for damage
        # Not numpy's own words about Python objects: they advise to load whatever is in there.
        reason = "it holds no arrays of numbers" if "allow_pickle" in str(error) else error
        raise ValueError(f"{path} is damaged, or not a file of this kind: {reason}") from error


@contextmanager
def named(path: str | Path, lines: Sequence[int] | None = None) -> Iterator[None]:
    """Name the file in an error about what it holds; what a stranger's file can break is an error about its values.

    Args:
        path: the file.
        lines: of a text file, the line of each row.
    """
    before = FROM_FILE.set(True)
    try:
        with memory_errors():
            yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as given:
        error = given.at_line(lines) if isinstance(given, RowError) and lines is not None else given
        kind = TypeError if isinstance(error, TypeError) else ValueError
        if isinstance(error, kind) and str(path) in str(error):
            if error is given:
                raise
            raise error from given
        plain = isinstance(error, ValueError | TypeError)
        raise kind(f"{path}: {error if plain else repr(error)}") from given
    finally:
        FROM_FILE.reset(before)


def check_unpacked(path: str | Path, size: int) -> None:
    """Refuse a small file that would fill the memory."""
    there = Path(path).stat().st_size
    if size > max(MOST_UNPACKED, MOST_TIMES * there):
        raise ValueError(f"its {there:,} bytes would unpack to {size:,}, which no predictions do")


def check_arrays(folder: zipfile.ZipFile) -> None:
    """Refuse arrays that announce more numbers than are there; numpy takes the memory before it looks."""
    for entry in folder.infolist():
        with folder.open(entry) as file:
            if file.read(6) != np.lib.format.MAGIC_PREFIX:
                continue
            file.seek(0)
            version = np.lib.format.read_magic(file)
            if version not in {(1, 0), (2, 0)}:
                raise ValueError(f"{entry.filename} is no array of numbers")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
            if math.prod(shape) * kind.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename} announces {' x '.join(map(str, shape))} numbers, and holds fewer")


def read_lines(file: TextIO, path: str | Path, watch: Callable[[float], None] | None = None) -> Iterator[str]:
    """Read the lines of a text, and tell now and then what share of it has been read."""
    size = max(1, Path(path).stat().st_size)
    try:
        for count, line in enumerate(file):
            if watch is not None and count % 4096 == 0:
                watch(min(1.0, file.buffer.tell() / size))
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); save it in that encoding") from error


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the words and the tensors of a safetensors file, and compare them with their checksum if they have one."""
    opened = optional_module("safetensors").safe_open
    with readable(path), opened(str(path), framework="pt") as file:
        words, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    written = words.pop(CHECKSUM, None)  # older files, and those of others, have none
    if written is not None and written != _checksum(words, tensors):
        raise ValueError(f"{path} is damaged: what it holds does not have the checksum that was written with it")
    return words, tensors


def sealed(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Add to the words of a safetensors file the checksum of all that it holds."""
    return {**words, CHECKSUM: _checksum(words, tensors)}


def write_whole(path: Path, *content: bytes | memoryview, before: Path | None = None) -> None:
    """Write a file so that a reader, or a crash, never meets half of it.

    Args:
        path: where.
        content: what, in one piece or several.
        before: how the file that was there is called from then on; by default it is gone.
    """
    try:
        _write_whole(path, content, before)
    except OSError as error:
        if error.filename is not None:
            raise
        # A full disk does not say whose file it was.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write_whole(path: Path, content: Sequence[bytes | memoryview], before: Path | None) -> None:
    if path.is_symlink():
        path = path.resolve()  # the link stays, and what it points to is replaced
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(b"".join(content))  # a pipe or a device is no file that could be replaced
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PART, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        if before is not None and path.is_file():
            also_called(path, before)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def also_called(path: Path, other: Path) -> None:
    """Give a file a second name, which may have been that of another file; at any moment both names have a file."""
    link = other.with_name(f".{other.name}{PART}")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # not every file system has links
        shutil.copyfile(path, link)
    link.replace(other)


def clear_parts(folder: Path) -> None:
    """Remove parts of files that a killed process has left in a folder; for who holds the folder's lock."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def _in_order(content: bytes) -> bytes:
    """Put the words of a safetensors file in order, so that equal predictions make equal bytes; it has them in none."""
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[end:]


def _checksum(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Give the CRC-32 of all that a safetensors file holds, whatever its order there."""
    shapes = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)]
    found = zlib.crc32(json.dumps([sorted(words.items()), shapes]).encode())
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _shown(row: Tensor) -> str:
    values = row.reshape(-1)[:6].tolist()
    text = ", ".join(f"{value:.6g}" for value in values) + (", ..." if row.numel() > 6 else "")
    return text if row.ndim == 0 else f"[{text}]"


def _one_of(columns: Mapping[str, Any], names: Sequence[str], path: str | Path) -> Any:
    """Take the column that has one of several names, or None."""
    there = [name for name in names if columns.get(name) is not None]
    if len(there) > 1:
        raise ValueError(f"{path}: {' and '.join(there)} mean the same; leave one of them out")
    return columns[there[0]] if there else None


def _label(columns: Mapping[str, Any], path: str | Path) -> str:
    there = [name for name in LABELS if name in columns]
    if len(there) != 1:
        raise ValueError(f"{path}: expected one column `label` or `labels`; its columns are {some_of(columns)}")
    return there[0]


def _numbers(columns: Mapping[str, Any], kind: str, names: Sequence[str], path: str | Path) -> NDArray[Any]:
    arrays = [np.asarray(columns[f"{kind}{name}"]) for name in names]
    table = _neighbours(arrays)
    if table is not None:
        return table
    # Columns of one floating-point type keep it, because how far a row may be from one depends on it.
    kinds = {array.dtype for array in arrays}
    wide = kinds.pop() if len(kinds) == 1 and arrays[0].dtype.kind == "f" else np.float64
    try:
        return np.stack(arrays, axis=1).astype(wide, copy=False)
    except ValueError as error:
        raise ValueError(f"{path}: a {kind}... column holds something that is not a number ({error})") from error


def _neighbours(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Find the part of a table that arrays are the columns of, in order, so that it need not be copied."""
    first, step = arrays[0], arrays[0].itemsize
    for place, one in enumerate(arrays):
        same = one.base is first.base and one.dtype == first.dtype and one.strides == first.strides
        if first.base is None or not same or one.ctypes.data != first.ctypes.data + place * step:
            return None
    shape, strides = (len(first), len(arrays)), (*first.strides, step)
    return np.lib.stride_tricks.as_strided(first, shape, strides) if first.dtype.kind == "f" else None


def _cells(reader: Any, path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Give the rows of a table of text, and the line where each begins; name the line where it is no such table."""
    try:
        line = 1
        for row in reader:
            yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num} cannot be taken apart ({error})") from error


class _Text(NamedTuple):
    """What a csv file holds: its columns, how far rows may be from one, and in which line each row begins."""

    columns: dict[str, Any]
    tolerance: Tensor
    lines: Sequence[int]


def _read_text(rows: Iterator[tuple[int, list[str]]], path: str | Path, mark: str = ",") -> _Text:
    """Read the rows of a csv file: numbers at once as numbers, the rest as text.

    Each row is allowed half a unit of its last digit for every class. That is looked for only where a row needs it.
    """
    header = [name.strip() for name in next(rows, (1, []))[1]]
    name, count = next(iter(Counter(header).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{path}: {count} columns are called {name!r}; each needs a name of its own")
    number = [i for i, name in enumerate(header) if name.startswith(NUMBERS) or name == "confidence"]
    # Probabilities come first, so that they are a slice of a row's numbers; columns of one kind stand together.
    number.sort(key=lambda i: (not header[i].startswith("prob_"), header[i].partition("_")[0]))
    classes = sum(header[i].startswith("prob_") for i in number)
    text = sorted(set(range(len(header))) - set(number))
    values, units, lines = array("d"), array("d"), array("q")
    words: list[list[str]] = [[] for _ in text]
    for line, row in rows:
        if not row:
            continue
        lines.append(line)
        if len(row) != len(header):
            raise ValueError(f"{path}: line {line} has {len(row)} cells, the header has {len(header)}")
        cells = [row[i] for i in number] if mark != ";" else [row[i].replace(",", ".") for i in number]
        try:
            found = [float(cell) for cell in cells]
        except ValueError as error:
            which = _no_number([header[i] for i in number], cells)
            raise ValueError(f"{path}: line {line} holds something that is not a number ({which})") from error
        values.extend(found)
        far = classes > 0 and abs(sum(found[:classes]) - 1) > 1e-7
        units.append(_rounding(cells[:classes]) if far else 0.0)
        for column, i in zip(words, text, strict=True):
            column.append(row[i])
    table = np.frombuffer(values, dtype=np.float64).reshape(len(units), len(number))
    columns: dict[str, Any] = dict.fromkeys(header, ())
    columns |= {header[i]: table[:, j] for j, i in enumerate(number)}
    columns |= {header[i]: column for i, column in zip(text, words, strict=True)}
    return _Text(columns, torch.tensor(units, dtype=torch.float64) * 1.000002, lines)  # a rounding error more


def _arrow_numbers(file: Any) -> dict[str, Any]:
    """Read the columns of a parquet file that make a table of one floating-point type, one by one into one table."""
    types = optional_module("pyarrow").types
    schema = file.schema_arrow
    names = [one.name for one in schema if one.name.startswith(NUMBERS) and types.is_floating(one.type)]
    names.sort(key=lambda name: name.partition("_")[0])  # columns of one kind stand together
    kinds = {schema.field(name).type for name in names}
    if len(kinds) != 1 or len(set(schema.names)) < len(schema.names):
        return {}
    kind = np.dtype(f"f{kinds.pop().bit_width // 8}")  # to_pandas_dtype, before pyarrow 18, needs pandas
    table = np.empty((file.metadata.num_rows, len(names)), dtype=kind)
    for place, name in enumerate(names):
        table[:, place] = file.read([name])[name].to_numpy()
    return {name: table[:, place] for place, name in enumerate(names)}


def _arrow_count(about: Any) -> int:
    """Count the values of a parquet file, without reading them."""
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    values = sum(int(group.column(i).num_values) for group in groups for i in range(group.num_columns))
    return max(int(about.num_rows) * int(about.num_columns), values)


def _arrow_column(column: Any, name: str, path: str | Path) -> Any:
    """Take a column of a parquet table as an array; a column of lists as a table, and text as it is."""
    types = optional_module("pyarrow").types
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lists = column.combine_chunks()
        length = optional_module("pyarrow.compute").list_value_length(lists).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(length != length[:1])[:1]:
            raise ValueError(f"{path}: row {row} of {name} has {length[row]} entries, row 0 has {length[0]}")
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1)
    if types.is_integer(column.type) or types.is_floating(column.type):
        return column.to_numpy()
    return column.to_pylist()


def _classes(columns: Mapping[str, Any], names: Sequence[str] | None, path: str | Path, by_column: bool) -> Any:
    """Find the class number of every label.

    Beside columns that are named after classes, a label is such a name if any label is, whatever type it has: the
    columns may stand in any order. Beside a table, whole numbers are places in it.
    """
    if not any(name.startswith("label") for name in columns):
        return None
    labels = columns[_label(columns, path)]
    if not isinstance(labels, Tensor) and np.asarray(labels).dtype.kind == "b":
        labels = np.asarray(labels).astype(np.int64)
    if (_are_whole(labels) and not by_column) or np.ndim(labels) == 2:
        return labels
    number = {name: i for i, name in enumerate(names or ())}
    bare = {name.strip(): i for name, i in number.items()}
    # Few words stand in many rows.
    words, rows = np.unique(np.asarray([_word(label, strip=False) for label in labels]), return_inverse=True)
    named = any(word in number or word.strip() in bare for word in words.tolist())
    if not named:
        _check_spelling(words.tolist(), list(number), path)
    found: list[int] = []
    for word in words.tolist():
        place = number.get(word, bare.get(word.strip()))
        whole = _as_whole(word.strip()) if place is None and not named else place
        if whole is None:
            row = int(np.flatnonzero(rows == len(found))[0])
            expected = f"one of the classes {some_of(number)}" if named else "a class name or a whole number"
            raise RowError(f"{path}: ", row, f" has label {word.strip()!r}, expected {expected}")
        found.append(whole)
    return torch.as_tensor(found)[torch.from_numpy(rows.reshape(-1))]


def check_distinct(names: Sequence[str] | None) -> None:
    """Refuse two classes of one name."""
    name, count = next(iter(Counter(names or ()).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"two classes have the same name, {name!r}; each needs one of its own")


def _told_apart(names: Sequence[str]) -> list[str]:
    """Give classes of one name a number each, and warn: older versions wrote such files, where labels are numbers."""
    given, found = set(names), dict[str, str]()
    times = Counter[str]()
    for name in names:
        unique = name
        while unique in found or (unique != name and unique in given):
            times[name] += 1
            unique = f"{name} ({times[name] + 1})"
        found[unique] = name
    renamed = [(name, unique) for unique, name in found.items() if unique != name]
    if renamed:
        warnings.warn(
            f"two classes have the same name, {renamed[0][0]!r}; one is called {renamed[0][1]!r} here", stacklevel=2
        )
    return list(found)


def _has_numbers(columns: Mapping[str, Any]) -> bool:
    """Say whether labels, if there are any, are places among the classes and not their names."""
    given = [columns[name] for name in LABELS if name in columns]
    return all(_are_whole(labels) or np.ndim(labels) == 2 for labels in given)


def _are_whole(labels: Any) -> bool:
    return isinstance(labels, Tensor) or np.asarray(labels).dtype.kind in "iub"


def tell_twins(names: Sequence[str] | None) -> None:
    """Warn of names that are the same but for capitals, blanks, or the spelling of a number."""
    found: dict[object, str] = {}
    for name in names or ():
        other = found.setdefault(_spelled(name), name)
        if other != name:
            warnings.warn(
                f"{other!r} and {name!r} are taken as two classes; if they are one, write them alike", stacklevel=2
            )


def _check_spelling(labels: Sequence[str], names: Sequence[str], path: str | Path) -> None:
    """Refuse labels that are no class name but the same number as one: 1 may be a place, or stand for the class 01."""
    spelled = {_spelled(name): name for name in names}
    for label in map(str.strip, labels):
        name = spelled.get(_spelled(label))
        if name is not None and NUMBER.fullmatch(label):
            raise ValueError(
                f"{path}: is the label {label!r} the class {name!r}, or the place {label} among the columns, counted "
                f"from 0? Write labels as the classes are called: {some_of(names)}"
            )


def _spelled(name: str) -> object:
    """Give what a name has in common with all that a person may take for the same."""
    bare = name.strip()
    return Decimal(bare) if NUMBER.fullmatch(bare) else " ".join(bare.casefold().split())


def _whole(values: Any, name: str) -> NDArray[np.int64]:
    """Take a column as whole numbers, also where a table has them as text or as 3.0."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu":
        numbers = array("q")
        for row, value in enumerate(values):
            number = _as_whole(word := _word(value))
            if number is None:
                raise RowError("", row, f" has {name} {word!r}, expected a whole number")
            numbers.append(number)
        found = np.asarray(numbers)
    return found.astype(np.int64)


def _as_whole(word: str) -> int | None:
    """Take a word as a whole number; None where it is none, or has more than 64 bits."""
    number = int(word) if len(word) <= LONGEST_WHOLE and WHOLE.fullmatch(word) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _word(value: Any, *, strip: bool = True) -> str:
    """Take a label as a word; 3.0, which a table makes of 3 where another row is empty, is 3."""
    word = str(value.item() if isinstance(value, Tensor | np.generic) else value)
    bare = word.strip()
    whole, point, rest = bare.partition(".")
    if point and WHOLE.fullmatch(whole) and not rest.strip("0"):
        return whole
    return bare if strip else word


def some_of(columns: Iterable[str], most: int = 20) -> str:
    """List names; of many only the first."""
    names = list(columns)
    more = f", ... and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _no_number(names: Sequence[str], cells: Sequence[str]) -> str:
    """Name the first cell that is not a number, and say what to do about it."""
    for name, cell in zip(names, cells, strict=True):
        try:
            float(cell)
        except ValueError:
            if not cell.strip():
                return f"{name} is empty; fill it in, or leave the row out"
            share = cell.strip().endswith("%") and name.startswith(("prob_", "confidence"))
            advice = "; write 70% as 0.7" if share else ""
            return f"{name} is {cell!r}{advice}"
    raise AssertionError("every cell is a number")


def _rounding(cells: Sequence[str]) -> float:
    """Find how far rounding can move the sum of a row: half a unit of the last digit of every number.

    A zero may be written with fewer digits than it is known with, so it counts like the finest number of the row.
    """
    units = {cell: _last_digit(cell) for cell in cells}
    finest = min((unit for unit in units.values() if unit), default=0.0)
    return 0.5 * math.fsum(units[cell] if float(cell) else finest for cell in cells)


def _decimal_rounding(scores: Any) -> float | None:
    """Find how far rounding can move the sum of a row of a table whose numbers all have as few decimals, as in text.

    Nothing where they have more decimals than could be told from their type.
    """
    table: NDArray[Any] = scores if isinstance(scores, np.ndarray) else np.empty(0)
    if table.ndim != 2 or table.dtype not in (np.float32, np.float64) or not np.isfinite(table.sum()):
        return None
    precision = float(np.finfo(table.dtype).eps)
    usual = TOLERANCE[torch.float64 if table.dtype == np.float64 else torch.float32]
    if bool((np.abs(table.sum(1, dtype=np.float64) - 1) <= usual).all()):
        return None
    for digits in range(1, 7):
        unit = 10.0**digits
        if precision * unit > 0.01:
            return None
        parts = (table[rows : rows + 4096].astype(np.float64) * unit for rows in range(0, len(table), 4096))
        if all(bool((np.abs(part - np.round(part)) <= precision * unit).all()) for part in parts):
            return max(usual, 0.5 / unit * int(table.shape[1]) * 1.000002)  # a rounding error more
    return None


def _last_digit(cell: str) -> float:
    """Find the value of a number's last digit; a whole number is taken as exact."""
    mantissa, exponent, power = cell.strip().lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(power or 0) - decimals) if decimals or exponent else 0.0
