"""The table of directions: how much of the calibration error is confidence that is too high, and how much too low."""

from collections.abc import Sequence

from fedlas.experiments.grid import AbstractGrid, Measured


class OverUnder(AbstractGrid):
    """O-ECE and U-ECE of cross-entropy and of both smoothing losses with and without FeDLaS."""

    name = "over_under"
    title = "Over- and under-confidence"

    def models(self, data: str, protocol: str) -> Sequence[str]:
        return tuple(super().models(data, protocol))[:1]  # sums of the printed parts are those of the ResNet-50

    def measured(self, data: str) -> Sequence[Measured]:
        del data
        return Measured("over_ece", "O-ECE %"), Measured("under_ece", "U-ECE %")
