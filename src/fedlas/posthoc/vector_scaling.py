"""Vector scaling: z' = a * z + b, with one factor and one offset for each class (Guo et al., 2017).

Minimises NLL + (penalty / n) (sum_k (a_k - 1/T)^2 s^2 + sum_k b_k^2), with T the best single temperature and s the
standard deviation of the logits. The pull towards temperature scaling matters only where samples are few, such as for a
class without any; `penalty=0` is the published method.
"""

from jaxtyping import Float
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples, check_penalty, learned_like, nearest_affine


class VectorScaling(AbstractCalibrator):
    """Scales and shifts the logit of each class.

    Args:
        penalty: strength of the pull towards plain temperature scaling.
    """

    name = "vector_scaling"
    citation = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017."

    def __init__(self, *, penalty: float = 1.0) -> None:
        self.penalty = check_penalty(penalty)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        return nearest_affine(samples, self.penalty, mixes=False)

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return logits * learned_like(self.learned["scale"], logits) + learned_like(self.learned["offset"], logits)
