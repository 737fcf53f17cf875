"""The table of fine-grained natural images: birds and aircraft, with pretrained models."""

from fedlas.experiments.grid import AbstractGrid


class Finegrained(AbstractGrid):
    """Accuracy, ECE and AECE of nine losses on CUB and Aircraft, ResNet-101 and ViT, with mean ranks."""

    name = "finegrained"
    title = "Accuracy and calibration on fine-grained natural images"
    ranked = ("ECE %", "AECE %")
