"""The table of photographs: birds and aircraft, networks that were trained before."""

from collections.abc import Sequence

from fedlas.experiments.grid import AbstractGrid, Measured


class Finegrained(AbstractGrid):
    """Accuracy, ECE and AECE of nine losses on CUB and Aircraft, ResNet-101 and ViT, with mean ranks."""

    name = "finegrained"
    title = "Accuracy and calibration on fine-grained photographs"
    ranked = ("ECE %", "AECE %")

    def measured(self, data: str) -> Sequence[Measured]:
        del data
        return (
            Measured("accuracy", "accuracy %", higher_is_better=True),
            Measured("ece", "ECE %"),
            Measured("aece", "AECE %"),
        )
