"""Matrix scaling: z' = W z + b (Guo et al., 2017), regularised off the diagonal (Kull et al., 2019).

Minimises NLL + (penalty / n) (sum_k (d_k - 1/T)^2 s^2 + sum_k b_k^2 + C sum_jk M_jk^2 s^2), where W = diag(d) + M, T is
the best single temperature, s the standard deviation of the logits and C the number of classes. Without the penalty,
C^2 weights overfit a few thousand samples; `penalty=0` is the method of Guo et al.
"""

from jaxtyping import Float
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples
from fedlas.posthoc.base.solvers import apply_affine, check_penalty, fit_affine


class MatrixScaling(AbstractCalibrator):
    """Multiplies the logits by a full matrix and adds an offset.

    Args:
        penalty: strength of the regularisation towards temperature scaling.
    """

    name = "matrix_scaling"
    citation = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017; Kull et al., NeurIPS 2019."

    def __init__(self, *, penalty: float = 1.0) -> None:
        self.penalty = check_penalty(penalty)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        return fit_affine(samples, self.penalty, full_matrix=True)

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return apply_affine(logits, self.learned)
