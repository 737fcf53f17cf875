"""Registries of classes that scan a package, so that a new module needs no further registration.

An entry is a concrete class that derives from the base class of the package, is defined in a module of the package, and
has a class attribute `name`.
"""

import difflib
import importlib
import inspect
import numbers
import pkgutil
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Generic, TypeVar, Union, get_args, get_origin

from fedlas.errors import UserError, UserTypeError

Entry = TypeVar("Entry")
Word = TypeVar("Word", bound=str)
SHORT = 4  # letters of a name that is too short to be searched in summaries
# Types of keywords that are checked, with their description; NumPy numbers are accepted too.
PLAIN: dict[Any, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
}


def nearest(name: str, known: Sequence[str], summaries: Mapping[str, str] | None = None) -> str:
    """Return the hint of an error message about an unknown name: the closest name, if any, and all names.

    A full name, such as "label_smoothing", is searched in the summaries (keys, with names as values).
    """
    by_letters = {_letters(known_name): known_name for known_name in known}
    similar, misspelt = (
        [by_letters[match] for match in difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=cutoff)]
        for cutoff in (0.5, 0.8)
    )
    beginning = [known_name for known_name in known if f"{name.lower()}_".startswith(f"{known_name}_")]
    texts = [text for text in (summaries or {}) if len(name) > SHORT and _letters(name) in _letters(text)]
    described = [(summaries or {})[text] for text in sorted(texts, key=len)]
    closest = [*misspelt, *sorted(beginning, key=len, reverse=True), *described, *similar][:1]
    hint = f"did you mean {closest[0]!r}? Known" if closest else "known"
    return f"{hint}: {', '.join(known)}."


def one_of(name: str, value: Word, known: Sequence[Word]) -> Word:
    """Return a value; raise if it is not one of the known values."""
    if value not in known:
        raise UserError(f"{name} {value!r} is unknown; {nearest(str(value), known)}")
    return value


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())


def keywords(cls: type) -> list[str]:
    """Return the names of all keywords of the constructor, including those of base classes."""
    return list(_annotations(cls))


@cache
def _annotations(cls: type) -> Mapping[str, tuple[Any, bool]]:
    """Return the type of each keyword, and whether it is required."""
    annotations: dict[str, tuple[Any, bool]] = {}
    for ancestor in cls.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = list(inspect.signature(vars(ancestor)["__init__"]).parameters.values())[1:]
        variadic = [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]
        named_parameters = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        annotations |= {
            p.name: (p.annotation, p.default is p.empty) for p in named_parameters if p.name not in annotations
        }
        typed_dicts = [
            typed_dict for annotation in variadic for typed_dict in get_args(annotation)
        ]  # Unpack[SomeTypedDict]
        annotations |= {
            n: (kind, False)
            for typed_dict in typed_dicts
            for n, kind in typed_dict.__annotations__.items()
            if n not in annotations
        }
        if typed_dicts or not variadic:
            break
    return annotations


def _wrong_type(value: object, annotation: Any) -> str | None:
    """Return the expected type as text if a value has another type; None if the type is correct or not checked."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if not all(kind in PLAIN or kind is types.NoneType for kind in kinds):
        return None
    if value is None:
        return None if types.NoneType in kinds else " or ".join(PLAIN[kind][1] for kind in kinds)
    checked = [PLAIN[kind] for kind in kinds if kind in PLAIN]
    if any(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)) for kind, _ in checked):
        return None
    return " or ".join([*(description for _, description in checked), *(["none"] if types.NoneType in kinds else [])])


def summary(cls: type) -> str:
    """Return the first line of the docstring of a class."""
    return (cls.__doc__ or "").split("\n", 1)[0]


@dataclass(frozen=True)
class CatalogRecord(Generic[Entry]):
    """Description of a catalogue entry.

    Attributes:
        name: name of the entry.
        summary: description in one sentence.
        citation: publication.
        keywords: keywords of the constructor.
        cls: class of the entry.
    """

    name: str
    summary: str
    citation: str
    keywords: tuple[str, ...]
    cls: type[Entry]


class Catalog(Generic[Entry]):
    """The classes in the modules of a package that derive from a base class.

    Args:
        package: name of the package.
        base: abstract base class of the entries.
        kind: name of the kind of entries in error messages, such as "metric".
    """

    def __init__(self, package: str, base: type[Entry], kind: str) -> None:
        self.package = package
        self.base = base
        self.kind = kind

    @cached_property
    def entries(self) -> dict[str, type[Entry]]:
        """All entries by name, sorted."""
        entries: dict[str, type[Entry]] = {}
        for cls in self._classes():
            name: str = getattr(cls, "name", "")
            if not name:
                raise UserTypeError(f"{cls.__module__}.{cls.__name__} has no `name`; every {self.kind} needs one")
            if name in entries:
                raise UserTypeError(
                    f"two files call their {self.kind} {name!r}: {entries[name].__module__}, {cls.__module__}"
                )
            entries[name] = cls
        return dict(sorted(entries.items()))

    def find(self, name: str) -> type[Entry]:
        """Return an entry by its name; raise with the closest name if there is none."""
        if name not in self.entries:
            summaries = {summary(cls): known_name for known_name, cls in self.entries.items()}
            stem = re.sub(rf"(?<=.)[\W_]*{self.kind}$", "", str(name), flags=re.IGNORECASE)
            raise UserError(f"no {self.kind} is called {name!r}; {nearest(stem, list(self.entries), summaries)}")
        return self.entries[name]

    def records(self) -> list[CatalogRecord[Entry]]:
        """Describe all entries."""
        return [
            CatalogRecord(name, summary(cls), getattr(cls, "citation", ""), tuple(keywords(cls)), cls)
            for name, cls in self.entries.items()
        ]

    def build(self, name: str, **options: object) -> Entry:
        """Build an entry; raise with the known keywords if one is unknown."""
        self.check(name, **options)
        return self.find(name)(**options)

    def check(self, name: str, **options: object) -> None:
        """Raise if a keyword is unknown, has the wrong type, or is missing."""
        entry: type = self.find(name)
        annotations = _annotations(entry)
        for option, value in options.items():
            if option not in annotations:
                raise UserTypeError(f"{self.kind} {name!r} takes no {option!r}; {nearest(option, list(annotations))}")
            expected = _wrong_type(value, annotations[option][0])
            if expected is not None:
                number = isinstance(value, numbers.Real) and not isinstance(value, bool)
                kind = UserError if number else UserTypeError
                raise kind(f"{option} of {self.kind} {name!r} must be {expected}, not {value!r}")
        for option, (_, needed) in annotations.items():
            if needed and option not in options:
                raise UserTypeError(f"{self.kind} {name!r} needs {option!r}: {option}=...")

    def class_called(self, name: str) -> type[Entry]:
        """Return an entry by the name of its class, for the `__getattr__` of a package."""
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
