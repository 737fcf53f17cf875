"""The checked inputs of a loss in one step, as rows of samples, pixels or tokens."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from fedlas import ranks
from fedlas.errors import UserError
from fedlas.losses.base.input_checks import all_are_classes, check_shapes, checked_labels

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Batch:
    """Inputs of a loss in one step: rows of samples, pixels or tokens.

    Logits and labels are in float32 or float64, features in the dtype that the network returns. `valid` marks the rows
    that are not ignored, and `all_valid` is true if all rows are known to be valid; `updates_state` is true in a
    training step, and false in an evaluation, which does not change the state of the loss; `shared` is true if the
    rows are one rank's part of a distributed batch.
    """

    logits: Float[Tensor, "n classes"]
    labels: Int[Tensor, " n"] | Float[Tensor, "n classes"]
    features: Float[Tensor, "n width"] | None
    index: Int[Tensor, " n"] | None
    valid: Bool[Tensor, " n"]
    log_probs: Float[Tensor, "n classes"]
    shared: bool = False
    updates_state: bool = False
    all_valid: bool = False

    @property
    def soft(self) -> bool:
        """Whether the labels are rows of probabilities."""
        return self.labels.is_floating_point()

    def confidence(self) -> Float[Tensor, " n"]:
        """Return the probability of the predicted class."""
        return self.log_probs.amax(1).exp()

    def correct(self) -> Float[Tensor, " n"]:
        """Return 1 for correct and 0 for incorrect predictions; for soft labels, the probability of the prediction."""
        prediction = self.logits.argmax(1)
        if self.soft:
            return self.labels.gather(1, prediction.unsqueeze(1)).squeeze(1)
        return (prediction == self.labels).to(self.logits.dtype)

    def excess(self, margin: float) -> Float[Tensor, "n classes"]:
        """Return max(0, d - margin), with d the distance of each logit from the largest logit of its row."""
        return (self.logits.amax(1, keepdim=True) - self.logits - margin).clamp_min(0)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of valid rows over all ranks; gradients are not shared across ranks."""
        mask = self.valid.reshape(-1, *[1] * (x.ndim - 1))
        local = x.sum(0) if self.all_valid else torch.where(mask, x, 0).sum(0)
        return ranks.total(local) if self.shared else local

    def count(self) -> Float[Tensor, ""]:
        """Return the number of valid samples on all ranks, at least 1."""
        return self.total(self.valid.to(self.logits.dtype)).clamp_min(1)

    def joined(self, x: Tensor) -> Tensor:
        """Concatenate the rows of all ranks, gradients included."""
        return ranks.joined(x) if self.shared else x

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of this rank from concatenated rows."""
        return ranks.own(x) if self.shared else x


def as_batch(
    logits: Tensor,
    labels: Tensor,
    features: Tensor | None = None,
    index: Tensor | None = None,
    *,
    ignore_index: int = IGNORE_INDEX,
    shared: bool = False,
    updates_state: bool = False,
) -> Batch:
    """Check the inputs of a step and reshape them to rows."""
    check_shapes(logits, labels, features, index)
    classes, all_valid = logits.shape[1], False
    dtype = at_least_float32(logits.dtype)
    logits = _rows(logits).to(dtype)
    if labels.is_floating_point():
        labels = checked_labels(labels, classes, ignore_index)
        if ignore_index != IGNORE_INDEX:
            raise UserError("ignore_index has no effect on soft labels; weight the samples yourself (loss.parts)")
        labels = _rows(labels).to(dtype)
        valid = torch.ones_like(logits[:, 0], dtype=torch.bool)
    else:
        original, labels = labels, (labels if labels.ndim == 1 else labels.reshape(-1)).long()
        all_valid = all_are_classes(labels, classes) and not 0 <= ignore_index < classes
        valid = labels.new_ones((), dtype=torch.bool).expand(len(labels)) if all_valid else labels != ignore_index
        if not all_valid:
            checked = checked_labels(original, classes, ignore_index).reshape(-1).long()
            labels = torch.where(valid, checked, 0)
            # Replace ignored rows, which may contain NaN: masking alone would give 0 * NaN = NaN in the gradient.
            logits = torch.where(valid.unsqueeze(1), logits, 0)
    return Batch(
        logits=logits,
        labels=labels,
        features=None if features is None else _rows(features),
        index=None if index is None else index.long().repeat_interleave(len(logits) // max(len(index), 1)),
        valid=valid,
        log_probs=functional.log_softmax(logits, 1),
        shared=shared,
        updates_state=updates_state,
        all_valid=all_valid,
    )


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of a tensor (a null context for a meta tensor)."""
    if x.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the computation of a loss: float32, or float64 for float64 inputs."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.promote_types(dtype, torch.float32)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])
