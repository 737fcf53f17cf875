"""The registry of metrics, found by a scan of this folder."""

from fedlas.catalog import Catalog
from fedlas.metrics.base import AbstractMetric

CATALOG = Catalog("fedlas.metrics", AbstractMetric, "metric")  # type: ignore[type-abstract]


def all_metrics() -> dict[str, AbstractMetric]:
    """Return all metrics by name, in the order in which reports list them."""
    metrics = [cls() for cls in CATALOG.entries.values()]
    return {metric.name: metric for metric in sorted(metrics, key=lambda metric: (metric.order, metric.name))}


def find_metric(name: str) -> AbstractMetric:
    """Return a metric by its name; raise with the nearest name if it is unknown."""
    return CATALOG.find(name)()


def summary_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics of summary tables."""
    return {name: metric for name, metric in all_metrics().items() if metric.in_summary}


def default_comparison_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics by which models are compared unless others are requested."""
    return {name: metric for name, metric in all_metrics().items() if metric.is_compared}


def logged_metrics() -> dict[str, AbstractMetric]:
    """Return the metrics that are logged during training by default."""
    return {name: metric for name, metric in all_metrics().items() if metric.is_logged}
