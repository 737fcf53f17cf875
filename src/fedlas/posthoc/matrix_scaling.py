"""Matrix scaling: z' = W z + b (Guo et al., 2017), regularised off the diagonal (Kull et al., 2019).

Minimises NLL + (penalty / n) (sum_k (d_k - 1/T)^2 s^2 + sum_k b_k^2 + C sum_jk M_jk^2 s^2), where W = diag(d) + M, T is
the best single temperature, s the standard deviation of the logits and C the number of classes. Without the penalty,
C^2 weights fit a few thousand samples by heart; `penalty=0` is the published method of 2017.
"""

from jaxtyping import Float
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples, apply_affine, check_penalty, nearest_affine


class MatrixScaling(AbstractCalibrator):
    """Lets the logits of all classes speak for each class.

    Args:
        penalty: strength of the pull towards plain temperature scaling.
    """

    name = "matrix_scaling"
    citation = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Kull et al., NeurIPS 2019."

    def __init__(self, *, penalty: float = 1.0) -> None:
        self.penalty = check_penalty(penalty)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        return nearest_affine(samples, self.penalty, mixes=True)

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return apply_affine(logits, self.learned)
