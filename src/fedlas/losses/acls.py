"""Adaptive and conditional label smoothing.

With M_i the largest logit of a sample and sg the stopped gradient,

    L = mean_i CE_i + lambda (lambda_pos pos_i + lambda_neg neg_i)
    pos_i = Σ over entries equal to M_i of max(0, M_i - m)^2
    neg_i = 1/(C-1) Σ over the other entries of max(0, sg[M_i] - s_ik - m)^2

As in the official code, the regulariser does not use the label, and `pos` acts on the raw logit: adding a constant to
all logits changes the loss. Paper: lambda 0.1, lambda_pos 1, lambda_neg 0.1, m 10 on Tiny-ImageNet, 6 on CIFAR.
"""

from typing import Unpack

import torch
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least


class ACLS(AbstractLoss):
    """Cross-entropy plus squared penalties on a large maximum logit and on logits far below the maximum."""

    name = "acls"
    citation = "Park et al., ACLS: Adaptive and Conditional Label Smoothing for Network Calibration, ICCV 2023."

    def __init__(
        self,
        *,
        lambda_: float = 0.1,
        margin: float = 6.0,
        lambda_pos: float = 1.0,
        lambda_neg: float = 0.1,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.lambda_ = at_least("lambda_", lambda_, 0)
        self.margin = at_least("margin", margin, 0)
        self.lambda_pos = at_least("lambda_pos", lambda_pos, 0)
        self.lambda_neg = at_least("lambda_neg", lambda_neg, 0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        largest = batch.logits.amax(1, keepdim=True).detach()
        is_largest = batch.logits == largest
        pos = torch.where(is_largest, (batch.logits - self.margin).clamp_min(0) ** 2, 0).sum(1)
        neg = torch.where(is_largest, 0, (largest - batch.logits - self.margin).clamp_min(0) ** 2).sum(1)
        neg = neg / max(batch.logits.shape[1] - 1, 1)
        return {
            "classification": self.cross_entropy(batch),
            "positive": self.lambda_ * self.lambda_pos * pos,
            "negative": self.lambda_ * self.lambda_neg * neg,
        }
