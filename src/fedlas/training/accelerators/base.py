"""Interface of accelerators: what the training engine asks of kernels that replace parts of a step.

The engine works without any accelerator. One is loaded by `training.build.load_accelerator`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor, nn

from fedlas.training.epoch_metrics import EpochMetrics
from fedlas.training.optimizer import OptimizerStep


@runtime_checkable
class EpochSums(Protocol):
    """Adds a batch to the sums of an epoch in one kernel."""

    def add_batch(
        self,
        logits: Float[Tensor, "n classes"],
        labels: Int[Tensor, " n"],
        samples: Float[Tensor, ""],
        correct: Float[Tensor, ""],
        means: list[Tensor],
        sums: list[Tensor],
    ) -> bool:
        """Add samples, correct predictions and means of a batch; return False if the kernel does not support it."""

    def add_gate(
        self,
        index: Int[Tensor, " n"],
        psi: Float[Tensor, " n"],
        gamma: Float[Tensor, " n"],
        alpha_i: Float[Tensor, " n"],
        alpha: float,
        edges: Float[Tensor, " edges"],
        now: Int8[Tensor, " samples"],
        sums: Float[Tensor, " 3+edges"],
    ) -> None:
        """Add the state of the gate of a FeDLaS loss."""


@runtime_checkable
class StepFunction(Protocol):
    """Ends a training step: clipping, learning rate, optimizer step and step counter."""

    def __call__(
        self, finite: Bool[Tensor, ""], count: Int[Tensor, ""], first_bad: Int[Tensor, ""], metrics: EpochMetrics
    ) -> None:
        """Update the parameters, or record the first bad step."""

    def receiving(self) -> AbstractContextManager[None]:
        """Return a context in which the network hands over its gradients."""

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context in which one step is captured."""


@runtime_checkable
class Accelerator(Protocol):
    """Custom kernels for a device.

    Attributes:
        epoch_sums: sums of an epoch; they need the fused optimizer step, which has tried the kernels.
    """

    epoch_sums: EpochSums

    def prepare_model(self, model: nn.Module) -> nn.Module | None:
        """Return a network with the same layers that trains faster, or None if the kernels do not fit."""

    def precompile(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return a context that pre-compiles the kernels of a network in parallel, if it has any."""

    def optimizer_step(self, plain: OptimizerStep, model: nn.Module) -> StepFunction:
        """Return a faster replacement of an optimizer step, or the step itself if the kernels do not fit."""
