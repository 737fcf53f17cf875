"""Binning rules of this package, and of other packages to reproduce their results.

    compat                      equal width                              equal mass
    None                        (lower, upper], 0 in the first bin       parts of equal size, ties together
    "official"                  float32 edges; 0 in no bin               interpolated; the lowest sample in no bin
    "torchmetrics"              [lower, upper); 1 in a bin of its own    -
    "netcal"                    [lower, upper) in float64, 1 in the last quantiles between 0 and 1
    "uncertainty-calibration"   (lower, upper] in float64                midpoints between parts of equal size

"official" is the official code of the paper (derived from focal_calibration). All rules are implemented here.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import (
    Bins,
    EdgeRule,
    bin_index,
    bin_statistics,
    class_statistics,
    equal_mass_edges,
    equal_width_edges,
    exact,
    interpolated_edges,
    stack,
)
from fedlas.metrics.inputs import MetricInput, Pairs, Rows, Scope, pairs, rows
from fedlas.metrics.result import Definition
from fedlas.predictions.arrays import Array

Kind = Literal["width", "mass"]
Compat = Literal["official", "torchmetrics", "netcal", "uncertainty-calibration"]

RULES = {
    None: EdgeRule.RIGHT,
    "official": EdgeRule.RIGHT_OPEN,
    "torchmetrics": EdgeRule.LEFT_OPEN,
    "netcal": EdgeRule.LEFT,
    "uncertainty-calibration": EdgeRule.RIGHT,
}
EVERY_CLASS: set[Scope] = {"class-wise", "multi-label"}
IN_FLOAT64 = {"netcal", "uncertainty-calibration"}


@dataclass(frozen=True)
class Binning:
    """A binning rule.

    Args:
        bins: number of bins.
        kind: "width" for bins of equal width, "mass" for bins of equally many samples.
        compat: package or code whose rules are followed; None for the rules of this package.
    """

    bins: int = 15
    kind: Kind = "width"
    compat: Compat | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bins, int) or isinstance(self.bins, bool) or self.bins < 1:
            raise UserError(f"bins is {self.bins!r}; it must be an integer of at least 1")
        if self.kind not in get_args(Kind):
            raise UserError(f'binning is {self.kind!r}; expected "width" or "mass"')
        if self.compat not in RULES:
            raise UserError(f"compat is {self.compat!r}; expected one of {', '.join(map(repr, get_args(Compat)))}")
        if self.kind == "mass" and self.compat == "torchmetrics":
            raise UserError("torchmetrics has no equal-mass bins to reproduce")

    @property
    def rule(self) -> EdgeRule:
        """Which edge belongs to a bin."""
        return RULES[self.compat]

    def __str__(self) -> str:
        return f"equal-{self.kind} bins {self.rule}"

    def define(self, definition: Definition) -> Definition:
        """Return a definition with the number and the edges of the bins."""
        return replace(definition, bins=self.bins, edges=str(self), compat=self.compat)

    def index(self, confidence: Float[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Return the bin of each confidence; -1 or the number of bins if it is in no bin."""
        return bin_index(self._compared(confidence), self.edges(confidence), self.rule)

    def fill(self, confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"] | Float[Tensor, " n"]) -> Bins:
        """Return the counts and sums of each bin."""
        return bin_statistics(self._compared(confidence), correct, self.edges(confidence), self.rule)

    def fill_classes(
        self, probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]
    ) -> Bins:
        """Return one histogram per class, of the probabilities of that class."""
        if self.compat == "official" and labels.ndim == 1:
            # The official code only uses classes up to the largest label in the data.
            probs = probs[:, : int(labels.max()) + 1]
        if self.kind == "width":
            return class_statistics(self._compared(probs), labels, self.edges(probs[:0, 0]), self.rule)
        soft = labels.ndim == 2
        return stack([self.fill(probs[:, k], labels[:, k] if soft else labels == k) for k in range(probs.shape[1])])

    def _compared(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return confidences in the dtype in which the other package compares them with edges."""
        if self.compat == "torchmetrics":
            return values.float()
        return exact(values) if self.compat in IN_FLOAT64 else values

    def edges(self, confidence: Float[Tensor, " n"]) -> Float64[Tensor, " edges"]:
        """Return the edges of the bins; only equal-mass edges depend on the confidences."""
        if self.kind == "width":
            return self._width_edges()
        if self.compat == "official":
            return interpolated_edges(confidence, self.bins)
        if self.compat == "netcal":
            return _quantile_edges(confidence, self.bins)
        if self.compat == "uncertainty-calibration":
            return _midpoint_edges(confidence, self.bins)
        return equal_mass_edges(confidence, self.bins)

    def _width_edges(self) -> Float64[Tensor, " edges"]:
        if self.compat in {"official", "torchmetrics"}:
            return torch.linspace(0, 1, self.bins + 1, dtype=torch.float32).double()
        if self.compat == "netcal":
            steps = torch.arange(self.bins + 1, dtype=torch.float64) * (1 / self.bins)
            return torch.cat([steps[:-1], torch.ones(1, dtype=torch.float64)])
        return equal_width_edges(self.bins)


def _quantile_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    ranked = exact(confidence).sort().values
    position = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=ranked.device) * (len(ranked) - 1)
    below = position.floor().long()
    above = (below + 1).clamp_max(len(ranked) - 1)
    edges = torch.lerp(ranked[below], ranked[above], position - below)
    edges[0], edges[-1] = 0, 1
    return edges


def _midpoint_edges(confidence: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    ranked = confidence.sort().values
    bins = min(bins, len(ranked))
    parts = torch.arange(1, bins, device=ranked.device)
    ends = parts * (len(ranked) // bins) + parts.clamp_max(len(ranked) % bins)
    inner = exact((ranked[ends - 1] + ranked[ends]) / 2)
    outer = torch.tensor([0.0, 1.0], dtype=torch.float64, device=inner.device)
    return torch.cat([outer[:1], inner, outer[1:]])


class Histogram(NamedTuple):
    """Counts and sums of bins, and the definition of results that are computed from them."""

    bins: Bins
    definition: Definition


def histogram(
    probs: MetricInput,
    labels: Array | None = None,
    bins: int = 15,
    *,
    binning: Kind = "width",
    scope: Scope = "top-label",
    compat: Compat | None = None,
    ignore_index: int | None = None,
) -> Histogram:
    """Return the histogram of predictions, from which binned errors are computed.

    Args:
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        bins: number of bins.
        binning: "width" for bins of equal width, "mass" for bins of equally many samples.
        scope: which confidences are used: "top-label", "class-wise", "positive" (binary) or "multi-label".
        compat: name of another package or code whose binning rules are followed, to reproduce its values.
        ignore_index: label of samples that are ignored.
    """
    return histogram_of(samples_of(probs, labels, scope, ignore_index), Binning(bins, binning, compat))


def samples_of(probs: MetricInput, labels: Array | None, scope: Scope, ignore_index: int | None) -> Pairs | Rows:
    """Return validated samples: rows if the scope needs all classes, else pairs."""
    return (rows if scope in EVERY_CLASS else pairs)(probs, labels, scope, ignore_index)


def histogram_of(samples: Pairs | Rows, binning: Binning) -> Histogram:
    """Return the histogram of validated samples."""
    if isinstance(samples, Rows):
        return Histogram(binning.fill_classes(samples.probs, samples.labels), binning.define(samples.definition))
    bins = samples.once(("bins", binning), lambda: binning.fill(samples.confidence, samples.correct))
    return Histogram(bins, binning.define(samples.definition))
