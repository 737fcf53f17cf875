"""Optimizer and learning rate, made to live inside a captured step.

The learning rate is a pure function of the step: a table on the device, looked up by a counter on the device, written
into tensors that the optimizer reads. Optimizers are fused: only those take a tensor as learning rate and a flag on the
device that makes them skip a step.

    constant    ────────     multi_step  ───┐__      cosine   ─╮
                                            └─                 ╰──
    one_cycle   ╱─╮          triangle    ╱╲          warmup    ╱──── in front of the first three
                  ╰──                      ╲__
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates

SKIP = "found_inf"  # the attribute that fused optimizers read: where it is 1, they change nothing


def build_optimizer(
    recipe: Recipe, net: nn.Module, loss: nn.Module, table: Float[Tensor, " steps"], device: torch.device
) -> tuple[torch.optim.Optimizer, LearningRates]:
    """Build the optimizer of network and loss, its memory filled with zeros, and the rates that it reads."""
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
        optimizer.state[parameter] = _memory(recipe, parameter)
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


def _memory(recipe: Recipe, parameter: Tensor) -> dict[str, Tensor]:
    """Make what an optimizer remembers of a parameter before its first step."""

    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if recipe.optimizer == "sgd":
        # Zeros give the same first step as torch's own start, which would be another path through the kernel.
        return {"momentum_buffer": zeros()} if recipe.momentum else {}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Go through all parameters of an optimizer, in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Give what an optimizer remembers, one dictionary for each parameter."""
    return [dict(optimizer.state[parameter]) for parameter in parameters_of(optimizer)]


def load_optimizer_state(optimizer: torch.optim.Optimizer, memory: list[dict[str, Tensor]]) -> None:
    """Put back what an optimizer remembered, in place: a captured step holds the addresses."""
    for parameter, saved in zip(parameters_of(optimizer), memory, strict=True):
        mine = optimizer.state[parameter]
        if {name: value.shape for name, value in saved.items()} != {name: value.shape for name, value in mine.items()}:
            raise ValueError(f"what the optimizer remembers is {', '.join(mine) or 'nothing'}, in other shapes")
        for name, value in saved.items():
            mine[name].copy_(value)


def reset_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer forget everything, in place."""
    for memory in optimizer_state(optimizer):
        for value in memory.values():
            value.zero_()


@torch.no_grad()
def scale_gradients(gradients: list[Tensor], factor: Float[Tensor, ""]) -> None:
    """Multiply gradients with a number on the device, without waiting for it."""
    if gradients:
        torch._foreach_mul_(gradients, factor)


def gradient_norm(gradients: list[Tensor], device: torch.device) -> Float[Tensor, ""]:
    """Give the length of all gradients together."""
    if not gradients:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(gradients)
