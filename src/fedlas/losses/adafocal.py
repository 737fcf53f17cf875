"""AdaFocal: focal loss whose gamma adapts to the calibration on a validation set.

    L = mean_i f(p_t, g)  CE_i,   f = (1 - p_t)^g where g > 0,  (1 + p_t)^|g| where g < 0 (inverse focal)

g is the gamma of the bin that contains p_t, the probability of the true class. Initially the 15 bins have equal
width and every gamma is 1. After each epoch the bins become the equal-mass bins of the validation confidence, and with
gap_b the mean confidence minus the accuracy of bin b (0 if the bin is empty),

    g_b <- g_b exp(step gap_b) where g_b > 0, g_b exp(-step gap_b) elsewhere
    g_b <- -switch where 0 < g_b < switch, +switch where -switch < g_b <= 0;  then clipped to [gamma_min, gamma_max]

As in the official code, bin edges are computed from the confidence, and samples are assigned by p_t. Differences: the
mean over the batch instead of the sum; the bins are saved with the loss (the official code resets them when a run
resumes).
"""

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, complement, whole, within
from fedlas.metrics.bin_sums import bin_statistics, interpolated_edges
from fedlas.predictions import Predictions


class AdaFocal(AbstractLoss):
    """Focal loss whose gamma is adapted per confidence bin after each epoch, from validation calibration gaps."""

    name = "adafocal"
    citation = "Ghosh et al., AdaFocal: Calibration-aware Adaptive Focal Loss, NeurIPS 2022."
    learns_between_epochs = True
    needs_validation = True

    def __init__(
        self,
        *,
        bins: int = 15,
        gamma: float = 1.0,
        step: float = 1.0,
        gamma_min: float = -2.0,
        gamma_max: float = 20.0,
        switch: float = 0.2,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.bins = whole("bins", bins)
        self.step = at_least("step", step, 0)
        self.gamma_min, self.gamma_max = gamma_min, at_least("gamma_max", gamma_max, gamma_min)
        self.switch = at_least("switch", switch, 0)
        self.gammas: Tensor
        self.edges: Tensor
        self.gamma = within("gamma", gamma, self.gamma_min, self.gamma_max)
        self.register_buffer("gammas", torch.full((self.bins,), float(self.gamma), dtype=torch.float64))
        self.register_buffer("edges", torch.linspace(0, 1, self.bins + 1, dtype=torch.float64))

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.expected(batch, self._loss_of)}

    @torch.no_grad()
    def learn_from_epoch(self, validation: Predictions | None) -> None:
        """Update bins and gammas from the calibration on the validation set; all ranks must pass the same data."""
        assert validation is not None
        confidence, correct = validation.confidence, validation.correct
        edges = interpolated_edges(confidence, self.bins)
        statistics = bin_statistics(confidence, correct, edges)
        self.edges.copy_(edges)
        self.update(torch.where(statistics.counts > 0, statistics.confidence - statistics.accuracy, 0))

    @torch.no_grad()
    def update(self, gaps: Float[Tensor, " bins"]) -> None:
        """Update each gamma by the gap between confidence and accuracy in its bin."""
        g = self.gammas
        g = g * torch.exp(self.step * g.sign() * gaps.to(g))
        switched = self.switch * (1 - 2 * (g > 0).to(g))
        g = torch.where(g.abs() < self.switch, switched, g)
        self.gammas.copy_(g.clamp(self.gamma_min, self.gamma_max))

    def _loss_of(self, log_p: Tensor) -> Tensor:
        p = log_p.exp()
        inner = self.edges[1:-1].to(p.dtype)
        g = self.gammas.to(p.dtype)[torch.bucketize(p.detach(), inner, right=True)]
        return -log_p * torch.where(g > 0, complement(log_p), 1 + p) ** g.abs()
