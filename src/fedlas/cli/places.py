"""Files that commands read and write, and what is not written over."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import typer

from fedlas.errors import UserError

Kind = Callable[[Path], bool]  # says whether a file is of some kind


def read_file(path: Path, watch: Callable[[str, float], None], columns: Any) -> Any:
    """Read predictions, and tell how far that is; `columns` are the options of `read_predictions`."""
    from fedlas.io import read_predictions

    stage = partial(watch, f"reading {path.name}")
    stage(0.0)
    found = read_predictions(path, watch=stage, **columns)
    stage(1.0)
    return found


def write_text(place: str, text: str) -> None:
    """Write a text to a file, whole or not at all, or to standard output."""
    if place == "-":
        typer.echo(text)
    else:
        from fedlas.io.atomic import write_atomic

        write_atomic(Path(place), text.encode())


def refuse_own_input(given: Iterable[Path], made: Iterable[Path | None]) -> None:
    """Refuse to write over what is read."""
    read = {path.resolve() for path in given}
    for path in filter(None, made):
        if path.resolve() in read:
            raise UserError(f"{path} is read, so it is not written over; name another file")


def refuse_other_kind(path: Path | None, what: str, written: Callable[[Path], object]) -> None:
    """Refuse to write over a file that is not of the kind that this command writes.

    Args:
        path: the file; one that is not there, or is empty, may be written.
        what: the kind in words.
        written: reads such a file; an error, or False, means that it is another kind.
    """
    if path is None or not path.is_file() or not path.stat().st_size:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is about to go
            fine = written(path) is not False
    except (ValueError, TypeError, KeyError, RecursionError):
        fine = False
    if not fine:
        raise UserError(f"{path} is there and is no {what}, so it is not written over; remove it, or name another file")


def refuse_strangers(folder: Path | None, names: str, drawn: Sequence[str], numbers: str, ours: Kind) -> None:
    """Refuse a folder where a file that is not ours has a name that one of ours may get.

    What belongs together has one name and several endings. It is known by the file that holds its numbers.

    Args:
        folder: where files go; one that is not there may be written to.
        names: a pattern of their names, without ending.
        drawn: endings of what is made of numbers.
        numbers: the ending of the file that holds them.
        ours: says whether such a file is one of ours.
    """
    if folder is None or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in {*drawn, numbers} and re.fullmatch(names, path.stem):
            beside = path.with_suffix(numbers)
            if not beside.is_file() or not ours(beside):
                raise UserError(
                    f"{path} is there and is not from fedlas, so it is not written over; remove it, or name another "
                    "folder"
                )


def refuse_other_figures(folder: Path | None, names: str) -> None:
    """Refuse a folder where a file that is no figure of ours has the name of one."""
    from fedlas.report.figures.style import FORMAT

    refuse_strangers(folder, names, (".pdf", ".png", ".svg"), ".json", partial(has_format, FORMAT))


def refuse_other_tables(folder: Path | None, names: str) -> None:
    """Refuse a folder where a file that is no table of ours has the name of one."""
    from fedlas.report.tables import COMPARED, FIELDS

    first = ",".join((*FIELDS, *COMPARED)).encode()
    refuse_strangers(
        folder, names, (".md", ".tex", ".html", ".txt"), ".csv", lambda path: beginning(path).startswith(first)
    )


def has_format(name: str, path: Path) -> bool:
    """Say whether a file is JSON that begins by saying what it is, as all of ours does; the rest is not read."""
    return re.match(rb'\s*\[?\s*\{\s*"format":\s*"%s"' % re.escape(name.encode()), beginning(path)) is not None


def is_page(path: Path) -> bool:
    """Say whether a file is one that `--html` wrote."""
    return b'<meta name="generator" content="fedlas">' in beginning(path)


def beginning(path: Path) -> bytes:
    """Read as much of a file as it takes to know it."""
    with path.open("rb") as file:
        return file.read(4096)


def check_places(files: Sequence[Path | None], folder: Path | None = None) -> None:
    """Find out before long work whether its results can be written."""
    seen: set[Path] = set()
    for path in filter(None, files):
        if path.resolve() in seen:
            raise UserError(f"{path} is named for two results, and one would write over the other; name another file")
        seen.add(path.resolve())
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # an error where its name is too long
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; the name of a file is needed")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the name of a folder is needed")
    for start in [*(path.absolute().parent for path in files if path), *([folder.absolute()] if folder else [])]:
        there = next(one for one in (start, *start.parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing can be written to {start}: {there} is no folder that may be written to")
