"""Cross-entropy: L = mean_i -log p_{y_i}.

The baseline of all other losses; equal to `torch.nn.CrossEntropyLoss`.
"""

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch


class CE(AbstractLoss):
    """Cross-entropy, the baseline."""

    name = "ce"
    citation = "Baseline; no method paper."

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.cross_entropy(batch)}
