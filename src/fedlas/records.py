"""The log of a run as others show it: numbers with names such as `val/ece`, histograms, and files for TensorBoard.

A record is one line of a run's `log.jsonl`: numbers, and groups of numbers. A group that has `edges` and `counts` is a
histogram: its first count is of what lies below the first edge, its last of what lies above the last.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fedlas.extras import optional_module


class Histogram(NamedTuple):
    """How many values lie below, between and above some edges."""

    edges: Sequence[float]
    counts: Sequence[int]

    @property
    def limits(self) -> list[float]:
        """The edges, and one more on each side for what lies outside."""
        width = self.edges[1] - self.edges[0]
        return [self.edges[0] - width, *self.edges, self.edges[-1] + width]


def numbers_in(record: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """List the numbers of a record, those of a group behind its name and a slash; what is no number is left out."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= numbers_in(value, f"{above}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[above + name] = float(value)
    return found


def histograms_in(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Histogram]]:
    """Find the histograms of a record, with their names; `gate/gamma_histogram` is called `gate/gamma`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            if {"edges", "counts"} <= value.keys():
                yield above + name.removesuffix("_histogram"), Histogram(value["edges"], value["counts"])
            else:
                yield from histograms_in(value, f"{above}{name}/")


class Board:
    """Writes for TensorBoard.

    Args:
        folder: where the files go.
        first: what was written from this epoch on, by an earlier process, is thrown away; None keeps everything.
    """

    def __init__(self, folder: str | Path, first: int | None = None) -> None:
        optional_module("tensorboard", "integrations")
        self.writer = optional_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=first)

    def record(self, record: Mapping[str, Any]) -> None:
        """Write one line of a log."""
        self.numbers(numbers_in(record), record["epoch"])
        for name, histogram in histograms_in(record):
            self.histogram(name, histogram, record["epoch"])

    def numbers(self, values: Mapping[str, float], epoch: int) -> None:
        """Write numbers."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)

    def histogram(self, name: str, histogram: Histogram, epoch: int) -> None:
        """Write a histogram; its sums are those of the middles."""
        limits = histogram.limits
        middles = [(low + high) / 2 for low, high in pairwise(limits)]
        pairs = list(zip(middles, histogram.counts, strict=True))
        self.writer.add_histogram_raw(
            name,
            min=limits[0],
            max=limits[-1],
            num=sum(histogram.counts),
            sum=sum(middle * count for middle, count in pairs),
            sum_squares=sum(middle * middle * count for middle, count in pairs),
            bucket_limits=limits[1:],
            bucket_counts=list(histogram.counts),
            global_step=epoch,
        )

    def close(self) -> None:
        """Write what is still to be written."""
        self.writer.close()
