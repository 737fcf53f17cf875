"""Fashion-MNIST: clothes in MNIST's format.

The IDX files, compressed or not, lie in `fashion-mnist/`, in torchvision's `FashionMNIST/raw/`, or where the Debian
package `dataset-fashion-mnist` puts them.
"""

from pathlib import Path
from typing import ClassVar

from fedlas.data.base import AbstractDataset, Part, as_images, as_labels
from fedlas.data.base.fetching import Source
from fedlas.data.base.formats import read_idx_pair
from fedlas.data.base.images import Transform

# One store, with TLS and, as its publishers write the address, without.
ADDRESSES = (
    "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)


class FashionMNIST(AbstractDataset):
    """Clothes, 28 x 28, grey: 60,000 for training and 10,000 for testing."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    citation = "Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017."
    num_classes = 10
    transform = Transform(size=28, channels=1, mean=(0.2860,), std=(0.3530,), pad=2, flip=True)
    sizes: ClassVar = {"train": 60_000, "test": 10_000}
    per_class: ClassVar = {"train": (6000,) * 10, "test": (1000,) * 10}
    # Debian compresses the files again, so only what they hold has the same MD5 everywhere.
    debian: ClassVar[str] = "/usr/share/datasets/fashion-mnist"
    files: ClassVar[dict[str, tuple[str, str]]] = {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    }

    # Of the file as it is published; the publishers give an MD5 alone. TensorFlow Datasets wrote these down.
    sha256: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    }

    @property
    def class_names(self) -> tuple[str, ...]:
        words = "T-shirt/top,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot"
        return tuple(words.split(","))

    def read(self, part: str) -> Part:
        images, labels = read_idx_pair(part, self.files, self._found)
        return Part(as_images(images), as_labels(labels))

    def _found(self, name: str, md5: str) -> Path:
        folders = ("fashion-mnist", "FashionMNIST/raw", self.debian)
        places = [f"{folder}/{name}{end}" for folder in folders for end in ("", ".gz")]
        addresses = tuple(f"{address}/{name}.gz" for address in ADDRESSES)
        return self.first_file(places, Source(addresses, md5, self.sha256.get(name)), "fashion-mnist")
