"""Vector scaling: z' = a * z + b, with one factor and one offset for each class (Guo et al., 2017).

Minimises NLL + (penalty / n) (sum_k (a_k - 1/T)^2 s^2 + sum_k b_k^2), with T the best single temperature and s the
standard deviation of the logits. The penalty matters only for classes with few samples or none; `penalty=0` is the
method of the paper.
"""

from jaxtyping import Float
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples, learned_like
from fedlas.posthoc.base.solvers import check_penalty, fit_affine


class VectorScaling(AbstractCalibrator):
    """Scales and shifts the logit of each class.

    Args:
        penalty: strength of the regularisation towards temperature scaling.
    """

    name = "vector_scaling"
    citation = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017."

    def __init__(self, *, penalty: float = 1.0) -> None:
        self.penalty = check_penalty(penalty)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        return fit_affine(samples, self.penalty, full_matrix=False)

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return logits * learned_like(self.learned["scale"], logits) + learned_like(self.learned["offset"], logits)
