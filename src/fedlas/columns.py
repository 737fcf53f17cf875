"""Tables of predictions in files: which columns there are, and what they mean.

Readers of npz, csv and parquet files give named columns; `understood` finds scores, labels and the rest among them by
their names, which the text of `fedlas.predictions` lists. Nothing is guessed from values.
"""

import csv
import math
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlas.column_names import LABELS, ReadOptions, Roles, find_roles, option
from fedlas.extras import optional_module
from fedlas.storage import (
    ObjectsError,
    RowError,
    check_arrays,
    check_file,
    check_unpacked,
    open_text,
    read_lines,
    readable,
)

FILLING = "(other"  # begins the name of a class that only fills a row up to one
MOST_FILLED = 2**29  # numbers in a table that is made of confidences alone
MOST_CLASSES = 2**20  # of a file: the metrics of each take a kilobyte, and a small file can claim any number
FEWEST = 20  # confidences of two classes of which one is below a half
NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")  # of a class that is called by one
LONGEST_WHOLE = 40  # digits of a number with leading zeros
WHOLE = re.compile(r"[+-]?\d+")  # a number as text
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
        top_only: whether only the top class is known.
    """

    are_logits: bool
    scores: Any
    labels: Any
    rest: dict[str, Any]
    top_only: bool = False


def read_npz(path: str | Path) -> dict[str, Any]:
    """Read the arrays of an npz file."""
    with readable(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
            raise ValueError("it holds one array alone; named ones are expected (numpy.savez)")
        check_unpacked(path, sum(int(entry.file_size) for entry in file.zip.infolist()))
        check_arrays(file.zip)
        return dict(file)


def read_csv(
    path: str | Path, watch: Callable[[float], None] | None = None, options: ReadOptions | None = None
) -> Text:
    """Read a table of text, its columns separated by commas, semicolons, tabs or blanks."""
    check_file(path)
    with open_text(path, newline="") as file:
        lines = read_lines(file, path, watch)
        first = next(lines, "")
        # Programs of countries that write 0,5 separate columns by semicolons.
        marks = (",", ";", "\t") if (options or {}).get("header", True) else (";", ",", "\t")
        blanks = ".txt" in Path(path).suffixes and not any(mark in first for mark in marks)
        mark = " " if blanks else next((mark for mark in marks if mark in first), ",")
        given = (line.strip(" ") for line in chain([first], lines)) if blanks else chain([first], lines)
        reader = csv.reader(given, delimiter=mark, skipinitialspace=blanks)
        return _read_text(_cells(reader, path), path, mark, options)


def read_parquet(path: str | Path) -> dict[str, Any]:
    """Read the columns of a parquet table."""
    with readable(path):
        file = optional_module("pyarrow.parquet").ParquetFile(str(path))
        check_unpacked(path, 8 * _arrow_count(file.metadata))
        columns = _arrow_numbers(file)
        rest = file.read([name for name in file.schema_arrow.names if name not in columns])
    columns |= {name: _arrow_column(rest[name], name, path) for name in rest.column_names}
    return {name: columns[name] for name in file.schema_arrow.names}


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


def no_scores(columns: Mapping[str, Any], path: str | Path) -> ValueError:
    """Return the error about a table in which no scores were found."""
    wanted = "logits, probs, logit_NAME, prob_NAME, or confidence and prediction"
    way = f"name the columns of the classes with {option('prob_columns')}"
    held = f"its columns are {some_of(columns)}" if columns else "it is empty"
    return ValueError(f"{path}: expected one of {wanted}; {way}; {held}")


def renamed(columns: Mapping[str, Any], roles: Roles, path: str | Path) -> dict[str, Any]:
    """Give columns the names that fedlas uses for them; leave out those that are not understood."""
    skipped = set(roles.unread)
    found = {roles.names.get(name, name): values for name, values in columns.items() if name not in skipped}
    if "correct" not in found:
        return found
    correct = found.pop("correct")
    if "confidence" in found and "prediction" not in found:
        known = {"1": True, "true": True, "0": False, "false": False}
        words = [_word(value).casefold() for value in correct]
        for row, word in enumerate(words):
            if word not in known:
                raise RowError(f"{path}: correct: ", row, f" is {word!r}; 0 or 1, true or false are expected")
        found["prediction"] = ["predicted"] * len(words)
        found["label"] = ["predicted" if known[word] else f"{FILLING})" for word in words]
    return found


def labels_of(options: ReadOptions) -> Any:
    """Return the labels that are given beside a table: an array, or the content of a file."""
    labels = options.get("labels")
    return read_labels(labels, options) if isinstance(labels, str | Path) else labels


def read_labels(path: str | Path, options: ReadOptions) -> Any:
    """Read labels from a file of their own: an array, a table with a column of labels, or one value in each line."""
    path = Path(path)
    kind = path.suffix.lower() if path.suffix.lower() != ".gz" else Path(path.stem).suffix.lower()
    if kind == ".npy":
        return read_npy(path)
    readers: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {".npz": read_npz, ".parquet": read_parquet}
    if kind not in {*readers, ".csv", ".tsv", ".txt"}:
        raise ValueError(f"{path}: labels are read from .npy, .npz, .csv, .tsv, .txt and .parquet files")
    header: ReadOptions = {"header": options.get("header", True)}
    columns = dict(readers[kind](path) if kind in readers else read_csv(path, options=header).columns)
    chosen = options.get("label_column")
    roles = {} if chosen in columns else find_roles(columns, header, path).names
    names = [str(chosen)] if chosen in columns else [name for name, role in roles.items() if role == "label"]
    names = names or (list(columns) if len(columns) == 1 else [])
    if not names:
        raise ValueError(f"{path}: no column is called label; name it with {option('label_column')}")
    values = columns[names[0]]
    if kind in {".csv", ".tsv", ".txt"}:
        if len(columns) == 1 and _is_number(names[0]) and options.get("header", True):
            values = [names[0], *values]  # numbers alone have no header
        if all(map(_is_number, values)) and all(float(value).is_integer() for value in values):
            return np.asarray([int(float(value)) for value in values], dtype=np.int64)
    return values


def understood(columns: Mapping[str, Any], path: str | Path) -> Understood:
    """Find scores, labels and the rest among named columns."""
    found = [kind for kind in ("logits", "probs") if kind in columns]
    found += [kind for kind in ("logit_", "prob_") if any(name.startswith(kind) for name in columns)]
    if not found and {"confidence", "prediction"} <= columns.keys():
        return _of_the_top_class(columns, path)
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
    tell_twins(names)
    soft = names is not None and all(f"label_{name}" in columns for name in names)
    if soft and any(name in columns for name in LABELS):
        raise ValueError(f"{path}: it has both a column of labels and label_NAME; leave one of them out")
    by_column = kind.endswith("_")
    labels = _numbers(columns, "label_", names or (), path) if soft else _classes(columns, names, path, by_column)
    wide = [name.removeprefix("feature_") for name in columns if name.startswith("feature_")]
    features = _numbers(columns, "feature_", wide, path) if wide else columns.get("features")
    rest = {"features": features, "class_names": names, **_about_samples(columns, path)}
    return Understood(kind.startswith("logit"), scores, labels, rest)


def _of_the_top_class(columns: Mapping[str, Any], path: str | Path) -> Understood:
    """Make probabilities of all classes where only that of the predicted one is known."""
    truth, said = ([_word(value) for value in columns[name]] for name in (_label(columns, path), "prediction"))
    kinds = [{WHOLE.fullmatch(word) is not None for word in words} for words in (truth, said)]
    if kinds in ([{True}, {False}], [{False}, {True}]):
        raise ValueError(f"{path}: one of label and prediction holds numbers, the other names: {truth[0]}, {said[0]}")
    names = sorted(set(truth) | set(said), key=lambda name: (not name.isdecimal(), name.zfill(20), name))
    tell_twins(names)
    confidence = _confidences(columns, path, names)
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
    rest = {"class_names": names, **_about_samples(columns, path)}
    return Understood(False, probs, [place[name] for name in truth], rest, top_only=True)


def _confidences(columns: Mapping[str, Any], path: str | Path, names: Sequence[str]) -> Tensor:
    """Take the column of confidences, one row each, if they can be what they are called."""
    confidence = torch.from_numpy(np.array(_numbers(columns, "", ["confidence"], path)))
    good = (confidence[:, 0] >= 0.001) & (confidence[:, 0] <= 1)
    named = [name for name in names if not name.startswith(FILLING)]
    if len(named) == 2 and len(confidence) >= FEWEST and bool((confidence < 0.5).any()):
        warnings.warn(
            f"{path}: the larger of two probabilities is never below 0.5, and some confidences are; if they are "
            f"probabilities of one class, call their column prob_NAME after it, such as prob_{names[1]}",
            stacklevel=2,
        )
    percent = "; percentages are divided by 100 before" if bool((confidence > 1).any()) else ""
    if not len(confidence):
        raise ValueError(f"{path}: confidence has no rows; at least one sample is needed")
    for row in (~good).nonzero()[:1, 0].tolist():
        fault = f" is not between 0.001 and 1{percent}: [{confidence[row, 0]:.6g}]"
        raise RowError(f"{path}: confidence: ", row, fault)
    return confidence


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


def _read_text(
    rows: Iterator[tuple[int, list[str]]], path: str | Path, mark: str = ",", options: ReadOptions | None = None
) -> Text:
    """Read the rows of a csv file: numbers at once as numbers, the rest as text.

    What rounding explains of the sum of a row is found from its digits, and only where the sum is not one.
    """
    options = options or {}
    head = next(rows, (1, []))
    first = head if not options.get("header", True) else next(((line, row) for line, row in rows if row), None)
    header = [name.strip() for name in head[1]] if options.get("header", True) else list(map(str, range(len(head[1]))))
    if mark in {" ", "\t"} and first is not None and len(first[1]) == len(header) + 1 and first[1][-1]:
        header = ["", *header]  # R writes no name above the names of rows
    name, count = next(iter(Counter(header).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{path}: {count} columns are called {name!r}; each needs a name of its own")
    row = first[1] if first is not None and len(first[1]) == len(header) else ["0"] * len(header)
    number, classes, maybe = _numeric_columns(header, row, options, path)
    text = sorted(set(range(len(header))) - set(number))
    rows = rows if first is None else chain([first], rows)
    values, rounding, lines = array("d"), array("d"), array("q")
    no_class: set[str] = set()
    words: list[list[str]] = [[] for _ in text]
    for line, row in rows:
        if not row:
            continue
        lines.append(line)
        if len(row) != len(header):
            raise ValueError(f"{path}: line {line} has {len(row)} cells, the header has {len(header)}")
        cells = [row[i] for i in number] if mark != ";" else [row[i].replace(",", ".") for i in number]
        if maybe:
            wrong = {place for place, i in enumerate(number) if i in maybe and not _is_number(cells[place])}
            no_class |= {header[number[place]] for place in wrong}
            cells = ["nan" if place in wrong else cell for place, cell in enumerate(cells)]
        try:
            found = [float(cell) for cell in cells]
        except ValueError as error:
            which = _no_number([header[i] for i in number], cells)
            raise ValueError(f"{path}: line {line} holds something that is not a number ({which})") from error
        values.extend(found)
        far = classes > 0 and abs(sum(found[:classes]) - 1) > 1e-7
        if classes:
            rounding.extend(_rounding(cells[:classes]) if far else (1e-6, 1e-6, 0.0))
        for column, i in zip(words, text, strict=True):
            column.append(row[i])
    table = np.frombuffer(values, dtype=np.float64).reshape(len(lines), len(number))
    columns: dict[str, Any] = dict.fromkeys(header, ())
    columns |= {header[i]: table[:, j] for j, i in enumerate(number)}
    columns |= {header[i]: column for i, column in zip(text, words, strict=True)}
    columns |= dict.fromkeys(no_class, ())
    return Text(columns, np.frombuffer(rounding, dtype=np.float64).reshape(-1, 3), lines)


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
    maybe = {i for i, name in enumerate(header) if name in unread and _is_number(row[i].replace(",", "."))}
    maybe = set() if roles.has_scores else maybe
    soft = {f"label_{name.partition('_')[2]}" for name in canonical if name.startswith(("prob_", "logit_"))}
    kinds = ("prob_", "logit_", "probs", "logits", "confidence", "feature_")
    number = [i for i, name in enumerate(canonical) if name.startswith(kinds) or name in soft or i in maybe]
    # Probabilities come first, so that they are a slice of a row's numbers; columns of one kind stand together.
    number.sort(key=lambda i: (not canonical[i].startswith("prob_"), i in maybe, canonical[i].partition("_")[0]))
    classes = sum(canonical[i].startswith("prob_") for i in number)
    return number, classes, maybe


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
    if getattr(labels, "ndim", 1) == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if not isinstance(labels, Tensor) and np.asarray(labels).dtype.kind == "b":
        labels = np.asarray(labels).astype(np.int64)
    if (_are_whole(labels) and not by_column) or np.ndim(labels) == 2:
        return labels
    number = {name: i for i, name in enumerate(names or ())}
    bare = {name.strip(): i for name, i in number.items()}
    # Few words stand in many rows.
    given = np.asarray([_word(label, strip=False) for label in labels])
    unique, first, rows = np.unique(given, return_index=True, return_inverse=True)
    words: list[str] = unique.tolist()
    found = [number.get(word, bare.get(word.strip())) for word in words]
    named = any(place is not None for place in found)
    if not named:
        _check_spelling(words, list(number), path)
        found = [_as_whole(word.strip()) for word in words]
    bad = {int(first[i]): words[i].strip() for i, place in enumerate(found) if place is None}
    if names is None and len(bad) == len(words) and not any(map(_is_number, bad.values())):
        reason = "labels are names, and nothing says which class each name is"
        raise ValueError(f"{path}: class_names is missing: {reason}")
    for row in sorted(bad)[:1]:
        raise RowError(f"{path}: ", row, f" has label {bad[row]!r}, expected {_expected(bad[row], names or (), named)}")
    return torch.as_tensor(found)[torch.from_numpy(rows.reshape(-1))]


def _expected(label: str, names: Sequence[str], named: bool) -> str:
    """Say which labels are known, and which of them may be meant by one that is not."""
    if not names:
        return "a whole number"
    known = some_of(names)
    words = f"one of the classes {known}" if named else f"a class name or a whole number; the classes are {known}"
    meant = next((name for name in names if _spelled(name) == _spelled(label)), None)
    return words if meant is None else f"{words}; did you mean {meant!r}?"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
    return 10.0 ** (int(power or 0) - decimals) if decimals or exponent else 0.0
