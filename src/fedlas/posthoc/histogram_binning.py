"""Histogram binning: replace the probability of a class by its frequency in the bin (Zadrozny and Elkan, 2001).

Each class has its own bins, of equal width or equal mass. Rows are normalised afterwards. Probabilities in an empty bin
are unchanged.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bin_sums import EdgeRule, bin_index, bin_statistics, equal_mass_edges, equal_width_edges
from fedlas.posthoc.base import AbstractCalibrator, Samples, check_floor, log_probs_of


class HistogramBinning(AbstractCalibrator):
    """Replaces each class's probability by the frequency in its bin.

    Args:
        bins: number of bins of each class.
        binning: "width" for bins of equal width, "mass" for bins of equally many samples. A class occurs in about 1/C
            of the samples, so use several times as many bins of equal mass as classes.
        floor: smallest probability that the calibrator returns.
    """

    name = "histogram_binning"
    citation = "Zadrozny and Elkan, Obtaining calibrated probability estimates, ICML 2001."

    def __init__(self, *, bins: int = 15, binning: Literal["width", "mass"] = "width", floor: float = 1e-7) -> None:
        if bins < 1:
            raise UserError(f"bins is {bins}; it must be at least 1")
        if binning not in {"mass", "width"}:
            raise UserError(f'binning is {binning!r}; expected "mass" or "width"')
        self.bins, self.binning, self.floor = int(bins), binning, check_floor(floor)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        probs, targets = samples.logits.softmax(1).cpu(), samples.label_probs.cpu()
        edges, values = zip(*(self._fit_class(probs[:, k], targets[:, k]) for k in range(probs.shape[1])), strict=True)
        return {"edges": torch.stack(edges), "values": torch.stack(values)}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        probs = logits.softmax(1)
        calibrated = torch.empty_like(probs)
        for k, (edges, values) in enumerate(zip(self.learned["edges"], self.learned["values"], strict=True)):
            column = probs[:, k].contiguous()
            value = values.to(column)[bin_index(column, edges, EdgeRule.RIGHT).clamp(0, self.bins - 1)]
            calibrated[:, k] = torch.where(value.isnan(), column, value)
        return log_probs_of(calibrated, probs, self.floor)

    def _fit_class(self, probs: Float[Tensor, " n"], targets: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        edges = equal_width_edges(self.bins) if self.binning == "width" else _equal_mass_edges(probs, self.bins)
        statistics = bin_statistics(probs.contiguous(), targets, edges, EdgeRule.RIGHT)
        return edges, torch.where(statistics.counts > 0, statistics.accuracy, torch.nan)


def _equal_mass_edges(probs: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Return edges between samples rather than at them, so that rounding does not change the bin of a sample."""
    ranked = probs.double().sort().values
    edges = equal_mass_edges(ranked, bins)
    above = ranked[torch.searchsorted(ranked, edges, right=True).clamp_max(len(ranked) - 1)]
    edges = (edges + above) / 2
    edges[0], edges[-1] = 0, 1
    return edges
