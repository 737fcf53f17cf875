"""Optimizers and gradient clipping, such that a step can be captured in a CUDA graph.

Optimizers are fused: only those accept a tensor as learning rate, and a flag on the device that makes them skip a step.
Clipping and unscaling of gradients do not wait for the device.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

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
    groups = _parameter_groups(recipe, net, loss)
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
            groups, lr=rates.groups[0], betas=(recipe.beta1, recipe.beta2), fused=True, capturable=device.type == "cuda"
        )
    for parameter in parameters_of(optimizer):
        optimizer.state[parameter] = _initial_state(recipe, parameter)
    setattr(optimizer, SKIP, torch.zeros((), device=device))
    return optimizer, rates


def _parameter_groups(recipe: Recipe, net: nn.Module, loss: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in net.parameters() if p.requires_grad]
    decayed = [p for p in trainable if recipe.decay_all or p.ndim > 1]
    undecayed = [p for p in trainable if not (recipe.decay_all or p.ndim > 1)]
    gate_decay = recipe.weight_decay if recipe.gate_weight_decay is None else recipe.gate_weight_decay
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": recipe.weight_decay, "factor": 1.0},
        {"params": undecayed, "weight_decay": 0.0, "factor": 1.0},
        {"params": list(loss.parameters()), "weight_decay": gate_decay, "factor": recipe.gate_lr_factor},
    ]
    return [group for group in groups if group["params"]]


def _initial_state(recipe: Recipe, parameter: Tensor) -> dict[str, Tensor]:
    """Return the optimizer state of a parameter before its first step."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if recipe.optimizer == "sgd":
        # Zeros give the same first step as torch's buffer created in that step, without another path in the kernel.
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


@torch.no_grad()
def clip_gradients(
    recipe: Recipe, net: nn.Module, loss: nn.Module, scaler: GradientScaler
) -> tuple[Float[Tensor, ""], Bool[Tensor, ""]]:
    """Clip the gradients of the network, as in the official code, or of network and loss; undo the loss scale.

    Returns:
        The gradient norm before clipping, and whether a gradient is not finite.
    """
    of_net, of_loss = ([p.grad for p in module.parameters() if p.grad is not None] for module in (net, loss))
    clipped, others = ([*of_net, *of_loss], []) if recipe.clip_loss else (of_net, of_loss)
    device = scaler.value.device
    norm = scaler.unscale(gradient_norm(clipped, device))
    overflow = ~is_finite(norm)
    if others:  # not part of the norm
        overflow = overflow | ~is_finite(gradient_norm(others, device))
    if recipe.clip is None:
        others = [*of_net, *of_loss]
    else:
        scale_gradients(clipped, scaler.unscale((recipe.clip / (norm + 1e-6)).clamp_max(1.0)))
    if scaler.used:
        scale_gradients(others, 1 / scaler.value)
    return norm, overflow


@runtime_checkable
class FusedStep(Protocol):
    """Clipping, learning rate, optimizer step and step counter by custom kernels."""

    @property
    def ready(self) -> bool:
        """Whether the kernels support the present gradients."""

    def gradient_slots(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward passes, in which gradients may be written to prepared memory."""

    def __call__(
        self, loss_is_valid: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Update the parameters, or record the first bad step.

        Args:
            loss_is_valid: whether the loss is finite and not too large.
            count: step counter, incremented.
            first_bad: number of the first bad step, negative if there is none.
            metrics: sums of the epoch, to which the gradient norm is added.
        """
