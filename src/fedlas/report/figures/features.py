"""Feature norms and rank statistics, shared by the figures about feature norms."""

import torch
from jaxtyping import Float64
from scipy.stats import rankdata
from torch import Tensor

from fedlas.errors import UserError
from fedlas.predictions import Predictions


def require_features(predictions: Predictions) -> Float64[Tensor, "n width"]:
    """Return the features in double precision; raise if there are none."""
    if predictions.features is None:
        raise UserError("these predictions have no features, which this figure needs")
    return predictions.features.double().cpu()


def feature_norms(predictions: Predictions) -> Float64[Tensor, " n"]:
    """Return the L1 norm of the features of each sample."""
    norms: Tensor = torch.linalg.vector_norm(require_features(predictions), 1, 1)
    return norms


def average_ranks(values: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return the rank of each value, starting at 1; tied values get their mean rank."""
    return torch.from_numpy(rankdata(values))


def correlation(x: Float64[Tensor, " n"], y: Float64[Tensor, " n"]) -> float:
    """Return Pearson's correlation coefficient."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])
