"""Statistics of the gate of a loss over an epoch: directions, flip rate, smoothing and histogram of the indicator."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from fedlas import ranks
from fedlas.losses.gate_history import GateHistory

EDGES = tuple(-4 + 0.5 * n for n in range(17))  # of the histogram of gamma; what lies outside is counted too


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
