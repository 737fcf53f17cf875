"""Multi-class difference of confidence and accuracy: L = base + beta (1/C) Σ_k |mean_i p_ik - mean_i y_ik|.

The base is cross-entropy or the focal loss (gamma 1 in the official scripts). The contribution of a sample is mean_k
sg[sign(gap_k)] (p_ik - y_ik): the mean of the contributions has the value and gradient of the penalty. The unused Huber
option of the official code is omitted.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, focal, one_of


class MDCA(AbstractLoss):
    """Cross-entropy or focal loss plus the distance of mean confidence and frequency of each class in the batch."""

    name = "mdca"
    citation = "Hebbalaguppe et al., A Stitch in Time Saves Nine: A Train-Time Regularizing Loss, CVPR 2022."

    def __init__(
        self,
        *,
        beta: float = 1.0,
        base: Literal["ce", "focal"] = "ce",
        gamma: float = 1.0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.beta = at_least("beta", beta, 0)
        self.base = one_of("base", base, ("ce", "focal"))
        self.gamma = at_least("gamma", gamma, 0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        probs = batch.log_probs.exp()
        classes = torch.arange(probs.shape[1], device=probs.device)
        labels = batch.labels if batch.soft else (classes == batch.labels.unsqueeze(1)).to(probs.dtype)
        excess = probs - labels
        sign = torch.sign(batch.total(excess.detach()))
        base = self.cross_entropy(batch) if self.base == "ce" else self.expected(batch, self._focal)
        return {"classification": base, "difference": self.beta * (sign * excess).mean(1)}

    def _focal(self, log_p: Tensor) -> Tensor:
        return focal(log_p, self.gamma)
