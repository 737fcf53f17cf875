"""Thumbnails of samples as data URLs. They are re-encoded, so that a page contains only pixels of an untrusted file.

Arrays are `(height, width)`, `(height, width, channels)` or `(channels, height, width)` with one, three or four
channels, of type uint8 (0..255) or floating-point (0..1). The range is not inferred from the values; values outside of
it raise an error.
"""

import base64
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module
from fedlas.predictions.arrays import Array, as_tensor

SIDE = 96  # pixels of the longer side
MOST_PIXELS = 64_000_000  # largest number of pixels of an image file
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM")
CHANNELS = {1, 3, 4}


def picture_of(image: Array | str | Path) -> str:
    """Return the thumbnail of an array or of an image file as a data URL."""
    images = optional_module("PIL.Image")
    picture = _opened(images, Path(image)) if isinstance(image, str | Path) else images.fromarray(pixels(image))
    picture.thumbnail((SIDE, SIDE))
    # Lossless for the small images of data sets; natural images are much smaller as JPEG.
    kind, mode = ("PNG", "RGBA" if "A" in picture.getbands() else "RGB") if max(picture.size) <= 64 else ("JPEG", "RGB")
    content = io.BytesIO()
    picture.convert(mode).save(content, kind, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content.getvalue()).decode()}"


def pixels(image: Array) -> NDArray[np.uint8]:
    """Convert an image to uint8 in the layout (height, width) or (height, width, channels)."""
    array = as_tensor(image, "image").cpu().numpy()
    if array.ndim == 3 and array.shape[2] not in CHANNELS and array.shape[0] in CHANNELS:
        array = np.moveaxis(array, 0, 2)
    if array.ndim not in {2, 3} or (array.ndim == 3 and array.shape[2] not in CHANNELS) or 0 in array.shape:
        raise UserError(f"an image has shape {array.shape}; (height, width), with 1, 3 or 4 channels, is expected")
    if array.dtype.kind == "f":
        if not (array >= 0).all() or not (array <= 1).all():
            raise UserError("an image of floating-point numbers has values outside 0..1; undo its normalisation first")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserTypeError(f"an image holds {array.dtype}; uint8, or floating-point numbers in 0..1, are expected")
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else np.ascontiguousarray(array)


def _opened(images: Any, path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path.name[:80]} is no file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of large images, which are checked below, and of invalid metadata
        file = images.open(path, formats=FORMATS)
        with file:
            if file.width * file.height > MOST_PIXELS:
                raise UserError(f"{path.name[:80]} has {file.width} x {file.height} pixels, which is too many")
            file.draft("RGB", (SIDE, SIDE))  # a large JPEG is decoded at a fraction of its size
            return file.convert("RGBA" if "A" in file.getbands() else "RGB")
