"""Predictions in files of any kind: the ending of its name says which kind a file is.

| ending | read | written | what it holds |
|---|---|---|---|
| .safetensors | yes | yes | all that `Predictions` hold |
| .npz | yes | yes | arrays `logits` or `probs`, `labels`, and optionally the others |
| .npy | yes | | an array of probabilities, or of logits with `logits=True`; labels come from another file |
| .csv, .tsv, .txt | yes | .csv | a column for each class, `logit_NAME` or `prob_NAME`, and `label`; .gz may follow |
| .parquet | yes | yes | the same columns, or a column of lists |
| .json | yes | | an object of columns, or a list of records |
| .jsonl | yes | yes | a record in each line: `logits` or `probs` as a list or as an object by class, `label` |
| .pt, .pth | yes | | a dictionary of tensors, read without unpickling anything else |

The names of columns are those that `fedlas.predictions` and `fedlas.column_names` list; nothing is found out by looking
at values.
"""

import csv
import io
import json
import tempfile
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, Unpack

import numpy as np
import torch

from fedlas.column_names import ColumnOptions, ReadOptions, check_options, short_list, table_kind
from fedlas.columns import (
    NUMBERS,
    frame_columns,
    labels_for,
    no_labels,
    read_labels,
    read_npy,
    texts,
    with_labels,
)
from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.storage import (
    MOST_TIMES,
    MOST_UNPACKED,
    ObjectsError,
    check_file,
    check_unpacked,
    memory_errors,
    named,
    open_text,
    read_lines,
    read_torch,
    readable,
    write_whole,
)

Watch = Callable[[float], None]


def read_predictions(
    path: str | Path, split: str | None = None, *, watch: Watch | None = None, **options: Unpack[ReadOptions]
) -> AnyPredictions:
    """Read predictions from a file of any kind.

    Args:
        path: the file; its ending says which kind it is.
        split: where the samples come from, if the file does not say so.
        watch: called now and then with the share of a text file that has been read.
        options: which columns hold what where their names do not say it, and labels that are in another file; see
            `fedlas.column_names.ReadOptions`.
    """
    check_options(options)
    path = Path(path)
    if path.is_dir():
        inside = sorted(file for folder in (path, path / "predictions") for file in folder.glob("*.safetensors"))
        there = f"such as {short_list(map(str, inside), 4)}" if inside else ", ".join(READERS)
        raise IsADirectoryError(f"{path} is a folder; a file of predictions is needed ({there})")
    check_file(path)
    packed = path.suffix.lower() == ".gz"
    kind = Path(path.stem).suffix.lower() if packed else path.suffix.lower()
    reader = READERS.get(kind) if not packed or kind in PACKED else None
    if reader is None:
        known = ", ".join([*READERS, *(f"{text}.gz" for text in PACKED)])
        raise UserError(f"{path}: predictions are read from {known}, not from {path.suffix or 'this'}")
    options = with_labels(options)
    with named(path):
        return reader(path, split, watch, options)


def as_predictions(
    given: Any, labels: Any = None, *, logits: Any = None, **columns: Unpack[ColumnOptions]
) -> AnyPredictions:
    """Make predictions of arrays, a file, a DataFrame, a mapping of arrays or a Hugging Face `PredictionOutput`.

    Args:
        given: one of these. An array holds probabilities, and a `PredictionOutput` logits.
        labels: the labels of arrays, or those of a file or table without labels.
        logits: logits in place of `given`, or True where `given` holds logits.
        columns: which columns of a file or table hold what, as in `read_predictions`.
    """
    if given is None and logits is not None:
        given, logits = logits, True
    if given is None or isinstance(given, bool):
        raise UserTypeError("give probabilities, logits=..., a file, a DataFrame or Predictions")
    if logits is not None and not isinstance(logits, bool):
        raise UserTypeError("give probabilities or logits=..., not both")
    if isinstance(given, AnyPredictions):
        if labels is not None or logits is not None or columns:
            raise UserTypeError("Predictions have their own labels and columns; give nothing else with them")
        return given
    options: Any = dict(columns, labels=labels, logits=bool(logits))
    check_options(options)
    if isinstance(given, str | Path):
        return labelled(read_predictions(given, **options), given)
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        table = dict(given) if isinstance(given, Mapping) else frame_columns(given)
        kind = type(given).__name__
        return labelled(
            Predictions.from_columns({str(name): one for name, one in table.items()}, kind, **options), kind
        )
    given_options = [name for name, value in columns.items() if value]
    output = hasattr(given, "predictions") and hasattr(given, "label_ids")
    if set(given_options) - ({"normalize"} if not logits and not output else set()):
        what = "a PredictionOutput of logits" if output else "an array of logits" if logits else "an array"
        raise UserTypeError(f"{', '.join(given_options)} cannot be used with {what}")
    if output:
        labels = given.label_ids if labels is None else labels
        outputs, logits = given.predictions, True
        given = outputs[0] if isinstance(outputs, tuple | list) else outputs  # hidden states follow the logits
    if isinstance(labels, str | Path):
        labels = labels_for(read_labels(labels, {}), len(given), str(labels))
    normalize = columns.get("normalize", False)
    return Predictions(given, labels) if logits else Predictions.from_probs(given, labels, normalize=normalize)


def labelled(found: AnyPredictions, path: str | Path, labels: str = "labels") -> AnyPredictions:
    """Return predictions; raise if they have no labels, with the option that would give them."""
    if isinstance(found, Predictions) and found.given_labels is None:
        raise no_labels(found.columns, path, labels)
    return found


def write_predictions(predictions: AnyPredictions, path: str | Path, *, probs: bool = False) -> Path:
    """Write predictions to a file, whole or not at all; its ending says which kind it becomes.

    Args:
        predictions: what is written.
        path: the file.
        probs: write probabilities instead of logits.
    """
    path = Path(path)
    check_ending(path)
    writer = WRITERS[path.suffix.lower()]
    if isinstance(predictions, TopLabelPredictions):
        if path.suffix.lower() != ".safetensors":
            raise UserError(f"{path}: of these predictions only the top class is known; write them to .safetensors")
        predictions.save(path)
        return path
    write_whole(path, writer(predictions, probs or predictions.given_probs is not None))
    return path


def check_ending(path: str | Path) -> None:
    """Raise an error where predictions cannot be written to a file of this name."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"{path}: predictions are written to {', '.join(WRITERS)}, not to {path.suffix or 'this'}")


def held_at(path: str | Path) -> AnyPredictions | None:
    """Read the predictions that something new would replace; None where nothing is, or an empty file."""
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody is going to use them
        return read_predictions(path)


def same_predictions(one: AnyPredictions, other: AnyPredictions) -> bool:
    """Say whether two hold the same: scores, labels, names and all that came with them."""
    if type(one) is not type(other):
        return False
    for field in fields(one):
        if field.name == "columns":
            continue
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            if first.dtype != second.dtype or not torch.equal(first.cpu(), second.cpu()):
                return False
        elif first is not second and (isinstance(first, torch.Tensor) or first != second):
            return False
    return True


def write_again(
    predictions: AnyPredictions, path: str | Path, held: AnyPredictions | None, *, probs: bool = False
) -> Path:
    """Write predictions where nothing is, or the same: others are not written over.

    Args:
        predictions: what is written.
        path: the file; its ending says which kind it becomes.
        held: what it held before, from `held_at`.
        probs: write probabilities instead of logits.
    """
    path = Path(path)
    if held is not None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about values that are as the user gave them
            written = write_predictions(predictions, Path(folder) / path.name, probs=probs)
            if not same_predictions(read_predictions(written), held):
                raise FileExistsError(f"{path} is there and holds other predictions; remove it, or name another file")
    return write_predictions(predictions, path, probs=probs)


def _safetensors(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    found = Predictions.load(path, **options)
    return found if split is None or found.split is not None else found.with_split(split)


def _npz(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    return Predictions.from_npz(path, split, **options)


def _npy(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    name = "logits" if options.get("logits") else "probs"
    return Predictions.from_columns({name: read_npy(path)}, path, split, **options)


def _csv(path: Path, split: str | None, watch: Watch | None, options: ReadOptions) -> AnyPredictions:
    return Predictions.from_csv(path, split, watch=watch, **options)


def _parquet(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    return Predictions.from_parquet(path, split, **options)


def _json(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    with readable(path), open_text(path) as file:
        found = json.loads(file.read(), parse_constant=_no_number, object_pairs_hook=_once)
    if isinstance(found, list):
        return Predictions.from_columns(_columns(enumerate(found), path, "record")[0], path, split, **options)
    if not isinstance(found, dict):
        raise UserError(f"{path}: an object of columns or a list of records is expected, not {type(found).__name__}")
    scalars = {"split", "format"}
    for name, column in found.items():
        if name not in scalars and not isinstance(column, list):
            raise UserError(f"{path}: {name} is {type(column).__name__}; every column is a list")
    columns = {}
    for name, column in found.items():
        if name not in scalars:
            filled = _Column(name, column[0] if column else None, "row")
            for row, value in enumerate(column):
                filled.add(value, row, path)
            columns[name] = filled.filled(path)
    return Predictions.from_columns(columns, path, split or found.get("split"), **options)


def _jsonl(path: Path, split: str | None, watch: Watch | None, options: ReadOptions) -> AnyPredictions:
    with open_text(path) as file:
        columns, lines = _columns(_records(read_lines(file, path, watch), path), path, "line")
    return Predictions.from_columns(columns, path, split, lines=lines, **options)


def _torch(path: Path, split: str | None, _: Watch | None, options: ReadOptions) -> AnyPredictions:
    with readable(path):
        try:
            with memory_errors():
                found = read_torch(path)
        except (MemoryError, FileNotFoundError, PermissionError):
            raise
        except ObjectsError as error:
            raise ObjectsError(f"{error}; save tensors (torch.from_numpy), or a .npz file (numpy.savez)") from error
        except Exception as error:
            raise UserError(f"{error}; save a dictionary of tensors: torch.save({{'logits': ...}})") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{path}: a dictionary of tensors is expected, not {type(found).__name__}")
    # A tensor may be longer than what is stored of it, by a stride of zero.
    check_unpacked(path, sum(value.nbytes for value in found.values() if isinstance(value, torch.Tensor)))
    return Predictions.from_columns({str(name): value for name, value in found.items()}, path, split, **options)


def _records(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line, parse_constant=_no_number, object_pairs_hook=_once)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: line {number} is no JSON ({error})") from error


def _columns(records: Iterable[tuple[int, Any]], path: Path, word: str) -> tuple[dict[str, Any], Sequence[int]]:
    """Turn records into columns, and give the number of each; `probs` by class becomes a column for each class.

    Numbers that make tables are kept as such while lines are read: objects of Python take many times the memory.
    """
    columns: dict[str, _Column] = {}
    numbers = array("q")
    for number, record in records:
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise UserError(f"{path}: {word} {number} is {kind}; an object with names is expected")
        flat: dict[str, Any] = {}
        for name, value in record.items():
            if isinstance(value, dict):  # {"probs": {"cat": 0.7, "dog": 0.3}}
                kind = table_kind(name) or name.removesuffix("s")
                flat |= {f"{kind}_{key}": one for key, one in value.items()}
            else:
                flat[name] = value
        if not numbers:
            columns = {name: _Column(name, value, word) for name, value in flat.items()}
        numbers.append(number)
        if flat.keys() != columns.keys():
            odd = short_list(sorted(flat.keys() ^ columns.keys()))
            raise UserError(f"{path}: {word} {number} and the first one do not have the same names: {odd}")
        for name, value in flat.items():
            columns[name].add(value, number, path)
    if not columns:
        raise UserError(f"{path} has no records; at least one sample is needed")
    return {name: column.filled(path) for name, column in columns.items()}, numbers


class _Column:
    """A column that is filled row by row: with numbers, with rows of numbers, or with words."""

    __slots__ = ("name", "values", "width", "word")  # a file may have a million of them

    def __init__(self, name: str, first: Any, word: str) -> None:
        self.name, self.word = name, word
        self.width = len(first) if isinstance(first, list) else None
        table = self.width is not None or name == "confidence"
        table |= name.startswith(NUMBERS) and not (name.startswith("label_") and isinstance(first, str))
        self.values: Any = array("d") if table else []

    def add(self, value: Any, row: int, path: Path) -> None:
        """Add the value of a row."""
        if isinstance(self.values, list):
            self.values.append(value)
            return
        many = self.width is not None
        if isinstance(value, list) is not many or (many and len(value) != self.width):
            wanted = f"a list of {self.width} numbers like the first" if many else "a number"
            raise UserError(f"{path}: {self.word} {row} of {self.name} is not {wanted}")
        given = value if many else [value]
        if not set(map(type, given)) <= {int, float}:
            kinds = " and ".join(sorted({type(one).__name__ for one in given}))
            raise UserError(f"{path}: {self.word} {row} of {self.name} holds {kinds}; numbers are expected")
        self.values.extend(given)

    def filled(self, path: Path) -> Any:
        """Give what was filled in, as an array or as words."""
        if not isinstance(self.values, list):
            found = np.frombuffer(self.values, dtype=np.float64)
            return found if self.width is None else found.reshape(-1, self.width)
        kinds = set(map(type, self.values))
        if kinds <= {bool}:
            return np.asarray(self.values, dtype=bool)
        if kinds <= {int}:
            return np.asarray(self.values, dtype=np.int64)
        if kinds <= {str}:
            return texts(self.values)
        if kinds <= {int, float}:
            return self.values
        named = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise UserError(f"{path}: {self.name} holds {named}; numbers or words are expected")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary; raise an error about a duplicate key, whose first value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise UserError(f"the key {name[:80]!r} occurs twice in one object")
    return found


def _no_number(word: str) -> NoReturn:
    raise UserError(f"{word} is no number")


def _to_safetensors(predictions: Predictions, probs: bool) -> bytes:
    return predictions.to_bytes(probs=probs)


def _to_npz(predictions: Predictions, probs: bool) -> bytes:
    held = _kept(predictions, probs)
    words: dict[str, Any] = {name: held.pop(name) for name in ("ids", "paths") if name in held}
    words |= {"class_names": predictions.class_names, "split": predictions.split}
    held |= {name: _fixed_width(value, name) for name, value in words.items() if value is not None}
    stream = io.BytesIO()
    np.savez(stream, **held)
    return stream.getvalue()


def _fixed_width(given: Any, name: str) -> Any:
    """Return texts as an array of numpy, whose entries are all as wide as the longest one."""
    listed = [given] if isinstance(given, str) else list(given)
    size = 4 * len(listed) * max(map(len, listed), default=0)
    if size > max(MOST_UNPACKED, MOST_TIMES * sum(map(len, listed))):
        raise UserError(f"{name} would take {size:,} bytes in an npz file, because one is very long; write .parquet")
    return np.asarray(given, dtype=str)


def _to_csv(predictions: Predictions, probs: bool) -> bytes:
    columns = _flat(predictions, probs)
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    # The shortest decimals that give the same number again.
    writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    return stream.getvalue().encode()


def _to_parquet(predictions: Predictions, probs: bool) -> bytes:
    arrow, parquet = optional_module("pyarrow"), optional_module("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(arrow.table(_flat(predictions, probs)), stream)
    return stream.getvalue()


def _to_jsonl(predictions: Predictions, probs: bool) -> bytes:
    kind = "probs" if probs else "logits"
    names = None if predictions.class_names is None else _column_names(predictions)
    held = {name: column.tolist() for name, column in _kept(predictions, probs).items()}
    if names is not None and isinstance(held.get("labels", [()])[0], int):
        held["labels"] = [names[i] for i in held["labels"]]
    singular = {"labels": "label", "ids": "id", "paths": "path"}
    lines = []
    for row in range(len(predictions)):
        record = {singular.get(name, name): column[row] for name, column in held.items()}
        if names is not None:
            record[kind] = dict(zip(names, record[kind], strict=True))
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(lines).encode()


def _kept(predictions: Predictions, probs: bool) -> dict[str, Any]:
    """List the columns of predictions as arrays."""
    scores = {"probs": predictions.probs} if probs else {"logits": predictions.logits}
    tensors = scores | {
        "labels": predictions.given_labels,
        "features": predictions.features,
        "index": predictions.index,
    }
    words = {"ids": predictions.ids, "paths": predictions.paths}
    # numpy has no bfloat16.
    held = {name: _numpy(tensor) for name, tensor in tensors.items() if tensor is not None}
    return held | {name: texts(value) for name, value in words.items() if value is not None}


def _numpy(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()


def _flat(predictions: Predictions, probs: bool) -> dict[str, Any]:
    """List the columns of predictions, those of tables one by one, under the names that are read again."""
    names = _column_names(predictions)
    kept, found = _kept(predictions, probs), {}
    for name, column in kept.items():
        single = {"ids": "id", "paths": "path"}.get(name, name.removesuffix("s"))
        if column.ndim == 1:
            found[single if name != "index" else name] = column
        else:
            called = names if name != "features" else tuple(map(str, range(column.shape[1])))
            found |= {f"{single}_{one}": column[:, i] for i, one in enumerate(called)}
    if predictions.class_names is not None and found.get("label") is not None:
        found["label"] = texts([names[i] for i in found["label"].tolist()])
    return found


def _column_names(predictions: Predictions) -> tuple[str, ...]:
    """Name a column for each class; names that could not be read again are an error."""
    names = predictions.class_names or tuple(map(str, range(predictions.num_classes)))
    if len({name.strip() for name in names}) < len(names):
        raise UserError("two classes have the same name; a table with a column for each class needs different ones")
    return names


READERS: Mapping[str, Callable[[Path, str | None, Watch | None, ReadOptions], AnyPredictions]] = {
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".npy": _npy,
    ".csv": _csv,
    ".tsv": _csv,
    ".txt": _csv,
    ".parquet": _parquet,
    ".json": _json,
    ".jsonl": _jsonl,
    ".pt": _torch,
    ".pth": _torch,
}
PACKED = (".csv", ".tsv", ".txt", ".json", ".jsonl")  # text that may be packed by gzip
WRITERS: Mapping[str, Callable[[Predictions, bool], bytes]] = {
    ".safetensors": _to_safetensors,
    ".npz": _to_npz,
    ".csv": _to_csv,
    ".parquet": _to_parquet,
    ".jsonl": _to_jsonl,
}
