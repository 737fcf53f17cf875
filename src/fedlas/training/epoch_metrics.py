"""Training metrics of an epoch: sums on the device, read once at the end."""

import math
from collections.abc import Collection
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from fedlas import ranks


@runtime_checkable
class EpochSums(Protocol):
    """Adds a batch to the sums of an epoch in one kernel."""

    def add_batch(  # noqa: PLR0917 (a signature of kernels)
        self,
        logits: Float[Tensor, "n classes"],
        labels: Int[Tensor, " n"],
        samples: Float[Tensor, ""],
        correct: Float[Tensor, ""],
        means: list[Tensor],
        sums: list[Tensor],
    ) -> bool:
        """Add samples, correct predictions and means of a batch; return False if the kernel does not support it."""

    def add_gate(  # noqa: PLR0917 (a signature of kernels)
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


class EpochMetrics:
    """Mean loss, mean of each loss term, accuracy and gradient norm of an epoch.

    Args:
        device: device of the sums.
        kernels: custom kernels that add a batch, if available.
    """

    def __init__(self, device: torch.device, kernels: EpochSums | None = None) -> None:
        self.device, self.kernels = device, kernels
        self.sums: dict[str, Tensor] = {}

    def total(self, name: str) -> Float[Tensor, ""]:
        """Return a sum, initially zero; it is changed in place because a captured step holds its address."""
        if name not in self.sums:
            self.sums[name] = torch.zeros((), dtype=torch.float64, device=self.device)
        return self.sums[name]

    @torch.no_grad()
    def add(self, name: str, value: Tensor | float) -> None:
        """Add to a sum, in place."""
        self.total(name).add_(value.detach() if isinstance(value, Tensor) else value)

    def add_batch(
        self, value: Tensor, terms: dict[str, Tensor], logits: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]
    ) -> None:
        """Add a batch: samples, correct predictions, and the mean of the loss and of its terms."""
        rows = len(labels)
        samples, correct = self.total("samples"), self.total("correct")
        parts = terms if len(terms) > 1 else {}
        means = {"loss": value.detach()} | {f"loss_{name}": term for name, term in parts.items()}
        sums = [self.total(name) for name in means]
        if self.kernels and self.kernels.add_batch(logits, labels, samples, correct, list(means.values()), sums):
            return
        self.add("samples", rows)
        self.add("correct", (logits.argmax(1) == labels).sum())
        for name, mean in means.items():
            self.add(name, mean * rows)

    def add_norm(self, norm: Float[Tensor, ""]) -> None:
        """Add the gradient norm of a step."""
        self.add("steps", 1)
        self.add("gradient_norm", norm)

    def read(self) -> dict[str, float]:
        """Wait for the device and return the means over all ranks."""
        sums = dict(zip(self.sums, self._totals().tolist(), strict=True))
        samples, correct = sums.pop("samples"), sums.pop("correct")
        norm = sums.pop("gradient_norm") / sums.pop("steps")
        means = {name: total / samples for name, total in sums.items()}
        return {"loss": means.pop("loss"), "accuracy": correct / samples, **means, "gradient_norm": norm}

    def _totals(self) -> Float[Tensor, " sums"]:
        """Return the sums over all ranks."""
        return ranks.total(torch.stack(list(self.sums.values())))

    def keep(self, names: Collection[str]) -> None:
        """Remove all sums but those with these names."""
        self.sums = {name: total for name, total in self.sums.items() if name in names}

    def reset(self) -> None:
        """Start a new epoch, in place."""
        for total in self.sums.values():
            total.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums of an unfinished epoch over all ranks; call it on all ranks."""
        return dict(zip(self.sums, self._totals().clone(), strict=True))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore an unfinished epoch: rank 0 gets the sums of all ranks, the other ranks start from zero."""
        self.reset()
        for name, value in state.items():
            self.add(name, value.to(self.device) * (ranks.rank() == 0))


def finite_or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not support."""
    return value if math.isfinite(value) else None
