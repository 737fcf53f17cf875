"""What comes in: predictions or plain arrays, checked once, and cut down to what a metric compares.

A calibration error compares a *confidence* with whether it was *correct*. The scope says which pairs are meant:

    "top-label"    the largest probability of a row; correct if that class is the label
    "class-wise"   every probability of a row, class by class; correct for the label's class
    "positive"     the probability of class 1 of a binary classifier; correct if the label is 1
    "multi-label"  every probability of a row, label by label; rows need not sum to one

Labels are class numbers, or rows of class probabilities (several annotators), for which "correct" is the share of the
row on that class. Maps `(n, classes, height, width)` with labels `(n, height, width)` are pooled over positions.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from fedlas.metrics.result import Definition
from fedlas.predictions import Array, Predictions, as_floats, as_tensor, check_probs, check_rows, softmax

Scope = Literal["top-label", "class-wise", "positive", "multi-label"]


@dataclass(frozen=True)
class Pairs:
    """Confidences and whether they were correct, with what is known about where they came from."""

    confidence: Float[Tensor, " n"]
    correct: Bool[Tensor, " n"] | Float[Tensor, " n"]
    about: Definition


@dataclass(frozen=True)
class Rows:
    """Checked probabilities and labels, one row per sample.

    Args:
        probs: one row of class probabilities per sample.
        labels: class numbers, or rows of class probabilities (soft labels, or several labels at once).
        about: the part of a result's definition that is already known.
    """

    probs: Float[Tensor, "n classes"]
    labels: Int64[Tensor, " n"] | Float[Tensor, "n classes"]
    about: Definition


class Checked(NamedTuple):
    """Arrays as they came, classes in the second dimension, and which positions count (None: all)."""

    probs: Tensor
    labels: Tensor
    kept: Tensor | None

    @property
    def soft(self) -> bool:
        """Whether labels are class probabilities rather than class numbers."""
        return self.labels.ndim == self.probs.ndim


def pairs(
    probs: Predictions | Array,
    labels: Array | None = None,
    scope: Scope = "top-label",
    ignore_index: int | None = None,
) -> Pairs:
    """Reduce predictions to one confidence per sample and whether it was correct."""
    if scope == "positive":
        return _positive(probs, labels, ignore_index)
    if scope != "top-label":
        raise ValueError(f'scope {scope!r} has no single confidence per sample; expected "top-label" or "positive"')
    if isinstance(probs, Predictions):
        soft = probs.labels.ndim == 2
        return Pairs(probs.confidence, probs.correct, _about(probs.confidence, scope, soft, probs.split))
    return _pairs(_checked(probs, labels, ignore_index))


def pairs_of_logits(logits: Array, labels: Array, scope: Scope = "top-label", ignore_index: int | None = None) -> Pairs:
    """Reduce logits to one confidence per sample and whether it was correct."""
    probs = probs_of(logits, scope)
    if scope != "top-label":
        return pairs(probs, labels, scope, ignore_index)
    return _pairs(_with_labels(probs, _labels(labels, probs), ignore_index))


def rows(
    probs: Predictions | Array,
    labels: Array | None = None,
    scope: Scope = "class-wise",
    ignore_index: int | None = None,
) -> Rows:
    """Check predictions and give them one row per sample."""
    if scope == "multi-label":
        return _label_rows(probs, labels)
    if isinstance(probs, Predictions):
        if probs.top_only:
            raise ValueError("only the top confidence of each sample is known; this metric needs every class")
        return Rows(probs.probs, probs.labels, _about(probs.probs, scope, probs.labels.ndim == 2, probs.split))
    return _rows(_checked(probs, labels, ignore_index), scope)


def rows_of_logits(logits: Array, labels: Array, scope: Scope = "class-wise", ignore_index: int | None = None) -> Rows:
    """Check logits and give their probabilities one row per sample."""
    probs = probs_of(logits, scope)
    if scope == "multi-label":
        return _label_rows(probs, labels)
    return _rows(_with_labels(probs, _labels(labels, probs), ignore_index), scope)


def logit_rows(logits: Array, labels: Array, ignore_index: int | None = None) -> Rows:
    """Check logits and labels and give them one row per sample; the rows hold logits, not probabilities."""
    scores = _finite(logits)
    return _rows(_with_labels(scores, _labels(labels, scores), ignore_index), "class-wise")


def probs_of(logits: Array, scope: Scope = "top-label") -> Float[Tensor, "..."]:
    """Turn logits into the probabilities that a scope expects, in float32 or better."""
    scores = _finite(logits)
    if scope == "multi-label" or (scope == "positive" and scores.shape[1:] in {(), (1,)}):
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).sigmoid()
    if scores.ndim < 2:
        raise ValueError(f'logits have shape {tuple(scores.shape)}; for a one-logit head say scope="positive"')
    return softmax(scores)


def _finite(logits: Array) -> Float[Tensor, "..."]:
    scores = as_floats(logits, "logits")
    # The extremes are NaN or infinite if any number is: one reading, where a mask would be written as well.
    if scores.numel() == 0 or not bool(torch.isfinite(torch.stack(torch.aminmax(scores))).all()):
        good = torch.isfinite(scores)
        check_rows("logits", scores, good if good.ndim == 1 else good.flatten(1).all(dim=1), "holds NaN or infinity")
    return scores


def _pairs(given: Checked) -> Pairs:
    confidence, prediction = given.probs.max(dim=1)
    correct = given.labels.gather(1, prediction[:, None])[:, 0] if given.soft else prediction == given.labels
    if given.kept is None:
        confidence, correct = confidence.reshape(-1), correct.reshape(-1)
    else:
        confidence, correct = confidence[given.kept], correct[given.kept]
    return Pairs(confidence, correct, _about(confidence, "top-label", given.soft))


def _rows(given: Checked, scope: Scope) -> Rows:
    table, truth = _table(given.probs), _table(given.labels) if given.soft else given.labels.reshape(-1)
    if given.kept is not None:
        table, truth = table[given.kept.reshape(-1)], truth[given.kept.reshape(-1)]
    return Rows(table, truth, _about(table, scope, given.soft))


def _table(maps: Float[Tensor, "n classes *space"]) -> Float[Tensor, "rows classes"]:
    return maps if maps.ndim == 2 else maps.movedim(1, -1).reshape(-1, maps.shape[1])


def _label_rows(probs: Predictions | Array, labels: Array | None) -> Rows:
    if isinstance(probs, Predictions):
        raise TypeError('scope "multi-label" needs arrays: the rows of Predictions sum to one')
    scores, truth = _arrays(probs, labels)
    if scores.ndim != 2 or truth.shape != scores.shape:
        raise ValueError(f"multi-label needs two tables of one shape, not {tuple(scores.shape)}, {tuple(truth.shape)}")
    _check_range("probs", scores)
    _check_range("labels", truth)
    return Rows(scores, truth.to(scores.dtype), _about(scores, "multi-label", truth.is_floating_point()))


def _positive(probs: Predictions | Array, labels: Array | None, ignore_index: int | None) -> Pairs:
    split = None
    if isinstance(probs, Predictions):
        scores, truth, split = probs.probs, probs.labels, probs.split
    else:
        scores, truth = _arrays(probs, labels)
        if scores.shape[1:] == (2,):
            check_probs(scores)
    if scores.ndim > 2 or scores.shape[1:] not in {(), (1,), (2,)}:
        raise ValueError(f'scope "positive" needs the probability of class 1, or of two classes, not {scores.shape}')
    confidence = scores if scores.ndim == 1 else scores[:, -1]
    truth = truth if truth.ndim == 1 else truth[:, -1]
    if len(truth) != len(confidence):
        raise ValueError(f"labels has {len(truth)} rows for {len(confidence)} samples")
    if ignore_index is not None:
        confidence, truth = confidence[truth != ignore_index], truth[truth != ignore_index]
    _check_range("probs", confidence)
    _check_range("labels", truth)
    soft = truth.is_floating_point()
    return Pairs(confidence, truth if soft else truth == 1, _about(confidence, "positive", soft, split))


def _arrays(probs: Array, labels: Array | None) -> tuple[Tensor, Tensor]:
    if labels is None:
        raise TypeError("labels are missing; only Predictions carry their own")
    scores = as_floats(probs, "probs")
    return scores, _labels(labels, scores)


def _labels(labels: Array, scores: Tensor) -> Tensor:
    return as_tensor(labels, "labels").to(scores.device)


def _checked(probs: Array, labels: Array | None, ignore_index: int | None) -> Checked:
    scores, truth = _arrays(probs, labels)
    if scores.ndim < 2:
        raise ValueError(f'probs have shape {tuple(scores.shape)}; for a binary probability say scope="positive"')
    given = _with_labels(scores, truth, ignore_index)
    check_probs(scores, ignored=None if given.kept is None else ~given.kept)
    return given


def _with_labels(scores: Float[Tensor, "n classes *space"], truth: Tensor, ignore_index: int | None) -> Checked:
    space = (len(scores), *scores.shape[2:])
    if truth.shape == scores.shape and truth.is_floating_point():
        check_probs(truth, name="labels")
        return Checked(scores, truth, None)
    if truth.shape != space or truth.is_floating_point():
        raise ValueError(
            f"labels are {truth.dtype} of shape {tuple(truth.shape)}; expected integers of shape {space} or "
            f"soft labels of shape {tuple(scores.shape)}"
        )
    truth = truth.long()
    kept = None if ignore_index is None else truth != ignore_index
    valid = (truth >= 0) & (truth < scores.shape[1])
    check_rows("labels", truth, valid if kept is None else valid | ~kept, f"is outside 0..{scores.shape[1] - 1}")
    if kept is not None and not bool(kept.any()):
        raise ValueError(f"every label is {ignore_index}, the ignored one; at least one sample is needed")
    return Checked(scores, truth, kept)


def _check_range(name: str, values: Tensor) -> None:
    good = (values >= 0) & (values <= 1)
    check_rows(name, values, good if good.ndim == 1 else good.all(dim=1), "is not between 0 and 1")


def _about(scores: Tensor, scope: Scope, soft: bool, split: str | None = None) -> Definition:
    return Definition(
        estimator="",
        scope=f"{scope}, soft labels" if soft else scope,
        n=len(scores),
        dtype=str(scores.dtype).removeprefix("torch."),
        split=split,
    )
