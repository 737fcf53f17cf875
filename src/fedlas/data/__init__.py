"""Data sets, one file each, with one interface; the folder is the catalogue."""

from dataclasses import dataclass
from typing import Any

from fedlas.catalog import Catalog, keywords
from fedlas.data.base import AbstractDataset, Sample, Split, data_root
from fedlas.data.base.fetching import DamagedFileError, MissingFileError
from fedlas.data.base.images import Transform
from fedlas.data.loading import Loader
from fedlas.data.resident import Resident

__all__ = [
    "AbstractDataset",
    "DamagedFileError",
    "DataRecord",
    "Loader",
    "MissingFileError",
    "Resident",
    "Sample",
    "Split",
    "Transform",
    "build_data",
    "data_root",
    "list_data",
]

CATALOG: Catalog[AbstractDataset] = Catalog("fedlas.data", AbstractDataset, "data set")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class DataRecord:
    """The catalogue entry of one data set."""

    name: str
    summary: str
    citation: str
    keywords: tuple[str, ...]
    cls: type[AbstractDataset]


def build_data(name: str, **options: Any) -> AbstractDataset:
    """Build a data set by its catalogue name; unknown keywords raise an error that lists the known ones."""
    return CATALOG.build(name, **options)


def list_data() -> list[DataRecord]:
    """List every data set of the catalogue."""
    return [
        DataRecord(name, (cls.__doc__ or "").split("\n", 1)[0], cls.citation, tuple(keywords(cls)), cls)
        for name, cls in CATALOG.entries.items()
    ]


def __getattr__(name: str) -> Any:
    """Find the class of any data set, so that `from fedlas.data import CIFAR10` needs no list of them."""
    if not name.startswith("_"):
        for cls in CATALOG.entries.values():
            if cls.__name__ == name:
                return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
