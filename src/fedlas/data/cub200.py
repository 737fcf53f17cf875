"""Caltech-UCSD Birds 200-2011, as unpacked to `CUB_200_2011/`.

`images.txt` gives the order and `train_test_split.txt` the official training and test parts.
"""

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from fedlas.data.base import Part, as_labels, require_files
from fedlas.data.base.fetching import DamagedFileError, Source
from fedlas.data.base.fine_grained import AbstractFineGrained
from fedlas.data.base.formats import lines_of

FOLDER = "CUB_200_2011"


class CUB200(AbstractFineGrained):
    """Two hundred bird species, natural images: 5,994 for training and 5,794 for testing."""

    name = "cub200"
    title = "CUB-200-2011"
    citation = "Wah et al., The Caltech-UCSD Birds-200-2011 Dataset, California Institute of Technology 2011."
    num_classes = 200
    sizes: ClassVar = {"train": 5994, "test": 5794}
    per_class: ClassVar = {"train": range(29, 31), "test": range(11, 31)}
    archive: ClassVar[Source] = Source(
        ("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",), "97eceeb196236b17998738112f37df78"
    )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """Species in their official order, without the leading numbers."""
        rows = _rows(self.unpacked(self.archive, FOLDER) / "classes.txt")
        return tuple(row[1].partition(".")[2] or row[1] for row in rows)

    def read(self, part: str) -> Part:
        folder = self.unpacked(self.archive, FOLDER)
        names = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
        files, labels, training = (_rows(folder / name) for name in names)
        ids = [[row[0] for row in rows] for rows in (files, labels, training)]
        if not ids[0] == ids[1] == ids[2]:
            raise DamagedFileError(f"{folder} is damaged: {', '.join(names)} do not list the same images")
        chosen = [n for n, row in enumerate(training) if (row[1] == "1") == (part == "train")]
        images = [folder / "images" / files[n][1] for n in chosen]
        return Part(
            require_files(images, folder / names[0]),
            as_labels([int(labels[n][1]) - 1 for n in chosen]),
            torch.tensor(chosen, dtype=torch.int64),
        )


def _rows(path: Path) -> list[tuple[str, str]]:
    rows = []
    for line in lines_of(path):
        number, _, value = line.partition(" ")
        if not number.isdigit() or not value:
            raise DamagedFileError(f"{path} is damaged: the line {line!r} is not a number and a value")
        rows.append((number, value))
    return rows
