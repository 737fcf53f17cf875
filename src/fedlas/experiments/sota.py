"""The main table: all losses and temperature scaling on small images."""

from collections.abc import Sequence

from fedlas.experiments.grid import AbstractGrid, Measured


class Sota(AbstractGrid):
    """Accuracy, ECE and AECE of all losses on Tiny-ImageNet, CIFAR-10 and CIFAR-100, with mean ranks."""

    name = "sota"
    title = "Accuracy and calibration of all losses"
    ranked = ("ECE %", "AECE %")

    def measured(self, data: str) -> Sequence[Measured]:
        del data
        return (
            Measured("accuracy", "accuracy %", higher_is_better=True, printed=False),
            Measured("ece", "ECE %"),
            Measured("aece", "AECE %"),
        )
