"""Ensemble temperature scaling: p' = w1 softmax(z / T) + w2 softmax(z) + w3 / C (Zhang et al., 2020).

T is that of temperature scaling; the weights are non-negative, sum to one and minimise the negative log-likelihood,
which is convex in them. They are fitted by expectation maximisation, which never increases the loss.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples, check_floor, learned_like, log_probs_of
from fedlas.posthoc.base.solvers import best_inverse_temperature

ROUNDS = 5_000


class EnsembleTemperature(AbstractCalibrator):
    """Mixes the scaled prediction with the original and the uniform one.

    Args:
        floor: smallest probability that the calibrator returns.
    """

    name = "ensemble_temperature"
    citation = "Zhang et al., Mix-n-Match: Ensemble and Compositional Methods for Calibration, ICML 2020."
    keeps_order = True
    by_class = False

    def __init__(self, *, floor: float = 1e-30) -> None:
        self.floor = check_floor(floor)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        factor = best_inverse_temperature(samples, 1e-4, 1e3)
        parts = _components(samples.logits, factor)
        targets = samples.label_probs
        positive = targets > 0
        likelihoods = torch.stack([part[positive] for part in parts], dim=1).double()
        weights = _weights(likelihoods, targets[positive].double()).cpu()
        return {"weights": weights, "temperature": torch.tensor(1 / factor, dtype=torch.float64)}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        parts = _components(logits, 1 / float(self.learned["temperature"]))
        weights = learned_like(self.learned["weights"], logits)
        mixed = sum((weight * part for weight, part in zip(weights, parts, strict=True)), torch.zeros_like(logits))
        return log_probs_of(mixed, parts[1], self.floor)


def _components(logits: Tensor, factor: float) -> list[Tensor]:
    original = logits.softmax(1)
    return [(logits * factor).softmax(1), original, torch.full_like(original, 1 / logits.shape[1])]


def _weights(likelihoods: Float64[Tensor, "entries 3"], targets: Float64[Tensor, " entries"]) -> Float64[Tensor, "3"]:
    """Return the maximum-likelihood weights, given the probability of each label under each component."""
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, device=likelihoods.device)
    total = targets.sum()
    for _ in range(ROUNDS):
        mixed = (likelihoods @ weights).clamp_min(1e-300)
        responsibility = ((targets / mixed) @ likelihoods) / total
        weights = weights * responsibility
        weights = weights / weights.sum()
        # At the optimum every weight above zero has responsibility 1, and the others at most 1.
        if float((responsibility - 1).max()) < 1e-9:
            break
    return weights
