"""Ensemble temperature scaling: p' = w1 softmax(z / T) + w2 softmax(z) + w3 / C (Zhang et al., 2020).

T is the best single temperature; the weights are not negative, sum to one and minimise the negative log-likelihood,
which is convex in them. Found by expectation maximisation on three numbers a sample, which never makes it worse.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from fedlas.posthoc.base import (
    AbstractCalibrator,
    Samples,
    best_inverse_temperature,
    check_floor,
    learned_like,
    log_probs_of,
)

ROUNDS = 5_000


class EnsembleTemperature(AbstractCalibrator):
    """Mixes the scaled prediction with the original and the uniform one.

    Args:
        floor: smallest probability that it returns.
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
        shares = samples.shares
        wanted = shares > 0
        own = torch.stack([part[wanted] for part in parts], dim=1).double()
        weights = _weights(own, shares[wanted].double()).cpu()
        return {"weights": weights, "temperature": torch.tensor(1 / factor, dtype=torch.float64)}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        parts = _components(logits, 1 / float(self.learned["temperature"]))
        weights = learned_like(self.learned["weights"], logits)
        mixed = sum((weight * part for weight, part in zip(weights, parts, strict=True)), torch.zeros_like(logits))
        return log_probs_of(mixed, parts[1], self.floor)


def _components(logits: Tensor, factor: float) -> list[Tensor]:
    plain = logits.softmax(1)
    return [(logits * factor).softmax(1), plain, torch.full_like(plain, 1 / logits.shape[1])]


def _weights(own: Float64[Tensor, "entries 3"], share: Float64[Tensor, " entries"]) -> Float64[Tensor, "3"]:
    """Find the weights under which the labels are most likely; `own` holds their probability in each component."""
    weights = torch.full((3,), 1 / 3, dtype=torch.float64, device=own.device)
    total = share.sum()
    for _ in range(ROUNDS):
        mixed = (own @ weights).clamp_min(1e-300)
        responsibility = ((share / mixed) @ own) / total
        weights = weights * responsibility
        weights = weights / weights.sum()
        # At the optimum every weight above zero has responsibility 1, and the others at most 1.
        if float((responsibility - 1).max()) < 1e-9:
            break
    return weights
