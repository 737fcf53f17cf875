"""Image transforms: decoding, resizing, normalisation, and a cache of decoded images on disk.

    file ─► decoded ─► resized ("stored", uint8) ─► padded, cropped, flipped ─► normalised

Everything up to "stored" depends on the image alone and can be cached; the rest is repeated in each epoch.
"""

import hashlib
import io
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from fedlas.data.base.fetching import DamagedFileError, locked, regular
from fedlas.errors import UserError
from fedlas.extras import optional_module

_filters = threading.Lock()  # warning filters are global, and files are decoded in many threads
MOST_UNPACKED, MOST_TIMES = 2**28, 100  # limits of the decoded size: bytes, and multiple of the file size
CHUNK = 512  # images resized at a time, to limit memory

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True, kw_only=True)
class Transform:
    """The preprocessing of images; OOD images are processed like those the network was trained on.

    Args:
        size: side of the square that the network sees.
        channels: 3 for colour, 1 for grey.
        mean: mean of each channel, for pixels scaled to 0 to 1.
        std: standard deviation of each channel.
        resize: side of the square to which each image is resized first, ignoring its aspect ratio; by default `size`.
        pad: width of the black border added in training, before normalisation.
        flip: whether to flip images horizontally with probability 0.5 in training.
        antialias: whether to apply antialiasing when an image is downsized.
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    pad: int = 0
    flip: bool = False
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise UserError(f"channels is 1 or 3, not {self.channels}")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise UserError(f"mean and std need one number for each of {self.channels} channels")
        if min(self.std) <= 0:
            raise UserError(f"std must be positive, not {self.std}")
        if self.size < 1 or self.pad < 0 or self.stored < self.size:
            raise UserError(f"cannot see {self.size} pixels of {self.stored}, padded by {self.pad}")

    @property
    def stored(self) -> int:
        """Side of the resized image, before padding and cropping."""
        return self.size if self.resize is None else self.resize

    @property
    def largest_offset(self) -> int:
        """The range of the offset of a training crop."""
        return self.stored + 2 * self.pad - self.size

    @property
    def centre(self) -> int:
        """The offset of the centre crop used in evaluation."""
        return round((self.stored - self.size) / 2)

    def constants(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return scale and shift that normalise a uint8 image: scale * image + shift."""
        mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return (1 / (255 * std)).to(device, torch.float32), (-mean / std).to(device, torch.float32)


def normalised(
    images: UInt8[Tensor, "n channels height width"],
    constants: tuple[Tensor, Tensor],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Float[Tensor, "n channels height width"]:
    """Normalise uint8 images in float32, then convert to `dtype`."""
    scale, shift = constants
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.addcmul(shift, images.contiguous(memory_format=layout), scale).to(dtype)


def fitted(
    images: UInt8[Tensor, "n channels height width"], transform: Transform
) -> UInt8[Tensor, "n seen stored stored"]:
    """Convert images of any size, grey or colour, to the size and channels that a transform expects."""
    if images.shape[1] == transform.channels and images.shape[2:] == (transform.stored, transform.stored):
        return images
    if not len(images):
        return images.new_empty(0, transform.channels, transform.stored, transform.stored)
    return torch.cat([_fitted(part, transform) for part in images.split(CHUNK)])


def _fitted(images: Tensor, transform: Transform) -> Tensor:
    if images.shape[1] != transform.channels:
        if images.shape[1] == 1:
            images = images.expand(-1, transform.channels, -1, -1)
        else:
            images = optional_module("torchvision.transforms.v2.functional", "train").rgb_to_grayscale(images)
    if images.shape[2:] != (transform.stored, transform.stored):
        resize = optional_module("torchvision.transforms.v2.functional", "train").resize
        images = resize(images, [transform.stored, transform.stored], antialias=transform.antialias)
    return images


def decode(path: Path, transform: Transform) -> UInt8[Tensor, "channels stored stored"]:
    """Decode an image file, and convert it to the size and channels that a transform expects."""
    pillow = optional_module("PIL.Image", "train")
    regular(path)
    try:
        content = path.read_bytes()
        with _opened(content) as picture:
            if 3 * picture.width * picture.height > max(MOST_UNPACKED, MOST_TIMES * len(content)):
                size = f"{picture.width:,} x {picture.height:,}"
                raise UserError(f"its {len(content):,} bytes would unpack to {size} pixels, which is too much")  # noqa: TRY301
            pixels = np.array(_in_bytes(picture).convert("RGB" if transform.channels == 3 else "L"))
    except (FileNotFoundError, MemoryError):
        raise
    except pillow.UnidentifiedImageError as error:
        raise DamagedFileError(f"{path} is damaged: it is not an image of a known format") from error
    except Exception as error:  # Pillow may raise anything for a damaged file
        raise DamagedFileError(f"{path} is damaged: {error or repr(error)}") from error
    image = torch.from_numpy(pixels).view(*pixels.shape[:2], -1).permute(2, 0, 1)
    return fitted(image[None].contiguous(), transform)[0]


def _opened(content: bytes) -> Any:
    """Open an image without Pillow's warning about large images; `decode` checks the size and names the file."""
    pillow = optional_module("PIL.Image", "train")
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
        return pillow.open(io.BytesIO(content))


def _in_bytes(picture: Any) -> Any:
    """Convert 16-bit grey images to 8 bits (Pillow would clip at 255); raise if the value of white is unknown."""
    if picture.mode.startswith("I"):
        pixels = np.asarray(picture).astype(np.int64)
        if pixels.size and not 0 <= pixels.min() <= pixels.max() < 1 << 16:
            raise UserError("its pixels have neither 8 nor 16 bits; save it with one of them")
        return optional_module("PIL.Image", "train").fromarray((pixels >> 8).astype(np.uint8))
    if picture.mode == "F":
        raise UserError("its pixels are floating-point numbers, whose value for white is unknown; save it in 8 bits")
    return picture


def decoded(
    paths: Sequence[Path], transform: Transform, cache: Path | None = None
) -> UInt8[Tensor, "n channels stored stored"]:
    """Decode and resize many image files.

    Args:
        paths: the files.
        transform: defines size and channels.
        cache: a folder for the result, which is memory-mapped the next time. The name of the cache file depends on
            names, sizes and times of the images, so changed images are decoded again.
    """
    shape = (len(paths), transform.channels, transform.stored, transform.stored)
    if cache is None:
        images = np.empty(shape, np.uint8)
        _decode_into(images, paths, transform)
        return torch.from_numpy(images)
    cached = cache / f"{_fingerprint(paths, transform)}.npy"
    if not cached.exists():
        with locked(cached):
            if not cached.exists():
                with _write_atomically(cached) as temporary:
                    images = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
                    _decode_into(images, paths, transform)
                    images.flush()
    try:
        regular(cached)
        # Copy on write: torch requires writable memory, and the file must not change.
        images = np.load(cached, mmap_mode="c", allow_pickle=False)
        if images.shape != shape or images.dtype != np.uint8:
            raise UserError(f"it holds {images.dtype} {images.shape}")
    except (ValueError, EOFError, OSError) as error:
        raise DamagedFileError(f"{cached} is damaged ({error}); remove it, and it will be created again") from error
    return torch.from_numpy(images)


def _decode_into(images: NDArray[np.uint8], paths: Sequence[Path], transform: Transform) -> None:
    def decode_image(number: int) -> None:
        images[number] = decode(paths[number], transform).numpy()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow and torch release the GIL
        list(pool.map(decode_image, range(len(paths))))


def _fingerprint(paths: Sequence[Path], transform: Transform) -> str:
    digest = hashlib.sha256(f"1 {transform.stored} {transform.channels} {transform.antialias}".encode())
    for path in paths:
        status = path.stat()
        digest.update(f"\n{path.absolute()} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


@contextmanager
def _write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to the final one when the file is on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # also a link
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
