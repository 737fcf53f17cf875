"""What a data set is: images with labels in the order of their publisher, and the splits that a seed makes of them.

A file of this folder writes `read(part)`, which returns the official training or test part, and a few facts. Splits,
checks of the contents, and finding files are done here. Nothing is read before the first `split`.

    official train part ─► train, val      (the seed decides)
    official test part  ─► test            (the same for every seed)

`Split.index` is a sample's position in the data set's own order, which no seed changes.
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

from fedlas.catalog import nearest
from fedlas.data.base.fetching import DamagedFileError, Progress, Source, fetch, unpack
from fedlas.data.base.images import HALF, IMAGENET, Transform, decoded, fitted
from fedlas.errors import UserError

NormalisationName: TypeAlias = Literal["imagenet", "half"]
Images: TypeAlias = UInt8[Tensor, "n channels height width"] | tuple[Path, ...]
Selection: TypeAlias = Literal["held_out", "official"]
LOOKED_INTO = 1000  # image files of a split, at most, of which a checksum knows more than name and size


class Sample(NamedTuple):
    """A batch: images as the network sees them, their labels, and which samples they are."""

    images: Tensor
    labels: Int[Tensor, " n"]
    index: Int[Tensor, " n"]  # type: ignore[assignment] # a tuple's own `index` is of no use here


@dataclass(frozen=True, eq=False)
class Part:
    """One official part of a data set, in its publisher's order.

    `index` is given where the parts share one order; otherwise each part is counted from 0.
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
        index: position of each sample in the data set's own order.
        class_names: one name per class.
        dataset: catalogue name of the data set.
        part: the image files that the split was picked from: what is kept of them on disk serves all of its splits.
        places: where in it each sample of the split lies.
    """

    name: str
    images: Images
    labels: Int[Tensor, " n"]
    index: Int[Tensor, " n"]
    class_names: tuple[str, ...]
    dataset: str
    part: tuple[Path, ...] | None = None
    places: Int[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        if not len(self.images) == len(self.labels) == len(self.index):
            raise UserError(f"{len(self.images)} images, {len(self.labels)} labels, {len(self.index)} indices")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({self.dataset} {self.name}, n={len(self):,}, classes={len(self.class_names)})"

    def checksum(self) -> str:
        """Give the SHA-256 of labels and images; of image files names and sizes count, and of some the last bytes."""
        found = hashlib.sha256(self.labels.numpy().tobytes())
        if isinstance(self.images, Tensor):
            found.update(self.images.contiguous().numpy().data)
        else:
            apart = -(-len(self.images) // LOOKED_INTO)
            for place, path in enumerate(self.images):
                found.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
                if place % apart == 0:
                    found.update(_last_bytes(path))
        return found.hexdigest()

    def decoded(self, transform: Transform, *, cache: str | Path | None = None, workers: int | None = None) -> "Split":
        """Hold the images in memory, at the size and channels that a transform starts from.

        Args:
            transform: of the data set that a network was trained on, which need not be this one.
            cache: a folder that keeps decoded image files for the next time.
            workers: threads that decode; by default one for each processor.
        """
        if isinstance(self.images, Tensor):
            return replace(self, images=fitted(self.images, transform))
        if cache is None:
            images = decoded(self.images, transform, None, workers)
        else:
            whole, places = self.kept(transform, cache, workers=workers)
            images = whole[places]
        return replace(self, images=images, part=None, places=None)

    def kept(
        self, transform: Transform, cache: str | Path, *, workers: int | None = None
    ) -> tuple[UInt8[Tensor, "m channels stored stored"], Int[Tensor, " n"]]:
        """Give the decoded images of the whole part, mapped into memory from a file, and where this split's lie in it.

        Args:
            transform: of the data set that a network was trained on, which need not be this one.
            cache: the folder that keeps them.
            workers: threads that decode; by default one for each processor.
        """
        if isinstance(self.images, Tensor):
            return fitted(self.images, transform), torch.arange(len(self))
        part, places = self._origin()
        return decoded(part, transform, Path(cache).expanduser(), workers), places

    def _origin(self) -> tuple[tuple[Path, ...], Int[Tensor, " n"]]:
        assert not isinstance(self.images, Tensor)
        return self.part or self.images, torch.arange(len(self)) if self.places is None else self.places

    def picked(self, positions: Int[Tensor, " m"]) -> "Split":
        """Keep only the samples at some positions of this split, in that order."""
        labels, index = self.labels[positions], self.index[positions]
        if isinstance(self.images, Tensor):
            return replace(self, images=self.images[positions], labels=labels, index=index)
        part, places = self._origin()
        files = tuple(self.images[n] for n in positions.tolist())
        return replace(self, images=files, labels=labels, index=index, part=part, places=places[positions])

    def joined(self, other: "Split") -> "Split":
        """Append the samples of another split of the same part."""
        labels, index = torch.cat([self.labels, other.labels]), torch.cat([self.index, other.index])
        if isinstance(self.images, Tensor):
            assert isinstance(other.images, Tensor)
            return replace(self, images=torch.cat([self.images, other.images]), labels=labels, index=index)
        assert not isinstance(other.images, Tensor)
        (part, places), (_, more) = self._origin(), other._origin()
        files, places = self.images + other.images, torch.cat([places, more])
        return replace(self, images=files, labels=labels, index=index, part=part, places=places)


class Common(TypedDict, total=False):
    """What every data set may be built with."""

    root: str | Path | None
    seed: int
    download: bool
    progress: Progress | None


def _last_bytes(path: Path, count: int = 4096) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count))
        return file.read(count)


class AbstractDataset(ABC):
    """A classification data set that can be split by a seed.

    Args:
        root: the folder that holds data sets; by default `data_root()`.
        seed: decides which samples of the training part are held out for validation.
        download: whether files that are missing may be fetched.
        progress: called as progress(file name, bytes so far, bytes in all or None) while a file is fetched.
    """

    name: ClassVar[str]
    citation: ClassVar[str]
    title: str  # what tables call it
    num_classes: int
    transform: Transform  # of every split; `transform_for` knows the exception
    # Keywords that repeat what the FeDLaS code released by its authors does, where the default does something better.
    published: ClassVar[Mapping[str, Any]] = {}
    splits: ClassVar[tuple[str, ...]] = ("train", "val", "test")
    resident: ClassVar[bool] = True  # whether the images are small enough to live on the training device
    stratified: ClassVar[bool] = False  # whether as large a share of each class is held out
    val_share: ClassVar[float] = 0.1
    selection: Selection = "held_out"
    # What the official parts hold: samples in all, and either the number in each class or the range it lies in.
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
        """One name per class; where the names come with the data, they are read now."""

    @abstractmethod
    def read(self, part: str) -> Part:
        """Read the official part "train" or "test"; what the bytes can tell about damage is checked here."""

    def split(self, name: str) -> Split:
        """Return the samples of "train", "val" or "test"."""
        one_of("split", name, self.splits)
        official = self.selection == "official"
        from_test = name == "test" or (name == "val" and official)
        part = self.part("test" if from_test else "train")
        index = torch.arange(len(part.labels)) if part.index is None else part.index
        whole = Split(name, part.images, part.labels, index, self.class_names, self.name)
        if from_test or official:
            return whole
        train, val = self.halves(part.labels)
        return whole.picked(train if name == "train" else val)

    def part(self, name: str) -> Part:
        """Return an official part whose contents were checked; it is read once."""
        if name not in self._parts:
            part = self.read(name)
            self.check(name, part.labels)
            self._parts[name] = part
        return self._parts[name]

    def halves(self, labels: Int[Tensor, " n"]) -> tuple[Int[Tensor, " train"], Int[Tensor, " val"]]:
        """Divide the training part into the positions to train on and those held out."""
        split = held_out_of_each_class if self.stratified else held_out
        return split(labels, self.seed, self.val_share)

    def transform_for(self, split: str) -> Transform:
        """Return what happens to the images of a split, which is the same for all of them unless asked otherwise."""
        one_of("split", split, self.splits)
        return self.transform

    def check(self, part: str, labels: Int[Tensor, " n"]) -> None:
        """Compare the number of samples, in all and in each class, with what was published."""
        where = f"{self.title}, official {part} part, in {self.root}"
        if len(labels) and not (labels.min() >= 0 and labels.max() < self.num_classes):
            raise DamagedFileError(
                f"{where}: labels from {labels.min()} to {labels.max()}, where 0 to {self.num_classes - 1} are expected"
            )
        if part in self.sizes and len(labels) != self.sizes[part]:
            raise DamagedFileError(f"{where}: {len(labels)} samples, where {self.sizes[part]} were published")
        found = torch.bincount(labels, minlength=self.num_classes).tolist()
        expected = self.per_class.get(part, range(len(labels) + 1))
        for number, count in enumerate(found):
            right = count in expected if isinstance(expected, range) else count == expected[number]
            if not right:
                wanted = f"{expected[0]} to {expected[-1]}" if isinstance(expected, range) else expected[number]
                raise DamagedFileError(f"{where}: class {number} has {count} samples, where {wanted} were published")

    def first_file(self, names: Sequence[str], source: Source, folder: str) -> Path:
        """Find a file under the first of several names below the root, or fetch it into a folder there."""
        for name in names:
            if (self.root / name).exists():  # an absolute name stays as it is
                return self.root / name
        return fetch(source, self.root / folder, download=self.download, progress=self.progress)

    def unpacked(self, source: Source, inside: str) -> Path:
        """Find a folder below the root, or make it from the published archive."""
        return unpack(source, self.root, inside, download=self.download, progress=self.progress)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed={self.seed}, root={str(self.root)!r})"


def data_root(root: str | Path | None = None) -> Path:
    """Say where data lies: in the folder given, else in $FEDLAS_DATA, else in the user's cache."""
    if root is None:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = os.environ.get("FEDLAS_DATA") or Path(cache) / "fedlas"
    return Path(root).expanduser().absolute()


def large_transform(
    image_size: int, resize: int | None, normalisation: str, antialias: bool, flip: bool = True
) -> Transform:
    """Describe what happens to photographs: brought to a square, then cropped."""
    constants = {"imagenet": IMAGENET, "half": HALF}
    mean, std = constants[one_of("normalisation", normalisation, list(constants))]
    if image_size < 1:
        raise UserError(f"image_size must be at least 1, not {image_size}")
    if resize is None:  # the published pairs are 448 and 384, 256 and 224
        resize = round(image_size * (7 / 6 if image_size >= 384 else 8 / 7))
    return Transform(size=image_size, channels=3, mean=mean, std=std, resize=resize, flip=flip, antialias=antialias)


def there(images: Sequence[Path], listed_in: Path) -> tuple[Path, ...]:
    """Make sure that the image files which a list names exist."""
    missing = [path for path in images if not path.exists()]
    if missing:
        raise DamagedFileError(f"{len(missing)} images of {listed_in} are not there, such as {missing[0]}")
    return tuple(images)


def held_out(labels: Int[Tensor, " n"], seed: int, share: float) -> tuple[Tensor, Tensor]:
    """Shuffle all samples as the published code does, whatever their class; the first ones are held out."""
    shuffled = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
    held = round(len(labels) * share)
    return shuffled[held:], shuffled[:held]


def held_out_of_each_class(labels: Int[Tensor, " n"], seed: int, share: float) -> tuple[Tensor, Tensor]:
    """Shuffle the samples of one class after the other; the last ones of each are held out."""
    random = np.random.RandomState(seed)
    train, val = [], []
    for number in labels.unique():
        places = torch.nonzero(labels == number)[:, 0].numpy()
        random.shuffle(places)
        held = len(places) - round(len(places) * share)
        train.append(places[:held])
        val.append(places[held:])
    none = [np.empty(0, np.int64)]
    return torch.from_numpy(np.concatenate(train or none)), torch.from_numpy(np.concatenate(val or none))


def share_of_batch(places: Int[Tensor, " n"], rank: int, world: int) -> Int[Tensor, " m"]:
    """Return what one rank works on: a contiguous part, one longer for the first ranks if it does not come out even.

    Of fewer places than ranks, the last ranks get none.
    """
    if not 0 <= rank < world:
        raise UserError(f"rank {rank} of {world}")
    return places.tensor_split(world)[rank]


def as_images(array: NDArray[np.uint8]) -> UInt8[Tensor, "n channels height width"]:
    """Make a tensor of (N, C, H, W) bytes, copied so that it can be written to and the file's memory is let go."""
    return torch.from_numpy(np.array(array, np.uint8, order="C"))


def as_labels(array: NDArray[Any] | Sequence[int]) -> Int[Tensor, " n"]:
    """Make a tensor of class numbers."""
    return torch.from_numpy(np.array(array, np.int64))


def one_of(what: str, word: str, known: Sequence[str]) -> str:
    """Return a word that is one of the known ones."""
    if word not in known:
        raise UserError(f"no {what} is called {word!r}; {nearest(str(word), list(known))}")
    return word
