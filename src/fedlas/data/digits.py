"""Digits of scikit-learn: 1,797 handwritten digits of 8 x 8 pixels that come with the package.

They are the test part of a UCI collection, so there is no official split. Here the first 1,000 samples in
scikit-learn's order are the training part and the last 797 are the test part. The seed selects the 200 training
samples that are held out for validation. Pixels from 0 to 16 are scaled to bytes from 0 to 255.

The task is too easy for calibration to matter. `label_noise` and `train_samples` make it harder; they change only the
training split.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
from numpy.typing import NDArray

from fedlas.data.base import AbstractDataset, Common, Part, Split, as_images, as_labels
from fedlas.data.base.images import Transform
from fedlas.errors import UserError
from fedlas.extras import optional_module

TRAINING = 1000


class Digits(AbstractDataset):
    """Handwritten digits of 8 x 8 pixels that need no download.

    Args:
        train_samples: number of training samples to keep, chosen by the seed; None keeps all.
        label_noise: fraction of the training labels that are replaced by another class, chosen by the seed.
        common: root, seed, download and progress, as for every data set.
    """

    name = "digits"
    title = "Digits"
    citation = "Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998."
    num_classes = 10
    # Mean and standard deviation of the 1,000 samples. No flips, because a flipped digit is another character.
    transform = Transform(size=8, channels=1, mean=(0.307,), std=(0.376,), pad=1)
    val_fraction = 0.2
    sizes: ClassVar = {"train": 1000, "test": 797}

    def __init__(self, *, train_samples: int | None = None, label_noise: float = 0.0, **common: Unpack[Common]) -> None:
        super().__init__(**common)
        most = TRAINING - round(TRAINING * self.val_fraction)
        if train_samples is not None and not 1 <= train_samples <= most:
            raise UserError(f"train_samples must lie between 1 and {most}, not {train_samples}")
        if not 0 <= label_noise <= 1:
            raise UserError(f"label_noise must lie between 0 and 1, not {label_noise}")
        self.train_samples = train_samples
        self.label_noise = label_noise

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def read(self, part: str) -> Part:
        pixels, labels = _read_bundled_file()
        index = np.arange(len(labels))
        index = index[:TRAINING] if part == "train" else index[TRAINING:]
        images = np.rint(pixels[index] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
        return Part(as_images(images), as_labels(labels[index]), as_labels(index))

    def split(self, name: str) -> Split:
        split = super().split(name)
        if name != "train":
            return split
        if self.train_samples is not None:  # the split is already shuffled
            split = split.picked(as_labels(np.arange(self.train_samples)))
        if self.label_noise:
            random = np.random.default_rng([self.seed, 1])
            labels = split.labels.numpy().copy()
            flipped = random.permutation(len(labels))[: round(len(labels) * self.label_noise)]
            labels[flipped] = (labels[flipped] + random.integers(1, 10, len(flipped))) % 10
            split = replace(split, labels=as_labels(labels))
        return split


def _read_bundled_file() -> tuple[NDArray[Any], NDArray[Any]]:
    """Read the data file of scikit-learn without `import sklearn`, which takes as long as a short training run."""
    spec = find_spec("sklearn")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1].astype(np.int64)
    pixels, labels = optional_module("sklearn.datasets", "train").load_digits(return_X_y=True)
    return pixels, labels
