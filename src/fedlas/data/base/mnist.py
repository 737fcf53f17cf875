"""The shared part of MNIST and Fashion-MNIST: four IDX files, compressed or not, in one of several folders."""

from pathlib import Path
from typing import ClassVar

from fedlas.data.base.dataset import AbstractDataset, Part, as_images, as_labels
from fedlas.data.base.fetching import Source
from fedlas.data.base.formats import read_idx


class AbstractMNIST(AbstractDataset):
    """Grey images of 28 x 28 pixels: 60,000 for training and 10,000 for testing."""

    num_classes = 10
    sizes: ClassVar = {"train": 60_000, "test": 10_000}
    addresses: ClassVar[tuple[str, ...]]  # URLs of the download folder, in order of preference
    folders: ClassVar[tuple[str, ...]]  # searched below the root; downloads are written to the first
    # MD5 of the published (compressed) file, and of its uncompressed content.
    files: ClassVar[dict[str, tuple[str, str]]]
    # SHA-256 of the published file, as TensorFlow Datasets recorded it; the publishers give only an MD5.
    sha256: ClassVar[dict[str, str]]

    def read(self, part: str) -> Part:
        prefix = "train" if part == "train" else "t10k"
        names = [f"{prefix}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
        images, labels = (read_idx(self._path(name), self.files[name][1]) for name in names)
        return Part(as_images(images[:, None]), as_labels(labels))

    def _path(self, name: str) -> Path:
        paths = [f"{folder}/{name}{suffix}" for folder in self.folders for suffix in ("", ".gz")]
        urls = tuple(f"{address}/{name}.gz" for address in self.addresses)
        return self.first_file(paths, Source(urls, self.files[name][0], self.sha256.get(name)), self.folders[0])
