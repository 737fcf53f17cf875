"""Import optional packages when they are needed; if one is missing, the error names the command that installs it."""

import importlib
from typing import Any

from fedlas.errors import MissingPackageError


def optional_module(name: str, extra: str = "report") -> Any:
    """Import an optional package; raise an error with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(needed(name, extra, error)) from error


def needed(name: str, extra: str, error: ImportError) -> str:
    """Return the message for a missing package, or for a missing dependency of an installed one."""
    package, missing = name.partition(".")[0], (error.name or name).partition(".")[0]
    why = "" if missing == package else f", which needs {missing},"
    return f"{package}{why} is needed for this: pip install 'fedlas[{extra}]'"
