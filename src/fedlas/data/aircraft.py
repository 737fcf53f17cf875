"""FGVC-Aircraft, 100 variants, as unpacked to `fgvc-aircraft-2013b/`.

The training part consists of the official training and validation lists. The copyright strip at the bottom of each
image is not removed.
"""

from functools import cached_property
from typing import ClassVar

from fedlas.data.base import Part, as_labels, require_files
from fedlas.data.base.fetching import DamagedFileError, Source
from fedlas.data.base.fine_grained import AbstractFineGrained
from fedlas.data.base.formats import lines_of, read_names

FOLDER = "fgvc-aircraft-2013b"


class Aircraft(AbstractFineGrained):
    """A hundred aircraft variants, natural images: 6,667 for training and 3,333 for testing."""

    name = "aircraft"
    title = "FGVC-Aircraft"
    citation = "Maji et al., Fine-Grained Visual Classification of Aircraft, 2013."
    num_classes = 100
    sizes: ClassVar = {"train": 6667, "test": 3333}
    per_class: ClassVar = {"train": range(66, 68), "test": range(33, 35)}
    archive: ClassVar[Source] = Source(
        ("https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",),
        "d4acdd33327262359767eeaa97a4f732",
    )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Variants in alphabetical order, which is the order of the class numbers."""
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
                raise DamagedFileError(f"{file} is damaged: the line {line!r} does not name a known variant")
            images.append(folder / "images" / f"{image}.jpg")
            labels.append(numbers[variant])
        return Part(require_files(images, file), as_labels(labels))
