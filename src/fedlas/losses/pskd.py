"""Progressive self-knowledge distillation (PS-KD): labels are softened by the previous prediction of each sample.

    L = mean_i (1 - a_t) CE_i + a_t CE(m_i, p_i),   a_t = alpha t / epochs (`linear`) or alpha (`constant`)

m_i is the prediction of sample i at its previous visit, in training mode and without gradient; t counts epochs from 1.
At the first visit the target is the label alone, as in the official code. Paper: linear, alpha 0.8. Class weights
act on both terms, as in label smoothing. Differences from the official code: the constant schedule; the table is saved
with the loss; t stays at `epochs` when training continues. With CutMix the official code mixes past predictions too,
which is not supported: soft labels are an error.

Memory: num_samples x num_classes numbers, 18 MB for 45,000 samples of 100 classes; for ImageNet (1.28 million samples,
1,000 classes) 5.1 GB in float32, 2.6 GB in bfloat16, on the device and in each checkpoint. Distillation is used in
training only: in evaluation mode, or where gradients are disabled, the loss is the cross-entropy and no index is
needed.
"""

from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from fedlas.losses.base import AbstractSelfDistillation, Batch, Options, TableType, one_of, whole, within
from fedlas.predictions import Predictions

Schedule = Literal["linear", "constant"]


class PSKD(AbstractSelfDistillation):
    """Self-distillation from the previous prediction of each sample, with a weight that grows over the epochs.

    Args:
        num_classes: number of classes.
        num_samples: number of samples of the training split, whose positions are passed as `index`.
        epochs: number of epochs of the training run, after which the linear schedule reaches alpha.
        alpha: final strength.
        schedule: `linear` growth from alpha / epochs in the first epoch to alpha in the last, or `constant`.
        table_dtype: `float32`, or `bfloat16` for half the memory of the past predictions.
        **options: see `AbstractLoss`.

    """

    name = "pskd"
    citation = "Kim et al., Self-Knowledge Distillation with Progressive Refinement of Targets, ICCV 2021."
    needs_index = True

    def __init__(
        self,
        *,
        num_classes: int,
        num_samples: int,
        epochs: int,
        alpha: float = 0.8,
        schedule: Schedule = "linear",
        table_dtype: TableType = "float32",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(num_classes=num_classes, **options)
        self.num_samples = self.index_limit = whole("num_samples", num_samples)
        self.epochs = whole("epochs", epochs)
        self.alpha = within("alpha", alpha, 0, 1)
        self.schedule = one_of("schedule", schedule, get_args(Schedule))
        self.finished_epochs: Tensor
        self.register_buffer("finished_epochs", torch.zeros((), dtype=torch.int64))
        self.create_table(self.num_samples, int(num_classes), table_dtype, 0.0)

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        if not batch.updates_state:
            return {"classification": self.cross_entropy(batch)}
        past = self.read_past(batch)
        was_visited = (past.sum(1) > 0).to(past.dtype)  # a table row starts with zeros
        value = self.distilled(batch, self._strength(past.dtype) * was_visited, past)
        self.write_past(batch)
        return {"classification": value}

    def learn_from_epoch(self, validation: Predictions | None) -> None:  # noqa: ARG002 (learns from training alone)
        """Count the epoch."""
        self.finished_epochs += 1

    def _strength(self, dtype: torch.dtype) -> Tensor | float:
        if self.schedule == "constant":
            return self.alpha
        return self.alpha * ((self.finished_epochs + 1).to(dtype) / self.epochs).clamp_max(1)
