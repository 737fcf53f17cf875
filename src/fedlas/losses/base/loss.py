"""`AbstractLoss`, the base class of all training losses.

A loss is a sum of named terms. Each term has one value per sample, already multiplied by its coefficient; a term of the
whole batch is split into per-sample contributions whose mean is the term. Class weights multiply the term
`classification`; every other term is a regulariser. With class weights w_k, labels y_i and n valid samples,

    mean:  Σ_i classification_i / Σ_i w_{y_i}  +  Σ_i regulariser_i / n      (soft labels: both divided by n)
    sum:   Σ_i classification_i + Σ_i regulariser_i
    none:  classification_i + regulariser_i

like the reductions of `torch.nn.functional.cross_entropy`. In a distributed training step, denominators are summed
over all ranks and sums are multiplied by the number of ranks. The mean over ranks that DistributedDataParallel computes
then has the value and gradient of one process with the whole batch. Ignored samples are masked and not removed, so that
shapes do not depend on data and nothing synchronises with the device.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypedDict, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fedlas import ranks
from fedlas.catalog import one_of
from fedlas.errors import UserError, UserTypeError
from fedlas.losses.base.batch import IGNORE_INDEX, Batch, as_batch, full_precision
from fedlas.losses.base.functional import (
    Reduction,
    class_weight,
    expected,
    reduce,
    shape_without_classes,
    smoothed,
    sum_of_terms,
)
from fedlas.losses.base.hyperparameters import whole
from fedlas.losses.base.input_checks import check_tensors, checked_index
from fedlas.losses.base.part import AbstractExact
from fedlas.losses.base.usage_checks import EpochCheck, LogitsCheck, UpdateCheck
from fedlas.predictions import Predictions

Loss = TypeVar("Loss", bound="AbstractLoss")


class Options(TypedDict, total=False):
    """Keywords of all losses, see `AbstractLoss`."""

    weight: Tensor | Sequence[float] | None
    ignore_index: int
    reduction: Reduction
    sync: bool


class Common(Options, total=False):
    """Keywords of losses for which the number of classes is optional."""

    num_classes: int | None


class GateState(NamedTuple):
    """State of the gate of a FeDLaS loss in a batch, detached; NaN where a sample is ignored.

    Attributes:
        psi: direction of each sample, +1 or -1.
        gamma: normalised feature norm of each sample.
        alpha_i: smoothing of each sample.
        alpha: base smoothing; alpha_i = alpha for gamma = 0.
    """

    psi: Tensor
    gamma: Tensor
    alpha_i: Tensor
    alpha: float


class AbstractLoss(AbstractExact):
    """Base class of training losses: a drop-in for `nn.CrossEntropyLoss` that may also use features and sample indices.

    Args:
        num_classes: number of classes, 2 or more; if given, logits with another number of classes are an error.
        weight: one factor per class, as in `nn.CrossEntropyLoss`; it multiplies the classification term.
        ignore_index: samples with this label are ignored.
        reduction: `mean`, `sum` or `none`.
        sync: in a distributed run, share statistics and denominators with all ranks in a training step.

    """

    name: ClassVar[str]
    citation: ClassVar[str]
    takes_maps: ClassVar[bool] = True
    takes_soft_labels: ClassVar[bool] = True
    learns_between_epochs: ClassVar[bool] = False
    """Whether `end_epoch` must be called after each epoch."""
    needs_validation: bool = False
    """Whether `end_epoch` needs predictions on a validation set; never pass predictions on the test set."""
    needs_features: bool = False
    needs_index: bool = False
    """Whether a training step needs the position of each sample in the training split; an evaluation never does."""
    has_gate: ClassVar[bool] = False
    """Whether a gate adapts the smoothing per sample; `gate_state` then returns its state."""
    index_limit: int | None = None
    identical_buffers: tuple[str, ...] = ()
    """Large buffers that are always equal on all ranks; `WithLoss` excludes them from the broadcast of DDP."""
    not_hyperparameters = frozenset(Common.__annotations__)

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        weight: Tensor | Sequence[float] | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduction: Reduction = "mean",
        sync: bool = True,
    ) -> None:
        super().__init__()
        self.num_classes = None if num_classes is None else whole("num_classes", num_classes, 2)
        self.weight: Tensor | None
        self.register_buffer("weight", class_weight(weight, num_classes))
        # Checked in the constructor: in a training step it would synchronise the host.
        if self.weight is not None and not bool(((self.weight >= 0) & self.weight.isfinite()).all()):
            raise UserError(f"weight must be finite and not negative, not {self.weight.tolist()}")
        if not isinstance(ignore_index, int):
            raise UserTypeError(f"ignore_index must be a whole number, not {ignore_index!r}")
        self.ignore_index = ignore_index
        self.reduction: Reduction = one_of("reduction", reduction, ("mean", "sum", "none"))
        if not isinstance(sync, bool):
            raise UserTypeError(f"sync must be true or false, not {sync!r}")
        self.sync = sync
        self.last_terms: dict[str, Tensor] = {}
        self._logits_check = LogitsCheck()
        self._update_check = UpdateCheck()
        self._epoch_check = EpochCheck()

    @abstractmethod
    def terms(self, batch: Batch) -> dict[str, Tensor]:
        """Return the named terms of each sample, already multiplied by their coefficients."""

    def end_epoch(self, validation: Predictions | None = None) -> None:
        """Update the loss at the end of an epoch; most losses do nothing.

        Args:
            validation: predictions on a validation set, for the losses with `needs_validation`.

        """
        if self.needs_validation and validation is None:
            raise UserError(f"{self.name} learns from a validation set: {self._end_epoch_call}")
        if validation is not None and not isinstance(validation, Predictions):
            raise UserTypeError(
                f"validation must be fedlas.Predictions(logits, labels), not {type(validation).__name__}"
            )
        if validation is not None and self.num_classes not in {None, validation.num_classes}:
            raise UserError(
                f"{self.name} was built for {self.num_classes} classes; validation has {validation.num_classes}"
            )
        self._epoch_check.finish()
        self._update_check.end_epoch(self.name, self)
        self.learn_from_epoch(validation)

    def disable_epoch_check(self) -> None:
        """Disable the warning about a missing `end_epoch`, for callbacks that call it."""
        self._epoch_check.finish()

    def gate_state(self) -> GateState | None:
        """Return the state of the gate in the latest batch, for losses with `has_gate`."""
        return None

    def extra_repr(self) -> str:
        """Show the hyperparameters, and the common keywords that differ from their defaults."""
        defaults = {"num_classes": None, "ignore_index": IGNORE_INDEX, "reduction": "mean", "sync": True}
        changed_options = {
            name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value
        }
        if self.weight is not None:
            changed_options["weight"] = f"<{len(self.weight)} classes>"
        return ", ".join(f"{name}={value!r}" for name, value in {**self.hyperparameters, **changed_options}.items())

    def learn_from_epoch(self, validation: Predictions | None) -> None:
        """Update the state after an epoch; override it in losses with `learns_between_epochs`."""

    def epoch_state(self) -> dict[str, list[float]]:
        """Return the state that is logged in each epoch; empty for most losses."""
        return {}

    @property
    def updates_state(self) -> bool:
        """Whether a call is a training step: in training mode, with gradients enabled."""
        return self.training and torch.is_grad_enabled()

    def train(self: Loss, mode: bool = True) -> Loss:
        """Set training or evaluation mode."""
        if not mode and self.learns_between_epochs:
            self._epoch_check.evaluated(self.name, self._end_epoch_call)
        return super().train(mode)

    def forward(
        self, logits: Tensor, labels: Tensor, features: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch; unless reduction is "none", store its detached terms in `last_terms`.

        In evaluation mode, or where gradients are disabled, the state of the loss does not change.
        """
        reduced = self._reduced(logits, labels, features, index, self.reduction)
        if self.reduction == "none":
            return sum_of_terms(reduced).reshape(shape_without_classes(logits))
        if not self.is_transformed:
            self.last_terms = {name: value.detach() for name, value in reduced.items()}
        return sum_of_terms(reduced)

    def parts(
        self, logits: Tensor, labels: Tensor, features: Tensor | None = None, index: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the named terms of each sample, with the shape of hard labels, for custom combinations."""
        per_sample = self._reduced(logits, labels, features, index, "none")
        return {name: values.reshape(shape_without_classes(logits)) for name, values in per_sample.items()}

    def _reduced(
        self, logits: Tensor, labels: Tensor, features: Tensor | None, index: Tensor | None, reduction: Reduction
    ) -> dict[str, Tensor]:
        check_tensors(logits, labels, features, index)
        with full_precision(logits):
            batch = self._batch(logits, labels, features, index)
            if torch.compiler.is_compiling() or self.is_transformed:  # a counter would be a constant of the graph
                return reduce(self.terms(batch), batch, self.weight, reduction)
            if not batch.updates_state:
                return reduce(self.terms(batch), batch, self.weight, reduction)
            self._logits_check.before_step(self.name, logits)
            self._update_check.before_step(self.name, self)
            if self.learns_between_epochs:
                self._epoch_check.before_step(self.name, self._end_epoch_call, len(logits), index)
            reduced = reduce(self.terms(batch), batch, self.weight, reduction)
            self._update_check.after_step(self)
            return reduced

    @property
    def _end_epoch_call(self) -> str:
        argument = "validation=fedlas.Predictions(logits, labels)" if self.needs_validation else ""
        return f"loss.end_epoch({argument})"

    def expected(self, batch: Batch, loss_of: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Return the mean of a loss over the label distribution: Σ_k y_k w_k l(k), with l(k) = loss_of(log p_k)."""
        return expected(batch, self.weight, loss_of)

    def cross_entropy(self, batch: Batch) -> Float[Tensor, " n"]:
        """Return the cross-entropy of each sample."""
        return expected(batch, self.weight, torch.neg)

    def smoothed(self, batch: Batch, alpha: float | Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the cross-entropy of each sample with label smoothing alpha."""
        return smoothed(batch, self.weight, alpha)

    def _batch(self, logits: Tensor, labels: Tensor, features: Tensor | None, index: Tensor | None) -> Batch:
        if self.needs_features and features is None:
            raise UserError(
                f"{self.name} needs features, the input of the network's last layer: loss(logits, labels, features). "
                "fedlas.WithFeatures(model) returns them for any network"
            )
        updates_state = self.updates_state
        if self.needs_index and updates_state and index is None:
            raise UserError(f"{self.name} needs index, each sample's position in the training split: index=...")
        if logits.ndim > 2 and not self.takes_maps:
            raise UserError(f"{self.name} takes logits of shape (N, C), not maps of shape {tuple(logits.shape)}")
        if labels.is_floating_point() and labels.ndim > 1 and not self.takes_soft_labels:
            raise UserError(f"{self.name} takes one class number per sample, not soft labels")
        if self.index_limit is not None and updates_state and index is not None and index.ndim == 1:
            index = checked_index(index, self.index_limit)
        shared = updates_state and self.sync and ranks.count() > 1
        batch = as_batch(
            logits,
            labels,
            features,
            index,
            ignore_index=self.ignore_index,
            shared=shared,
            updates_state=updates_state,
        )
        if self.num_classes not in {None, logits.shape[1]}:
            raise UserError(f"{self.name} was built for {self.num_classes} classes; logits have {logits.shape[1]}")
        if self.weight is not None and len(self.weight) != logits.shape[1]:
            raise UserError(f"weight of {self.name} has {len(self.weight)} classes; logits have {logits.shape[1]}")
        return batch
