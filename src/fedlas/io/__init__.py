"""Read and write predictions; the suffix of a file names its format.

| suffix | read | written | content |
|---|---|---|---|
| .safetensors | yes | yes | all fields of predictions |
| .npz | yes | yes | arrays `logits` or `probs`, `labels`, and optionally the others |
| .npy | yes | | an array of probabilities, or of logits with `logits=True`; labels are in another file |
| .csv, .tsv, .txt | yes | .csv | a column for each class, `logit_NAME` or `prob_NAME`, and `label`; .gz may follow |
| .parquet | yes | yes | the same columns, or a column of lists |
| .json | yes | | an object of columns, or a list of records |
| .jsonl | yes | yes | a record in each line: `logits` or `probs` as a list or as an object by class, `label` |
| .pt, .pth | yes | | a dictionary of tensors; nothing else is unpickled |
| run folder | yes | | predictions of the best weights for a split, such as `split="test"` |

`fedlas.io.columns` lists the names of columns; nothing is guessed from values.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedlas.errors import UserError, UserTypeError, short_list
from fedlas.io import csv, json, npz, parquet, safetensors, torch
from fedlas.io.atomic import write_atomic
from fedlas.io.columns import (
    CORRECT,
    LABEL_NAMES,
    OTHERS,
    ROW_NAMES,
    ColumnOptions,
    ReadOptions,
    check_options,
    find_roles,
)
from fedlas.io.label_file import read_labels
from fedlas.io.table import Table, build_predictions, no_labels
from fedlas.io.untrusted import check_file, content_errors, format_suffix, path_inside
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.predictions.arrays import check_row_names
from fedlas.progress import Progress

Reader = Callable[[Path, ReadOptions, Progress | None], Table]

READERS: Mapping[str, Reader] = {
    ".safetensors": safetensors.read,
    ".npz": npz.read,
    ".npy": npz.read_npy,
    ".csv": csv.read,
    ".tsv": csv.read,
    ".txt": csv.read,
    ".parquet": parquet.read,
    ".json": json.read,
    ".jsonl": json.read_jsonl,
    ".pt": torch.read,
    ".pth": torch.read,
}
COMPRESSED = (".csv", ".tsv", ".txt", ".json", ".jsonl")  # formats that may be compressed with gzip
WRITERS: Mapping[str, Callable[[Predictions, bool], bytes]] = {
    ".safetensors": safetensors.encode,
    ".npz": npz.encode,
    ".csv": csv.encode,
    ".parquet": parquet.encode,
    ".jsonl": json.encode_jsonl,
}


def read_predictions(
    path: str | Path, split: str | None = None, *, progress: Progress | None = None, **options: Unpack[ReadOptions]
) -> AnyPredictions:
    """Read predictions from a file of any format, or from a run folder.

    Args:
        path: the file; its suffix names the format.
        split: the split that the samples belong to, if the file does not name it; in a run folder, the split to read.
        progress: called with a name for the reading of the file and the fraction that has been read.
        options: roles of columns whose names do not show them, and labels from another file; see
            `fedlas.io.columns.ReadOptions`.
    """
    check_options(options)
    if not isinstance(path, str | PathLike):
        raise UserTypeError(
            f"read_predictions takes the name of a file, not {type(path).__name__}; "
            "fedlas.evaluate takes DataFrames and arrays as they are"
        )
    path = Path(path)
    if path.is_dir():
        path = _file_of_run(path, split)
    check_file(path)
    suffix, compressed = format_suffix(path), path.suffix.lower() == ".gz"
    if suffix not in READERS or (compressed and suffix not in COMPRESSED):
        known = ", ".join([*READERS, *(f"{text}.gz" for text in COMPRESSED)])
        raise UserError(f"{path}: predictions are read from {known}, not from {path.suffix or 'this'}")
    options = _read_label_option(options)
    with content_errors(path):
        if progress is not None:
            progress(f"reading {path.name}", 0.0)
        predictions = build_predictions(READERS[suffix](path, options, progress), path, options, split)
        if progress is not None:
            progress(f"reading {path.name}", 1.0)
        return predictions


def _file_of_run(folder: Path, split: str | None) -> Path:
    """Return the predictions of a run for a split; raise with the files of the folder if there are none."""
    if split is not None:
        path = path_inside(folder, f"predictions/best-{split}.safetensors", "a run")
        if path.is_file():
            return path
    files = sorted(file for inside in (folder, folder / "predictions") for file in inside.glob("*.safetensors"))
    listed = f"such as {short_list(map(str, files), 4)}" if files else ", ".join(READERS)
    raise IsADirectoryError(f"{folder} is a folder; a file of predictions is needed ({listed})")


def _read_label_option(options: ReadOptions) -> ReadOptions:
    """Replace a file of labels by its content."""
    labels = options.get("labels")
    return {**options, "labels": read_labels(labels, options)} if isinstance(labels, str | Path) else options


def as_predictions(
    source: Any, labels: Any = None, *, logits: bool = False, labelled: bool = True, **columns: Unpack[ColumnOptions]
) -> AnyPredictions:
    """Return predictions of arrays, a file, a DataFrame, a mapping of arrays or a Hugging Face `PredictionOutput`.

    Args:
        source: one of these. An array (NumPy, torch, JAX, ...) holds probabilities, a `PredictionOutput` logits.
        labels: the labels of arrays, or those of a file or table without labels.
        logits: whether `source` holds logits.
        labelled: raise if a file or table has no labels.
        columns: roles of the columns of a file or table, as in `read_predictions`.
    """
    if not isinstance(logits, bool):
        raise UserTypeError("logits is True or False; an array of logits is the first argument, with logits=True")
    if source is None:
        raise UserTypeError("predictions are None; give an array (a row per sample), a file, a table or Predictions")
    check_row_names(source, labels)
    if isinstance(source, AnyPredictions):
        if labels is not None or logits or columns:
            raise UserTypeError("Predictions have their own labels and columns; give nothing else with them")
        return source
    check_options(columns)
    is_frame = hasattr(source, "columns")
    if not is_frame and not isinstance(source, str | Path | Mapping):
        return _from_array(source, labels, logits, columns)
    options: Any = dict(columns, labels=labels, logits=logits)
    if isinstance(source, str | Path):
        name = str(source)
        predictions = read_predictions(source, **options)
    else:
        name = type(source).__name__
        table = frame_columns(source) if is_frame else {str(key): column for key, column in source.items()}
        options = _read_label_option(options)
        if is_frame and labels is not None and not find_roles(table, options, name).has_scores:
            options["prob_columns"] = _classes_of_frame(table, name)
        predictions = build_predictions(Table(table), name, options)
    return require_labels(predictions, name) if labelled else predictions


def _classes_of_frame(columns: Mapping[str, Any], name: str) -> list[str]:
    """Return the columns of a table whose labels are elsewhere, all of them classes; raise if one may be none."""
    others = [
        column
        for column, values in columns.items()
        if not _holds_floats(values) or column.casefold() in OTHERS | LABEL_NAMES | CORRECT | ROW_NAMES
    ]
    if others:
        raise UserError(
            f"{name}: {short_list(others, 6)} may be no class, and no other name shows which columns hold the scores; "
            f"name the columns of the classes with prob_columns=[...], or call them prob_NAME or logit_NAME"
        )
    return list(columns)


def _holds_floats(values: NDArray[Any]) -> bool:
    """Return whether a column holds floating-point numbers only."""
    return values.dtype.kind == "f" or (values.dtype.kind == "O" and all(isinstance(value, float) for value in values))


def _from_array(source: Any, labels: Any, logits: bool, columns: ColumnOptions) -> AnyPredictions:
    """Return predictions of an array or of a `PredictionOutput`."""
    is_output = hasattr(source, "predictions") and hasattr(source, "label_ids")
    class_names = columns.get("class_names")
    used = [name for name, value in columns.items() if name != "class_names" and value]
    if set(used) - ({"normalize"} if not logits and not is_output else set()):
        kind = "a PredictionOutput of logits" if is_output else "an array of logits" if logits else "an array"
        raise UserTypeError(f"{', '.join(used)} cannot be used with {kind}")
    if is_output:
        labels = source.label_ids if labels is None else labels
        outputs, logits = source.predictions, True
        source = outputs[0] if isinstance(outputs, tuple | list) else outputs  # hidden states follow the logits
    if class_names is not None:
        scores = {"logits" if logits else "probs": source}
        return as_predictions(scores, labels, labelled=False, **columns)
    if isinstance(labels, str | Path):
        labels = read_labels(labels, {}).for_samples(len(source), str(labels))
    if logits:
        return Predictions(source, labels)
    return Predictions.from_probs(source, labels, normalize=columns.get("normalize", False))


def frame_columns(frame: Any) -> dict[str, Any]:
    """Return the columns of a DataFrame of pandas or polars; columns of lists become arrays of two dimensions."""
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    for name, values in columns.items():
        if values.dtype.kind == "O" and len(values) and isinstance(values[0], list | tuple | np.ndarray):
            columns[name] = np.stack([np.asarray(row) for row in values])
    return columns


def require_labels(predictions: AnyPredictions, path: str | Path, labels: str = "labels") -> AnyPredictions:
    """Return predictions; raise if they have no labels, with the option that provides them."""
    if isinstance(predictions, Predictions) and predictions.given_labels is None:
        raise no_labels(predictions.columns, path, labels)
    return predictions


def write_predictions(predictions: AnyPredictions, path: str | Path, *, probs: bool = False) -> Path:
    """Write predictions to a file atomically; its suffix names the format.

    Only .safetensors files store all fields: metadata of any kind, and top-label predictions. The other formats store
    metadata as texts, which are metadata again if they group the samples.

    Args:
        predictions: what is written.
        path: the file.
        probs: write probabilities instead of logits.
    """
    path = Path(path)
    check_suffix(path)
    if isinstance(predictions, TopLabelPredictions):
        if path.suffix.lower() != ".safetensors":
            raise UserError(f"{path}: of these predictions only the top class is known; write them to .safetensors")
        write_atomic(path, safetensors.encode(predictions, probs))
    else:
        encode = WRITERS[path.suffix.lower()]
        write_atomic(path, encode(predictions, probs or predictions.given_probs is not None))
    return path


def check_suffix(path: str | Path) -> None:
    """Raise if predictions cannot be written to a file of this name."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"{path}: predictions are written to {', '.join(WRITERS)}, not to {path.suffix or 'this'}")


def read_existing(path: str | Path) -> AnyPredictions | None:
    """Read the predictions that a new file would replace; None if there is no file, or an empty one."""
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are only compared
        return read_predictions(path)


def same_predictions(first: AnyPredictions, second: AnyPredictions) -> bool:
    """Return whether two predictions have the same type and equal fields."""
    names = [field.name for field in fields(first) if field.name != "columns"]
    return type(first) is type(second) and all(_equal(getattr(first, name), getattr(second, name)) for name in names)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and first.cpu().equal(second.cpu())
    return first is second or (not isinstance(first, Tensor) and bool(first == second))
