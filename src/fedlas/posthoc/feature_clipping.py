"""Feature clipping: clamp the features to [-c, c] and recompute the logits (Tao et al., 2025).

Clamping reduces over-confidence that is due to very large features. It needs the features and the weights of the last
layer, so it works on `Predictions` and is not one of the calibrators of the catalogue, which take logits only.

c is chosen among quantiles of the features' absolute values to minimise the negative log-likelihood. The paper takes
the value from 0.01, 0.02, ..., 20.00 with the smallest ECE among those that retain more than 99 % of the accuracy.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas.errors import UserError
from fedlas.posthoc.base import mean_nll, with_logits
from fedlas.predictions import Predictions
from fedlas.predictions.arrays import Array, as_floats, check_rows, float32_or_better

CANDIDATES = 200


class FeatureClipping:
    """Clamps the features before the last layer.

    Args:
        weight: the last layer's weight, of shape (classes, width).
        bias: bias of the last layer, if any.
    """

    def __init__(self, weight: Array, bias: Array | None = None) -> None:
        self.weight = as_floats(weight, "weight")
        if self.weight.ndim != 2:
            raise UserError(f"weight has shape {tuple(self.weight.shape)}; (classes, width) is expected")
        self.bias = None if bias is None else as_floats(bias, "bias")
        self.threshold: float | None = None

    def fit(self, predictions: Predictions) -> "FeatureClipping":
        """Choose the threshold; infinity (no clipping) is always a candidate."""
        features = self._features(predictions)
        unclipped = self._logits(features, math.inf)
        check_rows("logits", unclipped, _agree(unclipped, predictions.logits), "differs from the output of this layer")
        largest = features.abs().flatten().double().sort().values
        quantile = torch.linspace(0, 1, CANDIDATES + 1, dtype=torch.float64)[1:] ** 0.25  # denser near the largest
        choices = largest[(quantile * (len(largest) - 1)).long().to(largest.device)].unique().tolist()
        losses = {c: mean_nll(self._logits(features, c), predictions.labels) for c in [*choices, math.inf]}
        self.threshold = min(losses, key=lambda c: (losses[c], -c))
        return self

    def transform(self, predictions: Predictions) -> Predictions:
        """Recompute the logits from clamped features."""
        if self.threshold is None:
            raise RuntimeError("feature clipping is not fitted yet; call fit(predictions) first")
        return with_logits(predictions, self._logits(self._features(predictions), self.threshold))

    def __repr__(self) -> str:
        classes, width = self.weight.shape
        state = "not fitted" if self.threshold is None else f"threshold {self.threshold:.6g}"
        return f"<FeatureClipping({width} features, {classes} classes), {state}>"

    def _features(self, predictions: Predictions) -> Float[Tensor, "n width"]:
        if predictions.features is None:
            raise UserError("these predictions have no features; feature clipping needs the input of the last layer")
        if predictions.features.shape[1] != self.weight.shape[1]:
            raise UserError(f"features have {predictions.features.shape[1]} columns, weight has {self.weight.shape[1]}")
        return predictions.features

    def _logits(self, features: Float[Tensor, "n width"], threshold: float) -> Float[Tensor, "n classes"]:
        clamped = float32_or_better(features).clamp(-threshold, threshold)
        weight = self.weight.to(clamped)
        logits = clamped @ weight.T
        return logits if self.bias is None else logits + self.bias.to(clamped)


def _agree(computed: Float[Tensor, "n classes"], expected: Float[Tensor, "n classes"]) -> Tensor:
    # After half-precision training, logits may differ in the second digit; with wrong weights, they differ more.
    size = expected.float().abs().amax(1).clamp_min(1)
    return (computed - expected.to(computed)).abs().amax(1) <= 0.05 * size
