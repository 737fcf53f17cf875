"""CIFAR-10, in `cifar-10-batches-bin/` (binary) or `cifar-10-batches-py/` (pickled)."""

from typing import ClassVar

from fedlas.data.base.cifar import AbstractCIFAR
from fedlas.data.base.fetching import Source


class CIFAR10(AbstractCIFAR):
    """Ten classes of objects, 32 x 32 pixels, colour: 50,000 images for training and 10,000 for testing."""

    name = "cifar10"
    title = "CIFAR-10"
    citation = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."
    num_classes = 10
    per_class: ClassVar = {"train": (5000,) * 10, "test": (1000,) * 10}
    archive: ClassVar[Source] = Source(
        ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), "c32a1d4ab5d03f1284b67883e8d87530"
    )
    binary_folder = "cifar-10-batches-bin"
    pickle_folder = "cifar-10-batches-py"
    files: ClassVar[dict[str, tuple[str, str]]] = {
        "data_batch_1": ("5dd7e06a14cb22eb9f671a540d1b7c25", "c99cafc152244af753f735de768cd75f"),
        "data_batch_2": ("5ea93a67294ea407fff1d09f752e9692", "d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": ("942cd6a4bcdd0dd3c604fbe906cb4421", "54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": ("ae636b3ba5c66a11e91e8cb52e771fcb", "634d18415352ddfa80567beed471001a"),
        "data_batch_5": ("53f37980c15c3d472c316c40844f3f0d", "482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": ("803d5f7f4d78ea53de84dbe85f74fb6d", "40351d587109b95175f43aff81a1287e"),
    }

    @property
    def class_names(self) -> tuple[str, ...]:
        return ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
