"""Explicit confidence penalty: L = mean_i CE_i - alpha H_i, with H_i the entropy of p_i; alpha 0.1.

H_i is the *mean* over classes of -q log q, q = clip(p, 1e-10, 1 - 1e-10), as in the code of
the published results. The original paper uses the sum, which is C times larger: `class_reduction="sum"`.
"""

from typing import Literal, Unpack

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, one_of


class ECP(AbstractLoss):
    """Cross-entropy minus the entropy of the prediction (confidence penalty)."""

    name = "ecp"
    citation = "Pereyra et al., Regularizing Neural Networks by Penalizing Confident Output Distributions, ICLR-W 2017."

    def __init__(
        self, *, alpha: float = 0.1, class_reduction: Literal["mean", "sum"] = "mean", **common: Unpack[Common]
    ) -> None:
        super().__init__(**common)
        self.alpha = at_least("alpha", alpha, 0)
        self.class_reduction = one_of("class_reduction", class_reduction, ("mean", "sum"))

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        q = batch.log_probs.exp().clamp(1e-10, 1 - 1e-10)
        negentropy = q * q.log()
        negentropy = negentropy.mean(1) if self.class_reduction == "mean" else negentropy.sum(1)
        return {"classification": self.cross_entropy(batch), "entropy": self.alpha * negentropy}
