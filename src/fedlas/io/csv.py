"""Text tables (.csv, .tsv, .txt), separated by commas, semicolons, tabs or blanks, with or without a header."""

import csv
import io
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedlas.errors import UserError
from fedlas.io.columns import ReadOptions, find_roles, header_advice
from fedlas.io.labels import is_number_text
from fedlas.io.table import Table, to_columns
from fedlas.io.texts import EncodedTexts, text_array
from fedlas.io.untrusted import check_file, open_text, read_batches
from fedlas.predictions import Predictions
from fedlas.predictions.arrays import RowLimits
from fedlas.progress import Progress

CELLS = 2**16  # that are converted together
MOSTLY_UNIQUE = ("id", "ids", "path", "paths", "index")  # columns in which few cells are equal
NUMERIC_ROLES = ("prob_", "logit_", "probs", "logits", "confidence", "feature_")


class Batch(NamedTuple):
    """Some rows of a text file.

    Attributes:
        lines: the first line of each row.
        columns: the cells of each column.
    """

    lines: Sequence[int] | NDArray[np.int64]
    columns: Sequence[Sequence[str]]


class Cells(NamedTuple):
    """The cells of a text file.

    Attributes:
        names: of the columns.
        first: cells of the first row, if there is one.
        batches: all rows.
        separator: what separates the cells.
    """

    names: list[str]
    first: list[str]
    batches: Iterator[Batch]
    separator: str


class NumericColumns(NamedTuple):
    """The columns of a text file that hold numbers.

    Attributes:
        positions: in the header; probabilities come first.
        probs: how many of them hold probabilities.
        candidates: positions of columns that may be classes: their first cells are numbers, and no scores are named.
    """

    positions: list[int]
    probs: int
    candidates: set[int]


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read a text table: columns of scores and features as numbers, all others as texts.

    If a row of probabilities does not sum to one, its digits show how much of that is rounding.
    """
    with _open(path, header=options.get("header", True), progress=progress) as cells:
        header = cells.names
        first = cells.first if len(cells.first) == len(header) else ["0"] * len(header)
        numeric = _numeric_columns(header, first, options, path)
        others = sorted(set(range(len(header))) - set(numeric.positions))
        texts: dict[int, list[str] | EncodedTexts] = {
            i: [] if header[i] in MOSTLY_UNIQUE else EncodedTexts() for i in others
        }
        values, limits, lines = array("d"), array("d"), array("q")
        not_numeric: set[str] = set()
        for batch in cells.batches:
            lines.frombytes(np.asarray(batch.lines, dtype=np.int64).tobytes())
            numbers = [
                [cell.replace(",", ".") for cell in batch.columns[i]] if cells.separator == ";" else batch.columns[i]
                for i in numeric.positions
            ]
            for position, i in enumerate(numeric.positions) if numeric.candidates else ():
                if i in numeric.candidates and not all(map(is_number_text, numbers[position])):
                    not_numeric.add(header[i])
                    numbers[position] = [cell if is_number_text(cell) else "nan" for cell in numbers[position]]
            part = _parse(numbers, [header[i] for i in numeric.positions], batch.lines, path)
            values.frombytes(part.tobytes())
            if numeric.probs:
                limits.frombytes(_row_limits(part, numbers, numeric.probs).tobytes())
            for i, column in texts.items():
                column.extend(batch.columns[i])
    table = np.frombuffer(values, dtype=np.float64).reshape(len(lines), len(numeric.positions))
    columns: dict[str, Any] = dict.fromkeys(header, ())
    columns |= {header[i]: table[:, position] for position, i in enumerate(numeric.positions)}
    columns |= {header[i]: text_array(column) if isinstance(column, list) else column for i, column in texts.items()}
    columns |= dict.fromkeys(not_numeric, ())
    by_row = np.frombuffer(limits, dtype=np.float64).reshape(-1, 3)
    return Table(columns, lines=lines, limits=RowLimits(*torch.from_numpy(by_row).T) if len(by_row) else None)


def read_texts(path: Path, *, header: bool) -> dict[str, list[str]]:
    """Read all cells of a text table as texts."""
    with _open(path, header=header) as cells:
        columns: dict[str, list[str]] = {name: [] for name in cells.names}
        for batch in cells.batches:
            for column, values in zip(columns.values(), batch.columns, strict=True):
                column.extend(map(sys.intern, values))
    return columns


def encode(predictions: Predictions, probs: bool) -> bytes:
    """Return the content of a csv file, with the shortest decimals that give the same numbers again."""
    columns = to_columns(predictions, probs)
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return stream.getvalue().encode()


@contextmanager
def _open(path: Path, *, header: bool, progress: Progress | None = None) -> Iterator[Cells]:
    """Open a text table, and find what separates its cells."""
    check_file(path)
    with open_text(path, newline="") as file:
        batches = read_batches(file, path, progress)
        first = next(batches, [""])
        # Where decimals are written as 0,5, columns are separated by semicolons.
        separators = (",", ";", "\t") if header else (";", ",", "\t")
        separator = next((mark for mark in separators if mark in first[0]), None)
        lines: Iterator[list[str]] = chain([first], batches)
        if separator is None and ".txt" in path.suffixes:
            separator = " "
            lines = ([line.strip(" ") for line in batch] for batch in lines)
        cells = _split(lines, path, separator or ",", header=header)
        _check_names(cells.names, path)
        yield cells


def _check_names(header: Sequence[str], path: Path) -> None:
    """Raise if two columns have the same name."""
    name, count = next(iter(Counter(header).most_common(1)), ("", 0))
    if count > 1:
        advice = header_advice(header, {})
        raise UserError(f"{path}: {count} columns are called {name!r}; each needs a different name{advice}")


def _split(batches: Iterator[list[str]], path: Path, separator: str, *, header: bool) -> Cells:
    """Split the lines of a text table into cells; without a header, columns are called by their numbers."""
    lines = next(batches)
    plain = header and separator != " " and not any('"' in line for line in lines)
    rows = _quoted_rows(lines if plain else chain(lines, chain.from_iterable(batches)), path, separator)
    head = next(rows, (1, []))
    first = next(((line, row) for line, row in rows if row), None) if header else head
    names = [name.strip() for name in head[1]] if header else list(map(str, range(len(head[1]))))
    row = [] if first is None else first[1]
    if separator in {" ", "\t"} and len(row) == len(names) + 1 and row[-1]:
        names = ["", *names]  # R writes no name above the names of rows
    if plain:
        remaining = _split_plain(chain([lines[1:]], batches), len(names), path, separator)
    else:
        remaining = _join_rows(rows if first is None else chain([first], rows), len(names), path)
    return Cells(names, row, remaining, separator)


def _split_plain(batches: Iterator[list[str]], width: int, path: Path, separator: str) -> Iterator[Batch]:
    """Split many lines at once, as long as there are no quotation marks."""
    start = 2
    for lines in batches:
        joined = "".join(lines)
        if '"' in joined:
            rows = _quoted_rows(chain(lines, chain.from_iterable(batches)), path, separator, start)
            yield from _join_rows(rows, width, path)
            return
        text = joined.replace("\r\n", "\n").removesuffix("\n")
        if width > 1 and _is_regular(text, separator, width, len(lines)) and "\r" not in text:
            cells = text.replace("\n", separator).split(separator)
            yield Batch(np.arange(start, start + len(lines)), [cells[i::width] for i in range(width)])
        else:
            yield from _join_rows(_quoted_rows(lines, path, separator, start), width, path)
        start += len(lines)


def _is_regular(text: str, separator: str, width: int, rows: int) -> bool:
    """Return whether each line of a text has the same number of cells."""
    content = np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)
    ends = content == ord("\n")
    kinds = ends[ends | (content == ord(separator))]
    return len(kinds) == rows * width and bool((kinds.reshape(rows, width) == (np.arange(width) == width - 1)).all())


def _quoted_rows(lines: Iterable[str], path: Path, separator: str, start: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Return the first line and the cells of each row."""
    reader: Any = csv.reader(lines, delimiter=separator, skipinitialspace=separator == " ")
    line = start
    try:
        for row in reader:
            yield line, row
            line = start + reader.line_num
    except csv.Error as error:
        raise UserError(f"{path}: line {start + reader.line_num - 1} cannot be split into cells ({error})") from error


def _join_rows(rows: Iterator[tuple[int, list[str]]], width: int, path: Path) -> Iterator[Batch]:
    """Join rows that are not empty to batches."""
    filled = ((line, row) for line, row in rows if row)
    while chunk := list(islice(filled, max(1, CELLS // max(1, width)))):
        for line, row in chunk:
            if len(row) != width:
                raise UserError(f"{path}: line {line} has {len(row)} cells, the header has {width}")
        yield Batch([line for line, _ in chunk], list(zip(*(row for _, row in chunk), strict=True)))


def _numeric_columns(header: Sequence[str], first: Sequence[str], options: ReadOptions, path: Path) -> NumericColumns:
    """Find the columns that hold numbers, from the header and the first row."""
    roles = find_roles({name: [cell] for name, cell in zip(header, first, strict=True)}, options, path)
    unread = set(roles.unread)
    names = ["" if name in unread else roles.names.get(name, name) for name in header]
    candidates = set()
    if not roles.has_scores:  # columns may be called by class names alone; the labels show later which ones are
        is_number = [is_number_text(cell.replace(",", ".")) for cell in first]
        candidates = {i for i, name in enumerate(header) if name in unread and is_number[i]}
    soft = {f"label_{name.partition('_')[2]}" for name in names if name.startswith(("prob_", "logit_"))}
    numeric = [i for i, name in enumerate(names) if name.startswith(NUMERIC_ROLES) or name in soft or i in candidates]
    # Columns of one kind are neighbours, so that they are a view of one table.
    numeric.sort(key=lambda i: (not names[i].startswith("prob_"), i in candidates, names[i].partition("_")[0]))
    return NumericColumns(numeric, sum(names[i].startswith("prob_") for i in numeric), candidates)


def _parse(
    columns: Sequence[Sequence[str]], names: Sequence[str], lines: Sequence[int] | NDArray[np.int64], path: Path
) -> NDArray[np.float64]:
    """Return cells as numbers, one column for each name."""
    if not columns:
        return np.empty((len(lines), 0))
    try:
        return np.stack([np.fromiter(map(float, column), np.float64, len(lines)) for column in columns], axis=1)
    except ValueError as error:
        raise UserError(f"{path}: {_describe_bad_cell(names, columns, lines)}") from error


def _describe_bad_cell(
    names: Sequence[str], columns: Sequence[Sequence[str]], lines: Sequence[int] | NDArray[np.int64]
) -> str:
    """Return the message about the first cell that is not a number."""
    for line, *cells in zip(lines, *columns, strict=True):
        for name, cell in zip(names, cells, strict=True):
            if not is_number_text(cell):
                reason = f"{name} is {cell[:80]!r}"
                if not cell.strip():
                    reason = f"{name} is empty; fill it in, or leave the row out"
                elif cell.strip().endswith("%") and name.startswith(("prob_", "confidence")):
                    reason += "; write 70% as 0.7"
                return f"line {line} holds something that is not a number ({reason})"
    raise AssertionError("every cell is a number")


def _row_limits(part: NDArray[np.float64], cells: Sequence[Sequence[str]], probs: int) -> NDArray[np.float64]:
    """Return the fields of `RowLimits` for each row, from the digits of its cells if it does not sum to one."""
    limits = np.tile((1e-6, 1e-6, 0.0), (len(part), 1))
    for row in np.flatnonzero(np.abs(part[:, :probs].sum(1) - 1) > 1e-7).tolist():
        limits[row] = _rounding([column[row] for column in cells[:probs]])
    return limits


def _rounding(cells: Sequence[str]) -> tuple[float, float, float]:
    """Return how far rounding can move the sum of a row below and above one, and the unit of the last digit.

    The errors of numbers above zero add up as independent ones do: four standard deviations, and at most half a unit
    each. A number that was rounded to zero has lost at most half a unit of the finest number of the row.
    """
    units = [_last_digit(cell) for cell in cells]
    positive = [unit for unit, cell in zip(units, cells, strict=True) if float(cell)]
    finest = min((unit for unit in units if unit), default=0.0)
    spread = 4 * math.sqrt(math.fsum(unit * unit for unit in positive) / 12)
    above = min(spread, math.fsum(positive) / 2) * 1.000002 + 1e-6
    return above + finest / 2 * (len(cells) - len(positive)), above, finest


def _last_digit(cell: str) -> float:
    """Return the value of a number's last digit; a whole number is taken as exact."""
    mantissa, exponent, power = cell.strip().lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        return 10.0 ** (int(power or 0) - decimals) if decimals or exponent else 0.0
    except (OverflowError, ValueError):  # of a zero with an enormous exponent
        return 0.0
