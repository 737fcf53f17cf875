"""JSON files: an object of columns, a list of records, or a record in each line (.jsonl)."""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedlas.errors import UserError, short_list
from fedlas.io.columns import NUMERIC_PREFIXES, ReadOptions, table_kind
from fedlas.io.table import SINGULAR, Table, class_columns, metadata_columns, to_arrays
from fedlas.io.texts import text_array
from fedlas.io.untrusted import file_errors, open_text, read_batches
from fedlas.predictions import Predictions
from fedlas.progress import Progress

TEXT_FIELDS = {"split", "format"}  # of an object of columns
ONE_VALUE = {"labels", "ids", "paths"}  # fields of which a record has one value


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read a JSON file."""
    del options, progress
    with file_errors(path), open_text(path) as file:
        content = _parse(file.read())
    if isinstance(content, list):
        return Table(_join_records(enumerate(content), path, "record")[0])
    if not isinstance(content, dict):
        raise UserError(f"{path}: an object of columns or a list of records is expected, not {type(content).__name__}")
    lists = {name: values for name, values in content.items() if name not in TEXT_FIELDS}
    for name, values in lists.items():
        if not isinstance(values, list):
            raise UserError(
                f"{path}: {name} is {type(values).__name__}; every column is a list; of a DataFrame, write a list of "
                "records: to_json(path, orient='records')"
            )
    columns = {}
    for name, values in lists.items():
        column = _Column(name, values[0] if values else None, "row")
        for row, value in enumerate(values):
            column.append(value, row, path)
        columns[name] = column.to_array(path)
    return Table(columns, content.get("split"))


def read_jsonl(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read a file with a JSON object in each line."""
    del options
    with open_text(path) as file:
        records = _parse_lines(chain.from_iterable(read_batches(file, path, progress)), path)
        columns, lines = _join_records(records, path, "line")
    return Table(columns, lines=lines)


def encode_jsonl(predictions: Predictions, probs: bool) -> bytes:
    """Return the content of a file with a JSON object in each line."""
    names = None if predictions.class_names is None else class_columns(predictions)
    columns = {name: column.tolist() for name, column in to_arrays(predictions, probs).items()}
    if names is not None and isinstance(columns.get("labels", [()])[0], int):
        columns["labels"] = [names[i] for i in columns["labels"]]
    metadata = metadata_columns(predictions, to_arrays(predictions, probs))
    scores = "probs" if probs else "logits"
    lines = []
    for row in range(len(predictions)):
        record = {SINGULAR[name] if name in ONE_VALUE else name: column[row] for name, column in columns.items()}
        if names is not None:
            record[scores] = dict(zip(names, record[scores], strict=True))
        record |= {name: texts[row] for name, texts in metadata.items()}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_raise_not_a_number, object_pairs_hook=_unique_keys)


def _raise_not_a_number(word: str) -> NoReturn:
    raise UserError(f"{word} is no number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise if a key occurs twice, because its first value would be lost."""
    content = dict(pairs)
    if len(content) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise UserError(f"the key {name[:80]!r} occurs twice in one object")
    return content


def _parse_lines(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any]]:
    """Return the number and the content of each line that is not empty."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, _parse(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: line {number} is no JSON ({error})") from error


def _join_records(records: Iterable[tuple[int, Any]], path: Path, word: str) -> tuple[dict[str, Any], Sequence[int]]:
    """Return columns, and the number of each record; `probs` by class become a column for each class.

    Numbers are stored as such while lines are read: Python objects take many times the memory.
    """
    columns: dict[str, _Column] = {}
    numbers = array("q")
    for number, record in records:
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UserError(f"{path}: {word} {number} is {kind}; an object with names is expected")
        flat = _flatten(record)
        if not numbers:
            columns = {name: _Column(name, value, word) for name, value in flat.items()}
        numbers.append(number)
        if flat.keys() != columns.keys():
            different = short_list(sorted(flat.keys() ^ columns.keys()))
            raise UserError(f"{path}: {word} {number} and the first one do not have the same names: {different}")
        for name, value in flat.items():
            columns[name].append(value, number, path)
    if not columns:
        raise UserError(f"{path} has no records; at least one sample is needed")
    return {name: column.to_array(path) for name, column in columns.items()}, numbers


def _flatten(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without nested objects: {"probs": {"cat": 0.7}} becomes {"prob_cat": 0.7}."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            prefix = table_kind(name) or name.removesuffix("s")
            flat |= {f"{prefix}_{key}": entry for key, entry in value.items()}
        else:
            flat[name] = value
    return flat


class _Column:
    """A column that grows row by row: numbers, rows of numbers, or texts."""

    __slots__ = ("name", "values", "width", "word")  # a file may have a million of them

    def __init__(self, name: str, first: Any, word: str) -> None:
        self.name, self.word = name, word
        self.width = len(first) if isinstance(first, list) else None
        numeric = self.width is not None or name == "confidence"
        numeric |= name.startswith(NUMERIC_PREFIXES) and not (name.startswith("label_") and isinstance(first, str))
        self.values: Any = array("d") if numeric else []

    def append(self, value: Any, row: int, path: Path) -> None:
        """Add the value of a row."""
        if isinstance(self.values, list):
            self.values.append(value)
            return
        many = self.width is not None
        if isinstance(value, list) is not many or (many and len(value) != self.width):
            expected = f"a list of {self.width} numbers like the first" if many else "a number"
            raise UserError(f"{path}: {self.word} {row} of {self.name} is not {expected}")
        numbers = value if many else [value]
        if not set(map(type, numbers)) <= {int, float}:
            kinds = " and ".join(sorted({type(entry).__name__ for entry in numbers}))
            raise UserError(f"{path}: {self.word} {row} of {self.name} holds {kinds}; numbers are expected")
        self.values.extend(numbers)

    def to_array(self, path: Path) -> Any:
        """Return the column as an array, or as a list of numbers of both kinds."""
        if not isinstance(self.values, list):
            numbers = np.frombuffer(self.values, dtype=np.float64)
            return numbers if self.width is None else numbers.reshape(-1, self.width)
        kinds = set(map(type, self.values))
        if kinds <= {bool}:
            return np.asarray(self.values, dtype=bool)
        if kinds <= {int}:
            return np.asarray(self.values, dtype=np.int64)
        if kinds <= {str}:
            return text_array(self.values)
        if kinds <= {int, float}:
            return self.values
        listed = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"{path}: {self.name} holds {listed}; numbers or words are expected")
