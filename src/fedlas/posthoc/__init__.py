"""Post-hoc calibrators, one file each; a new file in this folder is a new calibrator."""

from pathlib import Path
from typing import Any

from fedlas.catalog import Catalog, CatalogRecord
from fedlas.errors import UserError
from fedlas.io.untrusted import file_errors
from fedlas.posthoc.base import AbstractCalibrator, Fit, read
from fedlas.posthoc.feature_clipping import FeatureClipping

__all__ = [
    "AbstractCalibrator",
    "FeatureClipping",
    "Fit",
    "build_calibrator",
    "list_calibrators",
    "load_calibrator",
]

CATALOG: Catalog[AbstractCalibrator] = Catalog(
    "fedlas.posthoc",
    AbstractCalibrator,  # type: ignore[type-abstract]
    "calibrator",
)


def build_calibrator(name: str, **options: Any) -> AbstractCalibrator:
    """Build a calibrator by its name; `"probmetrics:svs"` is short for `"probmetrics", method="svs"`."""
    calibrator, colon, method = name.partition(":")
    return CATALOG.build(calibrator, **({"method": method} if colon else {}), **options)


def list_calibrators() -> list[CatalogRecord[AbstractCalibrator]]:
    """List all calibrators."""
    return CATALOG.records()


def load_calibrator(path: str | Path) -> AbstractCalibrator:
    """Read a calibrator of any class from its file."""
    metadata, tensors = read(path)
    name = metadata.get("name")
    if isinstance(name, str) and name not in CATALOG.entries:
        raise UserError(
            f"{path} holds {name!r}, which is no calibrator of fedlas; read it with `load` of the class that wrote it"
        )
    with file_errors(path):
        return CATALOG.find(metadata["name"]).restore(metadata, tensors)


def __getattr__(name: str) -> Any:
    """Return the class of a calibrator, as in `from fedlas.posthoc import Temperature`."""
    return CATALOG.class_called(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(cls.__name__ for cls in CATALOG.entries.values())])
