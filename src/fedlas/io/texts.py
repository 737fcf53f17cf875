"""Columns of texts, and their distinct values."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def text_array(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as an array of objects; entries of NumPy's text types are all as wide as the longest one."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


class Distinct(NamedTuple):
    """The distinct values of a column.

    Attributes:
        values: each value once.
        first: the first row of each value.
        codes: for each row, the position of its value in `values`.
    """

    values: list[Any]
    first: Sequence[int]
    codes: NDArray[np.int64]


def find_distinct(column: Any) -> Distinct:
    """Find the distinct values of a column: sorted numbers, or other values in the order of their first rows."""
    if isinstance(column, Tensor):
        column = (column.double() if column.is_floating_point() else column).numpy()  # numpy has no bfloat16
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        return Distinct(values.tolist(), first.tolist(), inverse.reshape(-1))
    numbers: defaultdict[Any, int] = defaultdict(lambda: len(numbers))
    codes = np.fromiter(map(numbers.__getitem__, column), np.int64, len(column))
    rows = np.empty(len(numbers), dtype=np.int64)
    rows[codes[::-1]] = np.arange(len(codes))[::-1]  # the last assignment to a position counts
    return Distinct(list(numbers), rows.tolist(), codes)
