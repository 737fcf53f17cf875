"""Correctness ranking loss: samples that were classified correctly more often should be more confident.

State: k_i, the number of epochs in which training sample i was classified correctly (in its augmented training view),
and K, the number of finished epochs (1 in the first two). With u_i = (k_i - k_min) / (K - k_min), every sample is
paired with the next of the batch, cyclically:

    L = mean CE + rank_weight mean_i max(0, -sign(u_i - u_j) (r_i - r_j) + |u_i - u_j|),  0 where u_i = u_j

The score r is the largest probability (`softmax`), its margin over the second largest (`margin`) or the negative
normalised entropy (`entropy`); the gradient flows through both scores of a pair. In the first epoch the ranking term is
0. Differences from the official code: the table has rows for training samples only, so that unseen samples do not keep
k_min at 0; u = 0 where every sample has k = K (official: 0/0); the counts are saved with the loss; ignored samples are
not paired. The ranking is used in training only: in evaluation mode, or where gradients are disabled, it is 0 and no
index is needed.
"""

import math
import warnings
from typing import Literal, Unpack

import torch
from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch, Common, at_least, one_of, whole
from fedlas.predictions import Predictions


class CRL(AbstractLoss):
    """Cross-entropy plus a ranking of confidence by how often each training sample was classified correctly.

    Args:
        num_samples: number of samples of the training split, whose positions are passed as `index`.
        rank_weight: weight of the ranking term.
        score: confidence score to rank.
        **common: see `AbstractLoss`.

    """

    name = "crl"
    citation = "Moon et al., Confidence-Aware Learning for Deep Neural Networks, ICML 2020."
    takes_maps = False
    takes_soft_labels = False
    learns_between_epochs = True
    needs_index = True

    def __init__(
        self,
        *,
        num_samples: int,
        rank_weight: float = 1.0,
        score: Literal["softmax", "margin", "entropy"] = "softmax",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**common)
        self.num_samples = self.index_limit = whole("num_samples", num_samples)
        self.rank_weight = at_least("rank_weight", rank_weight, 0)
        self.score = one_of("score", score, ("softmax", "margin", "entropy"))
        self.correct_epochs: Tensor
        self.finished_epochs: Tensor
        self.register_buffer("correct_epochs", torch.zeros(self.index_limit, dtype=torch.int64))
        self.register_buffer("finished_epochs", torch.zeros((), dtype=torch.int64))
        self._warned = False

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        classification = self.cross_entropy(batch)
        if not batch.updates_state:
            return {"classification": classification, "ranking": torch.zeros_like(classification)}
        self.check_update()
        assert batch.index is not None
        index = batch.joined(batch.index)
        valid = batch.joined(batch.valid)
        ranking = self._ranking(batch.joined(self._scores(batch)), index, valid)
        correct = batch.joined(batch.correct()).long()
        self.correct_epochs.index_add_(0, index, torch.where(valid, correct, 0))
        return {"classification": classification, "ranking": self.rank_weight * batch.own(ranking)}

    def learn_from_epoch(self, validation: Predictions | None) -> None:  # noqa: ARG002 (learns from training alone)
        """Count the epoch."""
        self.finished_epochs += 1
        most, epochs = int(self.correct_epochs.max()), int(self.finished_epochs)
        if most > epochs and not self._warned:
            self._warned = True
            warnings.warn(
                f"crl counted a training sample as correct {most} times in {epochs} epochs; call loss.end_epoch() "
                "after each epoch, loss.eval() for validation, and let each epoch visit a sample once",
                UserWarning,
                stacklevel=3,
            )

    def _scores(self, batch: Batch) -> Tensor:
        if self.score == "softmax":
            return batch.confidence()
        probs = batch.log_probs.exp()
        if self.score == "margin":
            largest = probs.topk(min(2, probs.shape[1]), 1).values
            return largest[:, 0] - largest[:, 1:].sum(1)
        return (probs * batch.log_probs).sum(1) / math.log(max(probs.shape[1], 2))

    def _ranking(self, score: Tensor, index: Tensor, valid: Tensor) -> Tensor:
        """Return the ranking loss of each sample against the next valid one."""
        partner = _next_valid(valid)
        span = self.finished_epochs.clamp_min(1) - self.correct_epochs.min()
        history = self.correct_epochs[index]
        # A single division of integers gives exactly the margins of the official code in float32.
        ahead = ((history - history[partner]) * (span > 0) / span.clamp_min(1)).to(score.dtype)
        hinge = (ahead.abs() - ahead.sign() * (score - score[partner])).clamp_min(0)
        return torch.where(ahead == 0, 0, hinge)


def _next_valid(valid: Tensor) -> Tensor:
    """Return for each position the next valid one, cyclically."""
    order = torch.argsort(~valid, stable=True)
    position = torch.arange(len(valid), device=valid.device)
    follower = order[torch.where(position + 1 < valid.sum(), position + 1, 0)] if len(valid) else order
    return torch.zeros_like(order).index_copy(0, order, follower)
