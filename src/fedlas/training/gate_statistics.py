"""Statistics of the gate of a loss over an epoch.

Numbers of samples with either direction, flip rate since the previous epoch, mean of alpha_i / alpha, fraction of
psi = -sign(gamma) (near 1: the gate only lowers the training loss, docs/decisions.md) and histogram of the indicator
gamma.
"""

from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fedlas import ranks
from fedlas.errors import UserError
from fedlas.losses.base import AbstractLoss
from fedlas.losses.flip_rate import GateHistory
from fedlas.training.epoch_metrics import EpochSums, finite_or_none

EDGES = tuple(-4 + 0.5 * n for n in range(17))  # of the histogram of gamma, which has an open bin at either end


class GateStatistics:
    """Statistics of the gate of a loss in an epoch; empty for losses without a gate.

    Args:
        loss: any loss.
        samples: size of the training split.
        device: device of the sums.
        kernels: custom kernels that add a batch, if available.
    """

    def __init__(
        self, loss: AbstractLoss, samples: int, device: torch.device, kernels: EpochSums | None = None
    ) -> None:
        self.loss, self.kernels = loss, kernels
        self.history = GateHistory(samples).to(device)
        self.edges = torch.tensor(EDGES, device=device)
        # Number of samples, Σ alpha_i / alpha, count of psi = -sign(gamma), and count of gamma >= each edge.
        self.sums = torch.zeros(3 + len(EDGES), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, index: Int[Tensor, " n"]) -> None:
        """Add the latest batch of the loss; skip ignored samples, whose psi is NaN."""
        state = self.loss.gate_state()
        if state is None:
            return
        psi, gamma, alpha_i, alpha = state
        alpha = max(alpha, 1e-12)
        if self.kernels is not None:
            self.kernels.add_gate(index, psi, gamma, alpha_i, alpha, self.edges, self.history.now, self.sums)
            return
        self.history.update(index, psi)
        valid = ~psi.isnan()
        ratio = torch.where(valid, alpha_i / alpha, 0).double()
        opposed = valid & (psi == -gamma.sign())
        reached = (gamma.unsqueeze(1) >= self.edges).sum(0)
        self.sums.add_(torch.cat([valid.sum().reshape(1), ratio.sum().reshape(1), opposed.sum().reshape(1), reached]))

    def end_epoch(self) -> dict[str, Any]:
        """Wait for the device, return the statistics of the epoch, and start the next one."""
        if not self.loss.has_gate:
            return {}
        samples, ratio, opposed, *reached = ranks.total(self.sums).tolist()
        self.sums.zero_()
        epoch = self.history.end_epoch()
        counts = [samples, *reached, 0.0]
        bins = [left - right for left, right in pairwise(counts)]
        return {
            "positive": finite_or_none(epoch.positive),
            "negative": finite_or_none(epoch.negative),
            "flip_rate": finite_or_none(epoch.flip_rate),
            "alpha_ratio": ratio / max(samples, 1),
            "against_gamma": opposed / max(samples, 1),
            "gamma_histogram": {"edges": list(EDGES), "counts": [round(count) for count in bins]},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with sums over all ranks; call it on all ranks."""
        return {"history": self.history.state_dict(), "sums": ranks.total(self.sums).clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state: all ranks get the history, rank 0 the sums of all ranks, the other ranks start from zero."""
        self.history.load_state_dict(state["history"])
        if state["sums"].shape != self.sums.shape:
            raise UserError(f"the gate has {tuple(self.sums.shape)} sums, not {tuple(state['sums'].shape)}")
        self.sums.copy_(state["sums"] * (ranks.rank() == 0))
