"""Gate statistics per epoch: fractions of samples in each mode, and flip rate.

Let psi_i^e be the mode of sample i in epoch e. The fractions of +1 and -1 are relative to the samples seen in epoch e;
the flip rate is the fraction with psi_i^e != psi_i^(e-1) of the samples seen in both epochs. A sample missing in an
epoch (`drop_last`) is not counted there. A psi of exactly 0, which `preset="official"` allows, counts as -1.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from fedlas import ranks
from fedlas.errors import UserError


@dataclass(frozen=True)
class GateEpoch:
    """Gate statistics of an epoch; fractions of zero samples are NaN."""

    positive: float
    negative: float
    flip_rate: float
    seen: int


class GateHistory(nn.Module):
    """Collects the mode of the gate by sample index; a module, so that it can be saved, moved and restored.

    Args:
        num_samples: size of the training split that `index` refers to.

    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        if num_samples < 1:
            raise UserError(f"num_samples must be at least 1, not {num_samples}")
        self.now: Tensor
        self.before: Tensor
        self.register_buffer("now", torch.zeros(num_samples, dtype=torch.int8))
        self.register_buffer("before", torch.zeros(num_samples, dtype=torch.int8))
        self.epochs: list[GateEpoch] = []

    @torch.no_grad()
    def update(self, index: Int[Tensor, " n"], psi: Float[Tensor, " n"]) -> None:
        """Record the modes of a batch, on all ranks; skip ignored samples, whose psi is NaN."""
        if index.shape != psi.shape:
            raise UserError(f"index has shape {tuple(index.shape)}, psi {tuple(psi.shape)}")
        # On a GPU reading the values would synchronise the host.
        if index.device.type == "cpu" and len(index) and (index.min() < 0 or index.max() >= len(self.now)):
            span = f"from {index.min()} to {index.max()}"
            raise UserError(f"index reaches {span}, outside of the {len(self.now)} samples of the history")
        index, psi = ranks.joined(index.long()), ranks.joined(psi)
        state = torch.where(psi > 0, 1, -1).to(torch.int8)
        self.now[index] = torch.where(psi.isnan(), self.now[index], state)

    @torch.no_grad()
    def end_epoch(self) -> GateEpoch:
        """End the epoch and return its fractions and its flip rate relative to the previous epoch."""
        seen = self.now != 0
        both_epochs = seen & (self.before != 0)
        flips = both_epochs & (self.now != self.before)
        numbers = torch.stack([seen.sum(), (self.now > 0).sum(), both_epochs.sum(), flips.sum()]).tolist()
        self.before.copy_(self.now)
        self.now.zero_()
        count, positive, common, flipped = (int(number) for number in numbers)
        epoch = GateEpoch(
            positive=positive / count if count else math.nan,
            negative=(count - positive) / count if count else math.nan,
            flip_rate=flipped / common if common else math.nan,
            seen=count,
        )
        self.epochs.append(epoch)
        return epoch

    def get_extra_state(self) -> list[dict[str, Any]]:
        """Return the finished epochs, for `state_dict`."""
        return [asdict(epoch) for epoch in self.epochs]

    def set_extra_state(self, state: list[dict[str, Any]]) -> None:
        """Restore the finished epochs from `state_dict`."""
        self.epochs = [GateEpoch(**epoch) for epoch in state]
