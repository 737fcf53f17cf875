"""One training step: batch assembly, forward, loss, backward, clipping, optimizer and learning rate.

All that a step reads or changes is in tensors on the device at fixed addresses: the step counter, the table of learning
rates, weights, optimizer state, the state of the loss, the metrics of the epoch and the first bad step. The host
decides nothing, so that `capture.py` can capture the whole step in a CUDA graph:

    index ─► images ─► mixup ─► network ─► loss ─► backward ─► gradient norm, clipping ─► optimizer
                                   │         │                      │                        │
                                metrics   its state          first bad step         lr = table[count], count + 1

If a loss or gradient is not finite, or a loss is thousands of times that of guessing, a flag on the device is set, and
the optimizer changes nothing from then on; the host reads the flag together with the metrics. In float16 an overflow
skips one step and lowers the loss scale; it is a bad step only at a scale of 1.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas.data.base import Sample
from fedlas.losses.base import AbstractLoss
from fedlas.models import Output, WithFeatures
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.optimizer import StepFunction
from fedlas.training.precision import GradientScaler, autocast
from fedlas.training.recipe import Recipe

DIVERGED = 1e4  # times the loss of guessing: training does not recover from that
Inputs = tuple[Tensor, ...]


@dataclass
class Parts:
    """Components of a step.

    Args:
        recipe: the recipe.
        task: network and loss as one module, wrapped for several processes if there are any.
        net: the network.
        loss: the loss.
        call_net: the network or its compiled form.
        call_loss: the loss or its compiled form.
        feed: assembles the batch from the inputs of a step.
        mixer: mixup and CutMix.
        optimizer: the optimizer.
        scaler: loss scale.
        optimizer_step: ends a step: clipping, learning rate, optimizer; by torch, or by custom kernels.
        precompile: context that pre-compiles custom kernels, if there are any.
    """

    recipe: Recipe
    task: nn.Module
    net: WithFeatures
    loss: AbstractLoss
    call_net: Callable[..., Output]
    call_loss: Callable[..., Tensor]
    feed: Callable[..., Sample]
    mixer: Mixer
    optimizer: torch.optim.Optimizer
    scaler: GradientScaler
    optimizer_step: StepFunction
    precompile: Callable[[], AbstractContextManager[Any]] | None = None


class TrainStep:
    """Trains on one batch at a time, eagerly.

    Args:
        parts: network, loss, optimizer and other components.
        metrics: sums of the epoch.
        gate: statistics of the gate of the loss.
    """

    def __init__(self, parts: Parts, metrics: EpochMetrics, gate: GateStatistics) -> None:
        self.parts, self.metrics, self.gate = parts, metrics, gate
        self.recipe, self.scaler, self.device = parts.recipe, parts.scaler, metrics.device
        self.count = torch.zeros((), dtype=torch.int64, device=self.device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=self.device)

    def __call__(self, *inputs: Tensor) -> None:
        """Train on a batch, given the inputs of the batch assembly; must not synchronise with the device."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        pieces = list(zip(*(value.chunk(self.recipe.accumulate) for value in inputs), strict=True))
        acceptable = []
        with self.parts.optimizer_step.gradient_slots():
            for number, piece in enumerate(pieces, start=1):
                with self._reduction(last=number == len(pieces)):
                    acceptable.append(self._forward_backward(piece, len(piece[0]) / len(inputs[0])))
        self.parts.optimizer_step(reduce(torch.logical_and, acceptable), self.count, self.first_bad, self.metrics)

    def _reduction(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients across ranks only with the last part of an accumulated step."""
        task = self.parts.task
        if last or not isinstance(task, DistributedDataParallel):
            return nullcontext()
        deferred: AbstractContextManager[None] = task.no_sync()
        return deferred

    def _forward_backward(self, inputs: Inputs, fraction: float) -> Bool[Tensor, ""]:
        """Add the gradient of a batch, or of a part of one; return whether its loss is acceptable."""
        sample = self.parts.feed(*inputs)
        images, labels = self.parts.mixer(sample.images, sample.labels, self.count)
        with autocast(self.recipe.precision, self.device):
            value, output = self.parts.task(images, labels, sample.index)
        terms, summed = self.parts.loss.last_terms, self.parts.loss.reduction == "sum"
        if fraction != 1 and summed:  # the sum over a part stands for that over the whole batch
            value, terms = value / fraction, {name: term / fraction for name, term in terms.items()}
        self.scaler.scale(value if fraction == 1 else value * fraction).backward()
        self.metrics.add_batch(value, terms, output.logits.detach(), sample.labels)
        self.gate.add(sample.index)
        limit = DIVERGED * math.log(output.logits.shape[1]) * (len(sample.labels) / fraction if summed else 1)
        acceptable: Bool[Tensor, ""] = value.detach().abs() < limit  # False for NaN
        return acceptable

    def bad_step(self) -> int | None:
        """Wait for the device and return the first step whose loss or gradient was bad."""
        step = int(self.first_bad)
        return None if step < 0 else step
