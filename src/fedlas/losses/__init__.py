"""Training losses, one file each, behind one interface; the folder is the catalogue."""

from dataclasses import dataclass
from typing import Any

from fedlas.catalog import Catalog, keywords, summary
from fedlas.losses.base import AbstractLoss, Batch, as_batch, smoothed_cross_entropy
from fedlas.losses.fedlas import BCG, NCI, AdaptiveSmoothing
from fedlas.losses.gate_history import GateHistory
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
    """What the catalogue tells about one loss."""

    name: str
    summary: str
    citation: str
    keywords: tuple[str, ...]
    cls: type[AbstractLoss]


def build_loss(name: str, **options: Any) -> AbstractLoss:
    """Build a loss by its catalogue name; keywords it does not take are an error that lists those it takes."""
    return CATALOG.build(name, **options)


def list_losses() -> list[LossRecord]:
    """List every loss of the catalogue."""
    return [
        LossRecord(name, summary(cls), cls.citation, tuple(keywords(cls)), cls) for name, cls in CATALOG.entries.items()
    ]


def __getattr__(name: str) -> Any:
    """Find the class of any loss, so that `from fedlas.losses import FeDLaSLS` needs no list of them.

    A type checker sees these names as Any; it knows the classes in their own files, as `fedlas.losses.fedlas`.
    """
    return CATALOG.class_called(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
