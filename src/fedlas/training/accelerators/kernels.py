"""The accelerator: custom Triton kernels for ResNets and SGD on one GPU."""

import warnings

import torch
from torch import nn

from fedlas.training.accelerators import metric_sums, resnet
from fedlas.training.accelerators.optimizer_step import FusedOptimizerStep, fits
from fedlas.training.accelerators.trial import batch_norm_failure, resnet_support
from fedlas.training.epoch_metrics import EpochSums
from fedlas.training.optimizer import FusedStep
from fedlas.training.recipe import Recipe
from fedlas.training.schedule import LearningRates


class CustomKernels:
    """Custom kernels for a device; see `Accelerator`.

    Args:
        device: where a network trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.epoch_sums: EpochSums = metric_sums

    def prepare_model(self, model: nn.Module) -> nn.Module | None:
        """Return a ResNet whose training passes use the kernels, or None if the network is another one."""
        if not resnet.fits(model):
            return None
        reason = batch_norm_failure(self.device)
        if reason is not None:
            warnings.warn(f"custom kernels cannot be used, torch.compile is used instead: {reason}", stacklevel=2)
            return None
        return resnet.FusedResNet(model, resnet_support(model, self.device))

    def optimizer_step(
        self, recipe: Recipe, optimizer: torch.optim.Optimizer, rates: LearningRates, loss: nn.Module, model: nn.Module
    ) -> FusedStep | None:
        """Return a fused optimizer step, if the kernels support the optimizer."""
        if not fits(recipe, optimizer, self.device):
            return None
        return FusedOptimizerStep(
            recipe, optimizer, rates, loss, model if isinstance(model, resnet.FusedResNet) else None
        )
