"""Public names of a package that are imported when they are first used, so that importing the package stays fast.

A package imports its public names below `if TYPE_CHECKING:`, where type checkers read them, and assigns
`lazy_attributes(__name__)` to `__getattr__`, `__dir__` and `__all__`, which reads the same imports.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_attributes(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package (PEP 562)."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    modules = {
        alias.name: str(statement.module)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:  # a package inside this one
            value = import_module(f"{package}.{name}")
        else:
            value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # looked up once
        return value

    return get_attribute, lambda: sorted(modules), list(modules)
