"""The state of the gate per training sample and epoch: how many are in each mode, and how many change it.

With psi_i^e the state of sample i in epoch e: the proportions are the shares of +1 and -1 among the samples seen in
epoch e; the flip rate is the share of samples with psi_i^e != psi_i^(e-1) among those seen in both epochs. A loader
that drops its last batch leaves some samples out of an epoch; they count in neither. A psi of exactly 0, which
`preset="official"` allows, counts as -1.
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
    """What one epoch showed; a share of nothing is NaN."""

    positive: float
    negative: float
    flip_rate: float
    seen: int


class GateHistory(nn.Module):
    """Collects the gate's state by sample index; saved, moved and restored like any module.

    Args:
        num_samples: size of the training split that `index` counts in.

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
        """Note the state of a batch, on all ranks; samples whose psi is NaN, the ignored ones, are passed over."""
        if index.shape != psi.shape:
            raise UserError(f"index has shape {tuple(index.shape)}, psi {tuple(psi.shape)}")
        # On a GPU a look at the numbers would make the host wait.
        if index.device.type == "cpu" and len(index) and (index.min() < 0 or index.max() >= len(self.now)):
            span = f"from {index.min()} to {index.max()}"
            raise UserError(f"index reaches {span}, outside of the {len(self.now)} samples of the history")
        index, psi = ranks.joined(index.long()), ranks.joined(psi)
        state = torch.where(psi > 0, 1, -1).to(torch.int8)
        self.now[index] = torch.where(psi.isnan(), self.now[index], state)

    @torch.no_grad()
    def end_epoch(self) -> GateEpoch:
        """Close the epoch and give its proportions and its flip rate against the one before."""
        seen = self.now != 0
        both = seen & (self.before != 0)
        flips = both & (self.now != self.before)
        numbers = torch.stack([seen.sum(), (self.now > 0).sum(), both.sum(), flips.sum()]).tolist()
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
        """Give the finished epochs to `state_dict`."""
        return [asdict(epoch) for epoch in self.epochs]

    def set_extra_state(self, state: list[dict[str, Any]]) -> None:
        """Take the finished epochs from `state_dict`."""
        self.epochs = [GateEpoch(**epoch) for epoch in state]
