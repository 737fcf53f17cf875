"""Mixup and CutMix: mix each image and its label with the next one of the batch.

    mixup:   x_i <- t x_i + (1 - t) x_j        CutMix:   a rectangle of x_i <- that of x_j, t = fraction outside of it
    y_i <- t y_i + (1 - t) y_j,   j = i + 1 cyclically (batches are shuffled), t drawn from Beta(alpha, alpha)

The random draws of all steps are made in advance and indexed by the step counter on the device. So a resumed run uses
the same draws, and a captured step needs no random numbers.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from fedlas.training.recipe import Recipe
from fedlas.training.schedule import row_of


class Mixer:
    """Mixes the batch of a step; does nothing if the recipe uses neither mixup nor CutMix.

    Args:
        recipe: alpha of mixup and CutMix.
        steps: number of steps of the run.
        num_classes: number of classes.
        device: device of the tables.
    """

    def __init__(self, recipe: Recipe, steps: int, num_classes: int, device: torch.device) -> None:
        self.num_classes = num_classes
        self.used = recipe.mixup > 0 or recipe.cutmix > 0
        self.table = _draws(recipe, steps).to(device) if self.used else torch.zeros(0, 4, device=device)

    def __call__(
        self, images: Float[Tensor, "n c h w"], labels: Int[Tensor, " n"], step: Int[Tensor, ""]
    ) -> tuple[Float[Tensor, "n c h w"], Int[Tensor, " n"] | Float[Tensor, "n classes"]]:
        """Return mixed images and soft labels, without host synchronisation."""
        if not self.used:
            return images, labels
        keep, is_cutmix, x, y = row_of(self.table, step).unbind()
        partner = images.roll(-1, 0)
        area, inside = _rectangle(keep, x, y, *images.shape[2:])
        cutmix_images = torch.where(inside, partner, images)
        mixup_images = (keep * images + (1 - keep) * partner).to(images.dtype)
        mixed = torch.where(is_cutmix > 0, cutmix_images, mixup_images)
        keep = torch.where(is_cutmix > 0, 1 - area, keep)
        one_hot_labels = functional.one_hot(labels, self.num_classes).to(torch.float32)
        return mixed.contiguous(memory_format=_layout(images)), keep * one_hot_labels + (
            1 - keep
        ) * one_hot_labels.roll(-1, 0)


def _draws(recipe: Recipe, steps: int) -> Float[Tensor, "steps 4"]:
    """Draw for each step: weight t, whether it is CutMix, and the centre of the rectangle."""
    random = np.random.default_rng([recipe.seed, 2])
    is_cutmix = random.random(steps) < (0.5 if recipe.mixup and recipe.cutmix else float(recipe.cutmix > 0))
    mixup_weight = random.beta(recipe.mixup or 1.0, recipe.mixup or 1.0, steps)
    cutmix_weight = random.beta(recipe.cutmix or 1.0, recipe.cutmix or 1.0, steps)
    columns = [np.where(is_cutmix, cutmix_weight, mixup_weight), is_cutmix, random.random(steps), random.random(steps)]
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32))


def _rectangle(keep: Tensor, x: Tensor, y: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the fraction of the image that the rectangle covers, and the mask of its pixels."""
    half = (1 - keep).clamp_min(0).sqrt() / 2
    rows, columns = torch.arange(height, device=keep.device), torch.arange(width, device=keep.device)
    in_rows = (rows >= ((y - half) * height).round()) & (rows < ((y + half) * height).round())
    in_columns = (columns >= ((x - half) * width).round()) & (columns < ((x + half) * width).round())
    inside = in_rows[:, None] & in_columns[None, :]
    return inside.float().mean(), inside


def _layout(images: Tensor) -> torch.memory_format:
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format
