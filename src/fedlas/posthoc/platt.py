"""Platt scaling of a binary classifier: z' = a z + b, with z the logit of class 1 over class 0 (Platt, 1999).

With `smooth` the labels are pulled in a little, as published: 1 becomes (n1 + 1) / (n1 + 2) and 0 becomes 1 / (n0 + 2),
with n1 and n0 samples of the two classes, so that separable samples do not make the factor infinite.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.posthoc.base import AbstractCalibrator, Samples, minimise


class Platt(AbstractCalibrator):
    """Scales and shifts the one logit of a binary classifier.

    Args:
        smooth: pull labels in as published; otherwise take them as they are.
    """

    name = "platt"
    citation = "Platt, Probabilistic outputs for support vector machines, 1999."

    def __init__(self, *, smooth: bool = True) -> None:
        self.smooth = bool(smooth)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        if samples.logits.shape[1] != 2:
            raise UserError(f"platt is for two classes, not {samples.logits.shape[1]}; take vector_scaling instead")
        score = (samples.logits[:, 1] - samples.logits[:, 0]).double()
        truth = samples.shares[:, 1].double()
        if self.smooth:
            positive = truth.sum()
            high, low = (positive + 1) / (positive + 2), 1 / (len(truth) - positive + 2)
            truth = truth * high + (1 - truth) * low
        size = score.abs().max().clamp_min(1e-30)  # a unit of about one, so that the method's steps fit any scale

        def objective(slope: Tensor, offset: Tensor) -> Tensor:
            return functional.binary_cross_entropy_with_logits(slope * (score / size) + offset, truth)

        zero = torch.zeros((), dtype=torch.float64, device=score.device)
        found = minimise(objective, {"slope": size.clone(), "offset": zero})
        return {"slope": found["slope"] / size, "offset": found["offset"]}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        score = (logits[:, 1] - logits[:, 0]) * float(self.learned["slope"]) + float(self.learned["offset"])
        return torch.stack([torch.zeros_like(score), score], dim=1)
