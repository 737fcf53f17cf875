"""Base class of losses that use their own past predictions as targets (self-distillation)."""

import math
import os
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedlas.catalog import one_of
from fedlas.losses.base.batch import Batch
from fedlas.losses.base.loss import AbstractLoss

TableType = Literal["float32", "bfloat16"]
Distillation = TypeVar("Distillation", bound="AbstractSelfDistillation")


class AbstractSelfDistillation(AbstractLoss):
    """Base class of losses whose target contains the previous prediction of each training sample.

    The buffer `past` has one row of probabilities per training sample. A training step reads the rows of its batch and
    then overwrites them with its own predictions. Rows of ignored samples and of predictions that are not finite do not
    change. The option `table_dtype` sets the dtype of the table; casting the loss does not change it. In a distributed
    run each rank writes the rows of all ranks, so that all tables are equal. An evaluation uses no past predictions.
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
        # A sample may occur twice, for example if a distributed sampler pads an epoch. Several writes to one row have
        # no defined order on a GPU; therefore all of them write the last usable prediction.
        key = 2 * index + usable
        ranked, order = key.sort(stable=True)
        winner = order[torch.searchsorted(ranked, 2 * index + 1, right=True) - 1]
        self.past.index_copy_(0, index, rows[winner].to(self.past.dtype))

    def distilled(self, batch: Batch, alpha: float | Tensor, target: Float[Tensor, "n classes"]) -> Float[Tensor, " n"]:
        """Return (1 - alpha) CE + alpha CE(target, p) for each sample; class weights act as in label smoothing."""
        log_probs = batch.log_probs if self.weight is None else batch.log_probs * self.weight.to(batch.logits.dtype)
        # A class with target 0 contributes nothing, even if its log-probability is -inf.
        toward_target = torch.where(target > 0, target * log_probs, 0).sum(1)
        return (1 - alpha) * self.cross_entropy(batch) - alpha * toward_target

    def _rows_of(self, batch: Batch) -> Int[Tensor, " n"]:
        assert batch.index is not None
        # Compiled indexing counts a negative index from the end; an index beyond the table raises in every mode.
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
    """Return the main memory of the machine in bytes, or infinity if unknown."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf
