"""The table of directions: how much of the calibration error is confidence that is too high, and how much too low."""

from collections.abc import Sequence

from fedlas.experiments.base import Choice
from fedlas.experiments.grid import AbstractGrid, Measured


class OverUnder(AbstractGrid):
    """O-ECE and U-ECE of cross-entropy and of both smoothing losses with and without FeDLaS."""

    name = "over_under"
    title = "Over- and under-confidence"
    one_network = True  # sums of the printed parts are those of the ResNet-50

    def measured(self, data: str, choice: Choice) -> Sequence[Measured]:
        del data, choice
        return Measured("over_ece", "O-ECE %"), Measured("under_ece", "U-ECE %")
