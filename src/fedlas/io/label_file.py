"""Labels in a separate file: an array, a table with a column of labels, or one value in each line."""

from pathlib import Path
from typing import Any

from fedlas.errors import UserError, short_list
from fedlas.io.columns import ROW_NAMES, ReadOptions, header_advice, label_names, option
from fedlas.io.csv import read_texts
from fedlas.io.labels import LabelFile
from fedlas.io.npz import read_array, read_arrays
from fedlas.io.parquet import ParquetFile
from fedlas.io.untrusted import format_suffix

TEXT_SUFFIXES = {".csv", ".tsv", ".txt"}


def read_labels(path: str | Path, options: ReadOptions) -> LabelFile:
    """Read labels from a .npy, .npz, .csv, .tsv, .txt or .parquet file."""
    path = Path(path)
    suffix = format_suffix(path)
    if suffix == ".npy":
        return LabelFile(path, read_array(path))
    if suffix == ".parquet":
        file = ParquetFile(path)
        name = _label_column(file.examples, options, path)
        return LabelFile(path, file.read([name])[name])
    if suffix == ".npz":
        arrays = read_arrays(path)
        return LabelFile(path, arrays[_label_column(arrays, options, path)])
    if suffix not in TEXT_SUFFIXES:
        raise UserError(f"{path}: labels are read from .npy, .npz, .csv, .tsv, .txt and .parquet files")
    header = options.get("header", True)
    columns = read_texts(path, header=header)
    name = _label_column(columns, options, path)
    single = len(columns) == 1
    return LabelFile(path, [name, *columns[name]] if single and header else columns[name], may_have_header=single)


def _label_column(columns: dict[str, Any], options: ReadOptions, path: Path) -> str:
    """Return the column that is chosen, or called as labels are, or the only one."""
    chosen = options.get("label_column")
    if chosen in columns:
        return str(chosen)
    known = list(label_names(columns, {}, path))
    others = [name for name in columns if name.casefold() not in ROW_NAMES]
    if not known and len(others) != 1:
        header: ReadOptions = {"header": options.get("header", True)}
        raise UserError(
            f"{path}: no column is called label; name it with {option('label_column')}; its columns are "
            f"{short_list(columns)}{header_advice(columns, header)}"
        )
    return (known or others)[0]
