"""FGVC-Aircraft, 100 variants, as unpacked to `fgvc-aircraft-2013b/`.

The official training and validation lists together are the training part, as published. By default a tenth of each
class of it is held out for selection. The published code selects on the test split, which flatters itself;
`selection="official"` does that too. The strip with the copyright below each image stays, as published.
"""

from functools import cached_property
from typing import ClassVar, Unpack

from fedlas.data.base import AbstractDataset, FineGrained, Part, as_labels, fine_grained_options, there
from fedlas.data.base.fetching import DamagedFileError, Source
from fedlas.data.base.formats import lines_of, read_names

FOLDER = "fgvc-aircraft-2013b"


class Aircraft(AbstractDataset):
    """A hundred variants of aircraft in photographs: 6,667 for training and 3,333 for testing.

    Args:
        options: selection, image_size, resize, normalisation, antialias, and what every data set takes.
    """

    name = "aircraft"
    title = "FGVC-Aircraft"
    citation = "Maji et al., Fine-Grained Visual Classification of Aircraft, 2013."
    published: ClassVar = {"selection": "official", "antialias": False}
    num_classes = 100
    resident = False
    stratified = True
    sizes: ClassVar = {"train": 6667, "test": 3333}
    per_class: ClassVar = {"train": range(66, 68), "test": range(33, 35)}
    archive: ClassVar[Source] = Source(
        ("https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",),
        "d4acdd33327262359767eeaa97a4f732",
    )

    def __init__(self, **options: Unpack[FineGrained]) -> None:
        self.selection, self.transform, common = fine_grained_options(options)
        super().__init__(**common)

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Variants in the order of their names, which is also that of the class numbers."""
        file = self.unpacked(self.archive, FOLDER) / "data" / "variants.txt"
        return read_names(file, self.num_classes, "variants")

    def read(self, part: str) -> Part:
        folder = self.unpacked(self.archive, FOLDER) / "data"
        numbers = {name: number for number, name in enumerate(self.class_names)}
        file = folder / f"images_variant_{'trainval' if part == 'train' else 'test'}.txt"
        images, labels = [], []
        for line in lines_of(file):
            image, _, variant = line.partition(" ")
            if variant not in numbers:
                raise DamagedFileError(f"{file} is damaged: the line {line!r} names no known variant")
            images.append(folder / "images" / f"{image}.jpg")
            labels.append(numbers[variant])
        return Part(there(images, file), as_labels(labels))
