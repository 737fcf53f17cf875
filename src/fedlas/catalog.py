"""A folder is a catalogue: each file in it may define entries, and no list of them is kept by hand.

An entry is a concrete class that derives from the folder's abstract base, is defined in a file of the folder, and has
a class attribute `name`. Adding an entry is adding a file; nothing else changes.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property
from typing import Generic, TypeVar, get_args

Entry = TypeVar("Entry")


def nearest(word: str, known: list[str]) -> str:
    """End an error message about an unknown word: the closest known one, if any is close, and all of them."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=0.5)
    hint = f"did you mean {plain[close[0]]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def keywords(cls: type) -> list[str]:
    """Name every keyword that a class can be built with, those of its bases included."""
    found: dict[str, None] = {}
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = list(inspect.signature(vars(ancestor)["__init__"]).parameters.values())[1:]
        rest = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
        found.update((p.name, None) for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        named = [dictionary for annotation in rest for dictionary in get_args(annotation)]  # Unpack[SomeTypedDict]
        found.update((name, None) for dictionary in named for name in dictionary.__annotations__)
        if named or not rest:
            break
    return list(found)


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
                raise TypeError(f"{cls.__module__}.{cls.__name__} has no `name`; every {self.kind} needs one")
            if name in found:
                raise TypeError(
                    f"two files call their {self.kind} {name!r}: {found[name].__module__}, {cls.__module__}"
                )
            found[name] = cls
        return dict(sorted(found.items()))

    def find(self, name: str) -> type[Entry]:
        """Look an entry up by name."""
        if name not in self.entries:
            raise ValueError(f"no {self.kind} is called {name!r}; {nearest(str(name), list(self.entries))}")
        return self.entries[name]

    def build(self, name: str, **options: object) -> Entry:
        """Build an entry, with errors that name the keywords it takes."""
        cls = self.find(name)
        known = keywords(cls)
        for option in options:
            if option not in known:
                raise TypeError(f"{self.kind} {name!r} takes no {option!r}; {nearest(option, known)}")
        return cls(**options)

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
