"""Terminal output: sanitised text, tables, progress bars and log messages.

A table that is not printed to a terminal is as wide as its content.
"""

import logging
import os
import shlex
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from fedlas.progress import Progress, progress_bars

logger = logging.getLogger("fedlas")


class _LogHandler(logging.Handler):
    """Print log messages to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        show(self.format(record), err=True)


_handler = _LogHandler()


def configure_logging(*, quiet: bool, verbose: bool) -> None:
    """Print warnings (quiet), progress messages too, or debug messages too (verbose), to standard error."""
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    _handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s" if verbose else "%(message)s"))
    if _handler not in logger.handlers:
        logger.addHandler(_handler)


def is_quiet() -> bool:
    """Return whether `--quiet` was given."""
    return logger.level == logging.WARNING


def is_verbose() -> bool:
    """Return whether `--verbose` was given or `FEDLAS_DEBUG` is set."""
    return logger.level == logging.DEBUG or bool(os.environ.get("FEDLAS_DEBUG"))


def show(text: object, *, err: bool = False) -> None:
    """Print a sanitised text."""
    typer.echo(sanitize(str(text)), err=err)


def sanitize(text: str) -> str:
    """Replace control characters, which could set the colours or the title of the terminal."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in {"Cc", "Cf"} else "\ufffd" for letter in text
    )


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print a table without truncating any cell."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    terminal = (sys.stderr if err else sys.stdout).isatty()
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for name in head:
        table.add_column(sanitize(name), overflow="fold", no_wrap=not terminal)
    for row in rows:
        table.add_row(*map(sanitize, row))
    content_width = sum(max(len(row[n]) for row in [head, *rows]) + 4 for n in range(len(head)))
    width = None if terminal else content_width
    console = Console(width=width, highlight=False, markup=False, stderr=err)
    # Rich only renders, because it exits the process if standard output is closed.
    with console.capture() as rendered:
        console.print(table)
    typer.echo(rendered.get(), nl=False, err=err)


def command_line() -> str:
    """Return the command as typed."""
    return shlex.join(["fedlas", *sys.argv[1:]])


@contextmanager
def progress() -> Iterator[Progress]:
    """Show a progress bar for each step (on terminals, without `--quiet`), and yield the callback that moves them."""
    if not sys.stderr.isatty() or is_quiet():
        yield lambda *_: None
        return
    with progress_bars() as update:
        yield lambda step, fraction: update(sanitize(step), fraction)
