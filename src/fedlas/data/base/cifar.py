"""The shared part of CIFAR-10 and CIFAR-100: their binary version or, if that is absent, the pickled one.

Pickles are read only if their MD5 is correct, with a restricted unpickler that creates plain data and arrays only.
"""

from typing import ClassVar

import numpy as np

from fedlas.data.base.dataset import AbstractDataset, Part, as_images, as_labels
from fedlas.data.base.fetching import Source
from fedlas.data.base.formats import read_cifar_binary, read_cifar_pickle
from fedlas.data.base.images import CIFAR, Transform


class AbstractCIFAR(AbstractDataset):
    """Colour images of 32 x 32 pixels: 50,000 for training and 10,000 for testing."""

    transform = Transform(size=32, channels=3, mean=CIFAR[0], std=CIFAR[1], pad=4, flip=True)
    sizes: ClassVar = {"train": 50_000, "test": 10_000}
    archive: ClassVar[Source]
    # MD5 of each file in the binary version and in the pickled one.
    files: ClassVar[dict[str, tuple[str, str]]]
    binary_folder: ClassVar[str]
    pickle_folder: ClassVar[str]
    label_bytes: ClassVar[int] = 1  # label bytes of a binary record; the last one is the class
    label_key: ClassVar[str] = "labels"  # key of the labels in a pickled batch

    def read(self, part: str) -> Part:
        names = [name for name in self.files if name.startswith("test") == (part == "test")]
        pickled = self.root / self.pickle_folder
        if pickled.exists() and not (self.root / self.binary_folder).exists():
            batches = [read_cifar_pickle(pickled / name, self.label_key, self.files[name][1]) for name in names]
        else:
            folder = self.unpacked(self.archive, self.binary_folder)
            batches = [
                read_cifar_binary(folder / f"{name}.bin", self.label_bytes, self.files[name][0]) for name in names
            ]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return Part(as_images(images), as_labels(labels))
