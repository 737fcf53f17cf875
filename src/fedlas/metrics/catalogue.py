"""All metrics, found by a scan of this folder; everything that lists metrics asks here."""

from fedlas.catalog import Catalog
from fedlas.metrics.base import AbstractMetric

CATALOG = Catalog("fedlas.metrics", AbstractMetric, "metric")  # type: ignore[type-abstract]


def all_metrics() -> dict[str, AbstractMetric]:
    """Return every metric by its name, in the order of reports."""
    found = [cls() for cls in CATALOG.entries.values()]
    return {one.name: one for one in sorted(found, key=lambda one: (one.order, one.name))}


def find_metric(name: str) -> AbstractMetric:
    """Return a metric by its name; an unknown one is an error with the nearest name."""
    return CATALOG.find(name)()


def summary_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics of summary tables."""
    return {name: one for name, one in all_metrics().items() if one.in_summary}


def compared_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics by which reports compare models."""
    return {name: one for name, one in all_metrics().items() if one.is_compared}
