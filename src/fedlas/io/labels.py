"""Labels of a table: class names or numbers, in many spellings, to class numbers."""

import re
import warnings
from array import array
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import RowError, UserError, short_list
from fedlas.io.texts import find_distinct, text_array

NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
INTEGER = re.compile(r"[+-]?\d+")
# A number as numpy.savetxt and R write it; 12e4 may be the name of a class.
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*[eE][+-]?|[eE][+-])\d{1,2}")
MAX_DIGITS = 40  # of an integer, with leading zeros
CORRECTNESS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
BINARY_LABELS = {"false": 0, "true": 1}
MAX_WARNINGS = 5  # about similar class names


class LabelFile(NamedTuple):
    """Labels from a separate file.

    Attributes:
        path: the file.
        values: the labels, in the order of the samples.
        may_have_header: whether the first value may be a header: the only column of a text file.
    """

    path: Path
    values: Any
    may_have_header: bool = False

    def for_samples(self, n: int, source: str) -> Any:
        """Return the labels of n samples; one more value in a text file of one column is its header."""
        values = self.values
        if self.may_have_header and len(values) == n + 1:
            values = values[1:]
        if len(values) != n:
            raise UserError(f"{source}: {len(values):,} labels for {n:,} samples")
        if not isinstance(values, list):
            return values
        texts = [normalize_label(value) for value in values]
        numbers = [parse_integer(text) for text in texts]
        return text_array(texts) if None in numbers else np.asarray(numbers, dtype=np.int64)


def class_numbers(labels: Any, names: Sequence[str] | None, path: str | Path, *, by_column: bool, classes: int) -> Any:
    """Return the class number of each label, or soft labels as they are.

    If columns are named after classes, labels are such names if any label is, whatever their type: the columns may have
    any order. Beside a table, integers are class numbers. For two classes of other names, true and false are the second
    and the first class.

    Args:
        labels: the column of labels.
        names: the class names, if known.
        path: the file, for errors.
        by_column: whether the table has a column for each class.
        classes: number of classes of a table; 0 if unknown.
    """
    if getattr(labels, "ndim", 1) == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "b" and not by_column:
        labels = labels.astype(np.int64)
    if (are_integers(labels) and not by_column) or np.ndim(labels) == 2:
        return labels
    number = {name: i for i, name in enumerate(names or ())}
    stripped = {name.strip(): i for name, i in number.items()}
    distinct = find_distinct(labels)
    texts = [normalize_label(label, strip=False) for label in distinct.values]
    numbers = [number.get(text, stripped.get(text.strip())) for text in texts]
    named = any(class_number is not None for class_number in numbers)
    if not named:
        _check_spelling(texts, list(number), path)
        numbers = [parse_integer(text.strip()) for text in texts]
        binary = [BINARY_LABELS.get(text.strip().casefold()) for text in texts]
        numbers = binary if classes <= 2 and None not in binary else numbers
    unknown = {
        int(distinct.first[i]): texts[i].strip() for i, class_number in enumerate(numbers) if class_number is None
    }
    if names is None and len(unknown) == len(texts) and not any(map(is_number_text, unknown.values())):
        raise UserError(
            f"{path}: class_names is missing: labels are names, and nothing says which class each name is; give class "
            "numbers, or name the columns of the classes as labels do"
        )
    if unknown:
        row = min(unknown)
        expected = _expected_label(unknown[row], names or (), named)
        if set(unknown.values()) == {str(classes)} and set(texts) <= set(map(str, range(1, classes + 1))):
            expected += "; these labels count from 1: subtract 1"
        raise RowError(f"{path}: ", row, f" has label {unknown[row][:80]!r}, expected {expected}")
    return torch.as_tensor(numbers)[torch.from_numpy(distinct.codes.astype(np.int64, copy=False))]


def _expected_label(label: str, names: Sequence[str], named: bool) -> str:
    """Return which labels are known, and which of them may be meant."""
    if not names:
        return "a whole number"
    known = short_list(names)
    if len(names) == 2 and names[0] == f"not {names[1]}":
        known += f" (add a column for {label[:80]!r}, or write {names[0]!r})"
    expected = f"one of the classes {known}" if named else f"a class name or a whole number; the classes are {known}"
    meant = next((name for name in names if _spelling(name) == _spelling(label)), None)
    return expected if meant is None else f"{expected}; did you mean {meant!r}?"


def _check_spelling(labels: Sequence[str], names: Sequence[str], path: str | Path) -> None:
    """Raise if a label is no class name but the same number as one: 1 may be a class number, or mean the class 01."""
    by_spelling = {_spelling(name): name for name in names}
    for label in map(str.strip, labels):
        name = by_spelling.get(_spelling(label))
        if name is not None and NUMBER.fullmatch(label):
            raise UserError(
                f"{path}: is the label {label!r} the class {name!r}, or the position {label} among the columns, "
                f"counted from 0? Write labels as the classes are called: {short_list(names)}"
            )


def _spelling(name: str) -> object:
    """Return what names that differ only in capitals, blanks or the spelling of a number have in common."""
    stripped = name.strip()
    return Decimal(stripped) if NUMBER.fullmatch(stripped) else " ".join(stripped.casefold().split())


def warn_of_similar_names(names: Sequence[str] | None) -> None:
    """Warn of class names that differ only in capitals, blanks or the spelling of a number."""
    first: dict[object, str] = {}
    pairs = [(first.setdefault(_spelling(name), name), name) for name in names or ()]
    similar = [(other, name) for other, name in pairs if other != name]
    for other, name in similar[:MAX_WARNINGS]:
        warnings.warn(
            f"{other!r} and {name!r} are taken as two classes; if they are one, write them alike", stacklevel=2
        )
    if len(similar) > MAX_WARNINGS:
        more = len(similar) - MAX_WARNINGS
        warnings.warn(f"{more:,} more pairs of class names are spelled almost alike", stacklevel=2)


def parse_correctness(column: Any, path: str | Path) -> NDArray[np.bool_]:
    """Return whether each prediction is correct: 1 or 0, true or false, yes or no."""
    distinct = find_distinct(column)
    flags = [CORRECTNESS.get(normalize_label(value).lower()) for value in distinct.values]
    for value, flag, row in zip(distinct.values, flags, distinct.first, strict=True):
        if flag is None:
            raise RowError(f"{path}: ", int(row), f" has correct {str(value)[:80]!r}, expected 1 or 0, true or false")
    return np.array(flags, dtype=bool)[distinct.codes]


def are_integers(values: Any) -> bool:
    """Return whether a column has an integer or boolean type."""
    return isinstance(values, Tensor) or np.asarray(values).dtype.kind in "iub"


def as_integers(values: Any, name: str) -> NDArray[np.int64]:
    """Return a column as integers, which may be texts or floats such as 3.0."""
    column = np.asarray(values)
    if column.dtype.kind not in "iu":
        numbers = array("q")
        for row, value in enumerate(values):
            number = parse_integer(text := normalize_label(value))
            if number is None:
                raise RowError("", row, f" has {name} {text!r}, expected a whole number")
            numbers.append(number)
        column = np.asarray(numbers)
    return column.astype(np.int64)


def parse_integer(text: str) -> int | None:
    """Return the integer that a text is; None if it is none, or has more than 64 bits."""
    number = int(text) if len(text) <= MAX_DIGITS and INTEGER.fullmatch(text) else None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def is_number_text(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def normalize_label(value: Any, *, strip: bool = True) -> str:
    """Return a label as text; 3.0, which pandas makes of 3 if another row is empty, and 3.00e+00 become 3."""
    text = str(value.item() if isinstance(value, Tensor | np.generic) else value)
    stripped = text.strip()
    whole, point, rest = stripped.partition(".")
    if point and INTEGER.fullmatch(whole) and not rest.strip("0"):
        return whole
    if SCIENTIFIC.fullmatch(stripped) and float(stripped).is_integer():
        return str(int(float(stripped)))
    return stripped if strip else text
