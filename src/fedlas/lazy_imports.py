"""Public names of a package that are imported when they are first used, so that importing the package stays fast.

A package lists its names by module and assigns `lazy_attributes(...)` to `__getattr__`, `__dir__` and `__all__`. Type
checkers do not follow this; they read the same names from imports below `if TYPE_CHECKING:`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_attributes(
    package: str, names: Mapping[str, Sequence[str]], packages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package (PEP 562).

    Args:
        package: name of the package.
        names: public names by the module that defines them, relative to the package.
        packages: packages inside the package that are public names themselves.
    """
    modules = {name: module for module, listed in names.items() for name in listed}
    public = [*packages, *modules]

    def get_attribute(name: str) -> Any:
        if name in packages:
            value = import_module(f"{package}.{name}")
        elif name in modules:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # looked up once
        return value

    return get_attribute, lambda: sorted(public), public
