"""How foreign a sample looks: one number for each row of logits or features, higher for samples less like the known.

With logits z, p = softmax(z), h the features and T a temperature:

    max_probability      1 - max_j p_j                                (Hendrycks and Gimpel, 2017)
    entropy              -sum_j p_j log p_j, in nats
    max_logit            -max_j z_j                                   (Hendrycks et al., 2022)
    energy               -T log sum_j exp(z_j / T)                    (Liu et al., 2020)
    generalised_entropy  sum over the M largest p_j of (p_j (1 - p_j))^gamma   (GEN: Liu et al., 2023)
    feature_norm         -|h|_p: known samples have the longer features
    knn                  distance of h / |h|_2 to its k-th nearest among those of the training set (Sun et al., 2022)

A network that is sure has p_max = 1 after rounding, in float32 from a lead of 17 on, and all such samples would tie. So
the first two and the fifth start from what is left beside the maximum: with d_j = z_j - max z and S the sum of exp(d_j)
over the other classes, 1 - p_max = S / (1 + S) and the entropy is log(1 + S) - sum_j d_j exp(d_j) / (1 + S). Nothing
cancels there, whatever the logits.

Scores are computed in float64 where the device has it, a part of the rows at a time, and come as such: float32 makes
ties of its own, and TF32 settings would spoil distances.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError
from fedlas.predictions import AnyPredictions, Array, TopLabelPredictions, as_floats, check_rows, two_columns

NO_FLOAT64 = {"mps"}
AT_ONCE, AT_ONCE_ON_DEVICE = 2**18, 2**26  # logits that are worked on at a time
QUERIES, NEIGHBOURS = 1024, 8192  # rows of the tables of distances that `knn` holds at a time: 64 MiB of float64


class Rest(NamedTuple):
    """The largest logit of each row, and how far the others lie below it."""

    top: Float[Tensor, " n"]
    others: Float[Tensor, "n others"]


def max_probability(logits: Array) -> Float[Tensor, " n"]:
    """Say how much probability is left for all classes but the likeliest one: 1 minus the largest probability."""

    def of(rest: Rest) -> Tensor:
        others = rest.others.exp().sum(1)
        return others / (1 + others)

    return _by_rows(of, logits)


def entropy(logits: Array) -> Float[Tensor, " n"]:
    """Find the entropy of the predicted distribution, in nats."""

    def of(rest: Rest) -> Tensor:
        weight = rest.others.exp()
        others = weight.sum(1)
        # Logits may lie infinitely far apart; what has no weight adds nothing.
        return others.log1p() - (rest.others.clamp_min(torch.finfo(weight.dtype).min) * weight).sum(1) / (1 + others)

    return _by_rows(of, logits)


def max_logit(logits: Array) -> Float[Tensor, " n"]:
    """Take the largest logit with its sign turned, so that a small one looks foreign."""
    return -_exact(_logits(logits).amax(1))


def energy(logits: Array, temperature: float = 1.0) -> Float[Tensor, " n"]:
    """Find the free energy of the logits, which is high where all of them are small.

    Args:
        logits: one row per sample.
        temperature: the larger it is, the more the lesser logits count.
    """
    if not 0 < temperature < math.inf:
        raise UserError(f"temperature is {temperature}; a positive number is needed")
    return _by_rows(lambda rest: -(rest.top + temperature * (rest.others / temperature).exp().sum(1).log1p()), logits)


def generalised_entropy(logits: Array, gamma: float = 0.1, top: int = 100) -> Float[Tensor, " n"]:
    """Find the generalised entropy of the likeliest classes, which sees small deviations from a sure answer.

    Args:
        logits: one row per sample.
        gamma: above 0 and up to 1; the smaller it is, the more the unlikely classes count.
        top: how many of the likeliest classes count; all of them where there are fewer.
    """
    if not 0 < gamma <= 1:
        raise UserError(f"gamma is {gamma}; a number above 0 and up to 1 is needed")
    if top < 1:
        raise UserError(f"top is {top}; at least one class is needed")

    def of(rest: Rest) -> Tensor:
        lead = rest.others.logsumexp(1)
        total = functional.softplus(lead)  # log(1 + S), which is minus the log of the largest probability
        log_probs = rest.others.topk(min(top - 1, rest.others.shape[1])).values - total[:, None]
        products = log_probs + (-log_probs.exp()).log1p()  # log p + log(1 - p); of the largest p it is lead - 2 total
        return (gamma * (lead - 2 * total)).exp() + (gamma * products).exp().sum(1)

    return _by_rows(of, logits)


def feature_norm(features: Array, p: float = 1.0) -> Float[Tensor, " n"]:
    """Take the length of the features with its sign turned, so that short ones look foreign.

    Args:
        features: one row per sample, the input of the last linear layer.
        p: 1 adds up absolute values, which is what FeDLaS looks at; 2 is the Euclidean length, `inf` the maximum.
    """
    if not p > 0:
        raise UserError(f"p is {p}; a positive number is needed")
    rows, scale = _scaled(_exact(_features(features, "features")))
    norm: Tensor = torch.linalg.vector_norm(rows, p, dim=1)
    return -norm * scale


def knn(features: Array, train_features: Array, k: int = 50) -> Float[Tensor, " n"]:
    """Measure how far the direction of the features is from its k-th nearest neighbour in the training set.

    All distances are computed, a table of bounded size at a time. Features that are all zero have no direction; they
    stay zero, at distance 1 from every other.

    Args:
        features: one row per sample.
        train_features: one row per training sample, or per sample of a part of them.
        k: which neighbour counts.
    """
    rows, known = _features(features, "features"), _features(train_features, "train_features")
    if rows.shape[1] != known.shape[1]:
        raise UserError(f"features have {rows.shape[1]} columns, train_features have {known.shape[1]}")
    if not 1 <= k <= len(known):
        raise UserError(f"k is {k}; there are {len(known)} training features to choose the k-th nearest from")
    return torch.cat([_kth_distance(part, known, k) for part in rows.split(QUERIES)])


def score_of(predictions: AnyPredictions, name: str, train_features: Array | None = None, k: int = 50) -> Tensor:
    """Find a score of predictions by its name; "l1_norm" and "l2_norm" are feature norms.

    Args:
        predictions: what a model said about some samples; probabilities are used exactly as they were given.
        name: one of `score_names()`.
        train_features: features of the training set, for "knn".
        k: which neighbour counts, for "knn".
    """
    lack = missing(predictions, name, train_features)
    if lack is not None:
        raise UserError(f"{name} needs {lack}")
    if isinstance(predictions, TopLabelPredictions):
        return 1 - _exact(predictions.confidence)
    if name in OF_LOGITS:
        given = predictions.given_probs
        return OF_LOGITS[name](predictions.logits) if given is None else OF_PROBS[name](_exact(given))
    features = predictions.features
    assert features is not None
    if name in OF_FEATURES:
        return OF_FEATURES[name](features)
    assert train_features is not None
    return knn(features, train_features, k)


def missing(predictions: AnyPredictions, name: str, train_features: Array | None = None) -> str | None:
    """Say what predictions lack for a score, or None where they have everything."""
    if name not in score_names():
        raise UserError(f"there is no score {name!r}; there are {', '.join(score_names())}")
    if name in OF_LOGITS:
        if isinstance(predictions, TopLabelPredictions):
            known = "every class, and of these predictions only the top confidence is known"
            return None if name == "max_probability" else known
        if predictions.given_probs is not None and name not in OF_PROBS:
            return "logits, and these predictions were made of probabilities, which forget how large logits were"
        return None
    if predictions.features is None:
        return "features, and these predictions have none"
    return "train_features" if name == "knn" and train_features is None else None


def score_names() -> tuple[str, ...]:
    """List the names that `score_of` knows."""
    return (*OF_LOGITS, *OF_FEATURES, "knn")


def _probs_max(probs: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
    return 1 - probs.amax(1)


def _probs_entropy(probs: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
    terms: Tensor = torch.special.entr(probs)
    return terms.sum(1)


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
# The same scores of probabilities; their logarithms would tell apart rows that rounding alone makes different.
OF_PROBS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "max_probability": _probs_max,
    "entropy": _probs_entropy,
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
    "knn": "distance to the k-th nearest neighbour",
}
"""The quantity that each score is, for axes of figures: higher means more likely OOD."""


def _by_rows(of: Callable[[Rest], Tensor], logits: Array) -> Float[Tensor, " n"]:
    table = _logits(logits)
    size = AT_ONCE if table.device.type == "cpu" else AT_ONCE_ON_DEVICE
    parts = table.split(max(1, size // table.shape[1]))
    return torch.cat([of(_rest(_exact(part))) for part in parts])


def _rest(logits: Float[Tensor, "n classes"]) -> Rest:
    top, place = logits.max(1, keepdim=True)
    # The last column takes the place of the largest, which then leaves no hole.
    others = logits.scatter(1, place, logits[:, -1:])[:, :-1] - top
    return Rest(top[:, 0], others)


def _logits(logits: Array) -> Float[Tensor, "n classes"]:
    table = two_columns(as_floats(logits, "logits"), "logits")
    if not table.shape[1]:
        raise UserError("logits have no columns; one for each class is expected")
    return _finite(table, "logits")


def _features(features: Array, name: str) -> Float[Tensor, "n width"]:
    table = as_floats(features, name)
    if table.ndim != 2 or not table.shape[1]:
        raise UserError(f"{name} have shape {tuple(table.shape)}; one row of features per sample is expected")
    return _finite(table, name)


def _finite(table: Float[Tensor, "n columns"], name: str) -> Float[Tensor, "n columns"]:
    # The extremes are NaN or infinite if any number is, and reading them writes no mask.
    if table.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(table))).all()):
        check_rows(name, table, torch.isfinite(table).all(1), "holds NaN or infinity")
    return table


def _exact(values: Tensor) -> Float[Tensor, "..."]:
    return values.float() if values.device.type in NO_FLOAT64 else values.double()


def _kth_distance(rows: Float[Tensor, "n width"], known: Float[Tensor, "m width"], k: int) -> Float[Tensor, " n"]:
    query = _directions(rows)
    best = query.new_empty(len(query), 0)
    for part in known.split(NEIGHBOURS):
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
    """Divide each row by a power of two near its largest number, so that no square of a number is lost or infinite."""
    most = 1000 if rows.dtype == torch.float64 else 120
    scale = rows.abs().amax(1).log2().round().clamp(-most, most).exp2()
    return rows / scale[:, None], scale
