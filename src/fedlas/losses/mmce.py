"""Maximum mean calibration error, with the kernel k(a, b) = exp(-|a - b| / 0.4) between confidences.

With r_i the confidence, c_i the correctness (no gradient) and d_i = c_i - r_i:

    variant "m":  L = mean CE + lambda (1/n^2) Σ_ij d_i d_j k_ij
    variant "w":  L = mean CE + lambda sqrt(t + 1e-10),
                  t = mean_PP (1-r_i)(1-r_j) k_ij + mean_QQ r_i r_j k_ij - 2 mean_PQ (1-r_i) r_j k_ij

with P the correct and Q the incorrect samples; the penalty of "w" is 0 if one of them is empty. In the official code
"w" divides each mean by its number of pairs twice: `double_normalise=True`, the default; False is the estimator of the
paper. Paper: lambda 1 for "m", 2 for "w". Difference: t is clamped at 0, where the official square root is NaN. The
contribution of a sample to "m" is d_i mean_j d_j k_ij; to "w" it is the whole penalty.

The kernel is one-dimensional and exponential, so sorting and prefix sums compute all Σ_j w_j k_ij in O(n log n).
"""

from typing import Literal, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, one_of

WIDTH = 0.4


class MMCE(AbstractLoss):
    """Cross-entropy plus the maximum mean calibration error, a kernel distance of confidence and correctness."""

    name = "mmce"
    citation = (
        "Kumar et al., Trainable Calibration Measures for Neural Networks from Kernel Mean Embeddings, ICML 2018."
    )

    def __init__(
        self,
        *,
        lambda_: float = 1.0,
        variant: Literal["m", "w"] = "m",
        double_normalise: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.lambda_ = at_least("lambda_", lambda_, 0)
        self.variant = one_of("variant", variant, ("m", "w"))
        self.double_normalise = double_normalise

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        valid = batch.joined(batch.valid.to(batch.logits.dtype))
        confidence = batch.joined(batch.confidence())
        correct = batch.joined(batch.correct())
        penalty = self._mean if self.variant == "m" else self._weighted
        contribution = penalty(confidence, correct, valid)
        return {"classification": self.cross_entropy(batch), "kernel": self.lambda_ * batch.own(contribution)}

    def _mean(self, confidence: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
        difference = (correct - confidence) * valid
        kernel_sum = kernel_sums(confidence, difference.unsqueeze(1)).squeeze(1)
        return difference * kernel_sum / valid.sum().clamp_min(1)

    def _weighted(self, confidence: Tensor, correct: Tensor, valid: Tensor) -> Tensor:
        correct_weight, incorrect_weight = correct * valid, (1 - correct) * valid
        m, n = correct_weight.sum(), incorrect_weight.sum()
        both_occur = (m > 0) & (n > 0)
        m, n = torch.where(both_occur, m, 1), torch.where(both_occur, n, 1)
        # Divide before the product: with soft labels m can be so small that m * m underflows.
        p, q = correct_weight / m * (1 - confidence), incorrect_weight / n * confidence
        kernel_p, kernel_q = kernel_sums(confidence, torch.stack([p, q], 1)).unbind(1)
        t = self._normalised(p @ kernel_p, m * m) + self._normalised(q @ kernel_q, n * n)
        t = t - 2 * self._normalised(p @ kernel_q, m * n)
        return torch.where(both_occur, (t.clamp_min(0) + 1e-10).sqrt(), 0).expand(len(confidence))

    def _normalised(self, pairs: Tensor, number: Tensor) -> Tensor:
        return pairs / (number + 1e-5) if self.double_normalise else pairs


def kernel_sums(position: Float[Tensor, " n"], weights: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return Σ_j w_j exp(-|a_i - a_j| / 0.4) for every i, computed from sorted prefix sums.

    Samples at the same position have the kernel value 1 and, like |x| at 0, no gradient between them.
    """
    position, order = position.sort()
    weights = weights[order]
    rising = (position / WIDTH).exp().unsqueeze(1)
    first = torch.searchsorted(position.detach(), position.detach())
    last = torch.searchsorted(position.detach(), position.detach(), right=True)
    below = _prefix(weights * rising)[first] / rising
    above = _suffix(weights / rising)[last] * rising
    level = _prefix(weights)
    sums = below + (level[last] - level[first]) + above
    return torch.zeros_like(sums).index_copy(0, order, sums)


def _prefix(x: Tensor) -> Tensor:
    """Return the sum of the rows before each position; one more row than x."""
    return torch.cat([x.new_zeros(1, x.shape[1]), x.cumsum(0)])


def _suffix(x: Tensor) -> Tensor:
    """Return the sum of the rows from each position on; one more row than x."""
    return _prefix(x.flip(0)).flip(0)
