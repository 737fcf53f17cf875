"""Errors and exit codes of commands.

A user error prints one line to standard error and exits with code 1. Ctrl-C exits with 130, other signals exit with
128 + the signal number. A closed pipe (`fedlas ... | head`) is not an error. `--verbose` or `FEDLAS_DEBUG=1` shows
tracebacks.
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

from fedlas.cli.terminal import is_verbose, sanitize, show
from fedlas.errors import UserError

default_format_warning = warnings.formatwarning


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn user errors into one line and an exit code; internal errors keep their traceback."""
    try:
        yield
    except typer.Exit:  # a RuntimeError
        raise
    except (UserError, OSError) as error:
        if from_interrupt(error):
            raise typer.Exit(report_interrupt()) from None
        if isinstance(error, BrokenPipeError) and stdout_reader_is_gone():
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if is_verbose():
            raise
        show(f"fedlas: {' '.join(_message(error).split())}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        number = getattr(error, "signal_number", None)
        if number is None and from_interrupt(error):
            raise typer.Exit(report_interrupt()) from None
        if number is None and not is_verbose() and (message := _out_of_memory_message(error)) is not None:
            details = " ".join(message.split())
            show(f"fedlas: memory ran out{f' ({details})' if details else ''}", err=True)
            raise typer.Exit(1) from None
        if isinstance(error, RuntimeError) and str(error).startswith(
            "Symlink loop"
        ):  # raised by pathlib before Python 3.13
            show(f"fedlas: {error}", err=True)
            raise typer.Exit(1) from None
        if number is None:
            show(
                "fedlas: internal error, not caused by your input; please report it with the traceback below", err=True
            )
            raise
        show(f"fedlas: {error}", err=True)
        raise typer.Exit(128 + number) from None
    except KeyboardInterrupt:
        raise typer.Exit(report_interrupt()) from None


def _out_of_memory_message(error: Exception) -> str | None:
    """Return the message of an out-of-memory error of the host or of a GPU; None for other errors."""
    if not isinstance(error, RuntimeError):
        return str(error) if isinstance(error, MemoryError) else None
    from fedlas.io.untrusted import memory_message

    on_gpu = type(error).__name__ == "OutOfMemoryError"
    return str(error).partition(". ")[0] if on_gpu else memory_message(error)  # omit the advice for programmers


def _message(error: Exception) -> str:
    """Return the message of an error; for an OSError, the file and the reason without the error number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        names = " and ".join(os.fsdecode(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}"
    return str(error)


@contextmanager
def ignore_closed_pipe() -> Iterator[None]:
    """Continue if standard output is closed, as in `fedlas ... | head`."""
    try:
        yield
    except BrokenPipeError:
        if not stdout_reader_is_gone():
            raise


def stdout_reader_is_gone() -> bool:
    """Return whether standard output is a pipe without a reader; if so, discard all further output.

    Other broken pipes, such as those between training processes, are errors.
    """
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):  # not a real file
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    closed = any(state & select.POLLERR for _, state in poll.poll(0))
    if closed:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)  # Python then flushes its buffer to /dev/null at exit
        os.close(null)
    return closed


def report_interrupt() -> int:
    """Print that the command was interrupted and return the exit code of SIGINT."""
    typer.echo("fedlas: interrupted", err=True)
    return 128 + signal.SIGINT


def from_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error, directly or through its chain of causes.

    For example, an interrupted import of a compiled module raises another error.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def format_warning(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> str:
    """Format warnings for users as one line; keep the location of all others."""
    for_user = category is UserWarning or category.__module__.partition(".")[0] == "fedlas"
    if for_user and not is_verbose():
        return f"fedlas: {sanitize(' '.join(str(message).split()))}\n"
    return default_format_warning(message, category, *location, **more)
