"""A sketch of confidences with bounded memory, from which equal-mass bins are computed.

The sketch holds sums in fine cells. The width of a cell is 1/4096 of its distance from confidence 1, near which most
confidences of a trained model lie; about 100,000 cells reach a distance of 2^-24, the precision of float32.

A bin is a group of cells, so samples between the exact end of a bin and the end of its last cell are in the wrong bin.
Each of them changes two gaps by at most 1/n, which bounds the error. Cells of ties cause no error.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.accumulators import (
    AbstractHistogram,
    BinAccumulator,
    PairAccumulator,
    State,
    as_pairs,
    merge_definitions,
)
from fedlas.metrics.bin_sums import SUMS, Bins, EdgeRule, add_up, bin_index, bin_statistics, exact
from fedlas.metrics.binning import EVERY_CLASS, Binning, Histogram
from fedlas.metrics.inputs import Pairs, Rows, Scope
from fedlas.metrics.result import Definition

Memory = Literal["exact", "bounded"]
CELLS_PER_OCTAVE = 4096
OCTAVES = 24


class SketchAccumulator(AbstractHistogram):
    """Stores sums in fine cells, and the smallest and largest confidence in each."""

    def __init__(self, metric: Any, bins: int, scope: Scope, ignore_index: int | None) -> None:
        super().__init__(metric, scope, ignore_index)
        self.binning = Binning(bins, "mass")
        self.edges = fine_edges()
        self.cells: Bins | None = None
        self.low = self.high = torch.empty(0, dtype=torch.float64)

    def take(self, batch: Pairs | Rows) -> None:
        batch = as_pairs(batch)
        cells = bin_statistics(batch.confidence, batch.correct, self.edges, EdgeRule.RIGHT)
        values = exact(batch.confidence)
        index = bin_index(batch.confidence, self.edges, EdgeRule.RIGHT).to(values.device)
        low = torch.full_like(cells.confidence_sum, torch.inf).scatter_reduce(0, index, values, "amin")
        high = torch.full_like(cells.confidence_sum, -torch.inf).scatter_reduce(0, index, values, "amax")
        self._take(cells, low, high, batch.definition)

    def add(self, other: Any) -> None:
        if other.cells is not None:
            self._take(other.cells, other.low, other.high, other.definition)

    def histogram(self) -> Histogram:
        cells, last, _ = self._ends()
        bins = self.binning.bins
        group = torch.searchsorted(last, torch.arange(len(cells.counts), device=last.device)).clamp_max(bins - 1)
        counts = torch.zeros(bins, dtype=torch.int64, device=last.device).scatter_add_(0, group, cells.counts)
        ends = torch.cat([torch.zeros_like(last[:1]), last + 1])
        edges = cells.edges.to(last.device)[ends]
        sums = (add_up(cells.confidence_sum, group, bins), add_up(cells.correct_sum, group, bins))
        definition = self.binning.define(self.definition)
        return Histogram(
            Bins(edges, counts, *sums, cells.n), replace(definition, edges=f"{definition.edges}, of whole cells")
        )

    def error_bound(self) -> float:
        cells, last, ends = self._ends()
        reached = cells.counts.cumsum(0)
        first = torch.cat([torch.ones_like(last[:1], dtype=torch.bool), last[1:] != last[:-1]])
        parted = first & (self.low < self.high)[last]
        return 2 * int(((reached[last] - ends) * parted)[:-1].sum()) / cells.n

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.binning)

    def state(self) -> State:
        return (
            {}
            if self.cells is None
            else {**BinAccumulator.state_of(self.cells), "low": [self.low], "high": [self.high]}
        )

    def empty_state(self, num_classes: int | None = None) -> State:
        del num_classes
        counts, sums = (torch.zeros(len(self.edges) - 1, dtype=kind) for kind in (torch.int64, torch.float64))
        state: State = {"counts": counts, "confidence_sum": sums, "correct_sum": sums.clone(), "low": [], "high": []}
        return state | {"samples": torch.tensor(0)}

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        self.cells = None
        if state and len(state["low"]):
            counts, confidence, correct = (cast("Tensor", state[name]) for name in SUMS)
            low, high = (torch.stack(list(state[name])) for name in ("low", "high"))
            n = int(counts.sum())
            self.cells, self.definition = (
                Bins(self.edges, counts, confidence, correct, n),
                replace(self.definition, n=n),
            )
            self.low, self.high = low.amin(0), high.amax(0)

    def _ends(self) -> tuple[Bins, Tensor, Tensor]:
        """Return the last cell of each bin, and the number of samples up to the exact end of the bin."""
        if self.cells is None:
            raise UserError("no samples yet; call update first")
        cells = self.cells
        parts = torch.arange(1, self.binning.bins + 1, device=cells.counts.device)
        ends = parts * (cells.n // self.binning.bins) + parts.clamp_max(cells.n % self.binning.bins)
        return cells, torch.searchsorted(cells.counts.cumsum(0), ends), ends

    def _take(self, cells: Bins, low: Tensor, high: Tensor, definition: Definition) -> None:
        before = self.cells
        self.cells = cells if before is None else before + cells
        self.low = low if before is None else torch.minimum(self.low, low.to(self.low.device))
        self.high = high if before is None else torch.maximum(self.high, high.to(self.high.device))
        self.definition = merge_definitions(self.definition, definition)


def fine_edges() -> Float64[Tensor, " edges"]:
    """Return the edges of cells whose width is a fixed fraction of their distance from confidence 1."""
    steps = torch.arange(CELLS_PER_OCTAVE, dtype=torch.float64) / CELLS_PER_OCTAVE + 1
    octaves = 2.0 ** -torch.arange(OCTAVES, 0, -1, dtype=torch.float64)
    distance = torch.cat([torch.zeros(1, dtype=torch.float64), (octaves[:, None] * steps).flatten()])
    return torch.cat([torch.zeros(1, dtype=torch.float64), 1 - distance.flip(0)])


def histogram_accumulator(
    metric: Any, binning: Binning, scope: Scope, ignore_index: int | None, memory: Memory = "exact"
) -> AbstractHistogram:
    """Return an accumulator of bins: sums if the edges are fixed, else all samples or a sketch."""
    if memory == "bounded":
        if binning.compat is not None:
            raise UserError(f'memory="bounded" cannot follow the rules of {binning.compat}')
        if binning.kind == "width":
            raise UserError('memory="bounded" is for equal-mass bins; those of equal width always have bounded memory')
    elif binning.kind == "width":
        return BinAccumulator(metric, binning, scope, ignore_index)
    if scope in EVERY_CLASS:
        raise UserError("equal-mass bins of every class need all probabilities at once: use the function")
    if memory == "bounded":
        return SketchAccumulator(metric, binning.bins, scope, ignore_index)
    return PairAccumulator(metric, scope, ignore_index, binning=binning)
