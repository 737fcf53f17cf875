"""MNIST: handwritten digits in IDX files, compressed or not, in `mnist/` or torchvision's `MNIST/raw/`."""

from typing import ClassVar

from fedlas.data.base.images import Transform
from fedlas.data.base.mnist import AbstractMNIST


class MNIST(AbstractMNIST):
    """Handwritten digits, 28 x 28 pixels, grey: 60,000 images for training and 10,000 for testing."""

    name = "mnist"
    title = "MNIST"
    citation = "LeCun et al., Gradient-Based Learning Applied to Document Recognition, Proceedings of the IEEE 1998."
    transform = Transform(size=28, channels=1, mean=(0.1307,), std=(0.3081,), pad=2)
    per_class: ClassVar = {
        "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        "test": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    }
    # The first URL is PyTorch's mirror; the author's server often refuses connections.
    addresses = ("https://ossci-datasets.s3.amazonaws.com/mnist", "http://yann.lecun.com/exdb/mnist")
    folders = ("mnist", "MNIST/raw")
    files: ClassVar[dict[str, tuple[str, str]]] = {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    }
    sha256: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    }

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple("0123456789")
