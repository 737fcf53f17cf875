"""Predictions that calibrators are tried on."""

import torch
from torch import Tensor


def problem(n: int = 600, classes: int = 4, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are `scale` times too large, and labels drawn from the unscaled ones."""
    random = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, classes, generator=random, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    return scale * logits, labels


def binary_problem(n: int = 600, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The logits of a one-logit head, `scale` times too large and shifted, and labels drawn from the unscaled ones."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, generator=random, dtype=torch.float64)
    labels = (torch.rand(n, generator=random, dtype=torch.float64) < logits.sigmoid()).long()
    return scale * logits + 0.5, labels
