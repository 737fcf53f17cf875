"""Sums that grow on the device during an epoch and are read once at its end.

Beside loss terms and accuracy, a loss with a gate is watched: how many samples it pushes in either direction and how
many have changed direction since the epoch before, the mean of alpha_i / alpha, the share of psi = -sign(gamma) (near
1: the gate only lowers the training loss, docs/decisions.md), and the histogram of the indicator gamma.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fedlas import ranks


class EpochMetrics:
    """Mean loss, mean of each of its terms, accuracy and gradient norm of an epoch.

    Args:
        device: where the sums live.
        tally: takes in a batch with one kernel, where it can; see `kernels.tallies`.
    """

    def __init__(self, device: torch.device, tally: Callable[..., bool] | None = None) -> None:
        self.device, self.tally = device, tally
        self.sums: dict[str, Tensor] = {}

    def total(self, name: str) -> Float[Tensor, ""]:
        """Give a sum, which begins with zero, to be changed in place: a captured step holds its address."""
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
        """Take in what a step found: the mean of the loss and its terms, over the batch of all ranks."""
        rows = len(labels)
        samples, correct = self.total("samples"), self.total("correct")
        parts = terms if len(terms) > 1 else {}
        means = {"loss": value.detach()} | {f"loss_{name}": term for name, term in parts.items()}
        sums = [self.total(name) for name in means]
        if self.tally is not None and self.tally(logits, labels, samples, correct, list(means.values()), sums):
            return
        self.add("samples", rows)
        self.add("correct", (logits.argmax(1) == labels).sum())
        for name, mean in means.items():
            self.add(name, mean * rows)

    def add_norm(self, norm: Float[Tensor, ""]) -> None:
        """Take in the length of a step's gradient."""
        self.add("steps", 1)
        self.add("gradient_norm", norm)

    def read(self) -> dict[str, float]:
        """Wait for the device, and give the means over all ranks."""
        names = list(self.sums)
        totals = ranks.total(torch.stack(list(self.sums.values()))).tolist() if names else []
        sums = dict(zip(names, totals, strict=True))
        samples, steps = sums.pop("samples", 0.0) or math.nan, sums.pop("steps", 0.0) or math.nan
        norm = sums.pop("gradient_norm", math.nan) / steps
        means = {name: total / samples for name, total in sums.items()}
        return {"loss": means.pop("loss", math.nan), "accuracy": means.pop("correct", math.nan), **means} | {
            "gradient_norm": norm
        }

    def reset(self) -> None:
        """Begin a new epoch, in place."""
        for total in self.sums.values():
            total.zero_()

    def state(self) -> dict[str, Tensor]:
        """Give the sums of an epoch that is not over, over all ranks; each of them has to ask."""
        totals = ranks.total(torch.stack(list(self.sums.values()))).clone() if self.sums else ()
        return dict(zip(self.sums, totals, strict=True))

    def restore(self, state: dict[str, Tensor], *, first: bool = True) -> None:
        """Go on with the sums of an epoch that was not over; they are those of all ranks, so one rank takes them."""
        self.reset()
        for name, value in state.items():
            self.add(name, value.to(self.device) * first)
