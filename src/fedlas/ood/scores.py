"""OOD scores: one number for each row of logits or features; a higher score means more likely out-of-distribution.

With logits z, p = softmax(z), h the features and T a temperature:

    max_probability      1 - max_j p_j                                (Hendrycks and Gimpel, 2017)
    entropy              -sum_j p_j log p_j, in nats
    max_logit            -max_j z_j                                   (Hendrycks et al., 2022)
    energy               -T log sum_j exp(z_j / T)                    (Liu et al., 2020)
    generalised_entropy  sum over the M largest p_j of (p_j (1 - p_j))^gamma   (GEN: Liu et al., 2023)
    feature_norm         -|h|_p: the norm is larger for in-distribution samples
    knn                  distance of h / |h|_2 to its k-th nearest among those of the training set (Sun et al., 2022)

In float32, p_max rounds to 1 when the largest logit leads by 17, so that all such samples would be tied. Therefore
max_probability, entropy and generalised_entropy are computed from the other classes: with d_j = z_j - max z and S the
sum of exp(d_j) over them, 1 - p_max = S / (1 + S), and the entropy is log(1 + S) - sum_j d_j exp(d_j) / (1 + S). This
avoids cancellation.

Scores are computed and returned in float64 where the device supports it, in blocks of rows: float32 would cause ties,
and TF32 settings inaccurate distances.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions
from fedlas.predictions.arrays import Array, as_floats, check_finite, two_columns, warn_about_probabilities
from fedlas.predictions.probabilities import NO_FLOAT64

AT_ONCE, AT_ONCE_ON_DEVICE = 2**18, 2**26  # logits in one block of rows
QUERIES, NEIGHBOURS = 1024, 8192  # size of the distance matrices of `knn`: 64 MiB of float64


class ShiftedLogits(NamedTuple):
    """The largest logit of each row, and the others minus the largest."""

    top: Float[Tensor, " n"]
    others: Float[Tensor, "n others"]


def max_probability(logits: Array) -> Float[Tensor, " n"]:
    """Return 1 minus the largest probability."""

    def of(shifted: ShiftedLogits) -> Tensor:
        others = shifted.others.exp().sum(1)
        return others / (1 + others)

    return _by_rows(of, logits)


def entropy(logits: Array) -> Float[Tensor, " n"]:
    """Return the entropy of the predicted distribution, in nats."""

    def of(shifted: ShiftedLogits) -> Tensor:
        weight = shifted.others.exp()
        others = weight.sum(1)
        # A difference of logits may be infinite; its term is zero.
        return others.log1p() - (shifted.others.clamp_min(torch.finfo(weight.dtype).min) * weight).sum(1) / (1 + others)

    return _by_rows(of, logits)


def max_logit(logits: Array) -> Float[Tensor, " n"]:
    """Return the negative of the largest logit."""
    return -_exact(_logits(logits).amax(1))


def energy(logits: Array, temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Return the free energy of the logits, which is high if all of them are small.

    Args:
        logits: one row per sample.
        temperature: a larger one gives smaller logits more weight.
    """
    if not 0 < temperature < math.inf:
        raise UserError(f"temperature is {temperature}; a positive number is needed")
    return _by_rows(
        lambda shifted: -(shifted.top + temperature * (shifted.others / temperature).exp().sum(1).log1p()), logits
    )


def generalised_entropy(logits: Array, gamma: float = 0.1, top: int = 100) -> Float[Tensor, " n"]:
    """Return the generalised entropy of the most likely classes, which is sensitive to small deviations from certainty.

    Args:
        logits: one row per sample.
        gamma: above 0 and at most 1; a smaller one gives unlikely classes more weight.
        top: number of most likely classes that are used; all if there are fewer.
    """
    if not 0 < gamma <= 1:
        raise UserError(f"gamma is {gamma}; it must be above 0 and at most 1")
    if top < 1:
        raise UserError(f"top is {top}; at least one class is needed")

    def of(shifted: ShiftedLogits) -> Tensor:
        lead = shifted.others.logsumexp(1)
        total = functional.softplus(lead)  # log(1 + S), which is minus the log of the largest probability
        log_probs = shifted.others.topk(min(top - 1, shifted.others.shape[1])).values - total[:, None]
        products = log_probs + (-log_probs.exp()).log1p()  # log p + log(1 - p); of the largest p it is lead - 2 total
        return (gamma * (lead - 2 * total)).exp() + (gamma * products).exp().sum(1)

    return _by_rows(of, logits)


def feature_norm(features: Array, p: float = 1.0) -> Float[Tensor, " n"]:
    """Return the negative norm of the features.

    Args:
        features: one row per sample, the input of the last linear layer.
        p: order of the norm; 1 is the one that FeDLaS uses.
    """
    if not p > 0:
        raise UserError(f"p is {p}; a positive number is needed")
    rows, scale = _scaled(_exact(_features(features, "features")))
    norm: Tensor = torch.linalg.vector_norm(rows, p, dim=1)
    return -norm * scale


def knn(features: Array, train_features: Array, k: int = 50) -> Float[Tensor, " n"]:
    """Return the distance of the normalised features to their k-th nearest neighbour in the training set.

    All distances are computed, in blocks of bounded size. Features that are all zero stay zero, at distance 1 from all
    others.

    Args:
        features: one row per sample.
        train_features: one row per training sample, or per sample of a subset.
        k: number of the neighbour.
    """
    rows, train = _features(features, "features"), _features(train_features, "train_features")
    if rows.shape[1] != train.shape[1]:
        raise UserError(f"features have {rows.shape[1]} columns, train_features have {train.shape[1]}")
    if not 1 <= k <= len(train):
        raise UserError(f"k is {k}; there are {len(train)} training features to choose the k-th nearest from")
    return torch.cat([_kth_distance(part, train, k) for part in rows.split(QUERIES)])


def score_of(predictions: AnyPredictions, name: str) -> Tensor:
    """Compute a score of predictions by its name; "l1_norm" and "l2_norm" are feature norms.

    Args:
        predictions: logits, or probabilities, which are used as they are.
        name: one of `score_names()`.
    """
    lack = missing(predictions, name)
    if lack is not None:
        raise UserError(f"{name} needs {lack}")
    if isinstance(predictions, TopLabelPredictions):
        return 1 - _exact(predictions.confidence)
    if name in OF_LOGITS:
        probs = predictions.given_probs
        return OF_LOGITS[name](predictions.logits) if probs is None else OF_PROBS[name](_exact(probs))
    assert predictions.features is not None
    return OF_FEATURES[name](predictions.features)


def missing(predictions: AnyPredictions, name: str) -> str | None:
    """Return what predictions lack for a score, or None."""
    if name not in score_names():
        raise UserError(
            f"there is no score {name!r} of predictions; there are {', '.join(score_names())}; detect_scores evaluates "
            "other scores, such as those of fedlas.ood.knn"
        )
    if name in OF_LOGITS:
        if not predictions.has_all_classes:
            lack = "the probabilities of all classes, and these predictions hold only the top confidence"
            return None if name == "max_probability" else lack
        if isinstance(predictions, Predictions) and predictions.given_probs is not None and name not in OF_PROBS:
            return "logits, and these predictions hold probabilities, from which the scale of logits is lost"
        return None
    return "features, and these predictions have none" if predictions.features is None else None


def score_names() -> tuple[str, ...]:
    """Return the names of all scores of predictions."""
    return (*OF_LOGITS, *OF_FEATURES)


def available_scores(models: Sequence[AnyPredictions]) -> list[str]:
    """Return the names of the scores that can be computed from each of several predictions."""
    return [name for name in score_names() if all(missing(data, name) is None for data in models)]


def _probs_generalised(probs: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
    likeliest = probs.topk(min(100, probs.shape[1])).values
    return (likeliest * (1 - likeliest)).clamp_min(0).pow(0.1).sum(1)


OF_LOGITS: Mapping[str, Callable[[Array], Tensor]] = {
    "max_probability": max_probability,
    "entropy": entropy,
    "max_logit": max_logit,
    "energy": energy,
    "generalised_entropy": generalised_entropy,
}
# The same scores of probabilities; logarithms would turn rounding errors into different scores.
OF_PROBS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max_probability": lambda probs: 1 - probs.amax(1),
    "entropy": lambda probs: torch.special.entr(probs).sum(1),
    "generalised_entropy": _probs_generalised,
}
OF_FEATURES: Mapping[str, Callable[[Array], Tensor]] = {"l1_norm": feature_norm, "l2_norm": partial(feature_norm, p=2)}
QUANTITIES: Mapping[str, str] = {
    "max_probability": "1 − max probability",
    "entropy": "entropy (nats)",
    "max_logit": "−max logit",
    "energy": "energy",
    "generalised_entropy": "generalised entropy",
    "l1_norm": "−L1 norm of the features",
    "l2_norm": "−L2 norm of the features",
}
"""The quantity that each score is, for axes of figures: higher means more likely OOD."""


def _by_rows(of: Callable[[ShiftedLogits], Tensor], logits: Array) -> Float[Tensor, " n"]:
    table = _logits(logits)
    size = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    parts = table.split(max(1, size // table.shape[1]))
    return torch.cat([of(_shift(_exact(part))) for part in parts])


def _shift(logits: Float[Tensor, "n classes"]) -> ShiftedLogits:
    top, index = logits.max(1, keepdim=True)
    # The last column replaces the largest one.
    others = logits.scatter(1, index, logits[:, -1:])[:, :-1] - top
    return ShiftedLogits(top[:, 0], others)


def _logits(logits: Array) -> Float[Tensor, "n classes"]:
    table = two_columns(as_floats(logits, "logits"), "logits")
    check_finite(table)
    warn_about_probabilities(table)
    return table


def _features(features: Array, name: str) -> Float[Tensor, "n width"]:
    table = as_floats(features, name)
    if table.ndim != 2 or not table.shape[1]:
        raise UserError(f"{name} have shape {tuple(table.shape)}; one row of features per sample is expected")
    check_finite(table, name)
    return table


def _exact(values: Tensor) -> Float[Tensor, "..."]:
    return values.float() if values.device.type in NO_FLOAT64 else values.double()


def _kth_distance(rows: Float[Tensor, "n width"], train: Float[Tensor, "m width"], k: int) -> Float[Tensor, " n"]:
    query = _directions(rows)
    best = query.new_empty(len(query), 0)
    for part in train.split(NEIGHBOURS):
        near = _directions(part.to(query.device))
        # |q - t|^2 - |q|^2, so that a zero row is treated like any other.
        table = torch.addmm(near.square().sum(1), query, near.T, alpha=-2)
        best = torch.cat([best, table], 1)
        best = best.topk(min(k, best.shape[1]), largest=False).values
    return (best.amax(1) + query.square().sum(1)).clamp_min(0).sqrt()


def _directions(rows: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
    exact, _ = _scaled(_exact(rows))
    return functional.normalize(exact, dim=1, eps=torch.finfo(exact.dtype).tiny)


def _scaled(rows: Float[Tensor, "n width"]) -> tuple[Float[Tensor, "n width"], Float[Tensor, " n"]]:
    """Divide each row by a power of two near its largest value, so that squares neither underflow nor overflow."""
    most = 1000 if rows.dtype == torch.float64 else 120
    scale = rows.abs().amax(1).log2().round().clamp(-most, most).exp2()
    return rows / scale[:, None], scale
