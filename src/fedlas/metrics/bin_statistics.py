"""Bins of confidence: the edge rule in one place, exact counts, sums that add up.

Bin b of M holds the samples with `edge[b] < confidence <= edge[b + 1]` (left-open, right-closed). Equal-width edges are
b / M. Before they are compared, edges are rounded to the type of the confidences, so that the number nearest to b / M
lies on the edge in every type and falls into the bin below it.

Equal-mass edges of the sorted confidences c_0 <= ... <= c_{n-1} come in two kinds:

    `equal_mass_edges`     edge[b] is the largest confidence of the b-th of M parts whose sizes differ by at most one.
                           Equal confidences always share a bin (the first one whose upper edge reaches them).
    `interpolated_edges`   edge[b] is read from the sorted array at the fractional position b n / M: the procedure of
                           the published code, in which the least confident sample falls into no bin.

Counts are int64 and sums float64, so that they are right beyond 2^24 samples and for half-precision input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
from torch import Tensor

from fedlas.errors import UserError

NO_FLOAT64 = {"mps"}
MOST_AT_ONCE = 2**30  # probabilities; CUDA cannot list the hits of more than 2^31
COPIES_OF_CELLS = 2**16


class EdgeRule(StrEnum):
    """Which of its two edges belongs to a bin, and what happens to a confidence on the outermost edge."""

    RIGHT = "(lower, upper], lowest edge in the first bin"
    RIGHT_OPEN = "(lower, upper], lowest edge in no bin"
    LEFT = "[lower, upper), highest edge in the last bin"
    LEFT_OPEN = "[lower, upper), highest edge in a bin of its own"


TENSORS = ("edges", "counts", "confidence_sum", "correct_sum")
LEFT_CLOSED = {EdgeRule.LEFT, EdgeRule.LEFT_OPEN}


@dataclass(frozen=True)
class Bins:
    """What fell into each bin: how many samples, their confidence and their correctness, added up.

    Args:
        edges: lower edge of the first bin, then the upper edge of every bin.
        counts: samples in each bin; a leading dimension holds one histogram per class.
        confidence_sum: sum of the confidences in each bin.
        correct_sum: how many of them were correct (a fractional number with soft labels).
        n: how many samples were offered, those in no bin included.
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
        device = self.counts.device
        return type(self)(
            self.edges,
            self.counts + other.counts.to(device),
            self.confidence_sum + other.confidence_sum.to(device),
            self.correct_sum + other.correct_sum.to(device),
            self.n + other.n,
            self.rule,
        )

    def cpu(self) -> "Bins":
        """Bring the sums to the host."""
        sums = (self.counts.cpu(), self.confidence_sum.cpu(), self.correct_sum.cpu())
        return Bins(self.edges.cpu(), *sums, n=self.n, rule=self.rule)

    def to_dict(self) -> dict[str, Any]:
        """List everything as plain values."""
        tensors = {name: getattr(self, name).tolist() for name in TENSORS}
        return tensors | {"n": self.n, "rule": self.rule.name}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Bins":
        """Read back what `to_dict` wrote."""
        kinds = {name: torch.int64 if name == "counts" else torch.float64 for name in TENSORS}
        tensors = {name: torch.tensor(fields[name], dtype=kind) for name, kind in kinds.items()}
        return cls(**tensors, n=fields["n"], rule=EdgeRule[fields["rule"]])

    @property
    def share(self) -> Float64[Tensor, "*classes bins"]:
        """Share of all samples in each bin."""
        return self.counts.double() / self.n  # int64 / int would be float32

    @property
    def confidence(self) -> Float64[Tensor, "*classes bins"]:
        """Mean confidence in each bin, 0 where a bin is empty."""
        return self.confidence_sum / self.counts.clamp_min(1)

    @property
    def accuracy(self) -> Float64[Tensor, "*classes bins"]:
        """Share of correct samples in each bin, 0 where a bin is empty."""
        return self.correct_sum / self.counts.clamp_min(1)

    @property
    def gap(self) -> Float64[Tensor, "*classes bins"]:
        """Mean confidence minus accuracy: positive where the model is over-confident, 0 where a bin is empty."""
        return (self.confidence_sum - self.correct_sum) / self.counts.clamp_min(1)

    @property
    def weighted_gap(self) -> Float64[Tensor, "*classes bins"]:
        """Each bin's gap times its share of all samples; the absolute values add up to the ECE."""
        return (self.confidence_sum - self.correct_sum) / self.n


class Entries(NamedTuple):
    """Some entries of a table: their rows, their bins among those of all classes, and themselves."""

    row: Int64[Tensor, " found"]
    cell: Int64[Tensor, " found"]
    values: Float[Tensor, " found"]


def equal_width_edges(bins: int) -> Float64[Tensor, " edges"]:
    """Cut the interval from 0 to 1 into bins of one width."""
    if bins < 1:
        raise UserError(f"bins is {bins}; at least one is needed")
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def equal_mass_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Cut the sorted confidences into parts whose sizes differ by at most one, without parting equal values."""
    if bins < 1:
        raise UserError(f"bins is {bins}; at least one is needed")
    n = len(confidence)
    parts = torch.arange(bins + 1, device=confidence.device)
    ends = (parts * (n // bins) + parts.clamp_max(n % bins) - 1).clamp_min(0)
    if confidence.device.type == "cpu" and confidence.dtype in {torch.float32, torch.float64} and n:
        # A few order statistics take less time than all of them.
        return exact(torch.from_numpy(np.partition(confidence.numpy(), ends.numpy()))[ends])
    return exact(confidence.sort().values[ends])


def interpolated_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Find equal-mass edges as the published code does, by interpolation in the sorted confidences."""
    if bins < 1:
        raise UserError(f"bins is {bins}; at least one is needed")
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
    """Say which bin each confidence falls into; -1 or the number of bins means none.

    Where both outermost edges belong to a bin, so does what rounding has put beyond them.
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
    """Count the samples of each bin and add up their confidence and correctness."""
    index = bin_index(confidence, edges, rule)
    bins = len(edges) - 1 + (rule == EdgeRule.LEFT_OPEN)
    # Two spare cells take what is in no bin; a mask would make the host wait for the device.
    index = index.clamp(-1, bins) + 1
    values, hits = exact(confidence), exact(correct)
    index = index.to(values.device)
    if index.device.type == "cpu":
        count, confidence_sum, correct_sum = (
            count_up(index, bins + 2),
            add_up(values, index, bins + 2),
            add_up(hits, index, bins + 2),
        )
    else:  # all at once, because every call to a device costs
        sums = _scattered(torch.stack([torch.ones_like(values), values, hits]), index, bins + 2)
        count, confidence_sum, correct_sum = sums[0].long(), sums[1], sums[2]
    return Bins(exact(edges), count[1:-1], confidence_sum[1:-1], correct_sum[1:-1], len(confidence), rule)


def class_statistics(
    probs: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"] | Float[Tensor, "n classes"],
    edges: Float[Tensor, " edges"],
    rule: EdgeRule = EdgeRule.RIGHT,
    upper: Entries | None = None,
) -> Bins:
    """Fill one histogram per class with the probabilities of that class.

    At most M - 1 probabilities of a row can lie above the first of M equally wide bins, so only those are looked at
    one by one; the first bin is what remains of the column's total. `upper` are those, where they are already known.
    """
    probs, labels = _where_float64_is(probs), _where_float64_is(labels)
    n, classes = probs.shape
    if upper is None and n > 1 and n * classes > MOST_AT_ONCE:
        half = n // 2
        rest = class_statistics(probs[half:], labels[half:], edges, rule)
        return class_statistics(probs[:half], labels[:half], edges, rule) + rest
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
    """Find the probabilities above the first bin of their class."""
    bins = len(edges) - 1 + (rule == EdgeRule.LEFT_OPEN)
    first = edges[1].to(probs)
    row, column = _positions((probs >= first) if rule in LEFT_CLOSED else (probs > first))
    values = probs[row, column]
    return Entries(row, column * bins + bin_index(values, edges, rule), values)


def class_mass_statistics(
    probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"], bins: int
) -> Bins:
    """Fill one histogram per class, each with equal-mass bins of its own."""
    filled = []
    for k in range(probs.shape[1]):
        correct = labels[:, k] if labels.ndim == 2 else labels == k
        filled.append(bin_statistics(probs[:, k], correct, equal_mass_edges(probs[:, k], bins), EdgeRule.RIGHT))
    return stack(filled)


def stack(filled: Sequence[Bins]) -> Bins:
    """Put the histograms of several classes on top of each other."""
    return Bins(
        torch.stack([one.edges for one in filled]),
        torch.stack([one.counts for one in filled]),
        torch.stack([one.confidence_sum for one in filled]),
        torch.stack([one.correct_sum for one in filled]),
        filled[0].n,
        filled[0].rule,
    )


def add_up(values: Float64[Tensor, " n"], index: Int64[Tensor, " n"], cells: int) -> Float64[Tensor, " cells"]:
    """Add each value to its cell."""
    return _scattered(values, index, cells)


def count_up(index: Int64[Tensor, " n"], cells: int) -> Int64[Tensor, " cells"]:
    """Count the entries of each cell."""
    if index.device.type == "cpu":
        return torch.bincount(index, minlength=cells)
    return _scattered(torch.ones_like(index), index, cells)  # `bincount` would make the host wait


def _scattered(
    values: Shaped[Tensor, "*rows n"], index: Int64[Tensor, " n"], cells: int
) -> Shaped[Tensor, "*rows cells"]:
    # A device adds to one cell at a time: thousands of threads that meet in a few bins would queue, so each cell has
    # many copies there, which are added up in the end.
    copies = 1 if index.device.type == "cpu" else max(1, COPIES_OF_CELLS // cells)
    if copies > 1:
        index = index + cells * (torch.arange(len(index), device=index.device) % copies)
    sums = values.new_zeros(*values.shape[:-1], copies * cells).scatter_add_(-1, index.expand_as(values), values)
    return sums.view(*values.shape[:-1], copies, cells).sum(-2) if copies > 1 else sums


def exact(values: Tensor) -> Float64[Tensor, "..."]:
    """Bring numbers to float64, on the CPU where their device has none."""
    return _where_float64_is(values).double()


def _column_sums(table: Float[Tensor, "n classes"]) -> Float64[Tensor, " classes"]:
    # On the CPU numpy adds up a float32 table in float64 without making a copy of it in float64, as torch does.
    if table.device.type == "cpu" and table.dtype in {torch.float32, torch.float64}:
        return torch.from_numpy(table.numpy().sum(axis=0, dtype=np.float64))
    return table.sum(0, dtype=torch.float64)


def _positions(mask: Bool[Tensor, "n classes"]) -> tuple[Int64[Tensor, " found"], Int64[Tensor, " found"]]:
    # The same on the CPU: numpy finds sparse hits several times faster.
    flat = mask.reshape(-1)
    found = torch.from_numpy(np.flatnonzero(flat.numpy())) if flat.device.type == "cpu" else flat.nonzero()[:, 0]
    return found // mask.shape[1], found % mask.shape[1]


def _where_float64_is(values: Tensor) -> Tensor:
    return values.cpu() if values.device.type in NO_FLOAT64 else values
