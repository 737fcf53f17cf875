"""Errors and warnings that a user can do something about; the command line shows them as one line."""

import sys
import warnings
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

# Whether the arrays come from a file that is being read: advice then names columns and options of commands.
FROM_FILE: ContextVar[bool] = ContextVar("from_file", default=False)


class UserError(ValueError):
    """Wrong input; the message says what was wrong and what to do."""


class UserTypeError(UserError, TypeError):
    """A value of a wrong type."""


class MissingPackageError(UserError, ImportError):
    """A package that is needed here is not installed."""


class RowError(UserError):
    """An error about one row of an array, counted from 0; readers of text files replace the row by the line.

    Args:
        before: message before the row.
        row: number of the row.
        after: message after it.
    """

    def __init__(self, before: str, row: int, after: str) -> None:
        super().__init__(f"{before}row {row}{after}")
        self.before, self.row, self.after = before, row, after

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, int, str]]:
        return type(self), (self.before, self.row, self.after)  # exceptions are copied by their message otherwise

    def at_line(self, lines: Sequence[int]) -> UserError:
        """Return the same error with the line of a text file, counted from 1."""
        return UserError(f"{self.before}line {lines[self.row]}{self.after}")


def short_list(names: Iterable[str], most: int = 20) -> str:
    """List names for a message; of many the first ones, the last one and their number."""
    listed = list(names)
    if len(listed) <= most:
        return ", ".join(listed)
    return f"{', '.join(listed[: most - 1])}, ..., {listed[-1]} ({len(listed):,} in all)"


def warn_caller(text: str) -> None:
    """Warn with the stack level of the line outside of fedlas and torch that led to the warning."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in {"fedlas", "torch"}:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def choose_advice(in_python: str, in_file: str) -> str:
    """Return one of two texts: for arrays that a program passes, or for the content of a file that is read."""
    return in_file if FROM_FILE.get() else in_python
