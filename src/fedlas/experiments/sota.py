"""The main table: all losses and temperature scaling on small images."""

from fedlas.experiments.grid import AbstractGrid


class Sota(AbstractGrid):
    """Accuracy, ECE and AECE of all losses on Tiny-ImageNet, CIFAR-10 and CIFAR-100, with mean ranks."""

    name = "sota"
    title = "Accuracy and calibration of all losses"
    ranked = ("ECE %", "AECE %")
