"""Training losses, one file each, with a common interface; the catalogue lists the files of this folder."""

from dataclasses import dataclass
from typing import Any

from fedlas.catalog import Catalog, keywords, summary
from fedlas.losses.base import AbstractLoss, Batch, as_batch, smoothed_cross_entropy
from fedlas.losses.fedlas import BCG, NCI, AdaptiveSmoothing
from fedlas.losses.flip_rate import GateHistory
from fedlas.losses.input_checks import checks

__all__ = [
    "BCG",
    "NCI",
    "AbstractLoss",
    "AdaptiveSmoothing",
    "Batch",
    "GateHistory",
    "LossRecord",
    "as_batch",
    "build_loss",
    "checks",
    "list_losses",
    "smoothed_cross_entropy",
]

CATALOG: Catalog[AbstractLoss] = Catalog("fedlas.losses", AbstractLoss, "loss")  # type: ignore[type-abstract]


@dataclass(frozen=True)
class LossRecord:
    """Catalogue entry of a loss."""

    name: str
    summary: str
    citation: str
    keywords: tuple[str, ...]
    cls: type[AbstractLoss]


def build_loss(name: str, **options: Any) -> AbstractLoss:
    """Build a loss by its catalogue name; unknown keywords are an error that lists the known ones."""
    return CATALOG.build(name, **options)


def list_losses() -> list[LossRecord]:
    """List all losses of the catalogue."""
    return [
        LossRecord(name, summary(cls), cls.citation, tuple(keywords(cls)), cls) for name, cls in CATALOG.entries.items()
    ]


def __getattr__(name: str) -> Any:
    """Return the class of a loss, for `from fedlas.losses import FeDLaSLS`.

    For a type checker these names are Any; import a class from its own file, such as `fedlas.losses.fedlas`, to be
    typed.
    """
    return CATALOG.class_called(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
