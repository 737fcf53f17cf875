"""Interface of accelerators: what the training engine asks of kernels that replace parts of a step.

The engine works without any accelerator. One is loaded by `training.build.load_accelerator`.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fedlas.training.epoch_metrics import EpochSums
from fedlas.training.optimizer import FusedStep
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates


@runtime_checkable
class Accelerator(Protocol):
    """Custom kernels for a device.

    Attributes:
        epoch_sums: kernels that add a batch to the metrics; used only with the fused optimizer step, whose trial runs
            them too.
    """

    epoch_sums: EpochSums

    def prepare_model(self, model: nn.Module) -> nn.Module | None:
        """Return a network with the same layers that trains faster, or None if the kernels do not fit."""

    def optimizer_step(
        self, recipe: Recipe, optimizer: torch.optim.Optimizer, rates: LearningRates, loss: nn.Module, model: nn.Module
    ) -> FusedStep | None:
        """Return a fused optimizer step with clipping and learning rate, or None if the kernels do not fit."""
