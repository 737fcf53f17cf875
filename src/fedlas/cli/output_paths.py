"""Checks of output paths before any work is done, and the reading and writing of files by commands."""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedlas.errors import UserError

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]

FIGURE_SUFFIXES = (".pdf", ".png", ".svg", ".json")
TABLE_SUFFIXES = (".md", ".tex", ".txt", ".csv")


def write_text(path: str, text: str) -> None:
    """Write a text atomically to a file, or to standard output if the path is "-"."""
    if path == "-":
        typer.echo(text)
    else:
        from fedlas.io.atomic import write_atomic

        write_atomic(Path(path), text.encode())


def json_file(json: str | None) -> Path | None:
    """Return the file of the option `--json`, if it is set and not standard output."""
    return None if json in {None, "-"} else Path(str(json))


def check_outputs(
    files: Sequence[Path | None], *, overwrite: bool, inputs: Iterable[Path] = (), folder: Path | None = None
) -> None:
    """Raise unless output files and folder can be written, are no inputs, and may be replaced if they exist.

    Args:
        files: output files; None for an option that is not set.
        overwrite: value of the option `--overwrite`.
        inputs: input files.
        folder: output folder; None for an option that is not set.
    """
    check_writable(files, folder)
    resolved = {path.resolve() for path in inputs}
    for path in filter(None, files):
        if path.resolve() in resolved:
            raise UserError(f"{path} is an input file and cannot be the output as well; name another file")
    check_overwrite(files, overwrite=overwrite)


def check_overwrite(outputs: Iterable[Path | None], *, overwrite: bool) -> None:
    """Raise if an output file exists and is not empty, unless it may be overwritten."""
    for path in filter(None, outputs):
        if not overwrite and path.is_file() and path.stat().st_size:
            raise UserError(f"{path} exists; give --overwrite to replace it, or name another file")


def check_overwrite_in(folder: Path | None, names: str, suffixes: Sequence[str], *, overwrite: bool) -> None:
    """Raise if a folder holds a file with the name of an output, unless it may be overwritten.

    Args:
        folder: output folder; None for an option that is not set.
        names: regular expression of the names of the outputs, without suffix.
        suffixes: suffixes of the outputs, such as `FIGURE_SUFFIXES`.
        overwrite: value of the option `--overwrite`.
    """
    if overwrite or folder is None or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in suffixes and re.fullmatch(names, path.stem):
            raise UserError(f"{path} exists; give --overwrite to replace it, or name another folder")


def is_own_folder(folder: Path | None, work: str) -> bool:
    """Return whether this command has written to the folder before and may replace its own files."""
    return folder is not None and (folder / f".fedlas-{work}").is_file()


def mark_own_folder(folder: Path, work: str) -> None:
    """Create a folder with the hidden file that `is_own_folder` looks for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f".fedlas-{work}").touch()


def check_writable(files: Sequence[Path | None], folder: Path | None = None) -> None:
    """Raise if an output file or the output folder cannot be written, or if two outputs have the same path."""
    checked: set[Path] = set()
    for path in filter(None, files):
        if path.resolve() in checked:
            raise UserError(f"{path} is named for two outputs; name another file for one of them")
        checked.add(path.resolve())
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises if the name is too long
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; the name of a file is needed")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the name of a folder is needed")
    for start in [*(path.absolute().parent for path in files if path), *([folder.absolute()] if folder else [])]:
        parent = next(path for path in (start, *start.parents) if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write to {start}: {parent} is not a writable folder")
