"""How a command ends: with one line where the user can do something about it, and with an exit code that shells know.

Errors of the user end in 1, Ctrl-C in 130. A program that stops reading is no error. `FEDLAS_DEBUG=1` shows where
errors come from.
"""

import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from fedlas.cli.terminal import harmless, show
from fedlas.errors import UserError

usual_warning = warnings.formatwarning


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End with one line where the user can do something about it."""
    try:
        yield
    except (UserError, OSError) as error:
        if from_interrupt(error):
            raise typer.Exit(interrupted()) from None
        if isinstance(error, BrokenPipeError) and reader_left():
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if os.environ.get("FEDLAS_DEBUG"):
            raise
        show(f"fedlas: {' '.join(_said(error).split())}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        number = getattr(error, "signal_number", None)
        if number is None and from_interrupt(error):
            raise typer.Exit(interrupted()) from None
        if number is None and not os.environ.get("FEDLAS_DEBUG") and (said := _memory_words(error)) is not None:
            words = " ".join(said.split())
            show(f"fedlas: memory ran out{f' ({words})' if words else ''}", err=True)
            raise typer.Exit(1) from None
        if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib, before Python 3.13
            show(f"fedlas: {error}", err=True)
            raise typer.Exit(1) from None
        if number is None:
            show(
                "fedlas: an internal error, not one of your input; please report it with the traceback below", err=True
            )
            raise
        show(f"fedlas: {error}", err=True)
        raise typer.Exit(128 + number) from None
    except KeyboardInterrupt:
        raise typer.Exit(interrupted()) from None


def _memory_words(error: Exception) -> str | None:
    """Give what is said about memory that ran out, of the machine or of a GPU; None where it did not."""
    if not isinstance(error, RuntimeError):
        return str(error) if isinstance(error, MemoryError) else None
    from fedlas.io.untrusted import memory_message

    of_gpu = type(error).__name__ == "OutOfMemoryError"
    return str(error).partition(". ")[0] if of_gpu else memory_message(error)  # what follows is advice for programmers


def _said(error: Exception) -> str:
    """Say what went wrong; of a file that the system refuses, its name and the reason, without the system's number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        names = " and ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}"
    return str(error)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Go on where nobody reads standard output any more, as in `fedlas ... | head`; there is more to do."""
    try:
        yield
    except BrokenPipeError:
        if not reader_left():
            raise


def reader_left() -> bool:
    """Say whether standard output is a pipe that nobody reads; nothing more is written to it then.

    Pipes to other processes of a training may break too, and that is worth an error.
    """
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file
        return False
    waiting = select.poll()
    waiting.register(place, select.POLLOUT)
    gone = any(state & select.POLLERR for _, state in waiting.poll(0))
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, place)  # what is left in the buffer goes there when Python ends
        os.close(nowhere)
    return gone


def interrupted() -> int:
    """Say that Ctrl-C was heard where there is nothing to save, and give the exit code that shells know."""
    typer.echo("fedlas: interrupted", err=True)
    return 128 + signal.SIGINT


def from_interrupt(error: BaseException | None) -> bool:
    """Say whether an error only wraps Ctrl-C, as errors in compiled modules that are being imported do."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def plain_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """Write a warning for users in one line; others keep the place that they come from."""
    ours = category is UserWarning or category.__module__.partition(".")[0] == "fedlas"
    if ours and not os.environ.get("FEDLAS_DEBUG"):
        return f"fedlas: {harmless(' '.join(str(message).split()))}\n"
    return usual_warning(message, category, *place, **more)
