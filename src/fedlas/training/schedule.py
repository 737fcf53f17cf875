"""Learning-rate schedules, as tables on the device that a captured step can index.

The learning rate is a function of the step: a table on the device, indexed by a counter on the device, and written
into tensors that the optimizer reads.

    constant    ────────     multi_step  ───┐__      cosine   ─╮
                                            └─                 ╰──
    one_cycle   ╱─╮          triangle    ╱╲          warmup    ╱──── in front of the first three
                  ╰──                      ╲__
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedlas.training.recipe import Recipe


def lr_factor(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step as a fraction of the maximum."""
    total = max(1, recipe.epochs * steps_per_epoch)
    if recipe.schedule in ("one_cycle", "triangle"):
        return _cycle(recipe, step / total)
    warmup = recipe.warmup * steps_per_epoch
    warmup_factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if recipe.schedule == "cosine":
        progress = max(0.0, step - warmup) / max(1.0, total - warmup)
        return warmup_factor * _cosine(recipe.end_factor, progress)
    if recipe.schedule == "multi_step":
        epoch = step // steps_per_epoch
        return warmup_factor * recipe.decay ** sum(epoch >= milestone for milestone in recipe.milestones)
    return warmup_factor


def _cycle(recipe: Recipe, progress: float) -> float:
    peak = recipe.peak_at
    if progress < peak:
        return recipe.start_factor + (1 - recipe.start_factor) * progress / peak
    after_peak = (progress - peak) / (1 - peak) if peak < 1 else 0.0
    if recipe.schedule == "triangle":
        return 1 + (recipe.end_factor - 1) * after_peak
    return _cosine(recipe.end_factor, after_peak)


def _cosine(last: float, progress: float) -> float:
    """Return the factor on the way from 1 to the last factor."""
    return last + (1 - last) * (1 + math.cos(math.pi * progress)) / 2


def lr_table(recipe: Recipe, steps_per_epoch: int) -> Float[Tensor, " steps"]:
    """Return the learning rate of every step of a run."""
    steps = recipe.epochs * steps_per_epoch
    rates = [recipe.lr * lr_factor(recipe, step, steps_per_epoch) for step in range(steps)]
    return torch.tensor(rates, dtype=torch.float32)


class LearningRates:
    """Learning rates of all parameter groups, read from a table at the step counter on the device.

    Args:
        table: learning rate of every step.
        factors: factor of each parameter group.
        device: device of the table.
    """

    def __init__(self, table: Float[Tensor, " steps"], factors: list[float], device: torch.device) -> None:
        self.table = table.to(device)
        self.factors = torch.tensor(factors, dtype=torch.float32, device=device)
        self.now = torch.zeros_like(self.factors)
        self.groups = list(self.now.unbind())

    def set(self, step: Int[Tensor, ""]) -> None:
        """Write the learning rates of a step to the tensors of the optimizer, without synchronisation."""
        torch.mul(self.factors, row_of(self.table, step), out=self.now)


def row_of(table: Float[Tensor, "steps *rest"], step: Int[Tensor, ""]) -> Float[Tensor, " *rest"]:
    """Return a row of a table; `table[step]` would wait for the device to read the step."""
    index = step.clamp_max(len(table) - 1).reshape(1)
    return table.index_select(0, index).squeeze(0)
