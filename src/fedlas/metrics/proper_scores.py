"""Accuracy, top-k accuracy, and proper scores: negative log-likelihood and Brier score.

With p_i the probabilities of sample i, y_i its label as a row (one-hot, or soft), and means over samples:

    accuracy   mean of y_i[argmax p_i]
    top-k      mean of [fewer than k classes are ranked above the label]; ties are ranked by class number
    NLL        mean of -sum_k y_ik log p_ik, in nats; probabilities of zero are replaced by a floor, half of the last
               decimal if `Predictions` were rounded
    Brier      mean of sum_k (p_ik - y_ik)^2, between 0 and 2

The Brier score is decomposed over bins b of equal width of each class's probability, with f_bk the frequency of class k
in bin b, m_bk its mean probability, w_bk the fraction of samples, f_k the overall frequency:

    reliability  sum_kb w_bk (m_bk - f_bk)^2     0 when calibrated
    resolution   sum_kb w_bk (f_bk - f_k)^2      large if the frequencies differ between bins
    uncertainty  sum_k  mean(y_ik^2) - f_k^2     of the labels alone
    within_bins  the remainder: Brier = reliability - resolution + uncertainty + within_bins
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.accumulators import BinAccumulator, SumAccumulator, sums_of
from fedlas.metrics.base import AbstractMean, AbstractTopLabel
from fedlas.metrics.bin_sums import Bins, exact
from fedlas.metrics.binning import Binning
from fedlas.metrics.inputs import (
    MetricInput,
    Pairs,
    Rows,
    Scope,
    correctness,
    rows,
    top_of_logits_by_kernel,
)
from fedlas.metrics.intervals.methods import LossBootstrap, MeanBootstrap, WilsonInterval
from fedlas.metrics.intervals.resampling import Bounds
from fedlas.metrics.paired import PairedMeans
from fedlas.metrics.result import Definition, Result
from fedlas.predictions.arrays import Array
from fedlas.predictions.probabilities import least_log_prob, least_prob, slices_of

LARGE = 0.9  # probability of a label above which its square is summed separately
TOP = 5
# A loss above log 2 means a probability below one half. The loss is unbounded: unobserved losses are assumed to be that
# of the smallest normal float32; no loss is clipped to it.
NLL_BOUNDS = Bounds(0.0, math.log(2), -math.log(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True)
class Losses:
    """The negative log-likelihood of each sample, and the number of probabilities that were replaced by the floor."""

    values: Float64[Tensor, " n"]
    floor: float
    floored: int


class Accuracy(AbstractTopLabel):
    """Fraction of samples whose most probable class is the label."""

    name = "accuracy"
    title = "accuracy"
    explanation = "Fraction of samples whose most likely class is the label."
    higher_is_better = True
    in_summary = True
    is_compared = True
    is_logged = True
    order = 10
    interval = WilsonInterval(Bounds(0.0, 0.5, 1.0))  # the bounds are for soft labels
    paired = PairedMeans(largest=1.0)

    def of_pairs(self, samples: Pairs) -> Result:
        return Result(float(exact(correctness(samples)).mean()), replace(samples.definition, estimator=self.title))

    def values_of(self, samples: Pairs) -> Tensor:
        return correctness(samples)

    def accumulator(self, *, scope: Scope = "top-label", ignore_index: int | None = None) -> BinAccumulator:
        if scope != "top-label":
            raise UserError(f'accuracy is accumulated for scope "top-label", not {scope!r}')
        return BinAccumulator(self, Binning(1), scope, ignore_index)

    def compute(self, accumulator: Any) -> Result:
        histogram, definition = accumulator.histogram()
        definition = replace(definition, estimator=self.title, bins=None, edges=None)
        return Result(float(histogram.correct_sum.sum()) / histogram.n, definition)


class NLL(AbstractMean):
    """Mean negative log-likelihood of the labels, in nats; that of logits needs no floor of the probabilities."""

    name = "nll"
    title = "NLL"
    explanation = "Mean negative log-likelihood of the labels, in nats: accuracy and calibration in one."
    unit = "nats"
    in_summary = True
    is_compared = True
    is_logged = True
    order = 70
    interval = LossBootstrap(NLL_BOUNDS)
    paired = PairedMeans(bounds=NLL_BOUNDS)
    column_names = ("loss", "nll_floored", "nll_floor")

    def values(self, table: Rows) -> Tensor:
        return losses_of(table).values

    def columns(self, table: Rows) -> dict[str, Tensor]:
        losses = losses_of(table)
        floor = torch.tensor(losses.floor, dtype=torch.float64)
        return {"loss": losses.values, "nll_floored": torch.tensor(losses.floored), "nll_floor": floor}

    def of_sums(self, sums: Mapping[str, float], class_bins: Bins | None, definition: Definition) -> Result:
        result = super().of_sums(sums, class_bins, definition)
        return result.with_details(floor=sums.get("nll_floor", 0.0), floored=int(sums.get("nll_floored", 0)))


class Brier(AbstractMean):
    """Mean squared distance between probabilities and labels."""

    name = "brier"
    title = "Brier score"
    explanation = "Mean squared difference of the probabilities and the one-hot label, summed over classes."
    unit = ""
    in_summary = True
    is_compared = True
    order = 80
    interval = MeanBootstrap(Bounds(0.0, 0.5, 2.0))
    paired = PairedMeans(largest=2.0)
    column_names = ("squared_error", "label_square")

    def __call__(
        self,
        probs: MetricInput,
        labels: Array | None = None,
        bins: int | None = None,
        *,
        ignore_index: int | None = None,
    ) -> Result:
        """Compute the metric.

        Args:
            probs: predictions, or rows of class probabilities.
            labels: class numbers, or soft labels; not needed with predictions.
            bins: number of bins of the decomposition, whose parts are in `details`; None for no decomposition.
            ignore_index: label of samples that are ignored.
        """
        table = rows(probs, labels, ignore_index=ignore_index)
        class_bins = None if bins is None else Binning(bins).fill_classes(table.probs, table.labels)
        return self.of_sums(sums_of(self.columns(table)), class_bins, table.definition)

    def values(self, table: Rows) -> Tensor:
        return squared_errors(table.probs, table.labels)

    def columns(self, table: Rows) -> dict[str, Tensor]:
        return {"squared_error": self.values(table), "label_square": label_squares(table.labels)}

    def of_sums(self, sums: Mapping[str, float], class_bins: Bins | None, definition: Definition) -> Result:
        result = super().of_sums(sums, class_bins, definition)
        return result if class_bins is None else decompose(result, sums["label_square"], class_bins)

    def contributions(
        self, probs: MetricInput, labels: Array | None = None, bins: int | None = None, **options: Any
    ) -> Tensor:
        del bins  # used by the decomposition only
        return super().contributions(probs, labels, **options)

    def accumulator(self, bins: int | None = None, *, ignore_index: int | None = None) -> SumAccumulator:
        binning = None if bins is None else Binning(bins)
        return SumAccumulator(self, self.column_names, ignore_index, binning)


class Top5(AbstractMean):
    """Fraction of samples whose label is among the five most probable classes."""

    name = "top_5"
    title = "top-5 accuracy"
    explanation = "Fraction of samples whose label is among the five most likely classes."
    higher_is_better = True
    needs_hard_labels = True
    order = 220
    column_names = ("among_first",)
    fewest_classes = TOP + 1

    def values(self, table: Rows) -> Tensor:
        return among_first(table, TOP)

    def result(self, value: float, definition: Definition) -> Result:
        return Result(value, replace(definition, estimator=self.title, scope=f"top-{TOP}"))


accuracy, nll, brier, top_5 = Accuracy(), NLL(), Brier(), Top5()


def top_k(probs: MetricInput, labels: Array | None = None, k: int = 5, *, ignore_index: int | None = None) -> Result:
    """Return the fraction of samples whose label is among the k most probable classes."""
    table = rows(probs, labels, ignore_index=ignore_index)
    if k < 1:
        raise UserError(f"k is {k}; at least 1 is needed")
    definition = replace(table.definition, estimator=f"top-{k} accuracy", scope=f"top-{k}")
    return Result(float(exact(among_first(table, k)).mean()), definition)


def among_first(table: Rows, k: int) -> Tensor:
    """Return whether each label is among the k most probable classes; ties are ranked by class number."""
    probs, labels = table.probs, table.labels
    if labels.ndim == 2:
        best = probs.sort(dim=1, descending=True, stable=True).indices[:, :k]
        return exact(labels.gather(1, best)).sum(1)  # the sum of float16 probabilities may differ from one
    label_probs = probs.gather(1, labels[:, None])
    earlier = torch.arange(probs.shape[1], device=label_probs.device) < labels[:, None]
    return ((probs > label_probs) | ((probs == label_probs) & earlier)).sum(1) < k


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
        label_probs = exact(probs.gather(1, labels[:, None])[:, 0])
        return Losses(-torch.where(label_probs > 0, label_probs.log(), least), floor, int((label_probs <= 0).sum()))
    possible = labels > 0
    low = possible & (probs <= 0)
    logs = torch.where(low, least, torch.where(possible, _wide(probs, labels).log(), 0))
    return Losses(-exact((labels * logs).sum(1)), floor, int(low.any(1).sum()))


def logit_losses(logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]) -> Losses:
    """Return the negative log-likelihood of each sample from logits."""
    top = top_of_logits_by_kernel(logits) if labels.ndim == 1 else None
    if top is not None:
        confidence, prediction = top
        predicted, label = (exact(logits.gather(1, index[:, None])[:, 0]) for index in (prediction, labels))
        return Losses(predicted - label - exact(confidence).log(), 0.0, 0)
    parts = []
    for part in slices_of(logits):
        logs, truth = exact(_log_likelihoods(_wide(logits[part]), labels[part])), labels[part]
        overflow = ~torch.isfinite(logs)  # differences of logits beyond float32
        if bool(overflow.any()):
            rows_of = overflow.to(logits.device)
            logs[overflow] = _log_likelihoods(exact(logits[part][rows_of]), exact(truth[rows_of]).to(truth.dtype))
        parts.append(logs)
    return Losses(-torch.cat(parts), 0.0, 0)


def _log_likelihoods(logits: Float[Tensor, "n classes"], labels: Tensor) -> Float[Tensor, " n"]:
    logs = logits.log_softmax(dim=1)
    if labels.ndim == 1:
        return logs.gather(1, labels[:, None])[:, 0]
    return torch.where(labels == 0, 0.0, logs * labels).sum(1)  # define 0 * inf as 0


def losses_of(table: Rows) -> Losses:
    """Return the negative log-likelihood of each sample."""
    if table.are_logits:
        return logit_losses(table.scores, table.labels)
    return prob_losses(table.scores, table.labels, table.decimals)


def squared_errors(
    probs: Float[Tensor, "n classes"], labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]
) -> Float64[Tensor, " n"]:
    """Return the squared distance of each row from its label."""
    if labels.ndim == 2:
        return exact((_wide(probs, labels) - labels).square().sum(1))
    errors = []
    for part in slices_of(probs):
        table, label = probs[part].contiguous(), labels[part, None]  # sums in float32 depend on the layout
        label_probs = exact(table.gather(1, label)[:, 0])
        other_squares = exact(torch.linalg.vector_norm(_wide(table), dim=1)) ** 2 - label_probs**2
        # If the probability of the label is large, the squares of the others are lost to rounding, so these rows are
        # summed without it. Other rows are not, because this needs a copy.
        large = (label_probs > LARGE).nonzero()[:, 0].to(table.device)
        other_probs = _wide(table[large]).scatter_(1, label[large], 0)  # in place in the copy made by indexing
        other_squares[large.to(other_squares.device)] = exact(torch.linalg.vector_norm(other_probs, dim=1)) ** 2
        errors.append(other_squares.clamp_min(0) + (1 - label_probs) ** 2)
    return torch.cat(errors)


def label_squares(labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]) -> Float64[Tensor, " n"]:
    """Return the squared norm of each label as a row."""
    return exact(_wide(labels).square().sum(1)) if labels.ndim == 2 else exact(torch.ones_like(labels))


def _wide(table: Float[Tensor, "n classes"], other: Tensor | None = None) -> Float[Tensor, "n classes"]:
    """Return a table in float32 or better; a copy in float64 could exceed the memory of a device."""
    dtype = torch.promote_types(table.dtype, torch.float32)
    return table.to(dtype if other is None else torch.promote_types(dtype, other.dtype))


def decompose(brier: Result, label_square: float, histogram: Bins) -> Result:
    """Return a Brier score with its decomposition.

    Args:
        brier: the Brier score.
        label_square: sum of the squared norms of the labels as rows.
        histogram: bins of the probabilities of every class.
    """
    frequency = histogram.correct_sum.sum(-1, keepdim=True) / histogram.n
    reliability = float((histogram.fraction * histogram.gap**2).sum())
    resolution = float((histogram.fraction * (histogram.accuracy - frequency) ** 2).sum())
    uncertainty = label_square / histogram.n - float((frequency**2).sum())
    parts = {"reliability": reliability, "resolution": resolution, "uncertainty": uncertainty}
    parts["within_bins"] = float(brier) - (reliability - resolution + uncertainty)
    bins = histogram.counts.shape[-1]
    return Result(
        brier, replace(brier.definition, bins=bins, edges=f"equal-width bins {histogram.rule}"), details=parts
    )
