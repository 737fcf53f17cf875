"""Records of a training log for experiment trackers: scalars such as `val/ece`, histograms, and TensorBoard files.

A record is one line of `log.jsonl`, with numbers and nested groups of numbers. A group with `edges` and `counts` is a
histogram: the first count is that of values below the first edge, the last that of values above the last edge.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedlas.extras import optional_module


class Histogram(NamedTuple):
    """Counts of values in bins, including the values below the first and above the last edge."""

    edges: Sequence[float]
    counts: Sequence[int]

    @property
    def limits(self) -> list[float]:
        """The edges, with an additional edge on each side for the outer counts."""
        width = self.edges[1] - self.edges[0]
        return [self.edges[0] - width, *self.edges, self.edges[-1] + width]


def numbers_in(record: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """Return the numbers of a record, with names such as `val/ece` for numbers in groups; skip other values."""
    values: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            values |= numbers_in(value, f"{above}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[above + name] = float(value)
    return values


def histograms_in(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Histogram]]:
    """Yield the histograms of a record with their names; the suffix `_histogram` is removed."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            if {"edges", "counts"} <= value.keys():
                yield above + name.removesuffix("_histogram"), Histogram(value["edges"], value["counts"])
            else:
                yield from histograms_in(value, f"{above}{name}/")


class Board:
    """Writes TensorBoard files.

    Args:
        folder: output folder.
        first: discard records of an earlier process from this epoch on; None keeps all records.
    """

    def __init__(self, folder: str | Path, first: int | None = None) -> None:
        optional_module("tensorboard", "integrations")
        self.writer = optional_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=first)

    def record(self, record: Mapping[str, Any]) -> None:
        """Write a record."""
        self.numbers(numbers_in(record), record["epoch"])
        for name, histogram in histograms_in(record):
            self.histogram(name, histogram, record["epoch"])

    def numbers(self, values: Mapping[str, float], epoch: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        """Write a histogram; its sums are computed from the centers of the bins."""
        limits = histogram.limits
        centers = [(low + high) / 2 for low, high in pairwise(limits)]
        pairs = list(zip(centers, histogram.counts, strict=True))
        self.writer.add_histogram_raw(
            name,
            min=limits[0],
            max=limits[-1],
            num=sum(histogram.counts),
            sum=sum(center * count for center, count in pairs),
            sum_squares=sum(center * center * count for center, count in pairs),
            bucket_limits=limits[1:],
            bucket_counts=list(histogram.counts),
            global_step=epoch,
        )

    def close(self) -> None:
        """Flush and close the files."""
        self.writer.close()
