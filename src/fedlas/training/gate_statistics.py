"""Statistics of the gate of a loss over an epoch.

How many samples have either direction and how many changed it since the epoch before, the mean of alpha_i / alpha, the
share of psi = -sign(gamma) (near 1: the gate only lowers the training loss, docs/decisions.md) and the histogram of the
indicator gamma.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fedlas import ranks
from fedlas.errors import UserError
from fedlas.losses.base import AbstractLoss
from fedlas.losses.gate_history import GateHistory
from fedlas.training.epoch_metrics import EpochSums

EDGES = tuple(-4 + 0.5 * n for n in range(17))  # of the histogram of gamma; what lies outside is counted too


class GateStatistics:
    """Statistics of the gate of a loss in an epoch; empty for losses without one.

    Args:
        loss: any loss.
        samples: size of the training split.
        device: where the sums live.
        kernels: add a batch in one kernel, if given.
    """

    def __init__(
        self, loss: AbstractLoss, samples: int, device: torch.device, kernels: EpochSums | None = None
    ) -> None:
        self.loss, self.kernels = loss, kernels
        self.history = GateHistory(samples).to(device)
        self.edges = torch.tensor(EDGES, device=device)
        # How many samples, Σ alpha_i / alpha, how many psi = -sign(gamma), and how many gammas reach each edge.
        self.sums = torch.zeros(3 + len(EDGES), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, index: Int[Tensor, " n"]) -> None:
        """Add the latest batch of the loss; ignored samples, whose psi is NaN, are not counted."""
        state = self.loss.gate_state()
        if state is None:
            return
        psi, gamma, alpha_i, alpha = state
        alpha = max(alpha, 1e-12)
        if self.kernels is not None:
            self.kernels.add_gate(index, psi, gamma, alpha_i, alpha, self.edges, self.history.now, self.sums)
            return
        self.history.update(index, psi)
        known = ~psi.isnan()
        ratio = torch.where(known, alpha_i / alpha, 0).double()
        against = known & (psi == -gamma.sign())
        reached = (gamma.unsqueeze(1) >= self.edges).sum(0)
        self.sums.add_(torch.cat([known.sum().reshape(1), ratio.sum().reshape(1), against.sum().reshape(1), reached]))

    def read(self) -> dict[str, Any]:
        """Wait for the device and return the statistics of the epoch that ends."""
        if not self.loss.has_gate:
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

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with sums over all ranks; all ranks have to call it."""
        return {"history": self.history.state_dict(), "sums": ranks.total(self.sums).clone()}

    def load_state_dict(self, state: dict[str, Any], *, first: bool = True) -> None:
        """Continue from a saved state; the history is the same on all ranks, the first rank gets the sums."""
        self.history.load_state_dict(state["history"])
        if state["sums"].shape != self.sums.shape:
            raise UserError(f"the gate has {tuple(self.sums.shape)} sums, not {tuple(state['sums'].shape)}")
        self.sums.copy_(state["sums"] * first)

    def reset(self) -> None:
        """Start again, in place."""
        self.history.now.zero_()
        self.history.before.zero_()
        self.history.epochs.clear()
        self.sums.zero_()


def _number(value: float) -> float | None:
    """Return None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value
