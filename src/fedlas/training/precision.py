"""Numbers and switches of the machine: which precision, how reproducible, and a loss scale for float16.

The loss scale is torch's rule (halved after an overflow, doubled after 2,000 steps without one), with everything on the
device, so that it can be part of a captured step.
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
    """Give the narrow type that a network computes in, if any."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Let a network compute in the recipe's precision."""
    dtype = autocast_dtype(precision)
    # Each weight is used once a pass: a cache of narrow copies would save nothing, and captured graphs dislike it.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


class Scale:
    """The factor that keeps float16 gradients from vanishing; 1 and constant in any other precision.

    Args:
        precision: of the recipe.
        device: where it lives.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.used = precision == "fp16"
        self.value = torch.full((), FIRST_SCALE if self.used else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, overflow: Bool[Tensor, ""]) -> None:
        """Learn whether the gradients of a step were finite."""
        if not self.used:
            return
        good = (self.good_steps + 1) * ~overflow
        grown = good >= GROWTH_INTERVAL
        self.value.mul_(1 + grown.float() - overflow.float() / 2)
        self.good_steps.copy_(good * ~grown)

    def beyond_help(self, overflow: Bool[Tensor, ""]) -> Bool[Tensor, ""]:
        """Say whether gradients that are not finite would not become so by a lower scale."""
        return overflow & (self.value <= 1) if self.used else overflow

    def of(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Scale a loss."""
        return value * self.value if self.used else value

    def undone(self, value: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Take the scale out of what was computed with it."""
        return value / self.value if self.used else value

    def reset(self) -> None:
        """Start anew, in place."""
        self.value.fill_(FIRST_SCALE if self.used else 1.0)
        self.good_steps.zero_()
