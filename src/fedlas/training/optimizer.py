"""Optimizer, gradient clipping and learning rate, such that a step can be captured in a CUDA graph.

The learning rate is a function of the step: a table on the device, indexed by a counter on the device, and written
into tensors that the optimizer reads. Optimizers are fused: only those accept a tensor as learning rate, and a flag on
the device that makes them skip a step.

    constant    ────────     multi_step  ───┐__      cosine   ─╮
                                            └─                 ╰──
    one_cycle   ╱─╮          triangle    ╱╲          warmup    ╱──── in front of the first three
                  ╰──                      ╲__
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fedlas import ranks
from fedlas.errors import UserError
from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.precision import GradientScaler
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

SKIP = "found_inf"  # the attribute that fused optimizers read: where it is 1, they change nothing


def build_optimizer(
    recipe: Recipe, net: nn.Module, loss: nn.Module, table: Float[Tensor, " steps"], device: torch.device
) -> tuple[torch.optim.Optimizer, LearningRates]:
    """Build the optimizer of network and loss, its state filled with zeros, and its learning rates."""
    groups = _groups(recipe, net, loss)
    rates = LearningRates(table, [group.pop("factor") for group in groups], device)
    for group, rate in zip(groups, rates.groups, strict=True):
        group["lr"] = rate
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            groups, lr=rates.groups[0], momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(
            groups,
            lr=rates.groups[0],
            betas=(recipe.beta1, recipe.beta2),
            fused=True,
            capturable=device.type == "cuda",
        )
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter] = _initial_state(recipe, parameter)
    setattr(optimizer, SKIP, torch.zeros((), device=device))
    return optimizer, rates


def _groups(recipe: Recipe, net: nn.Module, loss: nn.Module) -> list[dict[str, Any]]:
    learned = [p for p in net.parameters() if p.requires_grad]
    decayed = [p for p in learned if recipe.decay_all or p.ndim > 1]
    spared = [p for p in learned if not (recipe.decay_all or p.ndim > 1)]
    gate_decay = recipe.weight_decay if recipe.gate_weight_decay is None else recipe.gate_weight_decay
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": recipe.weight_decay, "factor": 1.0},
        {"params": spared, "weight_decay": 0.0, "factor": 1.0},
        {"params": list(loss.parameters()), "weight_decay": gate_decay, "factor": recipe.gate_lr_factor},
    ]
    return [group for group in groups if group["params"]]


def _initial_state(recipe: Recipe, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter before its first step."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if recipe.optimizer == "sgd":
        # Zeros give the same first step as torch's own start, which would be another path through the kernel.
        return {"momentum_buffer": zeros()} if recipe.momentum else {}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Iterate over all parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Return the state of an optimizer, one dictionary per parameter."""
    return [dict(optimizer.state[parameter]) for parameter in parameters_of(optimizer)]


def load_optimizer_state(optimizer: torch.optim.Optimizer, states: list[dict[str, Tensor]]) -> None:
    """Restore the state of an optimizer, in place: a captured step holds the addresses."""
    for parameter, saved in zip(parameters_of(optimizer), states, strict=True):
        own = optimizer.state[parameter]
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in own.items()}:
            raise UserError(f"the optimizer's state is {', '.join(own) or 'empty'}, in other shapes")
        for name, value in saved.items():
            own[name].copy_(value)


@torch.no_grad()
def scale_gradients(gradients: list[Tensor], factor: Float[Tensor, ""]) -> None:
    """Multiply gradients by a factor on the device, without waiting for it."""
    if gradients:
        torch._foreach_mul_(gradients, factor)


def gradient_norm(gradients: list[Tensor], device: torch.device) -> Float[Tensor, ""]:
    """Return the norm of all gradients together."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(gradients)


def is_finite(value: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """Return whether a number is finite, in two kernels; `torch.isfinite` takes four."""
    return (value - value) == 0


@runtime_checkable
class StepFunction(Protocol):
    """Ends a training step: clipping, learning rate, optimizer step and step counter."""

    def __call__(
        self, finite: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Update the parameters, or record the first bad step."""

    def gradient_slots(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes, in which gradients may be written to prepared memory."""


class OptimizerStep:
    """Ends a training step, by torch: clipping, learning rate, optimizer step, step counter.

    Args:
        recipe: clipping and precision.
        net: the network.
        loss: the loss, whose parameters are clipped only on request.
        optimizer: fused, with learning rates in tensors.
        rates: writes those tensors.
    """

    def __init__(
        self, recipe: Recipe, net: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, rates: LearningRates
    ) -> None:
        self.recipe, self.net, self.loss, self.optimizer, self.rates = recipe, net, loss, optimizer, rates
        self.skip: Tensor = getattr(optimizer, SKIP)
        self.device = self.skip.device
        self.scaler = GradientScaler(recipe.precision, self.device)

    def gradient_slots(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes; autograd accumulates the gradients."""
        return nullcontext()

    @torch.no_grad()
    def __call__(
        self, finite: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Clip the gradients and update the parameters, unless this or an earlier step is bad.

        Args:
            finite: whether the loss is finite.
            count: number of the step; increased by one.
            first_bad: number of the first bad step, negative if there is none.
            metrics: sums of the epoch.
        """
        self.rates.set(count)
        net, loss = ([p.grad for p in m.parameters() if p.grad is not None] for m in (self.net, self.loss))
        together = self.recipe.clip_loss
        norm = self.scaler.unscale(gradient_norm([*net, *loss] if together else net, self.device))
        overflow = ~is_finite(norm)
        if loss and not together:  # not part of the norm
            overflow = overflow | ~is_finite(gradient_norm(loss, self.device))
        self._clip(net, loss, norm)
        if ranks.count() > 1:  # all ranks must skip together
            finite = ranks.total((~finite).float()) == 0
        bad = ~finite | self.scaler.is_final(overflow)
        first_bad.copy_(torch.where((first_bad < 0) & bad, count, first_bad))
        skip = (first_bad >= 0) | overflow
        self.skip.copy_(skip)
        self.optimizer.step()
        self.scaler.update(overflow)
        metrics.add_norm(torch.where(skip, 0, norm))
        count.add_(1)

    def _clip(self, net: list[Tensor], loss: list[Tensor], norm: Float[Tensor, ""]) -> None:
        """Clip the gradients of the network, as published, or those of network and loss together."""
        clipped, others = ([*net, *loss], []) if self.recipe.clip_loss else (net, loss)
        if self.recipe.clip is None:
            others = [*net, *loss]
        else:
            scale_gradients(clipped, self.scaler.unscale((self.recipe.clip / (norm + 1e-6)).clamp_max(1.0)))
        if self.scaler.used:
            scale_gradients(others, 1 / self.scaler.value)
