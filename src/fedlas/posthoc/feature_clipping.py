"""Feature clipping: clamp the features to [-c, c] and let the head make the logits again (Tao et al., 2025).

Very large features make very sure predictions; the threshold c takes the largest ones down. It needs the features and
the head's weights, so it works on `Predictions` and stands outside of the catalogue of calibrators, which see logits
alone.

c is chosen among quantiles of the features' absolute values to minimise the negative log-likelihood. With
`objective="ece"` it is chosen as published: c = 0.01, 0.02, ..., 20.00 with the smallest ECE among those that keep at
least 99 % of the accuracy.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.calibration_error import ece
from fedlas.posthoc.base import mean_nll, with_logits
from fedlas.predictions import Array, Predictions, as_floats, check_rows

CANDIDATES = 200
PUBLISHED = tuple(round(0.01 * step, 2) for step in range(1, 2001))
KEPT_ACCURACY = 0.99


class FeatureClipping:
    """Clamps the features before the last layer.

    Args:
        weight: the last layer's weight, of shape (classes, width).
        bias: its bias, if it has one.
        objective: what the threshold minimises.
    """

    def __init__(self, weight: Array, bias: Array | None = None, *, objective: Literal["nll", "ece"] = "nll") -> None:
        if objective not in {"nll", "ece"}:
            raise UserError(f'objective is {objective!r}; expected "nll" or "ece"')
        self.weight = as_floats(weight, "weight")
        if self.weight.ndim != 2:
            raise UserError(f"weight has shape {tuple(self.weight.shape)}; (classes, width) is expected")
        self.bias = None if bias is None else as_floats(bias, "bias")
        self.objective = objective
        self.threshold: float | None = None

    def fit(self, predictions: Predictions) -> "FeatureClipping":
        """Choose the threshold; leaving the features alone is always among the choices."""
        features = self._features(predictions)
        plain = self._logits(features, math.inf)
        check_rows("logits", plain, _agree(plain, predictions.logits), "is not what this head makes of the features")
        if self.objective == "ece":
            tried = self._published(predictions, features)
        else:
            largest = features.abs().flatten().double().sort().values
            place = torch.linspace(0, 1, CANDIDATES + 1, dtype=torch.float64)[1:] ** 0.25  # denser near the largest
            choices = largest[(place * (len(largest) - 1)).long().to(largest.device)].unique().tolist()
            tried = {c: mean_nll(self._logits(features, c), predictions.labels) for c in [*choices, math.inf]}
        self.threshold = min(tried, key=lambda c: (tried[c], -c))
        return self

    def transform(self, predictions: Predictions) -> Predictions:
        """Make the logits again from clamped features."""
        if self.threshold is None:
            raise RuntimeError("feature clipping is not fitted yet; call fit(predictions) first")
        return with_logits(predictions, self._logits(self._features(predictions), self.threshold))

    def __repr__(self) -> str:
        classes, width = self.weight.shape
        state = "not fitted" if self.threshold is None else f"threshold {self.threshold:.6g}"
        return f"<FeatureClipping({width} features, {classes} classes, objective={self.objective!r}), {state}>"

    def _published(self, predictions: Predictions, features: Float[Tensor, "n width"]) -> dict[float, float]:
        enough = KEPT_ACCURACY * float(predictions.correct.double().mean())
        tried = {math.inf: float(ece(predictions))}
        for c in PUBLISHED:
            clipped = with_logits(predictions, self._logits(features, c))
            if float(clipped.correct.double().mean()) > enough:
                tried[c] = float(ece(clipped, compat="official"))
        return tried

    def _features(self, predictions: Predictions) -> Float[Tensor, "n width"]:
        if predictions.features is None:
            raise UserError("these predictions have no features; feature clipping needs the input of the last layer")
        if predictions.features.shape[1] != self.weight.shape[1]:
            raise UserError(f"features are {predictions.features.shape[1]} wide, the head takes {self.weight.shape[1]}")
        return predictions.features

    def _logits(self, features: Float[Tensor, "n width"], threshold: float) -> Float[Tensor, "n classes"]:
        kind = torch.promote_types(features.dtype, torch.float32)
        clamped = features.to(kind).clamp(-threshold, threshold)
        weight = self.weight.to(clamped)
        made = clamped @ weight.T
        return made if self.bias is None else made + self.bias.to(clamped)


def _agree(made: Float[Tensor, "n classes"], given: Float[Tensor, "n classes"]) -> Tensor:
    # Half-precision training leaves logits that differ in the second digit; another layer's weights give other numbers.
    size = given.float().abs().amax(1).clamp_min(1)
    return (made - given.to(made)).abs().amax(1) <= 0.05 * size
