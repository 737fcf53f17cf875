"""Packages that only some functions need: imported when they are, and named with the command that installs them."""

import importlib
from typing import Any

from fedlas.errors import MissingPackageError


def optional_module(name: str, extra: str = "report") -> Any:
    """Import a package that only some functions need, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(needed(name, extra, error)) from error


def needed(name: str, extra: str, error: ImportError) -> str:
    """Say which package is needed and how to install it; also where it is there, and one is missing that it needs."""
    package, missing = name.partition(".")[0], (error.name or name).partition(".")[0]
    why = "" if missing == package else f", which needs {missing},"
    return f"{package}{why} is needed for this: pip install 'fedlas[{extra}]'"
