"""Isotonic regression: a non-decreasing map of the probability of each class (Zadrozny and Elkan, 2002).

The map of a class is the least-squares fit to the indicator of the class, with linear interpolation between its knots.
Rows are normalised afterwards, as one-vs-rest calibration requires.
"""

import numpy as np
import scipy
import torch
from jaxtyping import Float, Float64
from numpy.typing import NDArray
from torch import Tensor

from fedlas.posthoc.base import AbstractCalibrator, Samples, check_floor, log_probs_of


class Isotonic(AbstractCalibrator):
    """Applies a non-decreasing map to the probability of each class, then normalises.

    Args:
        floor: smallest probability that the calibrator returns.
    """

    name = "isotonic"
    citation = (
        "Zadrozny and Elkan, Transforming classifier scores into accurate multiclass probability estimates, KDD 2002."
    )

    def __init__(self, *, floor: float = 1e-7) -> None:
        self.floor = check_floor(floor)

    def learn(self, samples: Samples) -> dict[str, Tensor]:
        probs, targets = samples.logits.softmax(1).double().cpu().numpy(), samples.label_probs.double().cpu().numpy()
        curves = [_curve(probs[:, k], targets[:, k]) for k in range(probs.shape[1])]
        lengths = torch.tensor([len(x) for x, _ in curves])
        places, heights = (torch.from_numpy(np.concatenate(part)) for part in zip(*curves, strict=True))
        return {"places": places, "heights": heights, "lengths": lengths}

    def apply(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        probs = logits.softmax(1)
        lengths = self.learned["lengths"].tolist()
        places, heights = self.learned["places"].split(lengths), self.learned["heights"].split(lengths)
        columns = [_interpolate(probs[:, k], *curve) for k, curve in enumerate(zip(places, heights, strict=True))]
        return log_probs_of(torch.stack(columns, dim=1).to(probs), probs, self.floor)


def _curve(probs: NDArray[np.float64], targets: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the knots of the isotonic fit; equal probabilities are one point."""
    x, inverse, count = np.unique(probs, return_inverse=True, return_counts=True)
    mean = np.bincount(inverse, weights=targets) / count
    height = scipy.optimize.isotonic_regression(mean, weights=count).x
    # Interior points of a constant piece are redundant.
    step = np.diff(height) != 0
    corner = np.concatenate([[True], step]) | np.concatenate([step, [True]])
    return x[corner], height[corner]


def _interpolate(
    probs: Float[Tensor, " n"], corners: Float64[Tensor, " corners"], heights: Float64[Tensor, " corners"]
) -> Float64[Tensor, " n"]:
    """Interpolate linearly between the knots; constant outside."""
    corners, heights = corners.to(probs.device), heights.to(probs.device)
    at = probs.to(corners.dtype).contiguous()
    right = torch.searchsorted(corners, at).clamp(1, max(1, len(corners) - 1))
    right = right.clamp_max(len(corners) - 1)
    left = (right - 1).clamp_min(0)
    width = corners[right] - corners[left]
    fraction = ((at - corners[left]) / torch.where(width > 0, width, 1)).clamp(0, 1)
    return heights[left] + fraction * (heights[right] - heights[left])
