"""Arrays of NumPy: .npz and .npy files."""

import io
import math
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlas.errors import UserError
from fedlas.io.columns import ReadOptions
from fedlas.io.table import Table, metadata_columns, to_arrays
from fedlas.io.untrusted import MAX_RATIO, MAX_UNPACKED, ObjectsError, check_unpacked, file_errors
from fedlas.predictions import Predictions
from fedlas.progress import Progress

UNUSED = {"metrics"}  # of a PredictionOutput of Hugging Face: a dictionary, which is not read


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read an npz file: `logits` or `probs`, and optionally `labels`, `features`, `class_names`, `split`, ..."""
    del options, progress
    arrays = read_arrays(path)
    return Table(arrays, str(arrays["split"]) if "split" in arrays else None)


def read_npy(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read probabilities, or logits with the option `logits`, from an npy file."""
    del progress
    return Table({"logits" if options.get("logits") else "probs": read_array(path)})


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file."""
    with file_errors(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
            raise UserError("it holds one array alone; named ones are expected (numpy.savez)")
        entries = file.zip.infolist()
        check_unpacked(path, sum(int(entry.file_size) for entry in entries))
        name, count = Counter(file.zip.namelist()).most_common(1)[0] if file.files else ("", 0)
        if count > 1:
            raise UserError(f"{count} of its arrays are called {name.removesuffix('.npy')!r}")
        for entry in entries:
            if entry.filename.removesuffix(".npy") not in UNUSED:
                with file.zip.open(entry) as content:
                    check_array(entry, content)
        return {name: file[name] for name in file.files if name not in UNUSED}


def read_array(path: Path) -> NDArray[Any]:
    """Return the array of an npy file."""
    with file_errors(path):
        try:
            # Unlike reading, mapping compares the announced size with that of the file before it allocates memory.
            return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
        except ValueError as error:
            if "Python objects" not in str(error):
                raise
    raise ObjectsError(f"{path} holds Python objects, which are not read: save numbers or text, with astype")


def check_array(entry: zipfile.ZipInfo, file: Any) -> None:
    """Raise if an array holds Python objects, or announces more numbers than it has.

    Objects would have to be unpickled, and NumPy allocates the announced size before it reads.
    """
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        return
    file.seek(0)
    version = np.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise UserError(f"{entry.filename} is no array of numbers")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    if dtype.hasobject:
        name = entry.filename.removesuffix(".npy")
        is_label = name in {"label", "labels"}
        advice = f"text or class numbers, such as {name}.astype(str)" if is_label else "numbers or text, with astype"
        raise ObjectsError(f"{name} holds Python objects, which are not read: save them as {advice}")
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise UserError(f"{entry.filename} announces {' x '.join(map(str, shape))} numbers, and holds fewer")


def encode(predictions: Predictions, probs: bool) -> bytes:
    """Return the content of an npz file."""
    arrays: dict[str, Any] = dict(to_arrays(predictions, probs))
    texts: dict[str, Any] = {name: arrays.pop(name) for name in ("ids", "paths") if name in arrays}
    texts |= {"class_names": predictions.class_names, "split": predictions.split}
    arrays |= {name: _fixed_width(value, name) for name, value in texts.items() if value is not None}
    metadata = metadata_columns(predictions, arrays)
    arrays |= {name: _fixed_width(texts, name) for name, texts in metadata.items()}
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _fixed_width(values: Any, name: str) -> NDArray[Any]:
    """Return texts as an array of NumPy's text type, whose entries are all as wide as the longest one."""
    texts = [values] if isinstance(values, str) else list(values)
    size = 4 * len(texts) * max(map(len, texts), default=0)
    if size > max(MAX_UNPACKED, MAX_RATIO * sum(map(len, texts))):
        raise UserError(f"{name} would take {size:,} bytes in an npz file, because one is very long; write .parquet")
    return np.asarray(values, dtype=str)
