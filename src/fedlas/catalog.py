"""A folder is a catalogue: each file in it may define entries, and no list of them is kept by hand.

An entry is a concrete class that derives from the folder's abstract base, is defined in a file of the folder, and has
a class attribute `name`. Adding an entry is adding a file; nothing else changes.
"""

import difflib
import importlib
import inspect
import numbers
import pkgutil
import types
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from fedlas.errors import UserError, UserTypeError

Entry = TypeVar("Entry")
# What a keyword of a plain type takes, in words; NumPy's numbers are such numbers too.
PLAIN: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}


def nearest(word: str, known: list[str]) -> str:
    """End an error message about an unknown word: the closest known one, if any is close, and all of them."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=0.5)
    hint = f"did you mean {plain[close[0]]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def keywords(cls: type) -> list[str]:
    """Name every keyword that a class can be built with, those of its bases included."""
    return list(_annotations(cls))


def _annotations(cls: type) -> dict[str, tuple[Any, bool]]:
    """Give the type of every keyword, and whether nothing can be built without it."""
    found: dict[str, tuple[Any, bool]] = {}
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = list(inspect.signature(vars(ancestor)["__init__"]).parameters.values())[1:]
        rest = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
        own = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        found |= {p.name: (p.annotation, p.default is p.empty) for p in own if p.name not in found}
        named = [dictionary for annotation in rest for dictionary in get_args(annotation)]  # Unpack[SomeTypedDict]
        found |= {n: (kind, False) for one in named for n, kind in one.__annotations__.items() if n not in found}
        if named or not rest:
            break
    return found


def _wrong_type(value: object, kind: Any) -> str | None:
    """Say in words what a keyword takes, if that is plain and the value is something else."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if not all(one in PLAIN or one is types.NoneType for one in kinds):
        return None
    if value is None:
        return None if types.NoneType in kinds else " or ".join(PLAIN[one][1] for one in kinds)
    plain = [PLAIN[one] for one in kinds if one in PLAIN]
    if any(isinstance(value, one) and (one is bool or not isinstance(value, bool)) for one, _ in plain):
        return None
    return " or ".join([*(words for _, words in plain), *(["none"] if types.NoneType in kinds else [])])


def summary(cls: type) -> str:
    """Give the first line of what a class says about itself."""
    return (cls.__doc__ or "").split("\n", 1)[0]


class Catalog(Generic[Entry]):
    """The entries of one folder, found by importing its files.

    Args:
        package: the folder's dotted name.
        base: the abstract class that every entry derives from.
        kind: what an entry is called in error messages.
    """

    def __init__(self, package: str, base: type[Entry], kind: str) -> None:
        self.package = package
        self.base = base
        self.kind = kind

    @cached_property
    def entries(self) -> dict[str, type[Entry]]:
        """Every entry by its name, in the order of names."""
        found: dict[str, type[Entry]] = {}
        for cls in self._classes():
            name: str = getattr(cls, "name", "")
            if not name:
                raise UserTypeError(f"{cls.__module__}.{cls.__name__} has no `name`; every {self.kind} needs one")
            if name in found:
                raise UserTypeError(
                    f"two files call their {self.kind} {name!r}: {found[name].__module__}, {cls.__module__}"
                )
            found[name] = cls
        return dict(sorted(found.items()))

    def find(self, name: str) -> type[Entry]:
        """Look an entry up by name."""
        if name not in self.entries:
            raise UserError(f"no {self.kind} is called {name!r}; {nearest(str(name), list(self.entries))}")
        return self.entries[name]

    def build(self, name: str, **options: object) -> Entry:
        """Build an entry, with errors that name the keywords it takes."""
        self.check(name, **options)
        return self.find(name)(**options)

    def check(self, name: str, **options: object) -> None:
        """Refuse keywords that an entry does not take, or not of that type, and what lacks one that it needs."""
        known = _annotations(self.find(name))
        for option, value in options.items():
            if option not in known:
                raise UserTypeError(f"{self.kind} {name!r} takes no {option!r}; {nearest(option, list(known))}")
            wanted = _wrong_type(value, known[option][0])
            if wanted is not None:
                number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                kind = UserError if number else UserTypeError
                raise kind(f"{option} of {self.kind} {name!r} must be {wanted}, not {value!r}")
        for option, (_, needed) in known.items():
            if needed and option not in options:
                raise UserTypeError(f"{self.kind} {name!r} needs {option!r}: {option}=...")

    def class_called(self, name: str) -> type[Entry]:
        """Look an entry up by the name of its class, for a room's `__getattr__`."""
        for cls in self.entries.values() if not name.startswith("_") else ():
            if cls.__name__ == name:
                return cls
        raise AttributeError(f"module {self.package!r} has no attribute {name!r}")

    def _classes(self) -> Iterator[type[Entry]]:
        folder = importlib.import_module(self.package)
        for file in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{self.package}.{file.name}")
            for cls in vars(module).values():
                if not inspect.isclass(cls) or cls.__module__ != module.__name__ or inspect.isabstract(cls):
                    continue
                if issubclass(cls, self.base) and not cls.__name__.startswith("Abstract"):
                    yield cls
