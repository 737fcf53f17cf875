"""Validation metrics and gate statistics that the integrations log."""

import math
from collections.abc import Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedlas import ranks
from fedlas.losses.base import AbstractLoss
from fedlas.losses.flip_rate import GateHistory
from fedlas.metrics.registry import logged_metrics
from fedlas.predictions import Predictions


class ValidationMetrics:
    """Accumulates logits and labels of batches, and computes the default metrics over all samples of all ranks.

    Args:
        bins: number of bins of calibration errors.
        ignore_index: label of ignored samples.
        keep: whether to store all samples, for a loss that uses validation data between epochs.
        shared: whether the samples are distributed over ranks; otherwise each rank has all samples.
    """

    def __init__(self, bins: int = 15, ignore_index: int = -100, *, keep: bool = False, shared: bool = True) -> None:
        self.ignore_index, self.keep, self.shared = ignore_index, keep, shared
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.accumulators = {
            name: metric.accumulator(**({"bins": bins} if metric.is_binned else {}))
            for name, metric in logged_metrics().items()
        }

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of logits, (N, C) or (N, C, d1, ...), and hard or soft labels."""
        rows = logits.detach().movedim(1, -1).reshape(-1, logits.shape[1])
        if labels.is_floating_point():
            truth = labels.movedim(1, -1).reshape(rows.shape)
        else:
            truth = labels.reshape(-1)
            counts = truth != self.ignore_index
            rows, truth = rows[counts], truth[counts]
        if not len(rows):
            return
        for accumulator in self.accumulators.values():
            accumulator.update_logits(rows, truth)
        if self.keep:
            self.batches.append((rows.cpu(), truth.cpu()))

    @property
    def has_samples(self) -> bool:
        """Whether this rank has samples; after `read`, whether any rank has."""
        return self.accumulators["ece"].definition.n > 0

    def read(self) -> dict[str, float]:
        """Return the metrics by name; empty if there are no samples. Call it on all ranks."""
        if self.shared:
            for accumulator in self.accumulators.values():
                accumulator.sync()
        return (
            {name: float(accumulator.compute()) for name, accumulator in self.accumulators.items()}
            if self.has_samples
            else {}
        )

    def predictions(self) -> Predictions | None:
        """Return the samples of all ranks; None if they were not stored. Call it on all ranks."""
        by_process = [self.batches]
        if self.shared and ranks.count() > 1:
            by_process = [[] for _ in range(ranks.count())]
            dist.all_gather_object(by_process, self.batches)
        batches = [batch for part in by_process for batch in part]
        if not batches:
            return None
        logits, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return Predictions(logits, labels, split="validation")


class Gate:
    """Accumulates statistics of the gate of a loss; does nothing for losses without a gate.

    Args:
        loss: the loss.
    """

    def __init__(self, loss: AbstractLoss) -> None:
        self.loss = loss
        self.history: GateHistory | None = None
        self.sums: Tensor | None = None

    @torch.no_grad()
    def add(self, index: Tensor | None = None, num_samples: int | None = None) -> None:
        """Add the latest batch of the loss; the flip rate needs the indices of the samples."""
        state = self.loss.gate_state()
        if state is None:
            return
        psi, alpha_i = state.psi, state.alpha_i
        counts = ~psi.isnan()  # NaN: ignored samples
        sums = torch.stack([counts.sum(), (psi > 0).sum(), torch.where(counts, alpha_i, 0).sum()]).to(alpha_i.dtype)
        self.sums = sums if self.sums is None else self.sums.to(sums.device) + sums
        if index is not None and num_samples is not None and index.shape == psi.shape:
            if self.history is None:
                self.history = GateHistory(num_samples).to(psi.device)
            self.history.update(index, psi)

    def read(self) -> dict[str, float]:
        """Return the fractions of both modes, the mean alpha_i and, if indices are known, the flip rate; then reset.

        Call it on all ranks. A flip rate needs two epochs.
        """
        if self.sums is None:
            return {}
        samples, positive, alpha = ranks.total(self.sums).tolist()
        self.sums = None
        if not samples:
            return {}
        statistics = {
            "gate_positive": positive / samples,
            "gate_negative": 1 - positive / samples,
            "alpha": alpha / samples,
        }
        if self.history is not None:
            epoch = self.history.end_epoch()
            statistics |= {} if math.isnan(epoch.flip_rate) else {"flip_rate": epoch.flip_rate}
        return statistics

    def state(self) -> dict[str, Any]:
        """Return the state that the next epoch needs."""
        return {} if self.history is None else {"samples": len(self.history.now), "history": self.history.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        if state:
            self.history = GateHistory(state["samples"])
            self.history.load_state_dict(state["history"])


def count_samples(loader: Any) -> int | None:
    """Return the size of the data set of a loader; None for streams or several data sets."""
    data = getattr(loader, "dataset", None)
    return len(data) if isinstance(data, Sized) else None
