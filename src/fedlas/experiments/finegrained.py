"""The table of photographs: birds and aircraft, networks that were trained before."""

from fedlas.experiments.grid import AbstractGrid


class Finegrained(AbstractGrid):
    """Accuracy, ECE and AECE of nine losses on CUB and Aircraft, ResNet-101 and ViT, with mean ranks."""

    name = "finegrained"
    title = "Accuracy and calibration on fine-grained photographs"
    ranked = ("ECE %", "AECE %")
