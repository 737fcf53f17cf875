"""Label smoothing: L = mean_i (1 - alpha) CE_i + alpha E_i, with E_i = -(1/C) Σ_k log p_ik.

The true class keeps 1 - alpha + alpha/C, as in torch and in the FeDLaS paper; some code distributes alpha over the
other classes only. Paper: alpha 0.05, and 0.1 on CIFAR-100.
"""

from typing import Unpack

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, within


class LS(AbstractLoss):
    """Label smoothing with the same alpha for all samples."""

    name = "ls"
    citation = "Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016."

    def __init__(self, *, alpha: float = 0.05, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.alpha = within("alpha", alpha, 0, 1)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.smoothed(batch, self.alpha)}
