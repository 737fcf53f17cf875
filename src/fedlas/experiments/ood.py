"""The table of foreign data: how well networks tell images apart that they were not trained on."""

from collections.abc import Sequence

from fedlas.experiments import paper
from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Measured


class OutOfDistribution(AbstractGrid):
    """AUROC of entropy and of the largest probability, CIFAR-10 and CIFAR-100 against SVHN and each other."""

    name = "ood"
    title = "Detection of foreign data"

    def models(self, data: str, protocol: str) -> Sequence[str]:
        return tuple(super().models(data, protocol))[:1]  # the paper does not say; ResNet-50 is presumed

    def measured(self, data: str) -> Sequence[Measured]:
        scores = {"entropy": "entropy", "max_probability": "largest probability"}
        return tuple(
            Measured(
                "auroc", f"AUROC % {paper.data_name(ood)}, {shown}", higher_is_better=True, ood=ood, score=score,
                printed=score == "entropy",
            )
            for ood in paper.foreign_data(self.name, data)
            for score, shown in scores.items()
        )  # fmt: skip

    def notes(self, choice: Choice) -> tuple[str, ...]:
        consistent = "Foreign images pass through the transform of the data that the network was trained on"
        if choice.protocol != "official":
            return (*super().notes(choice), f"{consistent}; the published code normalises each data set by itself.")
        return (*super().notes(choice), f"{consistent}, here with the published test normalisation of CIFAR-100.")
