"""Training losses, one file each, with a common interface; the catalogue lists the files of this folder."""

from typing import Any

from fedlas.catalog import Catalog, CatalogRecord
from fedlas.losses.base import AbstractLoss, Batch, as_batch, smoothed_cross_entropy
from fedlas.losses.base.input_checks import checks
from fedlas.losses.fedlas import BCG, NCI, AdaptiveSmoothing
from fedlas.losses.flip_rate import GateHistory

__all__ = [
    "BCG",
    "NCI",
    "AbstractLoss",
    "AdaptiveSmoothing",
    "Batch",
    "GateHistory",
    "as_batch",
    "build_loss",
    "checks",
    "list_losses",
    "smoothed_cross_entropy",
]

CATALOG: Catalog[AbstractLoss] = Catalog("fedlas.losses", AbstractLoss, "loss")  # type: ignore[type-abstract]


def build_loss(name: str, **options: Any) -> AbstractLoss:
    """Build a loss by its catalogue name; unknown keywords are an error that lists the known ones."""
    return CATALOG.build(name, **options)


def list_losses() -> list[CatalogRecord[AbstractLoss]]:
    """List all losses of the catalogue."""
    return CATALOG.records()


def __getattr__(name: str) -> Any:
    """Return the class of a loss, for `from fedlas.losses import FeDLaSLS`.

    Type checkers see these names as Any; for types, import a class from its module, such as `fedlas.losses.fedlas`.
    """
    return CATALOG.class_called(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
