"""Data for several tests of metrics, and import of the packages that tests compare with."""

import importlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


def oracle(name: str) -> Any:
    """Import a package that tests compare with; the warnings of its import are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed")


def golden_logits() -> tuple[np.ndarray, np.ndarray]:
    """The problem on which the published code was run: 1,000 samples of 5 classes."""
    random = np.random.RandomState(0)
    logits = 2 * random.randn(1000, 5)
    labels = random.randint(0, 5, 1000)
    logits[np.arange(1000), labels] += 1.5
    return logits.astype(np.float32), labels


def saturated(n: int = 2_000, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities of an over-trained model: many confidences are exactly 1 in float32."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=source)
    labels = torch.randint(classes, (n,), generator=source)
    guess = torch.where(torch.rand(n, generator=source) < 0.8, labels, torch.randint(classes, (n,), generator=source))
    logits[torch.arange(n), guess] += 25 * torch.rand(n, generator=source)
    return logits.softmax(1), labels


def binary(n: int, seed: int = 0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """Confidences of a model whose accuracy is smaller by `shift`, and whether each prediction is correct."""
    random = np.random.default_rng(seed)
    confidence = 0.1 + 0.9 * random.beta(4, 1.2, n)
    correct = random.random(n) < np.clip(confidence - shift, 0, 1)
    return torch.from_numpy(confidence), torch.from_numpy(correct.astype(np.int64))


def two_classes(
    confidence: list[float], correct: list[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Rows whose top class has the given confidence, which must be at least one half."""
    top = torch.tensor(confidence, dtype=torch.float64)
    return torch.stack([top, 1 - top], dim=1).to(dtype), 1 - torch.tensor(correct)
