"""Optimizer and learning rate, made to live inside a captured step.

The learning rate is a pure function of the step: a table on the device, looked up by a counter on the device, written
into tensors that the optimizer reads. Optimizers are fused: only those take a tensor as learning rate and a flag on the
device that makes them skip a step.

    constant    ────────     multi_step  ───┐__      cosine   ─╮
                                            └─                 ╰──
    one_cycle   ╱─╮          triangle    ╱╲          warmup    ╱──── in front of the first three
                  ╰──                      ╲__
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedlas.training.recipe import Recipe

SKIP = "found_inf"  # the attribute that fused optimizers read: where it is 1, they change nothing


def lr_factor(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Give the learning rate of a step as a share of the highest."""
    total = max(1, recipe.epochs * steps_per_epoch)
    if recipe.schedule in ("one_cycle", "triangle"):
        return _cycle(recipe, step / total)
    warmup = recipe.warmup * steps_per_epoch
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if recipe.schedule == "cosine":
        done = max(0.0, step - warmup) / max(1.0, total - warmup)
        return rise * _cosine(1.0, recipe.end_factor, done)
    if recipe.schedule == "multi_step":
        epoch = step // steps_per_epoch
        return rise * recipe.decay ** sum(epoch >= milestone for milestone in recipe.milestones)
    return rise


def _cycle(recipe: Recipe, done: float) -> float:
    peak = recipe.peak_at
    if done < peak:
        return recipe.start_factor + (1 - recipe.start_factor) * done / peak
    rest = (done - peak) / (1 - peak) if peak < 1 else 0.0
    if recipe.schedule == "triangle":
        return 1 + (recipe.end_factor - 1) * rest
    return _cosine(1.0, recipe.end_factor, rest)


def _cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2


def lr_table(recipe: Recipe, steps_per_epoch: int) -> Float[Tensor, " steps"]:
    """List the learning rate of every step of a run."""
    steps = recipe.epochs * steps_per_epoch
    rates = [recipe.lr * lr_factor(recipe, step, steps_per_epoch) for step in range(steps)]
    return torch.tensor(rates, dtype=torch.float32)


class LearningRates:
    """The learning rates of all parameter groups, moved along a table by a counter on the device.

    Args:
        table: learning rate of every step.
        factors: what the rate is multiplied with, for each parameter group.
        device: where all of it lives.
    """

    def __init__(self, table: Float[Tensor, " steps"], factors: list[float], device: torch.device) -> None:
        self.table = table.to(device)
        self.factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self.now = torch.zeros_like(self.factors)
        self.groups = list(self.now.unbind())

    def set(self, step: Int[Tensor, ""]) -> None:
        """Write the rates of a step to where the optimizer reads them, without waiting."""
        torch.mul(self.factors, row_of(self.table, step), out=self.now)


def row_of(table: Float[Tensor, "steps *rest"], step: Int[Tensor, ""]) -> Float[Tensor, " *rest"]:
    """Look a step up in a table; `table[step]` would fetch the number from the device first, and wait for it."""
    place = step.clamp_max(len(table) - 1).reshape(1)
    return table.index_select(0, place).squeeze(0)


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
