"""CIFAR-100, in `cifar-100-binary/` (binary) or `cifar-100-python/` (pickled)."""

from dataclasses import replace
from typing import ClassVar, Unpack

from fedlas.data.base import Common
from fedlas.data.base.cifar import AbstractCIFAR
from fedlas.data.base.fetching import Source
from fedlas.data.base.images import IMAGENET, Transform

NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


class CIFAR100(AbstractCIFAR):
    """A hundred classes of objects, 32 x 32 pixels, colour: 50,000 images for training and 10,000 for testing.

    Args:
        official_test_normalisation: normalise the test split with ImageNet's mean and standard deviation, although the
            network was trained with CIFAR's. The official code does so by mistake.
        common: root, seed, download and progress, as for every data set.
    """

    name = "cifar100"
    title = "CIFAR-100"
    citation = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."
    official_options: ClassVar = {"official_test_normalisation": True}
    num_classes = 100
    per_class: ClassVar = {"train": (500,) * 100, "test": (100,) * 100}
    archive: ClassVar[Source] = Source(
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",), "03b5dce01913d631647c71ecec9e9cb8"
    )
    binary_folder = "cifar-100-binary"
    pickle_folder = "cifar-100-python"
    label_bytes = 2
    label_key = "fine_labels"
    files: ClassVar[dict[str, tuple[str, str]]] = {
        "train": ("6172c7755cfe09b2fe270c85cebc1b15", "16019d7e3df5f24257cddd939b257f8d"),
        "test": ("4499cfba6c016c1be1438163640a0898", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    }

    def __init__(self, *, official_test_normalisation: bool = False, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        self.official_test_normalisation = official_test_normalisation

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(NAMES.split())

    def transform_for(self, split: str) -> Transform:
        transform = super().transform_for(split)
        if split == "test" and self.official_test_normalisation:
            return replace(transform, mean=IMAGENET[0], std=IMAGENET[1])
        return transform
