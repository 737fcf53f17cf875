"""CIFAR-100 in its binary version (`cifar-100-binary/`) or, if that is absent, pickled (`cifar-100-python/`).

The pickles are opened only if their MD5 is the published one, by an unpickler that makes plain data and arrays only.
"""

from dataclasses import replace
from typing import ClassVar, Unpack

from fedlas.data.base import AbstractDataset, Common, Part, as_images, as_labels
from fedlas.data.base.fetching import Source
from fedlas.data.base.formats import read_cifar_binary, read_cifar_pickle
from fedlas.data.base.images import CIFAR, IMAGENET, Transform

NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


class CIFAR100(AbstractDataset):
    """A hundred kinds of things, 32 x 32, coloured: 50,000 for training and 10,000 for testing.

    Args:
        official_test_normalisation: normalise the test split with ImageNet's mean and deviation, although the network
            was trained with CIFAR's. The code behind the published tables does so by mistake.
        common: root, seed, download and progress, as for every data set.
    """

    name = "cifar100"
    title = "CIFAR-100"
    citation = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."
    published: ClassVar = {"official_test_normalisation": True}
    num_classes = 100
    transform = Transform(size=32, channels=3, mean=CIFAR[0], std=CIFAR[1], pad=4, flip=True)
    sizes: ClassVar = {"train": 50_000, "test": 10_000}
    per_class: ClassVar = {"train": (500,) * 100, "test": (100,) * 100}
    archive: ClassVar[Source] = Source(
        ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",), "03b5dce01913d631647c71ecec9e9cb8"
    )
    # Of each file: MD5 of the binary version and of the pickled one.
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

    def read(self, part: str) -> Part:
        pickled = self.root / "cifar-100-python"
        if pickled.exists() and not (self.root / "cifar-100-binary").exists():
            images, labels = read_cifar_pickle(pickled / part, "fine_labels", self.files[part][1])
        else:
            folder = self.unpacked(self.archive, "cifar-100-binary")
            images, labels = read_cifar_binary(folder / f"{part}.bin", 2, self.files[part][0])
        return Part(as_images(images), as_labels(labels))
