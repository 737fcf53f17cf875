"""Fashion-MNIST: images of clothes in MNIST's format.

The IDX files, compressed or not, are in `fashion-mnist/`, in torchvision's `FashionMNIST/raw/`, or in the folder of the
Debian package `dataset-fashion-mnist`.
"""

from typing import ClassVar

from fedlas.data.base.images import Transform
from fedlas.data.base.mnist import AbstractMNIST


class FashionMNIST(AbstractMNIST):
    """Clothes, 28 x 28 pixels, grey: 60,000 images for training and 10,000 for testing."""

    name = "fashion_mnist"
    title = "Fashion-MNIST"
    citation = "Xiao et al., Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017."
    transform = Transform(size=28, channels=1, mean=(0.2860,), std=(0.3530,), pad=2, flip=True)
    per_class: ClassVar = {"train": (6000,) * 10, "test": (1000,) * 10}
    # Two URLs of the same storage: with TLS, and the published one without TLS.
    addresses = (
        "https://fashion-mnist.s3.eu-central-1.amazonaws.com",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    )
    folders = ("fashion-mnist", "FashionMNIST/raw", "/usr/share/datasets/fashion-mnist")  # the last one is Debian's
    files: ClassVar[dict[str, tuple[str, str]]] = {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    }
    sha256: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    }

    @property
    def class_names(self) -> tuple[str, ...]:
        names = "T-shirt/top,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot"
        return tuple(names.split(","))
