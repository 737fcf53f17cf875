"""What figures about feature norms share: the norms, and how closely two numbers follow each other."""

import torch
from jaxtyping import Float64
from torch import Tensor

from fedlas.errors import UserError
from fedlas.predictions import Predictions


def features_of(predictions: Predictions) -> Float64[Tensor, "n width"]:
    """Take the features, in double precision."""
    if predictions.features is None:
        raise UserError("these predictions have no features, which this figure is about")
    return predictions.features.double().cpu()


def norms_of(predictions: Predictions) -> Float64[Tensor, " n"]:
    """Compute the L1 norm of the features of each sample."""
    found: Tensor = torch.linalg.vector_norm(features_of(predictions), 1, 1)
    return found


def places_by_size(values: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    shared: Tensor = counts.cumsum(0) - (counts - 1).double() / 2
    return shared[place]


def correlation(one: Float64[Tensor, " n"], other: Float64[Tensor, " n"]) -> float:
    """Compute Pearson's correlation."""
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])
