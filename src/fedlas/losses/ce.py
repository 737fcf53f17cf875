"""Cross-entropy: L = mean_i -log p_{y_i}.

Source: the reference that every other loss is measured against; equal to `torch.nn.CrossEntropyLoss`.
"""

from torch import Tensor

from fedlas.losses.base import AbstractLoss, Batch


class CE(AbstractLoss):
    """Plain cross-entropy, the loss that most classifiers are trained with."""

    name = "ce"
    citation = "Baseline; no method paper."

    def terms(self, batch: Batch) -> dict[str, Tensor]:
        return {"classification": self.cross_entropy(batch)}
