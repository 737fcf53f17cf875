"""Platt scaling of a binary classifier: z' = a z + b, with z the logit of class 1 over class 0 (Platt, 1999).

With `smooth` the targets are smoothed as in the paper: 1 becomes (n1 + 1) / (n1 + 2) and 0 becomes 1 / (n0 + 2), with
n1 and n0 samples of the two classes, so that the factor stays finite for separable samples.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.posthoc.base import AbstractCalibrator, Samples
from fedlas.posthoc.base.solvers import minimise


class Platt(AbstractCalibrator):
    """Applies an affine map to the logit of a binary classifier.

    Args:
        smooth: smooth the targets as in the paper.
    """

    name = "platt"
    citation = "Platt, Probabilistic outputs for support vector machines, 1999."

    def __init__(self, *, smooth: bool = True) -> None:
        self.smooth = bool(smooth)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        if samples.logits.shape[1] != 2:
            raise UserError(f"platt is for two classes, not {samples.logits.shape[1]}; use vector_scaling instead")
        score = (samples.logits[:, 1] - samples.logits[:, 0]).double()
        truth = samples.label_probs[:, 1].double()
        if self.smooth:
            positive = truth.sum()
            high, low = (positive + 1) / (positive + 2), 1 / (len(truth) - positive + 2)
            truth = truth * high + (1 - truth) * low
        size = score.abs().max().clamp_min(1e-30)  # makes the steps independent of the scale

        def objective(slope: Tensor, offset: Tensor) -> Tensor:
            return functional.binary_cross_entropy_with_logits(slope * (score / size) + offset, truth)

        zero = torch.zeros((), dtype=torch.float64, device=score.device)
        minimum = minimise(objective, {"slope": size.clone(), "offset": zero})
        return {"slope": minimum["slope"] / size, "offset": minimum["offset"]}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        score = (logits[:, 1] - logits[:, 0]) * float(self.learned["slope"]) + float(self.learned["offset"])
        return torch.stack([torch.zeros_like(score), score], dim=1)
