"""Focal loss: L = mean_i (1 - p_t)^gamma CE_i, with p_t the probability of the true class; gamma 3.

The gradient flows through (1 - p_t). Differences from the official code of 2020: the mean over the batch instead of
the sum, and a gradient that is finite at p_t = 1 for every gamma, also below 1.
"""

from typing import Unpack

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, focal


class Focal(AbstractLoss):
    """Cross-entropy that down-weights samples whose true class already has a high probability."""

    name = "focal"
    citation = "Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020."

    def __init__(self, *, gamma: float = 3.0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.gamma = at_least("gamma", gamma, 0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.expected(batch, lambda log_p: focal(log_p, self.gamma))}
