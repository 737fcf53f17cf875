"""Inputs of metrics: predictions or arrays, validated once and reduced to confidence and correctness.

A calibration error compares a *confidence* with whether it was *correct*. The scope selects the pairs:

    "top-label"    the largest probability of a row; correct if that class is the label
    "class-wise"   every probability of a row, class by class; correct for the label's class
    "positive"     the probability of class 1 of a binary classifier; correct if the label is 1
    "confidence"   confidences and correctness as passed by the caller
    "multi-label"  every probability of a row, label by label; rows need not sum to one

Labels are class numbers, or rows of class probabilities (several annotators), for which "correct" is the
probability of that class. Maps `(n, classes, height, width)` with labels `(n, height, width)` are pooled over all
positions.
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from fedlas.errors import UserError, UserTypeError
from fedlas.metrics.bin_sums import exact
from fedlas.metrics.result import Definition
from fedlas.predictions import AnyPredictions, Predictions, TopLabelPredictions, with_every_class
from fedlas.predictions.arrays import (
    Array,
    as_floats,
    as_tensor,
    check_finite,
    check_probs,
    check_row_names,
    check_rows,
    float32_or_better,
    two_columns,
)
from fedlas.predictions.probabilities import log_uncertainty, softmax, top_of_logits, top_of_probs

MANY_ROWS = 10_000  # with fewer rows, compiling the kernel takes longer than it saves
MOST_CLASSES = 2**15  # more do not fit into the registers of one Triton program

Scope = Literal["top-label", "class-wise", "positive", "confidence", "multi-label"]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Pairs:
    """Confidence and correctness of each sample.

    Args:
        confidence: one probability per sample.
        correct: whether the prediction is the label, or the probability that a soft label gives to it.
        definition: definition of results, without the estimator.
        log_uncertainty: logarithm of 1 - confidence in float64, if logits are known. It ranks samples whose
            confidences are equal in float32; None ranks by confidence.
    """

    confidence: Float[Tensor, " n"]
    correct: Bool[Tensor, " n"] | Float[Tensor, " n"]
    definition: Definition
    log_uncertainty: Float[Tensor, " n"] | None = None

    @cached_property
    def ranking(self) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Order of the samples from the most to the least confident, and the index of the group of ties of each."""
        uncertainty = -self.confidence if self.log_uncertainty is None else self.log_uncertainty
        ranked, order = uncertainty.sort()
        new = torch.cat([torch.zeros_like(ranked[:1], dtype=torch.bool), ranked[1:] != ranked[:-1]])
        return order, new.long().cumsum(0)

    def once(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return a cached value that several metrics of these pairs need."""
        if key not in self._computed:
            self._computed[key] = compute()
        value: Value = self._computed[key]
        return value

    @cached_property
    def _computed(self) -> dict[Hashable, Any]:
        return {}


@dataclass(frozen=True)
class Rows:
    """Validated scores and labels, one row per sample.

    Args:
        scores: one row of class probabilities, or of logits, per sample.
        labels: class numbers, or rows of class probabilities (soft labels, or several labels at once).
        definition: definition of results, without the estimator.
        are_logits: whether the scores are logits.
        decimals: number of decimals that probabilities are rounded to; None if they are not.
    """

    scores: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    definition: Definition
    are_logits: bool = False
    decimals: int | None = None

    @cached_property
    def probs(self) -> Float[Tensor, "n classes"]:
        """One row of class probabilities per sample."""
        return softmax(self.scores) if self.are_logits else self.scores


Counted = TypeVar("Counted", Predictions, TopLabelPredictions)
MetricInput: TypeAlias = AnyPredictions | Array | Pairs | Rows


class Which(TypedDict, total=False):
    """Options that select pairs of confidence and correctness."""

    scope: Scope
    ignore_index: int | None


class Checked(NamedTuple):
    """Validated arrays with classes in the second dimension, and a mask of the positions that are used (None: all)."""

    probs: Tensor
    labels: Tensor
    used: Tensor | None

    @property
    def ignored(self) -> Tensor | None:
        """Mask of the ignored positions (None: there are none)."""
        return None if self.used is None else ~self.used

    @property
    def soft(self) -> bool:
        """Whether labels are class probabilities rather than class numbers."""
        return self.labels.ndim == self.probs.ndim


def pairs(
    probs: MetricInput,
    labels: Array | None = None,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
    *,
    ranked: bool = False,
) -> Pairs:
    """Reduce predictions to the confidence and correctness of each sample; pairs are returned unchanged.

    Args:
        probs: predictions, class probabilities, or pairs.
        labels: class numbers or soft labels; predictions and pairs include their labels.
        scope: which confidences are used.
        ignore_index: label of samples that are ignored.
        ranked: whether to compute `log_uncertainty`, which ranks samples of equal confidence.
    """
    if isinstance(probs, Pairs):
        if labels is not None or ignore_index is not None:
            raise UserTypeError("pairs carry their own correctness; give neither labels nor ignore_index with them")
        if not (probs.definition.scope or "").startswith(scope):
            raise UserError(f"these pairs are {probs.definition.scope}, not {scope}")
        return probs
    if isinstance(probs, Rows):
        raise UserTypeError("rows hold all classes; this metric needs pairs, predictions or arrays")
    if isinstance(probs, Predictions):
        probs, labels, ignore_index = _without_ignored(probs, labels, ignore_index), None, None
    if isinstance(probs, TopLabelPredictions):
        probs = _without_ignored(probs, labels, ignore_index)
        if scope != "top-label":
            raise UserError(f'only the top confidence of each sample is known; scope "{scope}" needs all classes')
        return Pairs(
            probs.confidence, probs.correct, _definition(probs.confidence, scope, soft=False, split=probs.split)
        )
    if scope in {"positive", "confidence"}:
        positive = _positive(probs, labels, ignore_index, scope)
        if ranked and isinstance(probs, Predictions):
            return replace(positive, log_uncertainty=probs.log_uncertainty)
        return positive
    if scope != "top-label":
        expected = '"top-label", "positive" or "confidence"'
        raise UserError(f"scope {scope!r} has no single confidence per sample; expected {expected}")
    if isinstance(probs, Predictions):
        soft = probs.labels.ndim == 2
        definition = _definition(probs.confidence, scope, soft, probs.split)
        return Pairs(probs.confidence, probs.correct, definition, probs.log_uncertainty if ranked else None)
    checked = _tables(probs, labels, ignore_index)
    return _pairs(checked, *top_of_probs(checked.probs, ignored=checked.ignored))


def pairs_of_logits(
    logits: Array,
    labels: Array,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
    *,
    ranked: bool = False,
) -> Pairs:
    """Reduce logits to the confidence and correctness of each sample; the arguments are those of `pairs`."""
    if scope != "top-label":
        samples = pairs(probs_of(logits, scope), labels, scope, ignore_index)
        scores = as_floats(logits, "logits")
        if not ranked or scope != "positive" or scores.shape[1:] not in {(), (1,), (2,)}:
            return samples
        lead = two_columns(scores, "logits").double().diff(dim=1)[:, 0].abs()
        truth = _labels(labels, scores)
        truth = truth if truth.ndim == 1 else truth[:, -1]
        uncertainty = functional.logsigmoid(-lead)
        return replace(
            samples, log_uncertainty=uncertainty if ignore_index is None else uncertainty[truth != ignore_index]
        )
    scores = _table_of_logits(as_floats(logits, "logits"))
    checked = _with_labels(scores, _labels(labels, scores), ignore_index)
    confidence, prediction = top_of_logits_by_kernel(scores) or top_of_logits(scores)
    return _pairs(checked, confidence, prediction, log_uncertainty(scores, prediction) if ranked else None)


def rows(
    probs: MetricInput,
    labels: Array | None = None,
    scope: Scope = "class-wise",
    ignore_index: int | None = None,
) -> Rows:
    """Return validated predictions, one row per sample; rows are returned unchanged."""
    if isinstance(probs, Rows):
        if labels is not None or ignore_index is not None:
            raise UserTypeError("rows carry their own labels; give neither labels nor ignore_index with them")
        return probs
    if isinstance(probs, Pairs):
        raise UserTypeError(
            "pairs of confidence and correctness describe the top class only; this metric needs all classes"
        )
    if isinstance(probs, AnyPredictions):
        probs = with_every_class(probs, "this metric")
    if scope == "multi-label":
        if ignore_index is not None:
            raise UserError('scope "multi-label" has no single label to ignore; remove the rows before')
        return _label_rows(probs, labels)
    if isinstance(probs, Predictions):
        selected, are_logits = _without_ignored(probs, labels, ignore_index), probs.given_probs is None
        soft = selected.labels.ndim == 2
        definition = _definition(selected.scores, scope, soft, selected.split, are_logits=are_logits)
        return Rows(selected.scores, selected.labels, definition, are_logits, selected.decimals)
    checked = _tables(probs, labels, ignore_index)
    check_probs(checked.probs, ignored=checked.ignored)
    return _rows(checked, scope)


def rows_of_logits(logits: Array, labels: Array, scope: Scope = "class-wise", ignore_index: int | None = None) -> Rows:
    """Return validated logits, one row per sample; with several labels per sample, their probabilities."""
    if scope == "multi-label":
        return _label_rows(probs_of(logits, scope), labels)
    scores = _table_of_logits(_finite(logits))
    return _rows(_with_labels(scores, _labels(labels, scores), ignore_index), scope, are_logits=True)


def probs_of(logits: Array, scope: Scope = "top-label") -> Float[Tensor, "..."]:
    """Return the probabilities that a scope needs, in float32 or better."""
    scores = _finite(logits)
    if scope == "multi-label" or (scope == "positive" and scores.shape[1:] in {(), (1,)}):
        return float32_or_better(scores).sigmoid()
    return softmax(_table_of_logits(scores))


def top_of_logits_by_kernel(logits: Float[Tensor, "n classes *space"]) -> tuple[Tensor, Tensor] | None:
    """Return the result of `top_of_logits` from a Triton kernel; None if it cannot run."""
    if logits.device.type != "cuda" or logits.ndim != 2 or logits.dtype == torch.float64 or len(logits) < MANY_ROWS:
        return None
    kernel = _kernel()
    if kernel is None or logits.shape[1] > MOST_CLASSES:
        return None
    total, prediction = kernel(logits)
    if not bool(torch.isfinite(total).all()):
        check_finite(logits)
    return total.reciprocal(), prediction


@cache
def _kernel() -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    """Compile the kernel on first use; None if Triton or its compiler is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Triton
            from fedlas.metrics.kernels.top_label import top_label  # noqa: PLC0415

            top_label(torch.zeros(2, 2, device="cuda"))
    except Exception:  # torch computes the same result without the kernel
        return None
    return top_label


def _table_of_logits(scores: Float[Tensor, "..."]) -> Float[Tensor, "n classes *space"]:
    if scores.ndim < 2:
        advice = 'scope="positive" if the metric has it, else give the logits of both classes'
        raise UserError(f"logits have shape {tuple(scores.shape)}; for a single binary logit give {advice}")
    if len(scores) == 0:
        check_finite(scores)
    return scores


def _finite(logits: Array) -> Float[Tensor, "..."]:
    scores = as_floats(logits, "logits")
    check_finite(scores)
    return scores


def _pairs(checked: Checked, confidence: Tensor, prediction: Tensor, uncertainty: Tensor | None = None) -> Pairs:
    correct = checked.labels.gather(1, prediction[:, None])[:, 0] if checked.soft else prediction == checked.labels

    def select(values: Tensor) -> Tensor:
        return values.reshape(-1) if checked.used is None else values[checked.used]

    confidence = select(confidence)
    definition = _definition(confidence, "top-label", checked.soft)
    return Pairs(confidence, select(correct), definition, None if uncertainty is None else select(uncertainty))


def _rows(checked: Checked, scope: Scope, *, are_logits: bool = False) -> Rows:
    table, truth = _table(checked.probs), _table(checked.labels) if checked.soft else checked.labels.reshape(-1)
    if checked.used is not None:
        table, truth = table[checked.used.reshape(-1)], truth[checked.used.reshape(-1)]
    return Rows(table, truth, _definition(table, scope, checked.soft, are_logits=are_logits), are_logits)


def _table(maps: Float[Tensor, "n classes *space"]) -> Float[Tensor, "rows classes"]:
    return maps if maps.ndim == 2 else maps.movedim(1, -1).reshape(-1, maps.shape[1])


def _label_rows(probs: Predictions | Array, labels: Array | None) -> Rows:
    if isinstance(probs, Predictions):
        raise UserTypeError('scope "multi-label" needs arrays: the rows of Predictions sum to one')
    scores, truth = _arrays(probs, labels)
    if scores.ndim != 2 or truth.shape != scores.shape:
        raise UserError(
            f"multi-label needs probs and labels of the same shape, not {tuple(scores.shape)}, {tuple(truth.shape)}"
        )
    _check_range("probs", scores)
    _check_range("labels", truth)
    return Rows(scores, truth.to(scores.dtype), _definition(scores, "multi-label", truth.is_floating_point()))


def _positive(probs: Predictions | Array, labels: Array | None, ignore_index: int | None, scope: Scope) -> Pairs:
    split = None
    if isinstance(probs, Predictions):
        if scope == "confidence":
            raise UserTypeError('Predictions have classes; scope "confidence" is for arrays of confidences')
        scores, truth, split = probs.probs, probs.labels, probs.split
    else:
        scores, truth = _arrays(probs, labels)
    if scores.ndim > 2 and scores.shape[1] in {1, 2}:  # maps
        truth = _table(truth) if truth.shape == scores.shape else truth.reshape(-1)
        scores = _table(scores)
    if scores.shape[1:] == (2,):
        check_probs(scores)
    if scores.ndim > 2 or scores.shape[1:] not in ({()} if scope == "confidence" else {(), (1,), (2,)}):
        needed = (
            "one confidence per sample" if scope == "confidence" else "the probability of class 1, or of two classes"
        )
        raise UserError(f'scope "{scope}" needs {needed}, not a table of shape {tuple(scores.shape)}')
    confidence = scores if scores.ndim == 1 else scores[:, -1]
    if truth.ndim == 0 or truth.shape[1:] not in {(), (1,), (2,)}:
        raise UserError(
            f'scope "{scope}" needs one label per sample, or the probabilities of two classes, not labels of shape '
            f"{tuple(truth.shape)}"
        )
    if len(truth) != len(confidence):
        raise UserError(f"labels has {len(truth)} rows for {len(confidence)} samples")
    if truth.shape[1:] == (2,):
        check_probs(truth if truth.is_floating_point() else truth.double(), name="labels")
    # Two columns that sum to one have been checked already.
    vectors = [name for name, values in (("probs", scores), ("labels", truth)) if values.shape[1:] != (2,)]
    truth = truth if truth.ndim == 1 else truth[:, -1]
    if ignore_index is not None:
        confidence, truth = confidence[truth != ignore_index], truth[truth != ignore_index]
    for name in vectors:
        _check_range(name, confidence if name == "probs" else truth)
    soft = truth.is_floating_point()
    return Pairs(confidence, truth if soft else truth == 1, _definition(confidence, scope, soft, split))


def _without_ignored(predictions: Counted, labels: Array | None, ignore_index: int | None) -> Counted:
    """Return predictions without the ignored samples."""
    if labels is not None:
        raise UserTypeError("Predictions carry their own labels; give one or the other")
    if ignore_index is None:
        return predictions
    if predictions.labels.ndim == 2:
        raise UserError("soft labels have no class to ignore; select samples by predictions[mask]")
    mask = predictions.labels != ignore_index
    if not bool(mask.any()):
        raise UserError(f"every label is {ignore_index}, the ignored one; at least one sample is needed")
    return predictions[mask]


def _arrays(probs: Array, labels: Array | None) -> tuple[Tensor, Tensor]:
    if labels is None:
        raise UserTypeError("labels are missing; only Predictions carry their own")
    check_row_names(probs, labels)
    scores = as_floats(probs, "probs")
    return scores, _labels(labels, scores)


def _labels(labels: Array, scores: Tensor) -> Tensor:
    return as_tensor(labels, "labels").to(scores.device)


def _tables(probs: Array, labels: Array | None, ignore_index: int | None) -> Checked:
    scores, truth = _arrays(probs, labels)
    if scores.ndim < 2:
        advice = 'scope="positive" if the metric has it, else Predictions.from_probs(probs, labels)'
        raise UserError(f"probs have shape {tuple(scores.shape)}; for a binary probability give {advice}")
    return _with_labels(scores, truth, ignore_index)


def _with_labels(scores: Float[Tensor, "n classes *space"], truth: Tensor, ignore_index: int | None) -> Checked:
    space = (len(scores), *scores.shape[2:])
    if truth.shape == scores.shape and truth.is_floating_point():
        if ignore_index is not None:
            raise UserError("soft labels have no class to ignore; remove the samples before")
        check_probs(truth, name="labels")
        return Checked(scores, truth, None)
    if truth.shape != space or truth.is_floating_point():
        raise UserError(
            f"labels are {truth.dtype} of shape {tuple(truth.shape)}; expected integers of shape {space} or "
            f"soft labels of shape {tuple(scores.shape)}"
        )
    truth = truth.long()
    if ignore_index is None and truth.numel():
        # Fast path: the extremes show that all labels are valid, without a mask.
        low, high = torch.stack(torch.aminmax(truth)).tolist()
        if low >= 0 and high < scores.shape[1]:
            return Checked(scores, truth, None)
    mask = None if ignore_index is None else truth != ignore_index
    valid = (truth >= 0) & (truth < scores.shape[1])
    check_rows("labels", truth, valid if mask is None else valid | ~mask, f"is outside 0..{scores.shape[1] - 1}")
    if mask is not None and not bool(mask.any()):
        raise UserError(f"every label is {ignore_index}, the ignored one; at least one sample is needed")
    return Checked(scores, truth, mask)


def _check_range(name: str, values: Tensor) -> None:
    good = (values >= 0) & (values <= 1)
    check_rows(name, values, good if good.ndim == 1 else good.all(dim=1), "is not between 0 and 1")


def _definition(
    scores: Tensor, scope: Scope, soft: bool, split: str | None = None, *, are_logits: bool = False
) -> Definition:
    dtype = torch.promote_types(scores.dtype, torch.float32) if are_logits else scores.dtype  # of the probabilities
    return Definition(
        estimator="",
        scope=f"{scope}, soft labels" if soft else scope,
        n=len(scores),
        dtype=str(dtype).removeprefix("torch."),
        split=split,
    )


def correctness(samples: Pairs) -> Bool[Tensor, " n"] | Float[Tensor, " n"]:
    """Return whether each prediction is correct; a binary probability up to one half predicts class 0."""
    if not (samples.definition.scope or "").startswith("positive"):
        return samples.correct
    positive = samples.confidence > 0.5
    if samples.correct.dtype == torch.bool:
        return positive == samples.correct
    correct = exact(samples.correct)
    return torch.where(positive.to(correct.device), correct, 1 - correct)


def binary_predictions(samples: Pairs) -> Pairs:
    """Replace the probability of class 1 by the confidence in the predicted class: 1 above one half, else 0."""
    if not (samples.definition.scope or "").startswith("positive"):
        return samples
    confidence = torch.where(samples.confidence > 0.5, samples.confidence, 1 - samples.confidence)
    definition = replace(
        samples.definition, scope=(samples.definition.scope or "").replace("positive", "binary answers")
    )
    return Pairs(confidence, correctness(samples), definition, samples.log_uncertainty)
