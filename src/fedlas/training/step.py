"""One training step: batch assembly, forward, loss, backward, clipping, learning rate, optimizer.

All that a step reads or changes is in tensors on the device at fixed addresses: the step counter, the table of learning
rates, weights, optimizer state, the state of the loss, the metrics of the epoch and the first bad step. The host
decides nothing, so that `capture.py` can capture the whole step in a CUDA graph:

    index ─► images ─► mixup ─► network ─► loss ─► backward ─► gradient norm, clipping ─► optimizer
                                   │         │                      │                        │
                                metrics   its state          first bad step         lr = table[count], count + 1

A step is bad if its loss or a gradient is not finite, or if its loss is thousands of times that of uniform predictions.
The number of the first bad step is stored on the device, and the optimizer changes nothing from then on; the host reads
that number together with the metrics. In float16 an overflow skips one step and lowers the loss scale; it is a bad step
only at a scale of 1.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from fedlas import ranks
from fedlas.data.base import Sample
from fedlas.training.distributed import gradient_reduction
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.network_with_loss import NetworkWithLoss
from fedlas.training.optimizer import SKIP, FusedStep, clip_gradients
from fedlas.training.precision import GradientScaler, autocast
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

MAX_LOSS_RATIO = 1e4  # times the loss of uniform predictions: training does not recover from a larger loss


@dataclass(eq=False)
class TrainStep:
    """Trains on one batch at a time, eagerly.

    Args:
        recipe: precision, clipping, and the number of parts of a batch.
        assemble_batch: returns images, labels and positions of a batch.
        mixer: mixup and CutMix.
        module: network and loss.
        parallel_module: the same wrapped in DistributedDataParallel; the module itself if there is one process.
        optimizer: fused, with learning rates in tensors.
        rates: writes the learning rates of a step to the tensors that the optimizer reads.
        metrics: sums of the epoch.
        gate: statistics of the gate of a FeDLaS loss; empty for other losses.
        fused_step: custom kernels for clipping, learning rate and optimizer, if available.
    """

    recipe: Recipe
    assemble_batch: Callable[..., Sample]
    mixer: Mixer
    module: NetworkWithLoss
    parallel_module: nn.Module
    optimizer: torch.optim.Optimizer
    rates: LearningRates
    metrics: EpochMetrics
    gate: GateStatistics
    fused_step: FusedStep | None = None

    def __post_init__(self) -> None:
        self.device = self.metrics.device
        self.scaler = GradientScaler(self.recipe.precision, self.device)
        self.count = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)

    def __call__(self, *inputs: Tensor) -> None:
        """Train on a batch, given the inputs of the batch assembly; must not synchronise with the device."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = list(zip(*(value.chunk(self.recipe.accumulate) for value in inputs), strict=True))
        valid = []
        with nullcontext() if self.fused_step is None else self.fused_step.gradient_slots():
            for number, part in enumerate(parts, start=1):
                with gradient_reduction(self.parallel_module, needed=number == len(parts)):
                    valid.append(self._forward_backward(part, len(part[0]) / len(inputs[0])))
        loss_is_valid = reduce(torch.logical_and, valid)
        if self.fused_step is not None and self.fused_step.ready:
            self.fused_step(loss_is_valid, self.count, self.first_bad, self.metrics)
        else:
            self._clip_and_update(loss_is_valid)

    def _forward_backward(self, inputs: tuple[Tensor, ...], fraction: float) -> Bool[Tensor, ""]:
        """Add the gradient of a batch, or of a part of one; return whether its loss is finite and not too large."""
        sample = self.assemble_batch(*inputs)
        images, labels = self.mixer(sample.images, sample.labels, self.count)
        with autocast(self.recipe.precision, self.device):
            loss, output = self.parallel_module(images, labels, sample.index)
        terms, summed = self.module.loss.last_terms, self.module.loss.reduction == "sum"
        if fraction != 1 and summed:  # estimate the sum over the whole batch, so that parts are averaged like means
            loss, terms = loss / fraction, {name: term / fraction for name, term in terms.items()}
        self.scaler.scale(loss if fraction == 1 else loss * fraction).backward()
        self.metrics.add_batch(loss, terms, output.logits.detach(), sample.labels)
        self.gate.add(sample.index)
        limit = MAX_LOSS_RATIO * math.log(output.logits.shape[1]) * (len(sample.labels) / fraction if summed else 1)
        is_valid: Bool[Tensor, ""] = loss.detach().abs() < limit  # False for NaN
        return is_valid

    @torch.no_grad()
    def _clip_and_update(self, loss_is_valid: Bool[Tensor, ""]) -> None:
        """Clip the gradients and update the parameters, unless this or an earlier step is bad."""
        self.rates.set(self.count)
        norm, overflow = clip_gradients(self.recipe, self.module.net, self.module.loss, self.scaler)
        if ranks.count() > 1:  # all ranks must skip together
            loss_is_valid = ranks.total((~loss_is_valid).float()) == 0
        bad = ~loss_is_valid | self.scaler.is_unrecoverable(overflow)
        self.first_bad.copy_(torch.where((self.first_bad < 0) & bad, self.count, self.first_bad))
        skip = (self.first_bad >= 0) | overflow
        getattr(self.optimizer, SKIP).copy_(skip)
        self.optimizer.step()
        self.scaler.update(overflow)
        self.metrics.add_norm(torch.where(skip, 0, norm))
        self.count.add_(1)

    def bad_step(self) -> int | None:
        """Wait for the device and return the first step whose loss or gradient was bad."""
        step = int(self.first_bad)
        return None if step < 0 else step
