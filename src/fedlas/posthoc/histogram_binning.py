"""Histogram binning: a class's probability becomes how often the class occurred in its bin (Zadrozny and Elkan, 2001).

Each class has bins of its own, of equal width or holding equally many samples. Rows are normalised afterwards. A bin
without samples keeps the probabilities that fall into it.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bins import EdgeRule, bin_index, bin_statistics, equal_mass_edges, equal_width_edges
from fedlas.posthoc.base import AbstractCalibrator, Samples, check_floor, log_probs_of


class HistogramBinning(AbstractCalibrator):
    """Replaces each class's probability by the frequency seen in its bin.

    Args:
        bins: how many for each class.
        binning: "width" for bins of equal width, "mass" for bins that hold equally many samples. With C classes a class
            is right in about 1/C of the samples, so bins of equal mass should be several times as many as classes.
        floor: smallest probability that it returns.
    """

    name = "histogram_binning"
    citation = "Zadrozny and Elkan, Obtaining calibrated probability estimates, ICML 2001."

    def __init__(self, *, bins: int = 15, binning: Literal["width", "mass"] = "width", floor: float = 1e-7) -> None:
        if bins < 1:
            raise UserError(f"bins is {bins}; at least one is needed")
        if binning not in {"mass", "width"}:
            raise UserError(f'binning is {binning!r}; expected "mass" or "width"')
        self.bins, self.binning, self.floor = int(bins), binning, check_floor(floor)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        probs, shares = samples.logits.softmax(1).cpu(), samples.shares.cpu()
        edges, values = zip(*(self._one_class(probs[:, k], shares[:, k]) for k in range(probs.shape[1])), strict=True)
        return {"edges": torch.stack(edges), "values": torch.stack(values)}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        probs = logits.softmax(1)
        found = torch.empty_like(probs)
        for k, (edges, values) in enumerate(zip(self.learned["edges"], self.learned["values"], strict=True)):
            column = probs[:, k].contiguous()
            value = values.to(column)[bin_index(column, edges, EdgeRule.RIGHT).clamp(0, self.bins - 1)]
            found[:, k] = torch.where(value.isnan(), column, value)
        return log_probs_of(found, probs, self.floor)

    def _one_class(self, probs: Float[Tensor, " n"], shares: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
        edges = equal_width_edges(self.bins) if self.binning == "width" else _between(probs, self.bins)
        filled = bin_statistics(probs.contiguous(), shares, edges, EdgeRule.RIGHT)
        return edges, torch.where(filled.counts > 0, filled.accuracy, torch.nan)


def _between(probs: Float[Tensor, " n"], bins: int) -> Float64[Tensor, " edges"]:
    """Cut between samples rather than at them, so that a last digit does not decide which bin a sample is in."""
    ranked = probs.double().sort().values
    edges = equal_mass_edges(ranked, bins)
    above = ranked[torch.searchsorted(ranked, edges, right=True).clamp_max(len(ranked) - 1)]
    edges = (edges + above) / 2
    edges[0], edges[-1] = 0, 1
    return edges
