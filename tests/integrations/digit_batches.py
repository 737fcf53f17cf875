"""Handwritten digits for tests that really train: tensors, batches, and a network that learns them in a second."""

from functools import cache

import torch
from torch import Tensor, nn

TRAINING, VALIDATION = 600, 400


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return 1,000 digits in random order as rows of 64 pixels between 0 and 1, and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: TRAINING + VALIDATION]
    return torch.as_tensor(pixels, dtype=torch.float32)[order] / 16, torch.as_tensor(labels)[order]


def training() -> tuple[Tensor, Tensor]:
    x, labels = digits()
    return x[:TRAINING], labels[:TRAINING]


def validation() -> tuple[Tensor, Tensor]:
    x, labels = digits()
    return x[TRAINING:], labels[TRAINING:]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batches(epoch: int, rows: int = 50) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the batches of one epoch: pixels, labels, and indices into the training part."""
    x, labels = training()
    order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))
    return [(x[index], labels[index], index) for index in order.split(rows)]
