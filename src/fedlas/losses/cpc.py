"""Calibration through pairwise constraints.

    L    = mean CE + lambda_bdc BDC + lambda_bec BEC
    BDC  = mean_i -1/(C-1) Σ_{j≠y} log σ(s_iy - s_ij)
    BEC  = mean_i -1/((C-1)(C-2)) Σ_{j≠y} Σ_{k≠y} 1/2 log σ(s_ij - s_ik + 1e-10)

The pairs of BEC are ordered and include the constant diagonal j = k, as in the only public code. BEC is 0 for two
classes, where that code divides by zero. Paper: lambda_bdc 0.1, lambda_bec 1.

Value and gradient are summed over blocks of pairs, so that memory is O(N C); a compiled graph uses one fused pass.
"""

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least

PAIRS_AT_ONCE = 1 << 22


class CPC(AbstractLoss):
    """Cross-entropy plus pairwise constraints: the true logit above all others, the other logits equal."""

    name = "cpc"
    citation = "Cheng & Vasconcelos, Calibrating Deep Neural Networks by Pairwise Constraints, CVPR 2022."
    takes_soft_labels = False

    def __init__(self, *, lambda_bdc: float = 0.1, lambda_bec: float = 1.0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.lambda_bdc = at_least("lambda_bdc", lambda_bdc, 0)
        self.lambda_bec = at_least("lambda_bec", lambda_bec, 0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        classes = batch.logits.shape[1]
        other = torch.arange(classes, device=batch.logits.device) != batch.labels.unsqueeze(1)
        true = batch.logits.gather(1, batch.labels.unsqueeze(1))
        bdc = -torch.where(other, functional.logsigmoid(true - batch.logits), 0).sum(1) / max(classes - 1, 1)
        terms = {"classification": self.cross_entropy(batch), "discrimination": self.lambda_bdc * bdc}
        if classes > 2:
            bec = -_PairSum.apply(batch.logits, other)[0] / ((classes - 1) * (classes - 2))
            terms["exclusion"] = self.lambda_bec * bec
        return terms


class _PairSum(torch.autograd.Function):
    """Σ_{j,k} 1/2 log σ(s_j - s_k + 1e-10) over the selected classes; the forward pass computes the gradient too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Float[Tensor, "n c"], selected: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, "n c"]]:
        n, classes = logits.shape
        at_once = classes if torch.compiler.is_compiling() else max(1, PAIRS_AT_ONCE // max(n * classes, 1))
        mask = selected.to(logits.dtype)
        value, slopes = logits.new_zeros(n), []
        for start in range(0, classes, at_once):
            block = slice(start, start + at_once)
            difference = logits[:, block, None] - logits[:, None, :]
            value = value + ((functional.logsigmoid(difference + 1e-10) * mask[:, None]).sum(2) * mask[:, block]).sum(1)
            # d/ds_j of log σ(s_j - s_k) + log σ(s_k - s_j), each pair being counted in both orders
            slope = torch.sigmoid(-difference - 1e-10) - torch.sigmoid(difference - 1e-10)
            slopes.append((slope * mask[:, None]).sum(2) * mask[:, block])
        return value / 2, torch.cat(slopes, 1) / 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad.unsqueeze(1) * slope, None
