"""Learning-rate schedules, as tables on the device that a captured step looks up."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedlas.training.recipe import Recipe


def lr_factor(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step as a share of the highest."""
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
