"""Sums that grow on the device during an epoch and are read once at its end.

Beside loss terms and accuracy, a loss with a gate is watched: how many samples it pushes in either direction and how
many have changed direction since the epoch before, the mean of alpha_i / alpha, the share of psi = -sign(gamma) (near
1: the gate only lowers the training loss, docs/decisions.md), and the histogram of the indicator gamma.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedlas import ranks
from fedlas.losses.gate_history import GateHistory

EDGES = tuple(-4 + 0.5 * n for n in range(17))  # of the histogram of gamma; what lies outside is counted too


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


class GateStatistics:
    """What the gate of a loss did in an epoch; silent about losses without one.

    Args:
        loss: any loss.
        samples: size of the training split.
        device: where the sums live.
        tally: takes in a batch with one kernel; see `kernels.tallies`.
    """

    def __init__(
        self, loss: nn.Module, samples: int, device: torch.device, tally: Callable[..., None] | None = None
    ) -> None:
        self.loss: Any = loss
        self.tally = tally
        self.used = all(hasattr(loss, name) for name in ("psi", "gamma", "alpha_i"))
        self.history = GateHistory(samples).to(device)
        self.edges = torch.tensor(EDGES, device=device)
        # How many samples, Σ alpha_i / alpha, how many psi = -sign(gamma), and how many gammas reach each edge.
        self.sums = torch.zeros(3 + len(EDGES), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, index: Int[Tensor, " n"]) -> None:
        """Take in the latest batch of the loss; ignored samples, whose psi is NaN, count nowhere."""
        psi, gamma, alpha_i = (getattr(self.loss, name, None) for name in ("psi", "gamma", "alpha_i"))
        if not self.used or psi is None or gamma is None or alpha_i is None:
            return
        alpha = max(self.loss.smoothing.alpha, 1e-12)
        if self.tally is not None:
            self.tally(index, psi, gamma, alpha_i, alpha, self.edges, self.history.now, self.sums)
            return
        self.history.update(index, psi)
        known = ~psi.isnan()
        ratio = torch.where(known, alpha_i / alpha, 0).double()
        against = known & (psi == -gamma.sign())
        reached = (gamma.unsqueeze(1) >= self.edges).sum(0)
        self.sums.add_(torch.cat([known.sum().reshape(1), ratio.sum().reshape(1), against.sum().reshape(1), reached]))

    def read(self) -> dict[str, Any]:
        """Wait for the device, and say what the gate did in the epoch that ends now."""
        if not self.used:
            return {}
        samples, ratio, against, *reached = ranks.total(self.sums).tolist()
        self.sums.zero_()
        epoch = self.history.end_epoch()
        counts = [samples, *reached, 0.0]
        shares = [before - after for before, after in pairwise(counts)]
        return {
            "positive": _number(epoch.positive),
            "negative": _number(epoch.negative),
            "flip_rate": _number(epoch.flip_rate),
            "alpha_ratio": ratio / max(samples, 1),
            "against_gamma": against / max(samples, 1),
            "gamma_histogram": {"edges": list(EDGES), "counts": [round(share) for share in shares]},
        }

    def state(self) -> dict[str, Any]:
        """Give everything that the next epoch needs; the sums are those of all ranks, each of which has to ask."""
        return {"history": self.history.state_dict(), "sums": ranks.total(self.sums).clone()}

    def restore(self, state: dict[str, Any], *, first: bool = True) -> None:
        """Go on from a saved state; the history is the same on all ranks, the sums are for one of them."""
        self.history.load_state_dict(state["history"])
        if state["sums"].shape != self.sums.shape:
            raise ValueError(f"the gate has {tuple(self.sums.shape)} sums, not {tuple(state['sums'].shape)}")
        self.sums.copy_(state["sums"] * first)

    def reset(self) -> None:
        """Forget everything, in place."""
        self.history.now.zero_()
        self.history.before.zero_()
        self.history.epochs.clear()
        self.sums.zero_()


def _number(value: float) -> float | None:
    """JSON knows no NaN: a share of nothing is null."""
    return None if math.isnan(value) else value
