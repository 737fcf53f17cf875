"""Street View House Numbers, the 32 x 32 crops: MATLAB files in `svhn/` or the root.

If the MATLAB file of the test part is missing, a reconstruction (`svhn_rebuilt/test.npz`) is read if it exists: the
same digits, cropped again from the full images, with slightly different pixels. `title` then mentions it.
"""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy

from fedlas.data.base import AbstractDataset, Part, as_images, as_labels
from fedlas.data.base.fetching import DamagedFileError, Source, checked_bytes, regular
from fedlas.data.base.images import CIFAR, Transform
from fedlas.errors import UserError

# No URL with TLS is known.
ADDRESS = "http://ufldl.stanford.edu/housenumbers"
REBUILT = "svhn_rebuilt/test.npz"
LARGEST_REBUILT = 2**28  # bytes after unpacking; the test images have 80 million


class SVHN(AbstractDataset):
    """Digits of house numbers, 32 x 32 pixels, colour: 73,257 for training and 26,032 for testing."""

    name = "svhn"
    citation = "Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, NIPS workshop 2011."
    num_classes = 10
    # CIFAR's constants, as in the official code. Digits are not flipped.
    transform = Transform(size=32, channels=3, mean=CIFAR[0], std=CIFAR[1], pad=4)
    sizes: ClassVar = {"train": 73_257, "test": 26_032}
    per_class: ClassVar = {
        "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    }
    files: ClassVar[dict[str, str]] = {
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    }
    # Not published by the authors; TensorFlow Datasets and torchvision's prototypes have the same checksums.
    sha256: ClassVar[dict[str, str]] = {
        "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    }

    # MD5 of the pixels, because the bytes of an archive depend on the program that wrote it.
    rebuilt_md5: ClassVar[str] = "7e6f3efe9513517d256691902b9ff42a"

    @property
    def title(self) -> str:  # type: ignore[override]
        """The name in tables, which mentions rebuilt crops."""
        return "SVHN (rebuilt crops)" if self._is_rebuilt("test") else "SVHN"

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple("0123456789")

    def _possible_paths(self, part: str) -> list[str]:
        return [f"svhn/{part}_32x32.mat", f"{part}_32x32.mat"]

    def _is_rebuilt(self, part: str) -> bool:
        official = any((self.root / path).exists() for path in self._possible_paths(part))
        return part == "test" and not official and (self.root / REBUILT).exists()

    def read(self, part: str) -> Part:
        if self._is_rebuilt(part):
            return _rebuilt(self.root / REBUILT, self.rebuilt_md5)
        file = f"{part}_32x32.mat"
        source = Source((f"{ADDRESS}/{file}",), self.files[file], self.sha256.get(file))
        path = self.first_file(self._possible_paths(part), source, "svhn")
        content = io.BytesIO(checked_bytes(path, source.md5, source.sha256))
        try:
            arrays = scipy.io.loadmat(content, variable_names=["X", "y"])
            images, labels = arrays["X"].transpose(3, 2, 0, 1), arrays["y"].reshape(-1).astype(np.int64)
        except Exception as error:  # SciPy does not document what it raises for a damaged file
            raise DamagedFileError(f"{path} is damaged: {error!r}") from error
        labels[labels == 10] = 0  # the class numbers start at 1, and 10 is the digit 0
        return Part(as_images(images), as_labels(labels))


def _rebuilt(path: Path, md5: str) -> Part:
    try:
        with np.load(regular(path), allow_pickle=False) as file:
            size = sum(entry.file_size for entry in file.zip.infolist())
            if size > LARGEST_REBUILT:
                raise UserError(f"it would unpack to {size:,} bytes")
            images, labels = file["images"], file["labels"]
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DamagedFileError(f"{path} is damaged: {error!r}") from error
    if images.dtype != np.uint8 or images.shape != (len(labels), 32, 32, 3):
        raise DamagedFileError(f"{path} is damaged: its images are {images.dtype} {images.shape}")
    digest = hashlib.md5(images.tobytes(), usedforsecurity=False).hexdigest()
    if digest != md5:
        raise DamagedFileError(f"{path} is damaged: the MD5 of its pixels is {digest}, that of the rebuilt crops {md5}")
    return Part(as_images(images.transpose(0, 3, 1, 2)), as_labels(labels))
