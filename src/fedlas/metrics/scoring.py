"""Scores of whole predictions: how often they are right, and how much probability they give to what happens.

With p_i the probabilities of sample i, y_i its label as a row (one-hot, or soft), and means over samples:

    accuracy   mean of y_i[argmax p_i]
    top-k      mean of [fewer than k classes come before the label]; of equal probabilities the first class comes first
    NLL        mean of -sum_k y_ik log p_ik, in nats; probabilities of zero are raised to a stated floor,
               half of the last decimal where `Predictions` were rounded
    Brier      mean of sum_k (p_ik - y_ik)^2, between 0 and 2

The Brier score is decomposed over equally wide bins b of each class's probability, with f_bk how often class k occurs
in bin b, m_bk its mean probability there, w_bk the share of samples, f_k the overall frequency:

    reliability  sum_kb w_bk (m_bk - f_bk)^2     0 when calibrated
    resolution   sum_kb w_bk (f_bk - f_k)^2      large when the bins tell samples apart
    uncertainty  sum_k  mean(y_ik^2) - f_k^2     of the labels alone
    within_bins  what is left: Brier = reliability - resolution + uncertainty + within_bins
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.bins import Bins, EdgeRule, class_statistics, equal_width_edges, exact
from fedlas.metrics.result import Definition, Result
from fedlas.metrics.samples import Given, Pairs, Scope, in_one_read, logit_rows_of, pairs, rows
from fedlas.predictions import Array, Predictions, least_log_prob, least_prob, slices_of

LARGE = 0.9  # probability of a label


@dataclass(frozen=True)
class Losses:
    """The negative log-likelihood of each sample, and how many probabilities were raised to the floor."""

    values: Float64[Tensor, " n"]
    floor: float
    floored: int


def accuracy(
    probs: Given,
    labels: Array | None = None,
    *,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Result:
    """Measure how often the most probable class is the label."""
    found = pairs(probs, labels, scope, ignore_index)
    return Result(float(exact(correctness(found)).mean()), replace(found.about, estimator="accuracy"))


def correctness(found: Pairs) -> Bool[Tensor, " n"] | Float[Tensor, " n"]:
    """Return whether each prediction is correct; a binary probability up to one half predicts class 0."""
    if not (found.about.scope or "").startswith("positive"):
        return found.correct
    positive = found.confidence > 0.5
    if found.correct.dtype == torch.bool:
        return positive == found.correct
    correct = exact(found.correct)
    return torch.where(positive.to(correct.device), correct, 1 - correct)


def top_k(probs: Given, labels: Array | None = None, k: int = 5, *, ignore_index: int | None = None) -> Result:
    """Measure how often the label is among the k most probable classes."""
    table = rows(probs, labels, ignore_index=ignore_index)
    if k < 1:
        raise UserError(f"k is {k}; at least 1 is needed")
    if table.labels.ndim == 2:
        best = table.probs.sort(dim=1, descending=True, stable=True).indices[:, :k]
        hits = exact(table.labels.gather(1, best)).sum(1)  # shares in float16 do not add up to one
    else:
        hits = label_ranks(table.probs, table.labels) < k
    about = replace(table.about, estimator=f"top-{k} accuracy", scope=f"top-{k}")
    return Result(float(exact(hits).mean()), about)


def nll(probs: Given, labels: Array | None = None, *, ignore_index: int | None = None) -> Result:
    """Measure the mean negative log-likelihood of the labels, in nats.

    Logits inside `Predictions` are used as they are and need no floor.
    """
    losses, about = losses_of(probs, labels, ignore_index)
    return nll_result(float(losses.values.mean()), losses.floored, losses.floor, about)


def brier(
    probs: Given, labels: Array | None = None, bins: int | None = None, *, ignore_index: int | None = None
) -> Result:
    """Return the mean squared distance between probabilities and labels.

    Args:
        probs: predictions, or rows of class probabilities.
        labels: class numbers, or soft labels; not needed with predictions.
        bins: how many bins of probability to decompose the score over; `details` then hold its parts. None computes
            the score alone.
        ignore_index: label of samples that do not count.
    """
    table = rows(probs, labels, ignore_index=ignore_index)
    squares = squared_errors(table.probs, table.labels)
    if bins is None:
        return brier_alone(float(squares.mean()), table.about)
    filled = class_statistics(table.probs, table.labels, equal_width_edges(bins), EdgeRule.RIGHT)
    return brier_result(float(squares.sum()), float(label_squares(table.labels).sum()), filled, table.about)


def label_ranks(probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Count the classes that come before the label; of equal probabilities the first class comes first."""
    own = probs.gather(1, labels[:, None])
    earlier = torch.arange(probs.shape[1], device=own.device) < labels[:, None]
    return ((probs > own) | ((probs == own) & earlier)).sum(1)


def prob_losses(
    probs: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"] | Float[Tensor, "n classes"],
    decimals: int | None = None,
) -> Losses:
    """Return the negative log-likelihood of each sample from probabilities, which may be rounded to some decimals."""
    floor, least = least_prob(probs.dtype), least_log_prob(probs.dtype)
    if decimals is not None:
        floor = 0.5 * 10.0**-decimals
        least = math.log(floor)
    if labels.ndim == 1:
        own = exact(probs.gather(1, labels[:, None])[:, 0])
        return Losses(-torch.where(own > 0, own.log(), least), floor, int((own <= 0).sum()))
    wanted = labels > 0
    low = wanted & (probs <= 0)
    logs = torch.where(low, least, torch.where(wanted, _wide(probs, labels).log(), 0))
    return Losses(-exact((labels * logs).sum(1)), floor, int(low.any(1).sum()))


def logit_losses(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]) -> Losses:
    """Find the negative log-likelihood of each sample from logits."""
    read = in_one_read(logits) if labels.ndim == 1 else None
    if read is not None:
        # log p of the label is log p of the top class less the lead of that one.
        top, label = (exact(logits.gather(1, place[:, None])[:, 0]) for place in (read[1], labels))
        return Losses(top - label - exact(read[0]).log(), 0.0, 0)
    own = []
    for part in slices_of(logits):
        found, truth = exact(_log_likelihoods(_wide(logits[part]), labels[part])), labels[part]
        beyond = ~torch.isfinite(found)  # logits farther apart than float32 reaches
        if bool(beyond.any()):
            place = beyond.to(logits.device)
            found[beyond] = _log_likelihoods(exact(logits[part][place]), exact(truth[place]).to(truth.dtype))
        own.append(found)
    return Losses(-torch.cat(own), 0.0, 0)


def _log_likelihoods(logits: Float[Tensor, "n classes"], labels: Tensor) -> Float[Tensor, " n"]:
    logs = logits.log_softmax(dim=1)
    if labels.ndim == 1:
        return logs.gather(1, labels[:, None])[:, 0]
    return torch.where(labels == 0, 0.0, logs * labels).sum(1)  # 0 times infinity is nothing here


def losses_of(probs: Given, labels: Array | None, ignore_index: int | None = None) -> tuple[Losses, Definition]:
    """Check predictions and find the negative log-likelihood of each sample."""
    if isinstance(probs, Predictions) and probs.given_probs is None:
        table = logit_rows_of(probs, labels, ignore_index)
        return logit_losses(table.probs, table.labels), table.about
    table = rows(probs, labels, ignore_index=ignore_index)
    decimals = probs.decimals if isinstance(probs, Predictions) else None
    return prob_losses(table.probs, table.labels, decimals), table.about


def nll_result(value: float, floored: int, floor: float, about: Definition) -> Result:
    """Give the mean loss with the floor that was used."""
    about = replace(about, estimator="NLL", scope=None, unit="nats")
    return Result(value, about, None, {"floor": floor, "floored": floored})


def squared_errors(
    probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]
) -> Float64[Tensor, " n"]:
    """Find the squared distance of each row from its label."""
    if labels.ndim == 2:
        return exact((_wide(probs, labels) - labels).square().sum(1))
    found = []
    for part in slices_of(probs):
        table, place = probs[part].contiguous(), labels[part, None]  # sums in float32 depend on the layout
        own = exact(table.gather(1, place)[:, 0])
        others = exact(torch.linalg.vector_norm(_wide(table), dim=1)) ** 2 - own**2
        # Next to a large probability of the label, the squares of the others are lost in rounding: those rows are added
        # up without it. Not all rows, because that takes a copy of the table.
        large = (own > LARGE).nonzero()[:, 0].to(table.device)
        rest = _wide(table[large]).scatter_(1, place[large], 0)  # indexing has made a copy
        others[large.to(others.device)] = exact(torch.linalg.vector_norm(rest, dim=1)) ** 2
        found.append(others.clamp_min(0) + (1 - own) ** 2)
    return torch.cat(found)


def label_squares(labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]) -> Float64[Tensor, " n"]:
    """Find the squared length of each label as a row."""
    return exact(_wide(labels).square().sum(1)) if labels.ndim == 2 else exact(torch.ones_like(labels))


def _wide(table: Float[Tensor, "n classes"], other: Tensor | None = None) -> Float[Tensor, "n classes"]:
    """Take a table in float32 or better; copies of whole tables in float64 are what a device has no room for."""
    wide = torch.promote_types(table.dtype, torch.float32)
    return table.to(wide if other is None else torch.promote_types(wide, other.dtype))


def brier_alone(value: float, about: Definition) -> Result:
    """Return the Brier score without its parts."""
    return Result(value, replace(about, estimator="Brier score", scope=None, unit="", bins=None, edges=None, norm=None))


def brier_result(squares: float, label_length: float, filled: Bins, about: Definition) -> Result:
    """Put the Brier score and its parts together from sums over all samples."""
    value = squares / filled.n
    frequency = filled.correct_sum.sum(-1, keepdim=True) / filled.n
    reliability = float((filled.share * filled.gap**2).sum())
    resolution = float((filled.share * (filled.accuracy - frequency) ** 2).sum())
    uncertainty = label_length / filled.n - float((frequency**2).sum())
    parts = {"reliability": reliability, "resolution": resolution, "uncertainty": uncertainty}
    parts["within_bins"] = value - (reliability - resolution + uncertainty)
    bins = filled.counts.shape[-1]
    about = replace(
        about, estimator="Brier score", scope=None, unit="", bins=bins, edges=f"equal-width bins {filled.rule}"
    )
    return Result(value, about, None, parts)
