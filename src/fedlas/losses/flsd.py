"""Sample-dependent focal loss, FLSD-53: the focal loss with gamma_i = 5 where p_t < 0.2 and 3 elsewhere.

gamma_i has no gradient. Differences from the official code: gamma_i is selected by one vectorised operation instead of
a Python loop; the mean over the batch instead of the sum.
"""

import torch
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, focal


class FLSD(AbstractLoss):
    """Focal loss with a larger gamma for samples whose true class has a probability below 0.2."""

    name = "flsd"
    citation = "Mukhoti et al., Calibrating Deep Neural Networks using Focal Loss, NeurIPS 2020."

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.expected(batch, _loss_of)}


def _loss_of(log_p: Tensor) -> Tensor:
    gamma = torch.where(log_p.detach().exp() < 0.2, 5.0, 3.0).to(log_p.dtype)
    return focal(log_p, gamma)
