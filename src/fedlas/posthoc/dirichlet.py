"""Dirichlet calibration: z' = W log p + b, with p the softmax of the logits (Kull et al., 2019).

The same map as matrix scaling, of log-probabilities rather than logits, with the same penalty: off the diagonal and on
the offsets ("ODIR" in the paper), and here also towards the best single temperature on the diagonal.
"""

from jaxtyping import Float
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples
from fedlas.posthoc.base.solvers import apply_affine, check_penalty, fit_affine


class Dirichlet(AbstractCalibrator):
    """Applies the affine map of log-probabilities that follows from Dirichlet-distributed predictions of each class.

    Args:
        penalty: strength of the regularisation towards temperature scaling.
    """

    name = "dirichlet"
    citation = "Kull et al., Beyond temperature scaling, NeurIPS 2019."

    def __init__(self, *, penalty: float = 1.0) -> None:
        self.penalty = check_penalty(penalty)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        return fit_affine(Samples(samples.logits.log_softmax(1), samples.labels), self.penalty, full_matrix=True)

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return apply_affine(logits.log_softmax(1), self.learned)
