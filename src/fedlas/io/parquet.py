"""Parquet tables."""

import io
from collections.abc import Container, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.io.columns import NUMERIC_PREFIXES, ROW_NAMES, ReadOptions, find_roles, label_names
from fedlas.io.table import Table, find_groups, to_columns
from fedlas.io.texts import text_array
from fedlas.io.untrusted import check_unpacked, file_errors
from fedlas.predictions import Predictions
from fedlas.progress import Progress


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read the columns of a parquet table that have a role or may be metadata; others become an example of a type."""
    del progress
    file = ParquetFile(path)
    columns = dict(file.examples)
    labels = [name for name, role in label_names(columns, options, path).items() if role == "label"]
    columns |= file.read(labels)  # columns of classes may be called by the names that occur there
    unread = find_roles(columns, options, path).unread
    skipped = {*labels, *unread}
    names = [name for name in columns if name not in skipped and name.casefold() not in ROW_NAMES]
    return Table(columns | file.read(names) | file.read_groups(unread))


def encode(predictions: Predictions, probs: bool) -> bytes:
    """Return the content of a parquet file."""
    arrow, parquet = optional_module("pyarrow"), optional_module("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(arrow.table(to_columns(predictions, probs)), stream)
    return stream.getvalue()


class ParquetFile:
    """A parquet table whose columns are read by name.

    Attributes:
        examples: for each column an array with a value of its type; empty for a type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with file_errors(path):
            parquet = optional_module("pyarrow.parquet")
            metadata = parquet.read_metadata(str(path))
            chunks = [
                metadata.row_group(i).column(j)
                for i in range(metadata.num_row_groups)
                for j in range(metadata.num_columns)
            ]
            values = max(metadata.num_rows * metadata.num_columns, sum(chunk.num_values for chunk in chunks))
            check_unpacked(path, 8 * values)
            check_unpacked(path, sum(chunk.total_uncompressed_size for chunk in chunks))
            # Equal texts are read once: a small file may name a long one in every row.
            self._file = parquet.ParquetFile(str(path), read_dictionary=_text_columns(metadata))
        self.examples = {field.name: _example(field.type) for field in self._file.schema_arrow}

    def read_groups(self, names: Iterable[str]) -> dict[str, Any]:
        """Read the columns that group the samples, one by one; binary ones may be images, and are not read."""
        types = optional_module("pyarrow").types
        kinds = {field.name: field.type for field in self._file.schema_arrow}
        groups: dict[str, Any] = {}
        for name in names:
            if not len(self.examples[name]) or types.is_binary(kinds[name]) or _is_list(kinds[name]):
                continue
            values = self.read([name])[name]
            if find_groups(name, values) is not None:
                groups[name] = values
        return groups

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Read columns; raise if a type is neither numbers, texts nor lists of numbers."""
        chosen = dict.fromkeys(names)
        for field in self._file.schema_arrow:
            # A name also selects columns that have it and a dot as a prefix.
            selected = any(start in chosen for start in accumulate(field.name.split("."), "{}.{}".format))
            if selected and not len(_example(field.type)):
                raise UserError(
                    f"{self._path}: {field.name} holds {field.type}; numbers, texts or lists of numbers are read"
                )
        with file_errors(self._path):
            columns = _read_floats(self._file, chosen)
            other_columns = self._file.read([name for name in chosen if name not in columns])
        return columns | {
            name: _to_array(other_columns[name], name, self._path) for name in chosen if name not in columns
        }


def _text_columns(metadata: Any) -> list[str]:
    """Return the names of the columns that hold texts."""
    columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
    return [
        column.path for column in columns if column.physical_type == "BYTE_ARRAY" and column.max_repetition_level == 0
    ]


def _is_list(kind: Any) -> bool:
    types = optional_module("pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_date(kind: Any) -> bool:
    types = optional_module("pyarrow").types
    return bool(types.is_date(kind) or types.is_timestamp(kind))


def _example(kind: Any) -> Any:
    """Return a value of a type; none of types that are not read, whose values may be large or Python objects."""
    types = optional_module("pyarrow").types
    if _is_list(kind):
        numbers = types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
        return np.zeros((1, 1)) if numbers or types.is_boolean(kind.value_type) else ()
    if types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind):
        return np.zeros(1)
    if types.is_dictionary(kind):
        return _example(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or _is_date(kind)
    return text_array([""]) if is_text or types.is_boolean(kind) else ()


def _read_floats(file: Any, chosen: Container[str]) -> dict[str, Any]:
    """Read the columns of scores, features and soft labels into one array, if all have one floating-point type."""
    types = optional_module("pyarrow").types
    schema = file.schema_arrow
    fields = [field for field in schema if field.name in chosen]
    names = [
        field.name for field in fields if field.name.startswith(NUMERIC_PREFIXES) and types.is_floating(field.type)
    ]
    names.sort(key=lambda name: name.partition("_")[0])  # columns of one kind are neighbours
    kinds = {schema.field(name).type for name in names}
    if len(kinds) != 1 or len(set(schema.names)) < len(schema.names):
        return {}
    dtype = np.dtype(f"f{kinds.pop().bit_width // 8}")  # to_pandas_dtype, before pyarrow 18, needs pandas
    table = np.empty((file.metadata.num_rows, len(names)), dtype=dtype)
    for position, name in enumerate(names):
        table[:, position] = file.read([name])[name].to_numpy()
    return {name: table[:, position] for position, name in enumerate(names)}


def _to_array(column: Any, name: str, path: Path) -> Any:
    """Return a column as an array; a column of lists has two dimensions."""
    types = optional_module("pyarrow").types
    if _is_list(column.type):
        lists = column.combine_chunks()
        length = optional_module("pyarrow.compute").list_value_length(lists).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(length != length[:1])[:1]:
            raise UserError(f"{path}: row {row} of {name} has {length[row]} entries, row 0 has {length[0]}")
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1)
    if types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
        return column.to_numpy()
    if types.is_dictionary(column.type):
        column = column.unify_dictionaries().combine_chunks()
        values = text_array([*column.dictionary.to_pylist(), None])  # the last one for empty cells
        return values[column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)]
    return text_array((column.cast("string") if _is_date(column.type) else column).to_pylist())
