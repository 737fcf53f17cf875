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
from typing import Any, cast

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from fedlas.errors import UserError
from fedlas.metrics.accumulators import AbstractStore, BinStore, State, merge_definitions
from fedlas.metrics.base import AbstractMean, AbstractMetric, AbstractTopLabel
from fedlas.metrics.bin_sums import Bins, EdgeRule, class_statistics, equal_width_edges, exact
from fedlas.metrics.binning import Binning
from fedlas.metrics.inputs import (
    MetricInput,
    Pairs,
    Rows,
    Scope,
    correctness,
    logit_rows,
    logit_rows_of,
    rows,
    top_of_logits_by_kernel,
)
from fedlas.metrics.intervals.methods import LossBootstrap, MeanBootstrap, WilsonInterval
from fedlas.metrics.intervals.resampling import Bounds
from fedlas.metrics.paired import PairedMeans
from fedlas.metrics.result import Definition, Result
from fedlas.predictions import AnyPredictions, Predictions
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

    def store(self, *, scope: Scope = "top-label", ignore_index: int | None = None) -> BinStore:
        if scope != "top-label":
            raise UserError(f'accuracy is accumulated for scope "top-label", not {scope!r}')
        return BinStore(Binning(1), scope, ignore_index)

    def compute(self, store: Any) -> Result:
        histogram, definition = store.histogram()
        definition = replace(definition, estimator=self.title, bins=None, edges=None)
        return Result(float(histogram.correct_sum.sum()) / histogram.n, definition)


class NLL(AbstractMetric):
    """Mean negative log-likelihood of the labels, in nats."""

    name = "nll"
    title = "NLL"
    explanation = "Mean negative log-likelihood of the labels, in nats: accuracy and calibration in one."
    unit = "nats"
    needs_all_classes = True
    in_summary = True
    is_compared = True
    is_logged = True
    order = 70
    interval = LossBootstrap(NLL_BOUNDS)
    paired = PairedMeans(bounds=NLL_BOUNDS)

    def __call__(self, probs: MetricInput, labels: Array | None = None, *, ignore_index: int | None = None) -> Result:
        """Compute the metric; logits of `Predictions` are used directly and need no floor."""
        losses, definition = losses_of(probs, labels, ignore_index)
        return self.result(float(losses.values.mean()), losses.floored, losses.floor, definition)

    def result(self, value: float, floored: int, floor: float, definition: Definition) -> Result:
        """Return the mean loss, and the floor of probabilities that was used."""
        definition = replace(definition, estimator=self.title, scope=None, unit=self.unit)
        return Result(value, definition, None, {"floor": floor, "floored": floored})

    def contributions(self, probs: MetricInput, labels: Array | None = None, **options: Any) -> Tensor:
        return losses_of(probs, labels, **options)[0].values

    def store(self, *, ignore_index: int | None = None) -> "LossStore":
        return LossStore(ignore_index)

    def compute(self, store: "LossStore") -> Result:
        if store.definition.n == 0:
            raise UserError("no samples yet; call update first")
        return self.result(store.total / store.definition.n, store.floored, store.floor, store.definition)

    def columns(self, part: Predictions) -> dict[str, Tensor]:
        probs = part.given_probs
        losses = (
            logit_losses(part.logits, part.labels) if probs is None else prob_losses(probs, part.labels, part.decimals)
        )
        sums = {"floored": torch.tensor(losses.floored), "floor": torch.tensor(losses.floor, dtype=torch.float64)}
        return {"loss": losses.values, **sums}

    def column(self, columns: Mapping[str, Tensor]) -> Tensor:
        return columns["loss"]

    def of_columns(self, columns: Mapping[str, Tensor], class_bins: Bins, definition: Definition) -> Result:
        del class_bins
        floored, floor = (float(columns.get(name, torch.zeros(()))) for name in ("floored", "floor"))
        return self.result(float(columns["loss"].mean()), int(floored), floor, definition)


class Brier(AbstractMetric):
    """Mean squared distance between probabilities and labels."""

    name = "brier"
    title = "Brier score"
    explanation = "Mean squared difference of the probabilities and the one-hot label, summed over classes."
    unit = ""
    needs_all_classes = True
    in_summary = True
    is_compared = True
    order = 80
    interval = MeanBootstrap(Bounds(0.0, 0.5, 2.0))
    paired = PairedMeans(largest=2.0)

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
        squares = squared_errors(table.probs, table.labels)
        if bins is None:
            return self._alone(float(squares.mean()), table.definition)
        histogram = class_statistics(table.probs, table.labels, equal_width_edges(bins), EdgeRule.RIGHT)
        return brier_result(float(squares.sum()), float(label_squares(table.labels).sum()), histogram, table.definition)

    def _alone(self, value: float, definition: Definition) -> Result:
        definition = replace(definition, estimator=self.title, scope=None, unit="", bins=None, edges=None, norm=None)
        return Result(value, definition)

    def contributions(
        self, probs: MetricInput, labels: Array | None = None, bins: int | None = None, **options: Any
    ) -> Tensor:
        del bins  # used by the decomposition only
        table = rows(probs, labels, **options)
        return squared_errors(table.probs, table.labels)

    def store(self, bins: int | None = None, *, ignore_index: int | None = None) -> "BrierStore":
        return BrierStore(bins, ignore_index)

    def compute(self, store: "BrierStore") -> Result:
        histogram, definition = store.bins.histogram()
        decomposed = brier_result(store.squares, store.label_squares, histogram, definition)
        return decomposed if store.decomposed else self._alone(float(decomposed), definition)

    def columns(self, part: Predictions) -> dict[str, Tensor]:
        errors = squared_errors(part.probs, part.labels)
        return {"squared_error": errors, "label_square": label_squares(part.labels)}

    def column(self, columns: Mapping[str, Tensor]) -> Tensor:
        return columns["squared_error"]

    def of_columns(self, columns: Mapping[str, Tensor], class_bins: Bins, definition: Definition) -> Result:
        squares, lengths = columns["squared_error"], columns["label_square"]
        return brier_result(float(squares.sum()), float(lengths.sum()), class_bins, definition)


class Top5(AbstractMean):
    """Fraction of samples whose label is among the five most probable classes."""

    name = "top_5"
    title = "top-5 accuracy"
    explanation = "Fraction of samples whose label is among the five most likely classes."
    higher_is_better = True
    needs_hard_labels = True
    order = 220

    def values(self, table: Rows) -> Tensor:
        return among_first(table, TOP)

    def result(self, value: float, definition: Definition) -> Result:
        return Result(value, replace(definition, estimator=self.title, scope=f"top-{TOP}"))

    def columns(self, part: Predictions) -> dict[str, Tensor]:
        if part.labels.ndim > 1 or part.probs.shape[1] <= TOP:
            return {}
        return {"among_first": self.values(rows(part))}

    def of_columns(self, columns: Mapping[str, Tensor], class_bins: Bins, definition: Definition) -> Result | None:
        del class_bins
        if "among_first" not in columns:
            return None
        return self.result(float(exact(columns["among_first"]).mean()), definition)


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


def losses_of(probs: MetricInput, labels: Array | None, ignore_index: int | None = None) -> tuple[Losses, Definition]:
    """Return the negative log-likelihood of each sample of validated predictions."""
    if isinstance(probs, Predictions) and probs.given_probs is None:
        table = logit_rows_of(probs, labels, ignore_index)
        return logit_losses(table.probs, table.labels), table.definition
    table = rows(probs, labels, ignore_index=ignore_index)
    decimals = probs.decimals if isinstance(probs, Predictions) else None
    return prob_losses(table.probs, table.labels, decimals), table.definition


class LossStore(AbstractStore):
    """Stores the sum of the losses of all samples."""

    def __init__(self, ignore_index: int | None) -> None:
        super().__init__("class-wise", ignore_index)
        self.total, self.floored, self.floor = 0.0, 0, 0.0

    def take(self, batch: Pairs | Rows) -> None:
        assert isinstance(batch, Rows)
        self._add_losses(prob_losses(batch.probs, batch.labels), batch.definition)

    def add(self, probs: AnyPredictions | Array, labels: Array | None) -> None:
        self._add_losses(*losses_of(probs, labels, self.ignore_index))

    def add_logits(self, logits: Array, labels: Array) -> None:
        table = logit_rows(logits, labels, self.ignore_index)
        self._add_losses(logit_losses(table.probs, table.labels), table.definition)

    def state(self) -> State:
        values = {"total": self.total, "floored": float(self.floored), "floor": self.floor}
        state: State = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
        return state | {"samples": torch.tensor(self.definition.n)}

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        names = ("total", "floored", "floor", "samples")
        self.total, floored, self.floor, n = (float(cast("Tensor", state[name])) for name in names)
        self.floored, self.definition = int(floored), replace(self.definition, n=int(n))

    def merge(self, other: AbstractStore) -> None:
        same_kind = self.same(other)
        self._add_sums(same_kind.total, same_kind.floored, same_kind.floor, same_kind.definition)

    def _add_losses(self, losses: Losses, definition: Definition) -> None:
        self._add_sums(float(losses.values.sum()), losses.floored, losses.floor, definition)

    def _add_sums(self, total: float, floored: int, floor: float, definition: Definition) -> None:
        self.total += total
        self.floored += floored
        self.floor = max(self.floor, floor)
        self.definition = merge_definitions(self.definition, definition)


class BrierStore(AbstractStore):
    """Stores the sum of squared errors, and the bins of the decomposition."""

    def __init__(self, bins: int | None, ignore_index: int | None) -> None:
        super().__init__("class-wise", ignore_index)
        self.decomposed = bins is not None
        self.bins = BinStore(Binning(bins or 1), "class-wise", ignore_index)
        self.squares, self.label_squares = 0.0, 0.0

    def take(self, batch: Pairs | Rows) -> None:
        assert isinstance(batch, Rows)
        self.bins.take(batch)
        self.squares += float(squared_errors(batch.probs, batch.labels).sum())
        self.label_squares += float(label_squares(batch.labels).sum())

    def merge(self, other: AbstractStore) -> None:
        same_kind = self.same(other)
        self.bins.merge(same_kind.bins)
        self.squares += same_kind.squares
        self.label_squares += same_kind.label_squares

    def state(self) -> State:
        return self.bins.state() | self._sums() if self.bins.sums is not None else {}

    def _sums(self) -> State:
        values = {"squares": self.squares, "label_squares": self.label_squares}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def empty_state(self, num_classes: int | None = None) -> State:
        return self.bins.empty_state(num_classes) | self._sums()

    def set_state(self, state: Mapping[str, Tensor | list[Tensor]]) -> None:
        self.bins.set_state({name: value for name, value in state.items() if "squares" not in name})
        if state:
            self.squares, self.label_squares = (float(cast("Tensor", state[n])) for n in ("squares", "label_squares"))

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.bins.binning)


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


def brier_result(squares: float, label_length: float, histogram: Bins, definition: Definition) -> Result:
    """Return the Brier score and its decomposition from sums over all samples."""
    value = squares / histogram.n
    frequency = histogram.correct_sum.sum(-1, keepdim=True) / histogram.n
    reliability = float((histogram.fraction * histogram.gap**2).sum())
    resolution = float((histogram.fraction * (histogram.accuracy - frequency) ** 2).sum())
    uncertainty = label_length / histogram.n - float((frequency**2).sum())
    parts = {"reliability": reliability, "resolution": resolution, "uncertainty": uncertainty}
    parts["within_bins"] = value - (reliability - resolution + uncertainty)
    bins = histogram.counts.shape[-1]
    definition = replace(
        definition, estimator="Brier score", scope=None, unit="", bins=bins, edges=f"equal-width bins {histogram.rule}"
    )
    return Result(value, definition, None, parts)
