"""Tables of predictions in files: which columns there are, and what they mean.

Readers of npz, csv and parquet files give named columns; `understood` finds scores, labels and the rest among them by
their names, which the text of `fedlas.predictions` lists. Nothing is guessed from values.
"""

import csv
import math
import re
import sys
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.column_names import (
    LABELS,
    ROW_NAMES,
    UNUSED,
    LabelFile,
    ReadOptions,
    Roles,
    find_roles,
    header_advice,
    label_names,
    option,
    parses,
    short_list,
)
from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.storage import (
    ObjectsError,
    RowError,
    check_arrays,
    check_file,
    check_unpacked,
    open_text,
    read_batches,
    readable,
)

MOST_CLASSES = 2**20  # of a file: the metrics of each take a kilobyte, and a small file can claim any number
FEWEST = 20  # confidences of two classes of which one is below a half
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")  # of a class that is called by one
LONGEST_WHOLE = 40  # digits of a number with leading zeros
FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}  # whether one is correct
TRUTH = {"false": 0, "true": 1}  # labels of two classes
# A number as numpy.savetxt and R write it; 12e4 may be the name of a class.
SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*[eE][+-]?|[eE][+-])\d{1,2}")
WHOLE = re.compile(r"[+-]?\d+")  # a number as text
MOST_WARNINGS = 5  # about class names that are spelled almost alike
AT_ONCE = 2**16  # cells of a text file that are converted together
MOSTLY_UNIQUE = ("id", "ids", "path", "paths", "index")  # columns of a text file in which few cells are equal
NUMBERS = ("logit_", "prob_", "feature_", "label_")  # columns that hold numbers in a text file


class Text(NamedTuple):
    """Content of a csv file.

    Attributes:
        columns: values by name.
        rounding: for each row, how far its sum may lie below and above one, and the unit of its last digit.
        lines: the line in which each row begins.
    """

    columns: dict[str, Any]
    rounding: NDArray[np.float64]
    lines: Sequence[int]


class Understood(NamedTuple):
    """What the columns of a file mean.

    Attributes:
        are_logits: whether the scores are logits; probabilities otherwise.
        scores: one row for each sample.
        labels: class numbers or soft labels, if there are any.
        rest: what may come with them, by the names that `Predictions` has for it.
        top: where only the top class is known, what `TopLabelPredictions` need besides the confidences in `scores`.
    """

    are_logits: bool
    scores: Any
    labels: Any
    rest: dict[str, Any]
    top: dict[str, Any] | None = None


def read_npz(path: str | Path) -> dict[str, Any]:
    """Read the arrays of an npz file."""
    with readable(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
            raise UserError("it holds one array alone; named ones are expected (numpy.savez)")
        check_unpacked(path, sum(int(entry.file_size) for entry in file.zip.infolist()))
        name, count = Counter(file.zip.namelist()).most_common(1)[0] if file.files else ("", 0)
        if count > 1:
            raise UserError(f"{count} of its arrays are called {name.removesuffix('.npy')!r}")
        check_arrays(file.zip, unused=UNUSED)
        return {name: file[name] for name in file.files if name not in UNUSED}


def read_csv(
    path: str | Path, watch: Callable[[float], None] | None = None, options: ReadOptions | None = None
) -> Text:
    """Read a table of text, its columns separated by commas, semicolons, tabs or blanks."""
    with _opened(path, watch, header=(options or {}).get("header", True)) as (table, mark):
        return _read_text(table, path, mark, options)


@contextmanager
def _opened(
    path: str | Path, watch: Callable[[float], None] | None = None, *, header: bool
) -> Iterator[tuple["Table", str]]:
    """Open a table of text; return it in cells, with the mark between them."""
    check_file(path)
    with open_text(path, newline="") as file:
        batches = read_batches(file, path, watch)
        first = next(batches, [""])
        # Programs of countries that write 0,5 separate columns by semicolons.
        marks = (",", ";", "\t") if header else (";", ",", "\t")
        blanks = ".txt" in Path(path).suffixes and not any(mark in first[0] for mark in marks)
        mark = " " if blanks else next((mark for mark in marks if mark in first[0]), ",")
        given: Iterator[list[str]] = chain([first], batches)
        if blanks:
            given = ([line.strip(" ") for line in lines] for lines in given)
        yield _split(given, path, mark, header=header), mark


def read_parquet(path: str | Path, options: ReadOptions | None = None) -> dict[str, Any]:
    """Read the columns of a parquet table that have a role; the others become examples of their type."""
    table, options = _Parquet(path), options or {}
    columns = dict(table.examples)
    labels = [name for name, role in label_names(columns, options, path).items() if role == "label"]
    columns |= table.read(labels)  # they may name the columns of the classes
    left_out = {*labels, *find_roles(columns, options, path).unread}
    return columns | table.read([name for name in columns if name not in left_out and name.casefold() not in ROW_NAMES])


class _Parquet:
    """A parquet table, of which columns are read by their names.

    Attributes:
        examples: for each column a value of its type; none of a type that is not read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        with readable(path):
            parquet = optional_module("pyarrow.parquet")
            about = parquet.read_metadata(str(path))
            check_unpacked(path, 8 * _arrow_count(about))
            check_unpacked(path, _arrow_size(about))
            # Equal texts are read once: a small file may name a long one in every row.
            self._file = parquet.ParquetFile(str(path), read_dictionary=_arrow_texts(about))
        self.examples = {field.name: _arrow_example(field.type) for field in self._file.schema_arrow}

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Read columns; raise an error about a type that is neither numbers, texts nor lists of numbers."""
        wanted = dict.fromkeys(names)
        for field in self._file.schema_arrow:
            # A name also selects columns that have it and a dot as a prefix.
            selected = any(start in wanted for start in accumulate(field.name.split("."), "{}.{}".format))
            if selected and not len(_arrow_example(field.type)):
                raise UserError(
                    f"{self._path}: {field.name} holds {field.type}; numbers, texts or lists of numbers are read"
                )
        with readable(self._path):
            columns = _arrow_numbers(self._file, wanted)
            rest = self._file.read([name for name in wanted if name not in columns])
        return columns | {name: _arrow_column(rest[name], name, self._path) for name in wanted if name not in columns}


def read_npy(path: str | Path) -> NDArray[Any]:
    """Read the array of an npy file."""
    with readable(path):
        try:
            # Unlike reading, mapping compares the announced size with that of the file before it takes memory.
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        except ValueError as error:
            if "Python objects" not in str(error):
                raise
    raise ObjectsError(f"{path} holds Python objects, which are not read: save numbers or text, with astype")


def frame_columns(frame: Any) -> dict[str, Any]:
    """Return the columns of a DataFrame of pandas or polars; columns of lists become tables."""
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    for name, values in columns.items():
        if values.dtype.kind == "O" and len(values) and isinstance(values[0], list | tuple | np.ndarray):
            columns[name] = np.stack([np.asarray(row) for row in values])
    return columns


def no_scores(columns: Mapping[str, Any], roles: Roles, options: ReadOptions, path: str | Path) -> ValueError:
    """Return the error about a table in which no scores were found."""
    wanted = "logits, probs, logit_NAME, prob_NAME, or confidence and prediction"
    way = f"name the columns of the classes with {option('prob_columns')}"
    if "label" not in roles.names.values() and options.get("labels") is None:
        way += f", or, if these are called by class names alone, that of the labels with {option('label_column')}"
    held = f"its columns are {short_list(columns)}{header_advice(columns, options)}" if columns else "it is empty"
    return UserError(f"{path}: expected one of {wanted}; {way}; {held}")


def no_labels(roles: Roles | None, path: object, labels: str = "labels") -> ValueError:
    """Return the error about a table in which no labels were found; `labels` is the option that gives them."""
    unread = () if roles is None else roles.unread
    there = f"; these columns are not understood: {short_list(unread)}" if unread else ""
    way = f"name their column with {option('label_column')}, or give them with {option(labels)}"
    return UserError(f"{path}: no labels were found{there}; {way}")


def renamed(columns: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Give columns the names that fedlas uses for them; leave out those that are not understood."""
    others = {name: values for name, values in columns.items() if name not in roles.names and name not in roles.unread}
    return {role: columns[name] for name, role in roles.names.items()} | others


def with_labels(options: ReadOptions) -> ReadOptions:
    """Replace the name of a file of labels by its content."""
    labels = options.get("labels")
    return {**options, "labels": read_labels(labels, options)} if isinstance(labels, str | Path) else options


def read_labels(path: str | Path, options: ReadOptions) -> LabelFile:
    """Read labels from a file of their own: an array, a table with a column of labels, or one value in each line."""
    path = Path(path)
    kind = path.suffix.lower() if path.suffix.lower() != ".gz" else Path(path.stem).suffix.lower()
    if kind == ".npy":
        return LabelFile(path, read_npy(path))
    if kind not in {".npz", ".csv", ".tsv", ".txt", ".parquet"}:
        raise UserError(f"{path}: labels are read from .npy, .npz, .csv, .tsv, .txt and .parquet files")
    header: ReadOptions = {"header": options.get("header", True)}
    table = _Parquet(path) if kind == ".parquet" else None
    if table is not None:
        columns = dict(table.examples)
    else:
        columns = read_npz(path) if kind == ".npz" else _read_cells(path, header=header["header"])
    chosen = options.get("label_column")
    known = {} if chosen in columns else label_names(columns, {}, path)
    rest = [name for name in columns if name.casefold() not in ROW_NAMES]
    names = [str(chosen)] if chosen in columns else list(known) or (rest if len(rest) == 1 else [])
    if not names:
        raise UserError(
            f"{path}: no column is called label; name it with {option('label_column')}; its columns are "
            f"{short_list(columns)}{header_advice(columns, header)}"
        )
    values = columns[names[0]] if table is None else table.read(names)[names[0]]
    single = len(columns) == 1 and kind not in {".npz", ".parquet"}
    if single and header["header"]:
        values = [names[0], *values]
    return LabelFile(path, values, may_have_header=single)


def _read_cells(path: Path, *, header: bool) -> dict[str, Any]:
    """Read all cells of a table of text as text."""
    with _opened(path, header=header) as (table, _):
        _check_names(table.names, path)
        columns: dict[str, list[str]] = {name: [] for name in table.names}
        for batch in table.batches:
            for column, cells in zip(columns.values(), batch.columns, strict=True):
                column.extend(map(sys.intern, cells))
    return dict(columns)


def labels_for(given: LabelFile, n: int, source: str) -> Any:
    """Return as many labels as there are samples; with one line more in a text of one column, the first is a header."""
    values = given.values
    if given.may_have_header and len(values) == n + 1:
        values = values[1:]
    if len(values) != n:
        raise UserError(f"{source}: {len(values):,} labels for {n:,} samples")
    if not isinstance(values, list):
        return values
    words = [_word(value) for value in values]
    return np.asarray(list(map(int, words)), dtype=np.int64) if all(map(_is_place, words)) else texts(words)


def _is_place(word: str) -> bool:
    return _as_whole(word) is not None


def understood(columns: Mapping[str, Any], path: str | Path, source: str | None = None) -> Understood:
    """Find scores, labels and the rest among named columns.

    Args:
        columns: values by the names that fedlas uses.
        path: the file, for errors.
        source: where the labels come from, if from another file.
    """
    found = [kind for kind in ("logits", "probs") if kind in columns]
    found += [kind for kind in ("logit_", "prob_") if any(name.startswith(kind) for name in columns)]
    if not found and "confidence" in columns and columns.keys() & {"prediction", "correct"}:
        return _top_label(columns, path)
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
        raise UserError(f"{path}: it has {classes:,} classes; from a file at most {MOST_CLASSES:,} are read")
    if names is not None and _has_numbers(columns):
        names = _told_apart(names)
    tell_twins(names)
    soft = names is not None and all(f"label_{name}" in columns for name in names)
    if soft and any(name in columns for name in LABELS):
        raise UserError(f"{path}: it has both a column of labels and label_NAME; leave one of them out")
    by_column = kind.endswith("_")
    try:
        labels = (
            _numbers(columns, "label_", names or (), path)
            if soft
            else _classes(columns, names, source or path, by_column=by_column, classes=classes)
        )
    except RowError as error:
        if source is None:
            raise
        raise UserError(str(error)) from error  # the lines of the predictions are not those of the labels
    wide = [name.removeprefix("feature_") for name in columns if name.startswith("feature_")]
    features = _numbers(columns, "feature_", wide, path) if wide else columns.get("features")
    rest = {"features": features, "class_names": names, **_about_samples(columns, path)}
    return Understood(kind.startswith("logit"), scores, labels, rest)


def _top_label(columns: Mapping[str, Any], path: str | Path) -> Understood:
    """Find confidences, and which of them are correct, where nothing is known of other classes."""
    confidence = _numbers(columns, "", ["confidence"], path)[:, 0]
    if not len(confidence):
        raise UserError(f"{path}: confidence has no rows; at least one sample is needed")
    given = columns.get("class_names")
    names = None if given is None else [str(name) for name in given]
    called = {} if "correct" in columns and not set(LABELS) & columns.keys() else {"label": _label(columns, path)}
    called |= {"prediction": "prediction"} if "prediction" in columns else {}
    held = {word: _distinct(columns[name]) for word, name in called.items()}
    if names is None or not all(_are_whole(columns[name]) for name in called.values()):
        words = {word: [_word(value) for value in one.values] for word, one in held.items()}
        if len(words) == 2 and _mixes_numbers_and_names(*words.values()):
            shown = ", ".join(some[0] for some in words.values())
            raise UserError(f"{path}: one of label and prediction holds numbers, the other names: {shown}")
        mentioned = sorted({word for some in words.values() for word in some}, key=_by_number)
        if names is None and mentioned:
            names = mentioned
            tell_twins(names)
        number = {name: i for i, name in enumerate(names or ())}
        for word in mentioned:
            if word not in number:
                raise UserError(f"{path}: {word!r} is none of class_names: {short_list(number)}")
        found = {word: np.array([number[one] for one in some])[held[word].rows] for word, some in words.items()}
    else:
        found = {word: _whole(columns[name], word) for word, name in called.items()}
    _warn_of_low_confidence(confidence, names or (), path)
    top = {"prediction": found.get("prediction"), "correct": _flags(columns, path)}
    rest = {"class_names": names, **_about_samples(columns, path)}
    return Understood(False, confidence, found.get("label"), rest, top)


def _by_number(name: str) -> tuple[bool, str, str]:
    """Sort names that are numbers by their value, before all others."""
    return not name.isdecimal(), name.zfill(20), name


def _mixes_numbers_and_names(labels: Sequence[str], predictions: Sequence[str]) -> bool:
    """Return whether all words of one column are numbers and none of the other."""
    kinds = [{WHOLE.fullmatch(word) is not None for word in words} for words in (labels, predictions)]
    return kinds in ([{True}, {False}], [{False}, {True}])


def _flags(columns: Mapping[str, Any], path: str | Path) -> NDArray[np.bool_] | None:
    """Return the column `correct`, which may be written as 1 and 0 or true and false."""
    if "correct" not in columns:
        return None
    held = _distinct(columns["correct"])
    flags = [FLAGS.get(_word(value).lower()) for value in held.values]
    for value, flag, row in zip(held.values, flags, held.first, strict=True):
        if flag is None:
            raise RowError(f"{path}: ", int(row), f" has correct {str(value)[:80]!r}, expected 1 or 0, true or false")
    return np.array(flags, dtype=bool)[held.rows]


def _warn_of_low_confidence(confidence: NDArray[Any], names: Sequence[str], path: str | Path) -> None:
    if len(names) == 2 and len(confidence) >= FEWEST and bool((confidence < 0.5).any()):
        warnings.warn(
            f"{path}: the larger of two probabilities is never below 0.5, and some confidences are; if they are "
            f"probabilities of one class, call their column prob_NAME after it, such as prob_{names[1]}",
            stacklevel=2,
        )


class EncodedTexts:
    """A column of texts in which many are equal: each text once, and for each row its number (dictionary encoding).

    Attributes:
        places: the number of each text, in the order in which they occur.
    """

    ndim = 1

    def __init__(self) -> None:
        self.places: dict[Any, int] = _Places()
        self._codes = array("i")

    def extend(self, values: Any) -> None:
        """Add rows."""
        codes = np.fromiter(map(self.places.__getitem__, values), np.int32, len(values))
        self._codes.frombytes(codes.tobytes())

    @property
    def codes(self) -> NDArray[np.int32]:
        """For each row, the number of its text."""
        return np.frombuffer(self._codes, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._codes)

    def __iter__(self) -> Iterator[Any]:
        return map(list(self.places).__getitem__, self._codes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.object_]:
        del dtype, copy
        return texts(list(self.places))[self.codes]


class _Places(dict[Any, int]):
    """Numbers that are given to keys when they are first looked up."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


class Distinct(NamedTuple):
    """The different values of a column.

    Attributes:
        values: each value once.
        first: the row in which each value stands first.
        rows: for each row, the position of its value in `values`.
    """

    values: list[Any]
    first: Sequence[int]
    rows: NDArray[np.int64] | NDArray[np.int32]


def _distinct(column: Any) -> Distinct:
    """Find the different values of a column, without a copy of its texts: one of them may be very long."""
    if isinstance(column, Tensor):
        column = (column.double() if column.is_floating_point() else column).numpy()  # numpy has no bfloat16
    if isinstance(column, np.ndarray) and column.dtype.kind in "iufb":
        values, places, rows = np.unique(column, return_index=True, return_inverse=True)
        return Distinct(values.tolist(), places.tolist(), rows.reshape(-1))
    if not isinstance(column, EncodedTexts):
        given, column = column, EncodedTexts()
        column.extend(given)
    rows = column.codes
    first = np.empty(len(column.places), dtype=np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]  # of equal places, the last assignment counts
    return Distinct(list(column.places), first.tolist(), rows)


def _about_samples(columns: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    return {
        "index": _whole(columns["index"], "index") if "index" in columns else None,
        "ids": _one_of(columns, ("id", "ids"), path),
        "paths": _one_of(columns, ("path", "paths"), path),
    }


def _one_of(columns: Mapping[str, Any], names: Sequence[str], path: str | Path) -> Any:
    """Take the column that has one of several names, or None."""
    there = [name for name in names if columns.get(name) is not None]
    if len(there) > 1:
        raise UserError(f"{path}: {' and '.join(there)} mean the same; leave one of them out")
    return columns[there[0]] if there else None


def _label(columns: Mapping[str, Any], path: str | Path) -> str:
    there = [name for name in LABELS if name in columns]
    if len(there) != 1:
        raise UserError(f"{path}: expected one column `label` or `labels`; its columns are {short_list(columns)}")
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
        raise UserError(f"{path}: a {kind}... column holds something that is not a number ({error})") from error


def _neighbours(arrays: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Find the part of a table that arrays are the columns of, in order, so that it need not be copied."""
    first, step = arrays[0], arrays[0].itemsize
    for place, one in enumerate(arrays):
        same = one.base is first.base and one.dtype == first.dtype and one.strides == first.strides
        if first.base is None or not same or one.ctypes.data != first.ctypes.data + place * step:
            return None
    shape, strides = (len(first), len(arrays)), (*first.strides, step)
    return np.lib.stride_tricks.as_strided(first, shape, strides) if first.dtype.kind == "f" else None


class Batch(NamedTuple):
    """Some rows of a text file.

    Attributes:
        lines: the line in which each row begins.
        columns: the cells of each column.
    """

    lines: Sequence[int] | NDArray[np.int64]
    columns: Sequence[Sequence[str]]


class Table(NamedTuple):
    """A text file in parts.

    Attributes:
        names: of its columns.
        first: cells of its first row, if it has one.
        batches: all rows.
    """

    names: list[str]
    first: list[str]
    batches: Iterator[Batch]


def _split(batches: Iterator[list[str]], path: str | Path, mark: str, *, header: bool = True) -> Table:
    """Split the lines of a text file into cells; without a header, columns are called by their numbers."""
    lines = next(batches)
    plain = header and mark != " " and not any('"' in line for line in lines)
    rows = _quoted_rows(lines if plain else chain(lines, chain.from_iterable(batches)), path, mark)
    head = next(rows, (1, []))
    first = next(((line, row) for line, row in rows if row), None) if header else head
    names = [name.strip() for name in head[1]] if header else list(map(str, range(len(head[1]))))
    row = [] if first is None else first[1]
    if mark in {" ", "\t"} and len(row) == len(names) + 1 and row[-1]:
        names = ["", *names]  # R writes no name above the names of rows
    if plain:
        return Table(names, row, _split_plain(chain([lines[1:]], batches), len(names), path, mark))
    return Table(names, row, _grouped(rows if first is None else chain([first], rows), len(names), path))


def _split_plain(batches: Iterator[list[str]], width: int, path: str | Path, mark: str) -> Iterator[Batch]:
    """Split many lines at once, as long as there are no quotation marks."""
    start = 2
    for lines in batches:
        joined = "".join(lines)
        if '"' in joined:
            yield from _grouped(
                _quoted_rows(chain(lines, chain.from_iterable(batches)), path, mark, start), width, path
            )
            return
        text = joined.replace("\r\n", "\n").removesuffix("\n")
        if width > 1 and _is_regular(text, mark, width, len(lines)) and "\r" not in text:
            cells = text.replace("\n", mark).split(mark)
            yield Batch(np.arange(start, start + len(lines)), [cells[i::width] for i in range(width)])
        else:
            yield from _grouped(_quoted_rows(lines, path, mark, start), width, path)
        start += len(lines)


def _is_regular(text: str, mark: str, width: int, rows: int) -> bool:
    """Return whether each line of a text has the same number of cells."""
    content = np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)
    ends, marks = content == ord("\n"), content == ord(mark)
    found = ends[ends | marks]
    return len(found) == rows * width and bool((found.reshape(rows, width) == (np.arange(width) == width - 1)).all())


def _quoted_rows(lines: Iterable[str], path: str | Path, mark: str, start: int = 1) -> Iterator[tuple[int, list[str]]]:
    """Return the cells of each row and the line in which it begins."""
    reader: Any = csv.reader(lines, delimiter=mark, skipinitialspace=mark == " ")
    begins = start
    try:
        for row in reader:
            yield begins, row
            begins = start + reader.line_num
    except csv.Error as error:
        raise UserError(f"{path}: line {start + reader.line_num - 1} cannot be split into cells ({error})") from error


def _grouped(rows: Iterator[tuple[int, list[str]]], width: int, path: str | Path) -> Iterator[Batch]:
    """Join rows that are not empty to batches."""
    filled = ((line, row) for line, row in rows if row)
    while some := list(islice(filled, max(1, AT_ONCE // max(1, width)))):
        for line, row in some:
            if len(row) != width:
                raise UserError(f"{path}: line {line} has {len(row)} cells, the header has {width}")
        yield Batch([line for line, _ in some], list(zip(*(row for _, row in some), strict=True)))


def _read_text(table: Table, path: str | Path, mark: str = ",", options: ReadOptions | None = None) -> Text:
    """Read the rows of a csv file: numbers at once as numbers, the rest as text.

    What rounding explains of the sum of a row is found from its digits, and only where the sum is not one.
    """
    header, options = table.names, options or {}
    _check_names(header, path)
    row = table.first if len(table.first) == len(header) else ["0"] * len(header)
    number, classes, maybe = _numeric_columns(header, row, options, path)
    text = sorted(set(range(len(header))) - set(number))
    values, rounding, lines = array("d"), array("d"), array("q")
    non_numeric: set[str] = set()
    words: dict[int, list[str]] = {i: [] for i in text if header[i] in MOSTLY_UNIQUE}
    encoded = {i: EncodedTexts() for i in text if i not in words}
    for begins, by_column in table.batches:
        lines.frombytes(np.asarray(begins, dtype=np.int64).tobytes())
        cells = [by_column[i] if mark != ";" else [cell.replace(",", ".") for cell in by_column[i]] for i in number]
        for place, i in enumerate(number) if maybe else ():
            if i in maybe and not all(map(parses, cells[place])):
                non_numeric.add(header[i])
                cells[place] = [cell if parses(cell) else "nan" for cell in cells[place]]
        try:
            numbers = [np.fromiter(map(float, column), np.float64, len(begins)) for column in cells]
        except ValueError as error:
            raise UserError(f"{path}: {_no_number([header[i] for i in number], cells, begins)}") from error
        part = np.stack(numbers, axis=1) if numbers else np.empty((len(begins), 0))
        values.frombytes(part.tobytes())
        if classes:
            limits = np.tile((1e-6, 1e-6, 0.0), (len(begins), 1))
            for place in np.flatnonzero(np.abs(part[:, :classes].sum(1) - 1) > 1e-7).tolist():
                limits[place] = _rounding([column[place] for column in cells[:classes]])
            rounding.frombytes(limits.tobytes())
        for i, cells_of_text in words.items():
            cells_of_text.extend(by_column[i])
        for i, codes in encoded.items():
            codes.extend(by_column[i])
    values_of = np.frombuffer(values, dtype=np.float64).reshape(len(lines), len(number))
    columns: dict[str, Any] = dict.fromkeys(header, ())
    columns |= {header[i]: values_of[:, j] for j, i in enumerate(number)}
    columns |= {header[i]: texts(column) for i, column in words.items()}
    columns |= {header[i]: column for i, column in encoded.items()}
    columns |= dict.fromkeys(non_numeric, ())
    return Text(columns, np.frombuffer(rounding, dtype=np.float64).reshape(-1, 3), lines)


def _check_names(header: Sequence[str], path: str | Path) -> None:
    name, count = next(iter(Counter(header).most_common(1)), ("", 0))
    if count > 1:
        advice = header_advice(header, {})
        raise UserError(f"{path}: {count} columns are called {name!r}; each needs a name of its own{advice}")


def _numeric_columns(
    header: Sequence[str], row: Sequence[str], options: ReadOptions, path: str | Path
) -> tuple[list[int], int, set[int]]:
    """Find the columns of a text file that hold numbers, from its header and its first row.

    Returns their places, first those of probabilities; how many of these there are; and the places of columns that may
    belong to classes, because no scores are named and their first cells are numbers.
    """
    roles = find_roles({name: [cell] for name, cell in zip(header, row, strict=True)}, options, path)
    unread = set(roles.unread)
    canonical = ["" if name in unread else roles.names.get(name, name) for name in header]
    # Without scores, classes may stand alone as the names of columns; which of them do, the labels say later.
    maybe = {i for i, name in enumerate(header) if name in unread and parses(row[i].replace(",", "."))}
    maybe = set() if roles.has_scores else maybe
    soft = {f"label_{name.partition('_')[2]}" for name in canonical if name.startswith(("prob_", "logit_"))}
    kinds = ("prob_", "logit_", "probs", "logits", "confidence", "feature_")
    number = [i for i, name in enumerate(canonical) if name.startswith(kinds) or name in soft or i in maybe]
    # Probabilities come first, so that they are a slice of a row's numbers; columns of one kind stand together.
    number.sort(key=lambda i: (not canonical[i].startswith("prob_"), i in maybe, canonical[i].partition("_")[0]))
    classes = sum(canonical[i].startswith("prob_") for i in number)
    return number, classes, maybe


def _arrow_example(kind: Any) -> Any:
    """Return a value of a type; none of types that are not read: their values may be large, or Python objects."""
    types = optional_module("pyarrow").types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        numbers = types.is_floating(kind.value_type) or types.is_integer(kind.value_type)
        return np.zeros((1, 1)) if numbers or types.is_boolean(kind.value_type) else ()
    if types.is_floating(kind) or types.is_integer(kind) or types.is_decimal(kind):
        return np.zeros(1)
    if types.is_dictionary(kind):
        return _arrow_example(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)
    return texts([""]) if is_text or types.is_boolean(kind) else ()


def _arrow_numbers(file: Any, wanted: Container[str]) -> dict[str, Any]:
    """Read the columns of a parquet file that make a table of one floating-point type, one by one into one table."""
    types = optional_module("pyarrow").types
    schema = file.schema_arrow
    fields = [one for one in schema if one.name in wanted]
    names = [one.name for one in fields if one.name.startswith(NUMBERS) and types.is_floating(one.type)]
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


def _arrow_size(about: Any) -> int:
    """Return the uncompressed size of the columns of a parquet file."""
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    return sum(int(group.column(i).total_uncompressed_size) for group in groups for i in range(group.num_columns))


def _arrow_texts(about: Any) -> list[str]:
    """Name the columns of a parquet file that hold texts."""
    columns = [about.schema.column(i) for i in range(about.num_columns)]
    return [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and one.max_repetition_level == 0]


def _arrow_column(column: Any, name: str, path: str | Path) -> Any:
    """Take a column of a parquet table as an array; a column of lists as a table, and text as it is."""
    types = optional_module("pyarrow").types
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lists = column.combine_chunks()
        length = optional_module("pyarrow.compute").list_value_length(lists).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(length != length[:1])[:1]:
            raise UserError(f"{path}: row {row} of {name} has {length[row]} entries, row 0 has {length[0]}")
        return lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), -1)
    if types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
        return column.to_numpy()
    if types.is_dictionary(column.type):
        column = column.unify_dictionaries().combine_chunks()
        values = texts([*column.dictionary.to_pylist(), None])  # the last one for empty cells
        return values[column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)]
    return texts(column.to_pylist())


def texts(values: Sequence[Any]) -> NDArray[np.object_]:
    """Return texts as an array of Python objects: numpy's own texts are all as wide as the longest one."""
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _classes(
    columns: Mapping[str, Any], names: Sequence[str] | None, path: str | Path, *, by_column: bool, classes: int
) -> Any:
    """Find the class number of every label.

    Beside columns that are named after classes, a label is such a name if any label is, whatever type it has: the
    columns may stand in any order. Beside a table, whole numbers are places in it. Of two classes that have other
    names, true and false are the second and the first.
    """
    if not any(name.startswith("label") for name in columns):
        return None
    labels = columns[_label(columns, path)]
    if getattr(labels, "ndim", 1) == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "b" and not by_column:
        labels = labels.astype(np.int64)
    if (_are_whole(labels) and not by_column) or np.ndim(labels) == 2:
        return labels
    number = {name: i for i, name in enumerate(names or ())}
    bare = {name.strip(): i for name, i in number.items()}
    # Few words stand in many rows.
    given = _distinct(labels)
    words, first = [_word(label, strip=False) for label in given.values], given.first
    found = [number.get(word, bare.get(word.strip())) for word in words]
    named = any(place is not None for place in found)
    if not named:
        _check_spelling(words, list(number), path)
        found = [_as_whole(word.strip()) for word in words]
        flags = [TRUTH.get(word.strip().casefold()) for word in words]
        found = flags if classes <= 2 and None not in flags else found
    bad = {int(first[i]): words[i].strip() for i, place in enumerate(found) if place is None}
    if names is None and len(bad) == len(words) and not any(map(parses, bad.values())):
        reason = "labels are names, and nothing says which class each name is"
        way = "give class numbers, or name the columns of the classes as labels do"
        raise UserError(f"{path}: class_names is missing: {reason}; {way}")
    for row in sorted(bad)[:1]:
        raise RowError(
            f"{path}: ", row, f" has label {bad[row][:80]!r}, expected {_expected(bad[row], names or (), named)}"
        )
    return torch.as_tensor(found)[torch.from_numpy(given.rows.astype(np.int64, copy=False))]


def _expected(label: str, names: Sequence[str], named: bool) -> str:
    """Say which labels are known, and which of them may be meant by one that is not."""
    if not names:
        return "a whole number"
    known = short_list(names)
    words = f"one of the classes {known}" if named else f"a class name or a whole number; the classes are {known}"
    meant = next((name for name in names if _spelled(name) == _spelled(label)), None)
    return words if meant is None else f"{words}; did you mean {meant!r}?"


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
    pairs = [(found.setdefault(_spelled(name), name), name) for name in names or ()]
    twins = [(other, name) for other, name in pairs if other != name]
    for other, name in twins[:MOST_WARNINGS]:
        warnings.warn(
            f"{other!r} and {name!r} are taken as two classes; if they are one, write them alike", stacklevel=2
        )
    if len(twins) > MOST_WARNINGS:
        more = len(twins) - MOST_WARNINGS
        warnings.warn(f"{more:,} more pairs of class names are spelled almost alike", stacklevel=2)


def _check_spelling(labels: Sequence[str], names: Sequence[str], path: str | Path) -> None:
    """Refuse labels that are no class name but the same number as one: 1 may be a place, or stand for the class 01."""
    spelled = {_spelled(name): name for name in names}
    for label in map(str.strip, labels):
        name = spelled.get(_spelled(label))
        if name is not None and NUMBER.fullmatch(label):
            raise UserError(
                f"{path}: is the label {label!r} the class {name!r}, or the place {label} among the columns, counted "
                f"from 0? Write labels as the classes are called: {short_list(names)}"
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
    """Take a label as a word; 3.0, which a table makes of 3 where another row is empty, and 3.00e+00 are 3."""
    word = str(value.item() if isinstance(value, Tensor | np.generic) else value)
    bare = word.strip()
    whole, point, rest = bare.partition(".")
    if point and WHOLE.fullmatch(whole) and not rest.strip("0"):
        return whole
    if SCIENTIFIC.fullmatch(bare) and float(bare).is_integer():
        return str(int(float(bare)))
    return bare if strip else word


def _no_number(names: Sequence[str], columns: Sequence[Sequence[str]], lines: Sequence[int] | NDArray[np.int64]) -> str:
    """Name the first cell of some rows that is not a number, and say what to do about it."""
    for line, *cells in zip(lines, *columns, strict=True):
        for name, cell in zip(names, cells, strict=True):
            try:
                float(cell)
            except ValueError:
                what = f"{name} is {cell[:80]!r}"
                if not cell.strip():
                    what = f"{name} is empty; fill it in, or leave the row out"
                elif cell.strip().endswith("%") and name.startswith(("prob_", "confidence")):
                    what += "; write 70% as 0.7"
                return f"line {line} holds something that is not a number ({what})"
    raise AssertionError("every cell is a number")


def _rounding(cells: Sequence[str]) -> tuple[float, float, float]:
    """Return how far rounding can move the sum of a row below and above one, and the unit of the last digit.

    The errors of numbers above zero add up as independent ones do: four standard deviations, and at most half a unit
    each. A number that was rounded to zero has lost something, at most half a unit of the finest number of the row.
    """
    units = [_last_digit(cell) for cell in cells]
    positive = [unit for unit, cell in zip(units, cells, strict=True) if float(cell)]
    finest = min((unit for unit in units if unit), default=0.0)
    spread = 4 * math.sqrt(math.fsum(unit * unit for unit in positive) / 12)
    above = min(spread, math.fsum(positive) / 2) * 1.000002 + 1e-6
    return above + finest / 2 * (len(cells) - len(positive)), above, finest


def _last_digit(cell: str) -> float:
    """Find the value of a number's last digit; a whole number is taken as exact."""
    mantissa, exponent, power = cell.strip().lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    try:
        return 10.0 ** (int(power or 0) - decimals) if decimals or exponent else 0.0
    except (OverflowError, ValueError):  # of a zero with an enormous exponent
        return 0.0
