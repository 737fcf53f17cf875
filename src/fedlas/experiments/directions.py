"""The table of over- and under-confidence: the ECE of over-confident and of under-confident bins (O-ECE, U-ECE)."""

from collections.abc import Sequence

from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Measured


class OverUnder(AbstractGrid):
    """O-ECE and U-ECE of cross-entropy and of both smoothing losses with and without FeDLaS."""

    name = "over_under"
    title = "Over- and under-confidence"
    one_network = True  # in the paper, O-ECE + U-ECE equals the ECE of the ResNet-50

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        del data, choice
        return Measured("over_ece", "O-ECE %"), Measured("under_ece", "U-ECE %")
