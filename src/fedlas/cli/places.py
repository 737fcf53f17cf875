"""Files that commands read and write, and what is not written over."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer


def read_file(path: Path, watch: Callable[[str, float], None]) -> Any:
    """Read predictions, and tell how far that is."""
    from fedlas.files import read_predictions

    stage = partial(watch, f"reading {path.name}")
    stage(0.0)
    found = read_predictions(path, watch=stage)
    stage(1.0)
    return found


def write_text(place: str, text: str) -> None:
    """Write a text to a file, whole or not at all, or to standard output."""
    if place == "-":
        typer.echo(text)
    else:
        from fedlas.predictions import write_whole

        write_whole(Path(place), text.encode())


def refuse_own_input(given: Iterable[Path], made: Iterable[Path | None]) -> None:
    """Refuse to write over what is read."""
    read = {path.resolve() for path in given}
    for path in filter(None, made):
        if path.resolve() in read:
            raise ValueError(f"{path} is read, so it is not written over; name another file")


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
    except (ValueError, TypeError, KeyError):
        fine = False
    if not fine:
        raise ValueError(
            f"{path} is there and is no {what}, so it is not written over; remove it, or name another file"
        )


def is_answer(path: Path) -> bool:
    """Say whether a file is one that `--json` wrote."""
    from json import loads

    found = loads(path.read_text(encoding="utf-8"))
    first = found[0] if isinstance(found, list) and found else found
    known = ({"format", "models"}, {"sets", "mean"}, {"metric", "pairs"})  # of evaluate, ood and compare
    return isinstance(first, dict) and any(names <= first.keys() for names in known)


def is_page(path: Path) -> bool:
    """Say whether a file is one that `--html` wrote."""
    return b'<meta name="generator" content="fedlas">' in path.read_bytes()[:4096]


def check_places(files: Sequence[Path | None], folder: Path | None) -> None:
    """Find out before long work whether its results can be written."""
    for path in filter(None, files):
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder; the name of a file is needed")
    if folder is not None and folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; the name of a folder is needed")
    for start in [*(path.absolute().parent for path in files if path), *([folder.absolute()] if folder else [])]:
        there = next(one for one in (start, *start.parents) if one.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"nothing can be written to {start}: {there} is no folder that may be written to")
