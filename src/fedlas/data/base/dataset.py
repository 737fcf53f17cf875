"""The base class of data sets: images with labels in their official order, and the splits that are drawn with a seed.

A data set implements `read(part)`, which returns the official training or test part, and declares a few facts. This
module makes the splits, checks the contents and finds the files. Nothing is read before the first `split`.

    official train part ─► train, val      (depends on the seed)
    official test part  ─► test            (the same for every seed)

`Split.index` is the position of a sample in the original order of the data set; it does not depend on the seed.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from fedlas.catalog import one_of
from fedlas.data.base.fetching import DamagedFileError, Source, fetch, unpack
from fedlas.data.base.images import HALF, IMAGENET, Transform, decoded, fitted
from fedlas.errors import UserError
from fedlas.progress import Progress

NormalisationName: TypeAlias = Literal["imagenet", "half"]
Images: TypeAlias = UInt8[Tensor, "n channels height width"] | tuple[Path, ...]
Selection: TypeAlias = Literal["held_out", "official"]
LOOKED_INTO = 1000  # maximum number of image files whose content is part of the checksum of a split
HASHED_BYTES = 4096  # number of bytes at the end of such a file that are part of it


class Sample(NamedTuple):
    """A batch: transformed images, their labels, and the index of each sample."""

    images: Tensor
    labels: Int[Tensor, " n"]
    index: Int[Tensor, " n"]  # type: ignore[assignment] # hides tuple.index


@dataclass(frozen=True, eq=False)
class Part:
    """One official part of a data set, in its official order.

    `index` is set where both parts share one order; otherwise each part is counted from 0.
    """

    images: Images
    labels: Int[Tensor, " n"]
    index: Int[Tensor, " n"] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """The samples of one split.

    Args:
        name: "train", "val" or "test".
        images: bytes (N, C, H, W), or the paths of image files.
        labels: one class number per sample.
        index: position of each sample in the original order of the data set.
        class_names: one name per class.
        dataset: catalogue name of the data set.
        part: all image files of the official part that contains the split; splits of a part share one cache file.
        positions: position of each sample of the split in that part.
    """

    name: str
    images: Images
    labels: Int[Tensor, " n"]
    index: Int[Tensor, " n"]
    class_names: tuple[str, ...]
    dataset: str
    part: tuple[Path, ...] | None = None
    positions: Int[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.index):
            raise UserError(f"{len(self.images)} images, {len(self.labels)} labels, {len(self.index)} indices")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({self.dataset} {self.name}, n={len(self):,}, classes={len(self.class_names)})"

    def checksum(self) -> str:
        """Return the SHA-256 of labels and images; of image files only names, sizes and some contents are hashed."""
        digest = hashlib.sha256(self.labels.numpy().tobytes())
        if isinstance(self.images, Tensor):
            digest.update(self.images.contiguous().numpy().data)
        else:
            step = -(-len(self.images) // LOOKED_INTO)
            for number, path in enumerate(self.images):
                digest.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
                if number % step == 0:
                    digest.update(_last_bytes(path))
        return digest.hexdigest()

    def decoded(self, transform: Transform, *, cache: str | Path | None = None) -> "Split":
        """Load the images into memory, with the size and channels that a transform expects.

        Args:
            transform: transform of the data set on which the network was trained; may differ from this data set.
            cache: a folder in which decoded images are cached.
        """
        if isinstance(self.images, Tensor):
            return replace(self, images=fitted(self.images, transform))
        if cache is None:
            images = decoded(self.images, transform)
        else:
            part_images, positions = self.cached_images(transform, cache)
            images = part_images[positions]
        return replace(self, images=images, part=None, positions=None)

    def cached_images(
        self, transform: Transform, cache: str | Path
    ) -> tuple[UInt8[Tensor, "m channels stored stored"], Int[Tensor, " n"]]:
        """Return the decoded images of the official part, memory-mapped, and the positions of this split in it.

        Args:
            transform: transform of the data set on which the network was trained; may differ from this data set.
            cache: the folder of the cache file.
        """
        if isinstance(self.images, Tensor):
            return fitted(self.images, transform), torch.arange(len(self))
        part, positions = self._origin()
        return decoded(part, transform, Path(cache).expanduser()), positions

    def _origin(self) -> tuple[tuple[Path, ...], Int[Tensor, " n"]]:
        assert not isinstance(self.images, Tensor)
        return self.part or self.images, torch.arange(len(self)) if self.positions is None else self.positions

    def picked(self, chosen: Int[Tensor, " m"]) -> "Split":
        """Select the samples at some positions of this split, in that order."""
        labels, index = self.labels[chosen], self.index[chosen]
        if isinstance(self.images, Tensor):
            return replace(self, images=self.images[chosen], labels=labels, index=index)
        part, origin = self._origin()
        files = tuple(self.images[n] for n in chosen.tolist())
        return replace(self, images=files, labels=labels, index=index, part=part, positions=origin[chosen])

    def joined(self, other: "Split") -> "Split":
        """Append the samples of another split of the same part."""
        labels, index = torch.cat([self.labels, other.labels]), torch.cat([self.index, other.index])
        if isinstance(self.images, Tensor):
            assert isinstance(other.images, Tensor)
            return replace(self, images=torch.cat([self.images, other.images]), labels=labels, index=index)
        assert not isinstance(other.images, Tensor)
        (part, positions), (_, more) = self._origin(), other._origin()
        files, positions = self.images + other.images, torch.cat([positions, more])
        return replace(self, images=files, labels=labels, index=index, part=part, positions=positions)


class Common(TypedDict, total=False):
    """Keyword arguments of every data set."""

    root: str | Path | None
    seed: int
    download: bool
    progress: Progress | None


def _last_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - HASHED_BYTES))
        return file.read(HASHED_BYTES)


class AbstractDataset(ABC):
    """A classification data set that can be split by a seed.

    Args:
        root: the folder that holds data sets; by default `data_root()`.
        seed: random seed that selects the training samples held out for validation.
        download: whether missing files may be downloaded.
        progress: called during downloads, with their name and the fraction that is done (None if unknown).
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    title: str  # name in tables
    num_classes: int
    transform: Transform  # of all splits, unless `transform_for` is overridden
    # Keyword arguments of the official code that differ from the defaults.
    official_options: ClassVar[Mapping[str, Any]] = {}
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    resident: ClassVar[bool] = True  # whether the images are small enough to be kept on the training device
    stratified: ClassVar[bool] = False  # whether the same fraction of each class is held out
    val_fraction: ClassVar[float] = 0.1
    selection: Selection = "held_out"
    # Contents of the official parts: number of samples, and per class either the number or its range.
    sizes: ClassVar[Mapping[str, int]] = {}
    per_class: ClassVar[Mapping[str, Sequence[int] | range]] = {}

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        seed: int = 1,
        download: bool = True,
        progress: Progress | None = None,
    ) -> None:
        if not 0 <= seed < 1 << 32:
            raise UserError(f"seed must lie between 0 and 2^32 - 1, not {seed}")
        self.root = data_root(root)
        self.seed = seed
        self.download = download
        self.progress = progress
        self._parts: dict[str, Part] = {}

    @property
    @abstractmethod
    def class_names(self) -> tuple[str, ...]:
        """One name per class; read from disk if the names are part of the data."""

    @abstractmethod
    def read(self, part: str) -> Part:
        """Read the official part "train" or "test", and verify the checksums of its files."""

    def split(self, name: str) -> Split:
        """Return the samples of "train", "val" or "test"."""
        one_of("split", name, self.splits)
        official = self.selection == "official"
        from_test = name == "test" or (name == "val" and official)
        part = self.part("test" if from_test else "train")
        index = torch.arange(len(part.labels)) if part.index is None else part.index
        full_part = Split(name, part.images, part.labels, index, self.class_names, self.name)
        if from_test or official:
            return full_part
        train, val = self.halves(part.labels)
        return full_part.picked(train if name == "train" else val)

    def part(self, name: str) -> Part:
        """Return an official part, read once and checked."""
        if name not in self._parts:
            part = self.read(name)
            self.check(name, part.labels)
            self._parts[name] = part
        return self._parts[name]

    def halves(self, labels: Int[Tensor, " n"]) -> tuple[Int[Tensor, " train"], Int[Tensor, " val"]]:
        """Return the training and validation positions in the official training part."""
        split = held_out_of_each_class if self.stratified else held_out
        return split(labels, self.seed, self.val_fraction)

    def transform_for(self, split: str) -> Transform:
        """Return the transform of a split; by default the same for all splits."""
        one_of("split", split, self.splits)
        return self.transform

    def check(self, part: str, labels: Int[Tensor, " n"]) -> None:
        """Compare the number of samples, in total and per class, with the official numbers."""
        where = f"{self.title}, official {part} part, in {self.root}"
        if len(labels) and not (labels.min() >= 0 and labels.max() < self.num_classes):
            raise DamagedFileError(
                f"{where}: labels from {labels.min()} to {labels.max()}, where 0 to {self.num_classes - 1} are expected"
            )
        if part in self.sizes and len(labels) != self.sizes[part]:
            raise DamagedFileError(f"{where}: {len(labels)} samples; the official part has {self.sizes[part]}")
        counts = torch.bincount(labels, minlength=self.num_classes).tolist()
        expected = self.per_class.get(part, range(len(labels) + 1))
        for number, count in enumerate(counts):
            valid = count in expected if isinstance(expected, range) else count == expected[number]
            if not valid:
                official = f"{expected[0]} to {expected[-1]}" if isinstance(expected, range) else expected[number]
                raise DamagedFileError(f"{where}: class {number} has {count} samples; officially {official}")

    def first_file(self, names: Sequence[str], source: Source, folder: str) -> Path:
        """Return the first existing path of several below the root; if none exists, download the file into `folder`."""
        for name in names:
            if (self.root / name).exists():  # an absolute name is used as is
                return self.root / name
        return fetch(source, self.root / folder, download=self.download, progress=self.progress)

    def unpacked(self, source: Source, inside: str) -> Path:
        """Return a folder below the root; if it does not exist, download and unpack the archive."""
        return unpack(source, self.root, inside, download=self.download, progress=self.progress)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed={self.seed}, root={str(self.root)!r})"


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder of data sets: the argument, else $FEDLAS_DATA, else a folder in the user's cache."""
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.environ.get("FEDLAS_DATA") or Path(cache) / "fedlas"
    return Path(root).expanduser().absolute()


def large_transform(
    image_size: int, resize: int | None, normalisation: str, antialias: bool, flip: bool = True
) -> Transform:
    """Return the transform of large natural images: resize to a square, then crop."""
    constants = {"imagenet": IMAGENET, "half": HALF}
    mean, std = constants[one_of("normalisation", normalisation, list(constants))]
    if image_size < 1:
        raise UserError(f"image_size must be at least 1, not {image_size}")
    if resize is None:  # the paper resizes to 448 for 384, and to 256 for 224
        resize = round(image_size * (7 / 6 if image_size >= 384 else 8 / 7))
    return Transform(size=image_size, channels=3, mean=mean, std=std, resize=resize, flip=flip, antialias=antialias)


def require_files(images: Sequence[Path], listed_in: Path) -> tuple[Path, ...]:
    """Return the image files named in a list; raise if any does not exist."""
    missing = [path for path in images if not path.exists()]
    if missing:
        raise DamagedFileError(f"{len(missing)} images of {listed_in} are not there, such as {missing[0]}")
    return tuple(images)


def held_out(labels: Int[Tensor, " n"], seed: int, fraction: float) -> tuple[Tensor, Tensor]:
    """Shuffle all samples regardless of class, as the official code does; hold out the first ones."""
    shuffled = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    held_out_count = round(len(labels) * fraction)
    return shuffled[held_out_count:], shuffled[:held_out_count]


def held_out_of_each_class(labels: Int[Tensor, " n"], seed: int, fraction: float) -> tuple[Tensor, Tensor]:
    """Shuffle the samples of each class; hold out the last ones of each."""
    random = np.random.RandomState(seed)
    train, val = [], []
    for number in labels.unique():
        positions = torch.nonzero(labels == number)[:, 0].numpy()
        random.shuffle(positions)
        train_count = len(positions) - round(len(positions) * fraction)
        train.append(positions[:train_count])
        val.append(positions[train_count:])
    none = [np.empty(0, np.int64)]
    return torch.from_numpy(np.concatenate(train or none)), torch.from_numpy(np.concatenate(val or none))


def part_of_batch(positions: Int[Tensor, " n"], rank: int, world: int) -> Int[Tensor, " m"]:
    """Return the contiguous positions of one rank; if the division is uneven, the first ranks get one more.

    With fewer positions than ranks, the last ranks get none.
    """
    if not 0 <= rank < world:
        raise UserError(f"rank {rank} of {world}")
    return positions.tensor_split(world)[rank]


def as_images(array: NDArray[np.uint8]) -> UInt8[Tensor, "n channels height width"]:
    """Copy (N, C, H, W) bytes into a writable tensor that does not keep the file in memory."""
    return torch.from_numpy(np.array(array, np.uint8, order="C"))


def as_labels(array: NDArray[Any] | Sequence[int]) -> Int[Tensor, " n"]:
    """Return a tensor of class numbers."""
    return torch.from_numpy(np.array(array, np.int64))
