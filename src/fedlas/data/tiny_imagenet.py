"""Tiny ImageNet: 200 of ImageNet's classes at 64 x 64 pixels, as unpacked to `tiny-imagenet-200/`.

The labels of the test images were never released, so the validation images are used as the test part, as is usual. They
are in one folder, and `val_annotations.txt` has their classes (do not read folders as classes). Class numbers are the
positions of the sorted WordNet ids of `wnids.txt`. Training images are sorted by class, then by file name as text; the
official splits depend on this order.
"""

from functools import cached_property
from pathlib import Path
from typing import ClassVar

from fedlas.data.base import AbstractDataset, Part, as_labels, require_files
from fedlas.data.base.fetching import DamagedFileError, Source
from fedlas.data.base.formats import lines_of, read_names
from fedlas.data.base.images import IMAGENET, Transform

FOLDER = "tiny-imagenet-200"


class TinyImageNet(AbstractDataset):
    """Two hundred classes of objects, 64 x 64 pixels, colour: 100,000 for training and 10,000 for testing."""

    name = "tiny_imagenet"
    title = "Tiny-ImageNet"
    citation = "Le and Yang, Tiny ImageNet Visual Recognition Challenge, Stanford CS 231N 2015."
    num_classes = 200
    transform = Transform(size=64, channels=3, mean=IMAGENET[0], std=IMAGENET[1], pad=4, flip=True)
    stratified = True
    sizes: ClassVar = {"train": 100_000, "test": 10_000}
    per_class: ClassVar = {"train": (500,) * 200, "test": (50,) * 200}
    # Not published by the authors; several projects have the same checksums.
    archive: ClassVar[Source] = Source(
        ("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "http://cs231n.stanford.edu/tiny-imagenet-200.zip"),
        "90528d7ca1a48142e341f4ef8d21d0de",
        "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
    )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """WordNet ids in their order; `words.txt` in the same folder explains them."""
        return read_names(self.unpacked(self.archive, FOLDER) / "wnids.txt", self.num_classes, "classes")

    def read(self, part: str) -> Part:
        folder = self.unpacked(self.archive, FOLDER)
        return self._train(folder / "train") if part == "train" else self._test(folder / "val")

    def _train(self, folder: Path) -> Part:
        images, labels = [], []
        for number, name in enumerate(self.class_names):
            inside = sorted((folder / name / "images").glob("*.JPEG"), key=lambda path: path.name)
            images += inside
            labels += [number] * len(inside)
        return Part(tuple(images), as_labels(labels))

    def _test(self, folder: Path) -> Part:
        numbers = {name: number for number, name in enumerate(self.class_names)}
        file = folder / "val_annotations.txt"
        images, labels = [], []
        for line in lines_of(file):
            name, _, rest = line.partition("\t")
            wnid = rest.partition("\t")[0]
            if wnid not in numbers:
                raise DamagedFileError(f"{file} is damaged: the line {line!r} does not name a known class")
            images.append(folder / "images" / name)
            labels.append(numbers[wnid])
        return Part(require_files(images, file), as_labels(labels))
