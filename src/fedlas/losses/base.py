"""Base class of all training losses: batch, input checks and reduction.

A loss is a sum of named terms. Each term has one value per sample, already multiplied by its coefficient; a term of the
whole batch is split into per-sample contributions whose mean it is. Class weights multiply the term `classification`;
every other term is a regulariser. With w_k the class weights, y_i the label and n the number of valid samples,

    mean:  Σ_i classification_i / Σ_i w_{y_i}  +  Σ_i regulariser_i / n      (soft labels: both divided by n)
    sum:   Σ_i classification_i + Σ_i regulariser_i
    none:  classification_i + regulariser_i

as `torch.nn.functional.cross_entropy` reduces its only term. In a distributed training step, denominators are summed
over all ranks and sums are multiplied by the number of ranks. The mean over ranks that DistributedDataParallel computes
then equals value and gradient of one process with the whole batch. Ignored samples are masked and not removed, so that
shapes do not depend on data and nothing synchronises with the device.
"""

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from fedlas import ranks
from fedlas.catalog import keywords, nearest
from fedlas.errors import UserError, UserTypeError
from fedlas.losses.input_checks import (
    all_are_classes,
    check_shapes,
    check_tensors,
    checked_index,
    checked_labels,
    is_eager_on_cpu,
    is_transformed,
)
from fedlas.losses.usage_checks import EpochCheck, UpdateCheck
from fedlas.predictions import Predictions

Reduction = Literal["mean", "sum", "none"]
IGNORE_INDEX = -100
Word = TypeVar("Word", bound=str)
TableType = Literal["float32", "bfloat16"]
Exact = TypeVar("Exact", bound="AbstractExact")
Distillation = TypeVar("Distillation", bound="AbstractSelfDistillation")
Loss = TypeVar("Loss", bound="AbstractLoss")


@dataclass(frozen=True)
class Batch:
    """Inputs of a loss in one step: rows of samples, pixels or tokens.

    Logits and labels are in float32 or float64, features in the type that the network returns. `valid` marks the rows
    that are not ignored, and `all_valid` is true if all rows are known to be valid; `updates_state` is true in a
    training step, and false in an evaluation, which does not change the state of the loss; `shared` is true if the
    batch is one part of a batch that is distributed over ranks.
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
        """Return the correctness of predictions: 1 or 0, or the probability of the prediction in a soft label."""
        prediction = self.logits.argmax(1)
        if self.soft:
            return self.labels.gather(1, prediction.unsqueeze(1)).squeeze(1)
        return (prediction == self.labels).to(self.logits.dtype)

    def excess(self, margin: float) -> Float[Tensor, "n classes"]:
        """Return by how much the distance of each logit from the largest one of its row exceeds a margin."""
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


class Options(TypedDict, total=False):
    """Keywords of all losses, see `AbstractLoss`."""

    weight: Tensor | Sequence[float] | None
    ignore_index: int
    reduction: Reduction
    sync: bool


class Common(Options, total=False):
    """Keywords of losses for which the number of classes is optional."""

    num_classes: int | None


class AbstractPart(nn.Module, ABC):
    """A module that shows its hyperparameters in its `repr` and saves them in its `state_dict`.

    Hyperparameters are keywords of the constructor with an attribute of the same name. They are saved in the metadata
    of `state_dict`, which formats for tensors alone (safetensors) drop. Loading the state of another class is an error;
    loading a state with other hyperparameters is a warning.
    """

    not_hyperparameters: ClassVar[frozenset[str]] = frozenset()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters by their keywords."""
        names = [name for name in keywords(type(self)) if name not in self.not_hyperparameters]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def extra_repr(self) -> str:
        """Show the hyperparameters."""
        return ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters.items())

    @property
    def is_transformed(self) -> bool:
        """Whether this call is inside a transform of `torch.func`, whose tensors are invalid outside of it."""
        return is_transformed()

    def is_eager_on_cpu(self, x: Tensor) -> bool:
        """Return whether values can be read without synchronisation and the overhead per operator dominates."""
        return is_eager_on_cpu(x)

    def check_update(self) -> None:
        """Raise if the state cannot be updated in place."""
        if self.is_transformed:
            raise RuntimeError(
                f"{type(self).__name__} updates its state in a training step, which torch.func transforms cannot do; "
                "call loss.eval() first"
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            plain = {
                name: v for name, v in self.hyperparameters.items() if v is None or isinstance(v, int | float | str)
            }
            metadata |= {"class": type(self).__name__, "hyperparameters": plain}

    def _load_from_state_dict(  # noqa: PLR0917 (the signature of nn.Module)
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        mine, theirs = type(self).__name__, local_metadata.get("class", type(self).__name__)
        if mine != theirs:
            error_msgs.append(f"{prefix[:-1] or 'this module'} is a {mine}, but the state was saved by a {theirs}")
            return
        saved, own = local_metadata.get("hyperparameters", {}), self.hyperparameters
        different = [
            f"{name}={saved[name]!r} (here {own[name]!r})" for name in own if own[name] != saved.get(name, own[name])
        ]
        if different:
            warnings.warn(
                f"the loaded state of {mine} belongs to other hyperparameters: {', '.join(different)}",
                UserWarning,
                stacklevel=2,
            )


class AbstractExact(AbstractPart):
    """A module whose float64 buffers stay float64 when the module is cast to a lower precision.

    In bfloat16, updates of a running average with a small weight would be rounded to zero.
    """

    def _apply(self: Exact, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exact:
        exact = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float64}
        for name, buffer in exact.items():  # fn moves a float32 copy, which every device supports
            self._buffers[name] = buffer.float()
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = self._buffers[name]
            assert moved is not None
            dtype = torch.float32 if moved.device.type == "mps" else torch.float64
            self._buffers[name] = moved.to(dtype) if buffer.is_meta else buffer.to(moved.device, dtype)
        return self


class GateState(NamedTuple):
    """State of the gate of a FeDLaS loss in a batch, detached; NaN where a sample is ignored.

    Attributes:
        psi: direction of each sample, +1 or -1.
        gamma: normalised feature norm of each sample.
        alpha_i: smoothing of each sample.
        alpha: smoothing that alpha_i varies around.
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
    """Large buffers that are equal on all ranks anyway; `WithLoss` excludes them from the broadcast of DDP."""
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
        self.register_buffer("weight", _class_weight(weight, num_classes))
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
        self._epoch_check.finish()
        self._update_check.end_epoch(self.name, self)
        self.learn_from_epoch(validation)

    def gate_state(self) -> GateState | None:
        """Return the state of the gate in the latest batch, for losses with `has_gate`."""
        return None

    def extra_repr(self) -> str:
        """Show the hyperparameters, and the common keywords that differ from their defaults."""
        defaults = {"num_classes": None, "ignore_index": IGNORE_INDEX, "reduction": "mean", "sync": True}
        others = {name: getattr(self, name) for name, value in defaults.items() if getattr(self, name) != value}
        if self.weight is not None:
            others["weight"] = f"<{len(self.weight)} classes>"
        return ", ".join(f"{name}={value!r}" for name, value in {**self.hyperparameters, **others}.items())

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
            return _sum(reduced).reshape(_without_classes(logits))
        if not self.is_transformed:
            self.last_terms = {name: value.detach() for name, value in reduced.items()}
        return _sum(reduced)

    def parts(
        self, logits: Tensor, labels: Tensor, features: Tensor | None = None, index: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the named terms of each sample, shaped like hard labels, to be combined in a custom way."""
        each = self._reduced(logits, labels, features, index, "none")
        return {name: values.reshape(_without_classes(logits)) for name, values in each.items()}

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
            self._update_check.before_step(self.name, self)
            if self.learns_between_epochs:
                self._epoch_check.before_step(self.name, self._end_epoch_call, index)
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
        for built_for in (self.num_classes, None if self.weight is None else len(self.weight)):
            if built_for not in (None, logits.shape[1]):
                raise UserError(f"{self.name} was built for {built_for} classes; logits have {logits.shape[1]}")
        return batch


class AbstractSelfDistillation(AbstractLoss):
    """Base class of losses whose target contains the previous prediction of each training sample.

    The buffer `past` has one row of probabilities per training sample. A training step reads the rows of its batch and
    then overwrites them with its own predictions. Rows of ignored samples and of predictions that are not finite do not
    change. Casting the loss does not change the type of the table, which is an option. In a distributed run each rank
    writes the rows of all ranks, so that all tables are equal. An evaluation uses no past predictions.
    """

    takes_maps = False
    takes_soft_labels = False
    learns_between_epochs = True
    identical_buffers = ("past",)
    past: Tensor

    def create_table(self, num_samples: int, num_classes: int, table_dtype: TableType, value: float) -> None:
        """Create the table of past predictions, filled with one value."""
        self.table_dtype = one_of("table_dtype", table_dtype, ("float32", "bfloat16"))
        dtype = torch.float32 if table_dtype == "float32" else torch.bfloat16
        size = num_samples * num_classes * dtype.itemsize
        self._table_size = (
            f"{num_samples:,} x {num_classes:,} past predictions in {table_dtype} take {size / 1e9:,.1f} GB"
        )
        advice = "" if table_dtype == "bfloat16" else "; table_dtype='bfloat16' halves it"
        message = f"{self.name}: {self._table_size}, which does not fit into memory{advice}"
        if torch.get_default_device().type == "cpu" and size > _physical_memory():
            raise MemoryError(message)
        try:
            table = torch.full((num_samples, num_classes), value, dtype=dtype)
        except RuntimeError as error:
            raise MemoryError(message) from error
        self.register_buffer("past", table)

    def _apply(self: Distillation, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Distillation:
        table = self._buffers.get("past")
        if table is None:
            return super()._apply(fn, recurse)
        # A cast changes floating-point tensors only; as integers the table moves between devices and keeps its type.
        self._buffers["past"] = table.view(torch.int32 if table.dtype == torch.float32 else torch.int16)
        try:
            super()._apply(fn, recurse)
        except torch.OutOfMemoryError as error:
            error.add_note(f"{self.name}: {self._table_size}; see its option table_dtype")
            self._buffers["past"] = table
            raise
        moved = self._buffers["past"]
        assert moved is not None
        self._buffers["past"] = table.to(moved.device) if moved.is_floating_point() else moved.view(table.dtype)
        return self

    def read_past(self, batch: Batch) -> Float[Tensor, "n classes"]:
        """Return the past prediction of each sample of the batch."""
        index = self._rows_of(batch)
        compiled = torch.compiler.is_compiling()
        rows = (_read_rows_op(self.past, index) if compiled else self.past.index_select(0, index)).to(
            batch.logits.dtype
        )
        if self.past.dtype == torch.float32:
            return rows
        # Rounded probabilities need not sum to 1.
        return rows / rows.sum(1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)

    @torch.no_grad()
    def write_past(self, batch: Batch) -> None:
        """Replace the past predictions of the batch by its present ones."""
        self.check_update()
        index = self._rows_of(batch)
        probs = batch.log_probs.detach().exp()
        usable = batch.valid & probs.isfinite().all(1)
        rows = torch.where(usable.unsqueeze(1), probs, self.past.index_select(0, index).to(probs.dtype))
        index, usable, rows = batch.joined(index), batch.joined(usable), batch.joined(rows)
        # A sample may occur twice, as where a distributed sampler pads an epoch. Several writes to one row have no
        # defined order on a GPU; therefore all of them write the last usable prediction.
        key = 2 * index + usable
        ranked, order = key.sort(stable=True)
        winner = order[torch.searchsorted(ranked, 2 * index + 1, right=True) - 1]
        self.past.index_copy_(0, index, rows[winner].to(self.past.dtype))

    def distilled(self, batch: Batch, alpha: float | Tensor, target: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
        """Return (1 - alpha) CE + alpha CE(target, p) for each sample; class weights act as in label smoothing."""
        log_probs = batch.log_probs if self.weight is None else batch.log_probs * self.weight.to(batch.logits.dtype)
        # A class with probability 0 contributes nothing, also where its log-probability is -inf.
        toward_target = torch.where(target > 0, target * log_probs, 0).sum(1)
        return (1 - alpha) * self.cross_entropy(batch) - alpha * toward_target

    def _rows_of(self, batch: Batch) -> Int[Tensor, " n"]:
        assert batch.index is not None
        # Compiled indexing counts a negative index from the end; moved beyond the table it is an error everywhere.
        return torch.where(batch.index < 0, len(self.past), batch.index)


# A compiled backward pass may recompute an indexing operation instead of saving its result. It would then read the rows
# after they were overwritten, without an error. The result of a custom operator is saved.
@torch.library.custom_op("fedlas::read_rows", mutates_args=())
def _read_rows_op(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index)


@_read_rows_op.register_fake
def _(table: Tensor, index: Tensor) -> Tensor:
    return table.new_empty(len(index), table.shape[1])


def _physical_memory() -> float:
    """Return the main memory of the machine in bytes, or infinity where it is not known."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of a tensor (nothing for a meta tensor)."""
    if x.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a loss computes: float32, or float64 for float64 inputs."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.promote_types(dtype, torch.float32)


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
        given, labels = labels, (labels if labels.ndim == 1 else labels.reshape(-1)).long()
        all_valid = all_are_classes(labels, classes) and not 0 <= ignore_index < classes
        valid = labels.new_ones((), dtype=torch.bool).expand(len(labels)) if all_valid else labels != ignore_index
        if not all_valid:
            checked = checked_labels(given, classes, ignore_index).reshape(-1).long()
            labels = torch.where(valid, checked, 0)
            # An ignored row may contain NaN, which must not reach a gradient: 0 * NaN is NaN.
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


def expected(batch: Batch, weight: Tensor | None, loss_of: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
    """Return the mean of a loss over the label distribution: Σ_k y_k w_k l(k).

    `loss_of` maps log p_k to l(k) elementwise, for one column (hard labels) or for all classes.
    """
    if weight is not None:
        weight = weight.to(batch.logits.dtype)
    if batch.soft:
        target = batch.labels if weight is None else batch.labels * weight
        return (target * loss_of(batch.log_probs)).sum(1)
    if loss_of is torch.neg and not torch.compiler.is_compiling():  # one operator instead of four
        picked = functional.nll_loss(batch.log_probs, batch.labels, reduction="none")
    else:
        picked = loss_of(_pick(batch.log_probs, batch.labels)).squeeze(1)
    return picked if weight is None else picked * weight[batch.labels]


def smoothed(batch: Batch, weight: Tensor | None, alpha: float | Tensor) -> Float[Tensor, " n"]:
    """Return (1 - alpha) CE + alpha E for each sample, with E the cross-entropy to the uniform distribution."""
    log_probs = batch.log_probs if weight is None else batch.log_probs * weight.to(batch.logits.dtype)
    cross_entropy, mean = expected(batch, weight, torch.neg), log_probs.mean(1)
    if is_eager_on_cpu(mean):  # equal, with fewer operators
        return cross_entropy - alpha * (cross_entropy + mean)
    return (1 - alpha) * cross_entropy - alpha * mean


def focal(log_p: Tensor, gamma: float | Tensor) -> Tensor:
    """Return (1 - p)^gamma * (-log p) with a gradient that is finite also at p = 1."""
    return -log_p * complement(log_p) ** gamma


def complement(log_p: Tensor) -> Tensor:
    """Return 1 - p, accurate near p = 1 and positive, so that all its powers have a finite gradient."""
    return (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)


def reduce(terms: dict[str, Tensor], batch: Batch, weight: Tensor | None, reduction: Reduction) -> dict[str, Tensor]:
    """Reduce each term over the valid samples; see the docstring of the module."""
    each = terms
    if not batch.all_valid:
        each = {name: torch.where(batch.valid, values, 0) for name, values in terms.items()}
    if reduction == "none":
        return each
    if reduction == "mean" and batch.all_valid and weight is None and not batch.shared:
        return {name: values.mean() for name, values in each.items()}
    totals = {name: values.sum() for name, values in each.items()}
    if batch.shared:
        totals = {name: value * ranks.count() for name, value in totals.items()}
    if reduction == "sum":
        return totals
    count = batch.count()
    denominators = dict.fromkeys(totals, count)
    if weight is not None and not batch.soft:
        weights = batch.total(weight.to(count.dtype)[batch.labels])
        denominators["classification"] = torch.where(weights > 0, weights, 1)
    return {name: value / denominators[name] for name, value in totals.items()}


def smoothed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    alpha: float | Tensor,
    *,
    weight: Tensor | Sequence[float] | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the cross-entropy with a separate label smoothing for each sample.

    Like `F.cross_entropy(label_smoothing=alpha)`, but alpha may be a tensor with one value per label, and has a
    gradient.
    """
    one_of("reduction", reduction, ("mean", "sum", "none"))
    check_tensors(logits, labels)
    with full_precision(logits):
        batch = as_batch(logits, labels, ignore_index=ignore_index)
        if isinstance(alpha, Tensor) and alpha.ndim > 0:
            if tuple(alpha.shape) != _without_classes(logits):
                raise UserError(f"alpha must have shape {_without_classes(logits)}, not {tuple(alpha.shape)}")
            alpha = alpha.reshape(-1).to(batch.logits.dtype)
        elif not isinstance(alpha, Tensor):
            within("alpha", alpha, 0, 1)
        factors = _class_weight(weight, logits.shape[1])
        value = _sum(reduce({"classification": smoothed(batch, factors, alpha)}, batch, factors, reduction))
        return value.reshape(_without_classes(logits)) if reduction == "none" else value


def one_of(name: str, value: Word, known: Sequence[Word]) -> Word:
    """Return a value; raise if it is not one of the known ones."""
    if value not in known:
        raise UserError(f"{name} {value!r} is unknown; {nearest(str(value), list(known))}")
    return value


def at_least(name: str, value: float, lowest: float) -> float:
    """Return a number; raise if it is too small, not finite or not a number."""
    _check_number(name, value)
    if not (value >= lowest and math.isfinite(value)):
        raise UserError(f"{name} must be at least {lowest}, not {value}")
    return value


def whole(name: str, value: int, lowest: int = 1) -> int:
    """Return a number as an integer; raise if it is too small or not a whole number."""
    at_least(name, value, lowest)
    if value != int(value):
        raise UserError(f"{name} must be a whole number, not {value}")
    return int(value)


def within(name: str, value: float, lowest: float, highest: float) -> float:
    """Return a number; raise if it is outside of a closed interval or not a number."""
    _check_number(name, value)
    if not lowest <= value <= highest:
        raise UserError(f"{name} must lie between {lowest} and {highest}, not {value}")
    return value


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserTypeError(f"{name} must be a number, not {value!r}")


def _sum(terms: dict[str, Tensor]) -> Tensor:
    first, *others = terms.values()
    return sum(others, first)


def _pick(x: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, "n 1"]:
    """Return the entry of the label in each row."""
    if not torch.compiler.is_compiling():
        return x.gather(1, labels.unsqueeze(1))
    # The gradient of a gather is a scatter into a new tensor; that of a masked sum is fused with the softmax.
    is_label = torch.arange(x.shape[1], device=x.device) == labels.unsqueeze(1)
    picked = torch.where(is_label, x, 0).sum(1)
    # A label out of range, which is not checked here, gives NaN and not a loss of 0.
    return torch.where((labels >= 0) & (labels < x.shape[1]), picked, torch.nan).unsqueeze(1)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _without_classes(logits: Tensor) -> tuple[int, ...]:
    return (logits.shape[0], *logits.shape[2:])


def _class_weight(weight: Tensor | Sequence[float] | None, num_classes: int | None) -> Tensor | None:
    if weight is None:
        return None
    expected_type = "weight must be one floating-point number per class, such as [1.0, 0.5, 2.0]"
    try:
        weight = torch.as_tensor(weight, dtype=None if isinstance(weight, Tensor) else torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{expected_type}, not {weight!r}") from error
    if weight.ndim != 1 or not weight.is_floating_point():
        raise UserError(f"{expected_type}, not a tensor of {weight.dtype} and shape {tuple(weight.shape)}")
    if num_classes is not None and len(weight) != num_classes:
        raise UserError(f"weight has {len(weight)} entries for {num_classes} classes")
    return weight
