"""Data sets, one file each, with one interface; the folder is the catalogue."""

from typing import Any

from fedlas.catalog import Catalog, CatalogRecord
from fedlas.data.base import AbstractDataset, Sample, Split, data_root
from fedlas.data.base.fetching import DamagedFileError, MissingFileError
from fedlas.data.base.images import Transform
from fedlas.data.loading import Loader
from fedlas.data.resident import Resident

__all__ = [
    "AbstractDataset",
    "DamagedFileError",
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


def build_data(name: str, **options: Any) -> AbstractDataset:
    """Build a data set by its catalogue name; an unknown keyword raises an error that lists the known ones."""
    return CATALOG.build(name, **options)


def list_data() -> list[CatalogRecord[AbstractDataset]]:
    """List all data sets of the catalogue."""
    return CATALOG.records()


def __getattr__(name: str) -> Any:
    """Return the class of a data set, for `from fedlas.data import CIFAR10`."""
    return CATALOG.class_called(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
