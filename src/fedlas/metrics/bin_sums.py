"""Counts and sums per bin of confidence, and the edges of bins; `binning.py` selects edges and edge rule by options.

Bin b of M holds the samples with `edge[b] < confidence <= edge[b + 1]` (left-open, right-closed). Equal-width edges are
b / M. Edges are rounded to the type of the confidences before comparison, so that the number nearest to b / M lies on
the edge in every type and belongs to the lower bin.

There are two kinds of equal-mass edges of sorted confidences c_0 <= ... <= c_{n-1}:

    `equal_mass_edges`     edge[b] is the largest confidence of the b-th of M parts whose sizes differ by at most one.
                           Ties share a bin (the first whose upper edge is at least their confidence).
    `interpolated_edges`   edge[b] is interpolated in the sorted array at position b n / M, as in the official code; the
                           least confident sample is in no bin.

Counts are int64 and sums float64, so that they are exact above 2^24 samples and for half-precision input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
from torch import Tensor

from fedlas.errors import UserError

NO_FLOAT64 = {"mps"}
MOST_AT_ONCE = 2**30  # number of probabilities; `nonzero` on CUDA is limited to 2^31
COPIES_OF_CELLS = 2**16


class EdgeRule(StrEnum):
    """Which edge belongs to a bin, and the bin of a confidence on an outermost edge."""

    RIGHT = "(lower, upper], lowest edge in the first bin"
    RIGHT_OPEN = "(lower, upper], lowest edge in no bin"
    LEFT = "[lower, upper), highest edge in the last bin"
    LEFT_OPEN = "[lower, upper), highest edge in a bin of its own"


SUMS = ("counts", "confidence_sum", "correct_sum")
TENSORS = ("edges", *SUMS)
LEFT_CLOSED = {EdgeRule.LEFT, EdgeRule.LEFT_OPEN}


@dataclass(frozen=True)
class Bins:
    """Number of samples and sums of confidence and correctness per bin.

    Args:
        edges: lower edge of the first bin, then the upper edge of every bin.
        counts: number of samples in each bin; a leading dimension holds one histogram per class.
        confidence_sum: sum of the confidences in each bin.
        correct_sum: number of correct predictions in each bin (fractional for soft labels).
        n: number of samples, including those in no bin.
        rule: the edge rule.
    """

    edges: Float64[Tensor, "... edges"]
    counts: Int64[Tensor, "*classes bins"]
    confidence_sum: Float64[Tensor, "*classes bins"]
    correct_sum: Float64[Tensor, "*classes bins"]
    n: int
    rule: EdgeRule = EdgeRule.RIGHT

    def __add__(self, other: "Bins") -> "Bins":
        if self.rule != other.rule or not torch.equal(self.edges, other.edges.to(self.edges.device)):
            raise UserError("bins with different edges cannot be added")
        if self.counts.shape != other.counts.shape:
            before, now = self.counts.shape[0], other.counts.shape[0]
            raise UserError(f"there were {before} classes before and there are {now} now")
        sums: Any = {name: getattr(self, name) + getattr(other, name).to(self.counts.device) for name in SUMS}
        return replace(self, **sums, n=self.n + other.n)

    def cpu(self) -> "Bins":
        """Return a copy on the CPU."""
        tensors: Any = {name: getattr(self, name).cpu() for name in TENSORS}
        return replace(self, **tensors)

    def to_dict(self) -> dict[str, Any]:
        """Convert to types that JSON can store."""
        tensors = {name: getattr(self, name).tolist() for name in TENSORS}
        return tensors | {"n": self.n, "rule": self.rule.name}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Bins":
        """Restore from the output of `to_dict`."""
        kinds = {name: torch.int64 if name == "counts" else torch.float64 for name in TENSORS}
        tensors = {name: torch.tensor(fields[name], dtype=kind) for name, kind in kinds.items()}
        return cls(**tensors, n=fields["n"], rule=EdgeRule[fields["rule"]])

    @property
    def fraction(self) -> Float64[Tensor, "*classes bins"]:
        """Fraction of all samples in each bin."""
        return self.counts.double() / self.n  # int64 / int would be float32

    @property
    def confidence(self) -> Float64[Tensor, "*classes bins"]:
        """Mean confidence in each bin, 0 for empty bins."""
        return self.confidence_sum / self.counts.clamp_min(1)

    @property
    def accuracy(self) -> Float64[Tensor, "*classes bins"]:
        """Accuracy in each bin, 0 for empty bins."""
        return self.correct_sum / self.counts.clamp_min(1)

    @property
    def gap(self) -> Float64[Tensor, "*classes bins"]:
        """Mean confidence minus accuracy: positive means over-confident, 0 for empty bins."""
        return (self.confidence_sum - self.correct_sum) / self.counts.clamp_min(1)

    @property
    def weighted_gap(self) -> Float64[Tensor, "*classes bins"]:
        """Gap of each bin times its fraction of samples; the absolute values add up to the ECE."""
        return (self.confidence_sum - self.correct_sum) / self.n


class Entries(NamedTuple):
    """Selected entries of a table of probabilities: row, bin (numbered over all classes) and value."""

    row: Int64[Tensor, " found"]
    cell: Int64[Tensor, " found"]
    values: Float[Tensor, " found"]


def equal_width_edges(bins: int) -> Float64[Tensor, " edges"]:
    """Return the edges of equal-width bins on [0, 1]."""
    if bins < 1:
        raise UserError(f"bins is {bins}; it must be at least 1")
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def equal_mass_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Return the edges of bins whose sizes differ by at most one, except for ties."""
    if bins < 1:
        raise UserError(f"bins is {bins}; it must be at least 1")
    n = len(confidence)
    parts = torch.arange(bins + 1, device=confidence.device)
    ends = (parts * (n // bins) + parts.clamp_max(n % bins) - 1).clamp_min(0)
    if confidence.device.type == "cpu" and confidence.dtype in {torch.float32, torch.float64} and n:
        # Partial sorting is faster.
        return exact(torch.from_numpy(np.partition(confidence.numpy(), ends.numpy()))[ends])
    return exact(confidence.sort().values[ends])


def interpolated_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Return equal-mass edges as in the official code, by interpolation of the sorted confidences."""
    if bins < 1:
        raise UserError(f"bins is {bins}; it must be at least 1")
    ranked = exact(confidence).sort().values
    n = len(ranked)
    position = torch.arange(bins + 1, dtype=torch.float64, device=ranked.device) * (n / bins)
    below = position.floor().long().clamp_max(n - 1)
    above = (below + 1).clamp_max(n - 1)
    slope = ranked[above] - ranked[below]
    return slope * (position - below) + ranked[below]


def bin_index(
    confidence: Float[Tensor, " n"], edges: Float[Tensor, " edges"], rule: EdgeRule = EdgeRule.RIGHT_OPEN
) -> Int64[Tensor, " n"]:
    """Return the bin of each confidence; -1 or the number of bins if it is in no bin.

    If both outermost edges belong to a bin, values that exceed them by a rounding error belong to it too.
    """
    compared = (confidence if confidence.dtype == torch.float64 else confidence.float()).contiguous()
    rounded = edges.to(confidence.device, confidence.dtype).to(compared.dtype)
    if rule in {EdgeRule.RIGHT, EdgeRule.LEFT}:
        return torch.bucketize(compared, rounded[1:-1], right=rule in LEFT_CLOSED)
    return torch.bucketize(compared, rounded, right=rule in LEFT_CLOSED) - 1


def bin_statistics(
    confidence: Float[Tensor, " n"],
    correct: Bool[Tensor, " n"] | Float[Tensor, " n"] | Int[Tensor, " n"],
    edges: Float[Tensor, " edges"],
    rule: EdgeRule = EdgeRule.RIGHT_OPEN,
) -> Bins:
    """Return the counts and sums of each bin."""
    index = bin_index(confidence, edges, rule)
    bins = len(edges) - 1 + (rule == EdgeRule.LEFT_OPEN)
    # Two extra cells count the samples that are in no bin; a mask would need a host synchronisation.
    index = index.clamp(-1, bins) + 1
    values, right = exact(confidence), exact(correct)
    index = index.to(values.device)
    if index.device.type == "cpu":
        count, confidence_sum, correct_sum = (
            count_up(index, bins + 2),
            add_up(values, index, bins + 2),
            add_up(right, index, bins + 2),
        )
    else:  # a single call, because of the launch overhead
        sums = _scatter_add(torch.stack([torch.ones_like(values), values, right]), index, bins + 2)
        count, confidence_sum, correct_sum = sums[0].long(), sums[1], sums[2]
    return Bins(exact(edges), count[1:-1], confidence_sum[1:-1], correct_sum[1:-1], len(confidence), rule)


def class_statistics(
    probs: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"] | Float[Tensor, "n classes"],
    edges: Float[Tensor, " edges"],
    rule: EdgeRule = EdgeRule.RIGHT,
    upper: Entries | None = None,
) -> Bins:
    """Return one histogram per class, of the probabilities of that class.

    At most M - 1 probabilities of a row lie above the first of M bins of equal width. Only those are binned; the first
    bin is the total of the column minus the others. Pass `upper` if these entries were already computed.
    """
    probs, labels = _on_float64_device(probs), _on_float64_device(labels)
    n, classes = probs.shape
    if upper is None and n > 1 and n * classes > MOST_AT_ONCE:
        half = n // 2
        second_half = class_statistics(probs[half:], labels[half:], edges, rule)
        return class_statistics(probs[:half], labels[:half], edges, rule) + second_half
    bins = len(edges) - 1 + (rule == EdgeRule.LEFT_OPEN)
    row, cell, values = upper_entries(probs, edges, rule) if upper is None else upper
    counts = count_up(cell, classes * bins).view(classes, bins)
    confidence = add_up(exact(values), cell, classes * bins).view(classes, bins)
    outside = (probs == edges[0].to(probs)) if rule == EdgeRule.RIGHT_OPEN else torch.zeros_like(probs[0, 0]).bool()
    counts[:, 0] += n - counts.sum(1) - outside.sum(0).to(counts)
    confidence[:, 0] += _column_sums(probs) - confidence.sum(1)
    if labels.ndim == 2:
        correct = add_up(exact(labels[row, cell // bins]), cell, classes * bins).view(classes, bins)
        correct[:, 0] += _column_sums(labels.masked_fill(outside, 0)) - correct.sum(1)
    else:
        index = bin_index(probs.gather(1, labels[:, None])[:, 0], edges, rule)
        cell = torch.where(index < 0, classes * bins, labels * bins + index)
        correct = exact(count_up(cell, classes * bins + 1)[:-1]).view(classes, bins)
    return Bins(exact(edges), counts, confidence, correct, n, rule)


def upper_entries(
    probs: Float[Tensor, "n classes"], edges: Float[Tensor, " edges"], rule: EdgeRule = EdgeRule.RIGHT
) -> Entries:
    """Return the probabilities above the first bin of their class."""
    bins = len(edges) - 1 + (rule == EdgeRule.LEFT_OPEN)
    first = edges[1].to(probs)
    row, column = _positions((probs >= first) if rule in LEFT_CLOSED else (probs > first))
    values = probs[row, column]
    return Entries(row, column * bins + bin_index(values, edges, rule), values)


def stack(by_class: Sequence[Bins]) -> Bins:
    """Stack the histograms of several classes."""
    tensors: Any = {name: torch.stack([getattr(bins, name) for bins in by_class]) for name in TENSORS}
    return replace(by_class[0], **tensors)


def add_up(values: Float64[Tensor, " n"], index: Int64[Tensor, " n"], cells: int) -> Float64[Tensor, " cells"]:
    """Return the sum of the values of each cell."""
    return _scatter_add(values, index, cells)


def count_up(index: Int64[Tensor, " n"], cells: int) -> Int64[Tensor, " cells"]:
    """Return the number of entries of each cell."""
    if index.device.type == "cpu":
        return torch.bincount(index, minlength=cells)
    return _scatter_add(torch.ones_like(index), index, cells)  # `bincount` would need a host synchronisation


def _scatter_add(
    values: Shaped[Tensor, "*rows n"], index: Int64[Tensor, " n"], cells: int
) -> Shaped[Tensor, "*rows cells"]:
    # Atomic additions to the same cell are serialised on a GPU, so each cell has many copies, which are summed.
    copies = 1 if index.device.type == "cpu" else max(1, COPIES_OF_CELLS // cells)
    if copies > 1:
        index = index + cells * (torch.arange(len(index), device=index.device) % copies)
    sums = values.new_zeros(*values.shape[:-1], copies * cells).scatter_add_(-1, index.expand_as(values), values)
    return sums.view(*values.shape[:-1], copies, cells).sum(-2) if copies > 1 else sums


def exact(values: Tensor) -> Float64[Tensor, "..."]:
    """Return values in float64, on the CPU if their device does not support it."""
    return _on_float64_device(values).double()


def _column_sums(table: Float[Tensor, "n classes"]) -> Float64[Tensor, " classes"]:
    # On the CPU, NumPy sums a float32 table in float64 without the float64 copy that torch makes.
    if table.device.type == "cpu" and table.dtype in {torch.float32, torch.float64}:
        return torch.from_numpy(table.numpy().sum(axis=0, dtype=np.float64))
    return table.sum(0, dtype=torch.float64)


def _positions(mask: Bool[Tensor, "n classes"]) -> tuple[Int64[Tensor, " found"], Int64[Tensor, " found"]]:
    # On the CPU, NumPy is several times faster for sparse masks.
    flat = mask.reshape(-1)
    index = torch.from_numpy(np.flatnonzero(flat.numpy())) if flat.device.type == "cpu" else flat.nonzero()[:, 0]
    return index // mask.shape[1], index % mask.shape[1]


def _on_float64_device(values: Tensor) -> Tensor:
    return values.cpu() if values.device.type in NO_FLOAT64 else values
