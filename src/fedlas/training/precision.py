"""Precision of a network, and gradient scaling for float16.

The loss scale follows torch's rule (halved after an overflow, doubled after 2,000 steps without one), with
everything on the device, so that it can be part of a captured step.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fedlas.training.recipe import Precision

GROWTH_INTERVAL = 2000
FIRST_SCALE = 65536.0


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the low-precision type that a network computes in, if any."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a network computes in the precision of the recipe."""
    dtype = autocast_dtype(precision)
    # Each weight is used once a pass: a cache of casts would save nothing, and CUDA graphs cannot capture it.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class GradientScaler:
    """Loss scale that keeps float16 gradients from underflow; constant 1 in any other precision.

    Args:
        precision: precision of the recipe.
        device: device of the scale.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.used = precision == "fp16"
        self.value = torch.full((), FIRST_SCALE if self.used else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Bool[Tensor, ""]) -> None:
        """Update the scale after a step."""
        if not self.used:
            return
        good = (self.good_steps + 1) * ~overflow
        grown = good >= GROWTH_INTERVAL
        self.value.mul_(1 + grown.float() - overflow.float() / 2)
        self.good_steps.copy_(good * ~grown)

    def is_unrecoverable(self, overflow: Bool[Tensor, ""]) -> Bool[Tensor, ""]:
        """Return whether gradients are not finite, and a lower loss scale cannot help."""
        return overflow & (self.value <= 1) if self.used else overflow

    def scale(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Scale a loss."""
        return value * self.value if self.used else value

    def unscale(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Divide a value by the scale."""
        return value / self.value if self.used else value
