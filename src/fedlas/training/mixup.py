"""Mixup and CutMix: every image takes something of its neighbour in the batch, and of its label.

    mixup:   x_i <- t x_i + (1 - t) x_j        CutMix:   a rectangle of x_i <- that of x_j, t = the share that stays
    y_i <- t y_i + (1 - t) y_j,   j = i + 1 cyclically (batches are shuffled), t drawn from Beta(alpha, alpha)

All draws of a run are made in advance, for every step, and looked up by the step's counter on the device: no generator,
so a resumed run sees the same draws, and a captured step needs no random numbers.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from fedlas.training.recipe import Recipe
from fedlas.training.schedule import row_of


class Mixer:
    """Mixes the batch of a step; does nothing where the recipe asks for nothing.

    Args:
        recipe: says how strongly.
        steps: of the whole run.
        num_classes: of the labels.
        device: where the tables live.
    """

    def __init__(self, recipe: Recipe, steps: int, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.used = recipe.mixup > 0 or recipe.cutmix > 0
        self.table = _draws(recipe, steps).to(device) if self.used else torch.zeros(0, 4, device=device)

    def __call__(
        self, images: Float[Tensor, "n c h w"], labels: Int[Tensor, " n"], step: Int[Tensor, ""]
    ) -> tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"] | Float[Tensor, "n classes"]]:
        """Return mixed images and soft labels, without waiting for the device."""
        if not self.used:
            return images, labels
        keep, cuts, x, y = row_of(self.table, step).unbind()
        other = images.roll(-1, 0)
        share, inside = _rectangle(keep, x, y, *images.shape[2:])
        pasted = torch.where(inside, other, images)
        blended = (keep * images + (1 - keep) * other).to(images.dtype)
        mixed = torch.where(cuts > 0, pasted, blended)
        keep = torch.where(cuts > 0, 1 - share, keep)
        soft = functional.one_hot(labels, self.num_classes).to(torch.float32)
        return mixed.contiguous(memory_format=_layout(images)), keep * soft + (1 - keep) * soft.roll(-1, 0)


def _draws(recipe: Recipe, steps: int) -> Float[Tensor, "steps 4"]:
    """Draw for each step: t of mixup or CutMix, whether it is CutMix, and the centre of the rectangle."""
    random = np.random.default_rng([recipe.seed, 2])
    cuts = random.random(steps) < (0.5 if recipe.mixup and recipe.cutmix else float(recipe.cutmix > 0))
    blend = random.beta(recipe.mixup or 1.0, recipe.mixup or 1.0, steps)
    paste = random.beta(recipe.cutmix or 1.0, recipe.cutmix or 1.0, steps)
    columns = [np.where(cuts, paste, blend), cuts, random.random(steps), random.random(steps)]
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32))


def _rectangle(keep: Tensor, x: Tensor, y: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the share of the rectangle in the image, and the pixels inside of it."""
    half = (1 - keep).clamp_min(0).sqrt() / 2
    rows, columns = torch.arange(height, device=keep.device), torch.arange(width, device=keep.device)
    in_rows = (rows >= ((y - half) * height).round()) & (rows < ((y + half) * height).round())
    in_columns = (columns >= ((x - half) * width).round()) & (columns < ((x + half) * width).round())
    inside = in_rows[:, None] & in_columns[None, :]
    return inside.float().mean(), inside


def _layout(images: Tensor) -> torch.memory_format:
    last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
