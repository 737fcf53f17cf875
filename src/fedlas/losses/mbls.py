"""Margin-based label smoothing: L = mean_i CE_i + lambda (1/C) Σ_k max(0, max_l s_il - s_ik - m).

The largest logit is not detached, and its own entry (0) is part of the mean over classes. All published values of
lambda refer to this mean, although the papers write a sum. Paper: lambda 0.1 with m 6 on CIFAR; m 10 on Tiny-ImageNet
and the fine-grained sets, lambda 0.1 in the original code and 0.05 in the FeDLaS paper.
"""

from typing import Unpack

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least


class MbLS(AbstractLoss):
    """Margin-based label smoothing: a penalty on logits more than a margin below the largest one."""

    name = "mbls"
    citation = (
        "Liu et al., The Devil is in the Margin: Margin-based Label Smoothing for Network Calibration, CVPR 2022."
    )

    def __init__(self, *, lambda_: float = 0.1, margin: float = 6.0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.lambda_ = at_least("lambda_", lambda_, 0)
        self.margin = at_least("margin", margin, 0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        excess = batch.excess(self.margin).mean(1)
        return {"classification": self.cross_entropy(batch), "margin": self.lambda_ * excess}
