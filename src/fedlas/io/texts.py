"""Columns of texts, stored so that long or repeated texts take little memory."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def text_array(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as an array of objects; entries of NumPy's text types are all as wide as the longest one."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


class EncodedTexts:
    """A dictionary-encoded column: each text once, and for each row the number of its text.

    Attributes:
        numbers: the number of each text, in the order of first occurrence.
    """

    ndim = 1

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = _Numbers()
        self._codes = array("i")

    def extend(self, values: Any) -> None:
        """Append rows."""
        codes = np.fromiter(map(self.numbers.__getitem__, values), np.int32, len(values))
        self._codes.frombytes(codes.tobytes())

    @property
    def codes(self) -> NDArray[np.int32]:
        """For each row, the number of its text."""
        return np.frombuffer(self._codes, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._codes)

    def __iter__(self) -> Iterator[Any]:
        return map(list(self.numbers).__getitem__, self._codes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.object_]:
        del dtype, copy
        return text_array(list(self.numbers))[self.codes]


class _Numbers(dict[Any, int]):
    """Consecutive numbers, assigned to keys at their first lookup."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


class Distinct(NamedTuple):
    """The distinct values of a column.

    Attributes:
        values: each value once.
        first: the first row of each value.
        codes: for each row, the position of its value in `values`.
    """

    values: list[Any]
    first: Sequence[int]
    codes: NDArray[np.int64] | NDArray[np.int32]


def find_distinct(column: Any) -> Distinct:
    """Find the distinct values of a column without copying its texts, which may be very long."""
    if isinstance(column, Tensor):
        column = (column.double() if column.is_floating_point() else column).numpy()  # numpy has no bfloat16
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        return Distinct(values.tolist(), first.tolist(), inverse.reshape(-1))
    if not isinstance(column, EncodedTexts):
        values, column = column, EncodedTexts()
        column.extend(values)
    codes = column.codes
    rows = np.empty(len(column.numbers), dtype=np.int64)
    rows[codes[::-1]] = np.arange(len(codes))[::-1]  # the last assignment to a position counts
    return Distinct(list(column.numbers), rows.tolist(), codes)
