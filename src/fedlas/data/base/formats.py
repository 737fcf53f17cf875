"""The file formats of small-image data sets: IDX, CIFAR's binary records, and CIFAR's pickles, read safely."""

import gzip
import hashlib
import io
import math
import pickle
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedlas.data.base.fetching import DamagedFileError, MissingFileError, checked_bytes, regular
from fedlas.errors import UserError

Bytes = NDArray[np.uint8]
LARGEST_IDX = 2**28  # bytes after unpacking; the training images of MNIST have 47 million


def lines_of(path: Path) -> list[str]:
    """Read the non-empty lines of a text file of a data set."""
    try:
        return [line.strip() for line in regular(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there: remove {path.parent} and unpack it again") from None
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error


def read_idx(path: Path, md5: str | None = None) -> Bytes:
    """Read an IDX file of bytes, compressed or not.

    Args:
        path: the file; a name that ends in `.gz` is decompressed.
        md5: MD5 of the decompressed content, which does not depend on the compression.
    """
    if regular(path).suffix != ".gz":
        content = path.read_bytes()
    else:
        try:
            with gzip.open(path) as packed:
                content = packed.read(LARGEST_IDX + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DamagedFileError(f"{path} is damaged: {error}") from error
        if len(content) > LARGEST_IDX:
            raise DamagedFileError(f"{path} would unpack to more than {LARGEST_IDX:,} bytes, more than any such file")
    if content[:3] != b"\x00\x00\x08" or len(content) < 4:  # two zeros, then the code for unsigned bytes
        raise DamagedFileError(
            f"{path} is not an IDX file of bytes; it starts with {content[:4].hex(' ') or 'nothing'}"
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(content[4:start].ljust(4 * dimensions, b"\x00"), ">u4"))
    if len(content) != start + math.prod(shape):
        raise DamagedFileError(
            f"{path} is damaged: it announces {' x '.join(map(str, shape))} bytes, and {len(content) - start} follow"
        )
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if md5 is not None and digest != md5:
        raise DamagedFileError(f"{path} is damaged: the MD5 of its content is {digest}, the published one {md5}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_names(path: Path, count: int, what: str) -> tuple[str, ...]:
    """Read the names of all classes, one per line, and sort them."""
    names = sorted(lines_of(path))
    if len(set(names)) != count or len(names) != count:
        raise DamagedFileError(f"{path} is damaged: {len(set(names))} {what}, where {count} are expected")
    return tuple(names)


def read_cifar_binary(path: Path, label_bytes: int, md5: str | None = None) -> tuple[Bytes, Bytes]:
    """Read records of label bytes (the last one is the label) and 3 x 32 x 32 pixels."""
    content = np.frombuffer(checked_bytes(path, md5), np.uint8)
    record = label_bytes + 3072
    if content.size == 0 or content.size % record:
        raise DamagedFileError(f"{path} is damaged: {content.size} bytes are no multiple of {record}")
    rows = content.reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1]


def read_cifar_pickle(path: Path, labels: str, md5: str) -> tuple[Bytes, Bytes]:
    """Read a pickled batch with a restricted unpickler, after verifying its MD5.

    Args:
        path: the file.
        labels: the key of the labels.
        md5: MD5 of the file; required.
    """
    batch = plain_unpickled(checked_bytes(path, md5), path)
    try:
        images = np.asarray(batch["data"])
        truth = np.asarray(batch[labels], np.uint8)
        if images.dtype != np.uint8 or images.shape != (len(truth), 3072):
            raise UserError(f"data is {images.dtype} {images.shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} is no CIFAR batch: {error!r}") from error
    return images.reshape(-1, 3, 32, 32), truth


def plain_unpickled(content: bytes, path: Path) -> Any:
    """Unpickle dictionaries, lists, strings, bytes, numbers and numpy arrays; raise for anything else."""
    try:
        # CIFAR was pickled by Python 2, whose strings are bytes; NumPy decodes array contents from Latin-1.
        content_object = _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()
    except DamagedFileError as error:
        raise DamagedFileError(f"{path} {error}") from None
    except MemoryError:
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise DamagedFileError(f"{path} cannot be unpickled: {error!r}") from error
    pending, seen = [content_object], set()
    while pending:
        item = pending.pop()
        if type(item) not in _PLAIN or (isinstance(item, np.ndarray) and item.dtype.hasobject):
            raise DamagedFileError(f"{path} holds a {type(item).__name__}, which is not plain data")
        if id(item) not in seen and isinstance(item, (dict, list)):  # a list may contain itself
            seen.add(id(item))
            pending += [*item.keys(), *item.values()] if isinstance(item, dict) else item
    return content_object


_PLAIN = (dict, list, str, bytes, bool, int, float, type(None), np.ndarray)
_ARRAY = object()  # stands for the class ndarray, which a file may name but not call


def _blank_array(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    """Create the empty array with which unpickling an array starts; its contents are set afterwards."""
    if kind is not _ARRAY or shape != (0,):
        raise DamagedFileError(f"creates an array of shape {shape} from no data; it is not unpickled")
    return np.empty(0, np.dtype(code))


class _PlainUnpickler(pickle.Unpickler):
    # The names under which all versions of NumPy pickled arrays. They are looked up here, not in the modules that the
    # file names, so that a file cannot import anything.
    admitted: ClassVar = {
        (module, name): value
        for name, value, modules in (
            ("_reconstruct", _blank_array, ("numpy.core.multiarray", "numpy._core.multiarray")),
            ("ndarray", _ARRAY, ("numpy",)),
            ("dtype", np.dtype, ("numpy",)),
        )
        for module in modules
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.admitted:
            raise DamagedFileError(f"contains {module}.{name}, which plain data does not need; it is not unpickled")
        return self.admitted[module, name]
