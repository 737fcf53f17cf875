"""One training step: batch assembly, forward, loss, backward, clipping, optimizer and learning rate.

Everything that a step reads or changes is a tensor on the device at a fixed address: the step counter, the table of
learning rates, weights, optimizer state, the state of the loss, the metrics of the epoch, the first bad step. The host
decides nothing, so that `capture.py` can capture the whole step in a CUDA graph:

    index ─► images ─► mixup ─► network ─► loss ─► backward ─► norm, clipping ─► optimizer
                                   │         │                      │                │
                                metrics   its state          first bad step     lr = table[step], step + 1

A step whose loss or gradient is not finite, or whose loss is thousands of times that of guessing, sets a flag on the
device, and from then on the optimizer changes nothing. The host reads the flag together with the metrics. In float16 an
overflow skips one step and lowers the loss scale; it is a bad step only at a scale of 1.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fedlas import ranks
from fedlas.data.base import Sample
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.gate_statistics import GateStatistics
from fedlas.training.mixup import Mixer
from fedlas.training.optimizer import SKIP, gradient_norm, scale_gradients
from fedlas.training.precision import Scale, autocast
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

DIVERGED = 1e4  # times the loss of guessing: a network that is so wrong does not come back
Inputs = tuple[Tensor, ...]


@dataclass
class Parts:
    """What a step is made of.

    Args:
        task: network and loss as one module, wrapped for several processes if there are any.
        net: the network's own module, whose gradients are clipped.
        loss: the loss's own module.
        optimizer: fused, with the learning rate in tensors.
        rates: writes those tensors.
        feed: makes a batch of the inputs of a step.
        mixer: mixup and CutMix.
        fused_step: kernels of our own for the end of a step (`kernels.fused_step`), where they can be used.
        precompilation: in which kernels of our own are compiled and not run (`kernels.launching`), where there are any.
    """

    task: nn.Module
    net: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    rates: LearningRates
    feed: nn.Module
    mixer: Mixer
    fused_step: Any = None
    precompilation: Callable[[], AbstractContextManager[Any]] | None = None


class TrainStep:
    """Trains on one batch at a time, eagerly.

    Args:
        recipe: precision, clipping and accumulation.
        parts: what the step works on.
        gate: statistics of the gate of the loss.
        device: where all of it lives.
    """

    def __init__(self, recipe: Recipe, parts: Parts, gate: GateStatistics, device: torch.device) -> None:
        self.recipe, self.parts, self.gate, self.device = recipe, parts, gate, device
        self.metrics = EpochMetrics(device, None if parts.fused_step is None else parts.fused_step.tally)
        self.scale = Scale(recipe.precision, device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def __call__(self, *inputs: Tensor) -> None:
        """Train on a batch, given the inputs of the batch assembly; nothing in here may wait for the device."""
        self.parts.optimizer.zero_grad(set_to_none=True)
        pieces = list(zip(*(value.chunk(self.recipe.accumulate) for value in inputs), strict=True))
        fine = []
        with self.gradient_slots():
            for number, piece in enumerate(pieces, start=1):
                with self._reduced_once(last=number == len(pieces)):
                    fine.append(self._learn(piece, len(piece[0]) / len(inputs[0])))
        self._end(reduce(torch.logical_and, fine))

    def _reduced_once(self, *, last: bool) -> AbstractContextManager[None]:
        """Reduce gradients across ranks only with the last part of an accumulated step."""
        task = self.parts.task
        if last or not isinstance(task, DistributedDataParallel):
            return nullcontext()
        deferred: AbstractContextManager[None] = task.no_sync()
        return deferred

    @contextmanager
    def gradient_slots(self) -> Iterator[None]:
        """Let a network that can do so hand gradients over or write them to where they are needed, for a step."""
        model: Any = getattr(self.parts.net, "model", None)
        if self.parts.fused_step is None or not hasattr(model, "gradient_slots"):
            yield
            return
        model.gradient_slots, model.gradient_taker = self.parts.fused_step.slots, self.parts.fused_step.take
        try:
            yield
        finally:
            del model.gradient_slots, model.gradient_taker  # what is left says that there are none

    def _learn(self, inputs: Inputs, share: float) -> Bool[Tensor, ""]:
        """Add the gradient of a batch, or of a part of one; say whether its loss is finite."""
        sample: Sample = self.parts.feed(*inputs)
        images, labels = self.parts.mixer(sample.images, sample.labels, self.count)
        with autocast(self.recipe.precision, self.device):
            value, output = self.parts.task(images, labels, sample.index)
        terms = self._terms()
        most, summed = DIVERGED * math.log(output.logits.shape[1]), self._is_summed
        if share != 1 and summed:
            # What stands for the whole batch is the part's sum as many times as the part fits in.
            value, terms = value / share, {name: term / share for name, term in terms.items()}
        self.scale.of(value if share == 1 else value * share).backward()
        self.metrics.add_batch(value, terms, output.logits.detach(), sample.labels)
        self.gate.add(sample.index)
        rows = len(sample.labels) / share if summed else 1
        fine: Bool[Tensor, ""] = value.detach().abs() < most * rows  # what is not a number is not less, either
        return fine

    @property
    def _is_summed(self) -> bool:
        return getattr(self.parts.loss, "reduction", "mean") == "sum"

    def _terms(self) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = getattr(self.parts.loss, "last_terms", {})
        return terms

    def _end(self, fine: Bool[Tensor, ""]) -> None:
        """Take the optimizer's step and count it, in few kernels where all parameters have a gradient."""
        fused_step = self.parts.fused_step
        if fused_step is not None and fused_step.ready:
            sums = self.metrics.total("steps"), self.metrics.total("gradient_norm")
            fused_step.step(fine, self.count, self.first_bad, *sums)
            return
        if fused_step is not None:
            fused_step.widen()
        self.parts.rates.set(self.count)
        self._update(fine)
        self.count.add_(1)

    @torch.no_grad()
    def _update(self, fine: Bool[Tensor, ""]) -> None:
        """Clip, look for bad numbers, and let the optimizer take its step unless there are any."""
        net, loss = ([p.grad for p in m.parameters() if p.grad is not None] for m in (self.parts.net, self.parts.loss))
        together = self.recipe.clip_loss
        norm = self.scale.undone(gradient_norm([*net, *loss] if together else net, self.device))
        overflow = ~is_finite(norm)
        if loss and not together:  # what is not clipped may be as bad
            overflow = overflow | ~is_finite(gradient_norm(loss, self.device))
        self._clip(net, loss, norm)
        if ranks.count() > 1:  # all ranks must freeze together
            fine = ranks.total((~fine).float()) == 0
        bad = ~fine | self.scale.beyond_help(overflow)
        self.first_bad.copy_(torch.where((self.first_bad < 0) & bad, self.count, self.first_bad))
        skip = (self.first_bad >= 0) | overflow
        getattr(self.parts.optimizer, SKIP).copy_(skip)
        self.parts.optimizer.step()
        self.scale.update(overflow)
        self.metrics.add_norm(torch.where(skip, 0, norm))

    def _clip(self, net: list[Tensor], loss: list[Tensor], norm: Float[Tensor, ""]) -> None:
        """Shorten long gradients: those of the network alone, as published, or those of the loss with them."""
        clipped, spared = ([*net, *loss], []) if self.recipe.clip_loss else (net, loss)
        if self.recipe.clip is None:
            spared = [*net, *loss]
        else:
            scale_gradients(clipped, self.scale.undone((self.recipe.clip / (norm + 1e-6)).clamp_max(1.0)))
        if self.scale.used:
            scale_gradients(spared, 1 / self.scale.value)

    def bad_step(self) -> int | None:
        """Wait for the device, and give the first step whose loss or gradient was bad."""
        step = int(self.first_bad)
        return None if step < 0 else step

    def state(self) -> dict[str, Any]:
        """Give what a resumed run needs of the step itself; all ranks have to ask."""
        return {
            "count": self.count,
            "scale": self.scale.value,
            "good_steps": self.scale.good_steps,
            "meter": self.metrics.state(),
            "watch": self.gate.state(),
        }

    def restore(self, state: dict[str, Any], *, first: bool = True) -> None:
        """Go on from a saved state, in place; sums over all ranks go to the first."""
        self.count.copy_(state["count"])
        self.scale.value.copy_(state["scale"])
        self.scale.good_steps.copy_(state["good_steps"])
        self.metrics.restore(state["meter"], first=first)
        self.gate.restore(state["watch"], first=first)
        self.first_bad.fill_(-1)

    def reset(self) -> None:
        """Begin another run, in place: what was captured stays valid."""
        self.count.zero_()
        self.scale.reset()
        self.metrics.reset()
        self.gate.reset()
        self.first_bad.fill_(-1)


def is_finite(value: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """Say whether a number is finite, in two kernels; torch's own `isfinite` takes four."""
    return (value - value) == 0
