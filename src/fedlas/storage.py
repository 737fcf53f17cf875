"""Files, read as if a stranger had made them, and written whole or not at all.

Whoever reads a file here learns in one line what is wrong with it and which file it is; no reader waits for a pipe,
fills the memory for a small file, or runs what a file brings along. Whoever writes one never leaves half of it.
"""

import gzip
import io
import json
import math
import os
import pickle
import secrets
import shutil
import stat
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlas.errors import UserError, UserTypeError
from fedlas.extras import optional_module

# Names a CRC-32 among the words of a file. It finds every single flipped bit, as a SHA-256 would; that takes three
# times as long, and would not keep out somebody who can write it anew either.
CHECKSUM = "fedlas.crc32"
ALLOCATOR = "DefaultCPUAllocator: "  # who in torch says that there is no memory
FROM_FILE: ContextVar[bool] = ContextVar("from_file", default=False)  # whether arrays come from a file that is read
MORE_THAN_TENSORS = "it holds more than tensors, numbers and words, which is never loaded"
LEGACY = 0x1950A86A20F9469CFC6C  # begins a file that torch before 1.6 wrote
BATCH = 2**15  # bytes of a text file that are read together: their cells fit into a cache
PART = ".part"  # ends the name of a file that is being written
# A file may hold more than it is long; one that holds more than both of these is made to fill a memory.
MOST_UNPACKED, MOST_TIMES = 2**28, 100


class RowError(UserError):
    """An error about one row, which is counted from 0; who reads a text file says which line that is.

    Args:
        before: what is said before the row.
        row: which one.
        after: what is said after it.
    """

    def __init__(self, before: str, row: int, after: str) -> None:
        super().__init__(f"{before}row {row}{after}")
        self.before, self.row, self.after = before, row, after

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, int, str]]:
        return type(self), (self.before, self.row, self.after)  # an error is copied and pickled by its words otherwise

    def at_line(self, lines: Sequence[int]) -> ValueError:
        """Make the same error that names the line of the file, as editors count them."""
        return UserError(f"{self.before}line {lines[self.row]}{self.after}")


class ObjectsError(UserError):
    """A file holds Python objects, which are never read: it is not damaged, and has to be written otherwise."""


def check_file(path: str | Path) -> None:
    """Refuse what is there and no file: a pipe keeps who reads it waiting, and a device may have no end."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # who opens it says why it cannot
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise UserError(f"{path} is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


def own_file(folder: Path, name: str | Path, whose: str) -> Path:
    """Give the path of a file that belongs to a folder, and refuse what leads elsewhere: `..`, or a link on the way.

    Whoever made the folder could have any file read, or written over. The folder itself may be a link.

    Args:
        folder: a run folder, say.
        name: of the file, in the folder or below it.
        whose: what the folder is, for errors.
    """
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise UserError(f"{folder / name} lies outside of {folder}")
    path = folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise UserError(f"{path} is a link; {whose}'s own files are never links: remove it, or copy what it names")
    return path


def no_memory(error: BaseException) -> str | None:
    """Give what torch says in a RuntimeError about the machine's memory that ran out; None where it did not."""
    _, allocator, said = str(error).partition(ALLOCATOR)
    return said.strip() if allocator and isinstance(error, RuntimeError) else None


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a MemoryError where torch says in a RuntimeError that the machine's memory ran out."""
    try:
        yield
    except RuntimeError as error:
        said = no_memory(error)
        if said is None:
            raise
        raise MemoryError(said) from error


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """Refuse what is no file, and name the file in whatever error a reader raises about it."""
    check_file(path)
    try:
        with memory_errors():
            yield
    except MemoryError:
        raise  # which is no fault of the file
    except ObjectsError as error:
        raise ObjectsError(f"{path}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise  # a file that is not there says so itself; a plain one without a number is a reader's word for damage
        # Not numpy's own words about Python objects: they advise to load whatever is in there.
        reason = "it holds no arrays of numbers" if "allow_pickle" in str(error) else error
        raise UserError(f"{path} is damaged, or not a file of this kind: {reason}") from error


@contextmanager
def named(path: str | Path, lines: Sequence[int] | None = None) -> Iterator[None]:
    """Name the file in an error about what it holds; what a stranger's file can break is an error about its values.

    Args:
        path: the file.
        lines: of a text file, the line of each row.
    """
    before = FROM_FILE.set(True)
    try:
        with memory_errors():
            yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as given:
        error = given.at_line(lines) if isinstance(given, RowError) and lines is not None else given
        kind = UserTypeError if isinstance(error, TypeError) else UserError
        if isinstance(error, kind) and str(path) in str(error):
            if error is given:
                raise
            raise error from given
        plain = isinstance(error, ValueError | TypeError)
        raise kind(f"{path}: {error if plain else repr(error)}") from given
    finally:
        FROM_FILE.reset(before)


def check_unpacked(path: str | Path, size: int) -> None:
    """Refuse a small file that would fill the memory."""
    there = Path(path).stat().st_size
    if size > max(MOST_UNPACKED, MOST_TIMES * there):
        raise UserError(f"its {there:,} bytes would unpack to {size:,}, which no predictions do")


def check_arrays(folder: zipfile.ZipFile, unused: Container[str] = ()) -> None:
    """Refuse arrays of Python objects, and those that announce more numbers than are there.

    Objects would have to be unpickled, and numpy takes the memory before it looks how many numbers there are.
    """
    for entry in folder.infolist():
        if entry.filename.removesuffix(".npy") not in unused:
            with folder.open(entry) as file:
                check_array(entry, file)


def check_array(entry: zipfile.ZipInfo, file: Any) -> None:
    """Raise if an array in the format of NumPy holds Python objects, or announces more numbers than there are."""
    if file.read(6) != np.lib.format.MAGIC_PREFIX:
        return
    file.seek(0)
    version = np.lib.format.read_magic(file)
    if version not in {(1, 0), (2, 0)}:
        raise UserError(f"{entry.filename} is no array of numbers")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    if kind.hasobject:
        name = entry.filename.removesuffix(".npy")
        label = name in {"label", "labels"}
        way = f"text or class numbers, such as {name}.astype(str)" if label else "numbers or text, with astype"
        raise ObjectsError(f"{name} holds Python objects, which are not read: save them as {way}")
    if math.prod(shape) * kind.itemsize > entry.file_size:
        raise UserError(f"{entry.filename} announces {' x '.join(map(str, shape))} numbers, and holds fewer")


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, which ends with an error where it is out of proportion to the file."""

    def __init__(self, path: Path) -> None:
        self._file, self._path, self._size = gzip.GzipFile(path), path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{self._path} is damaged, or not a gzip file: {error}") from error
        self._size += len(content)
        check_unpacked(self._path, self._size)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_text(path: str | Path, newline: str | None = None) -> io.TextIOWrapper:
    """Open a text file in UTF-8; one whose name ends in .gz is unpacked."""
    if Path(path).suffix.lower() != ".gz":
        return Path(path).open(newline=newline, encoding="utf-8-sig")
    content = io.BufferedReader(_Unpacked(Path(path)), 2**16)
    return io.TextIOWrapper(content, newline=newline, encoding="utf-8-sig")


def read_lines(file: io.TextIOWrapper, path: str | Path, watch: Callable[[float], None] | None = None) -> Iterator[str]:
    """Read the lines of a text; report progress as a fraction of the file."""
    return chain.from_iterable(read_batches(file, path, watch))


def read_batches(
    file: io.TextIOWrapper, path: str | Path, watch: Callable[[float], None] | None = None
) -> Iterator[list[str]]:
    """Read the lines of a text, some at a time; report progress as a fraction of the file, unless it is packed."""
    watch = watch if file.seekable() else None
    size = max(1, Path(path).stat().st_size)
    try:
        while lines := file.readlines(BATCH):
            if watch is not None:
                watch(min(1.0, file.buffer.tell() / size))  # type: ignore[attr-defined]
            yield lines
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error}); save it in that encoding") from error


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read the words and the tensors of a safetensors file, and compare them with their checksum if they have one."""
    opened = optional_module("safetensors").safe_open
    with readable(path), opened(str(path), framework="pt") as file:
        words, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    written = words.pop(CHECKSUM, None)  # older files, and those of others, have none
    if written is not None and written != _checksum(words, tensors):
        raise UserError(f"{path} is damaged: what it holds does not have the checksum that was written with it")
    return words, tensors


def read_torch(path: str | Path, content: bytes | None = None, stand_ins: Mapping[str, Any] | None = None) -> Any:
    """Read a file that `torch.save` wrote: tensors and plain values, and nothing that takes more memory than the file.

    The pickle is first read without creating any tensor, because torch allocates whatever size a pickle names.

    Args:
        path: the file.
        content: its bytes, where they have been read already.
        stand_ins: what takes the place of further names in the pickle, such as "numpy.dtype".
    """
    size = Path(path).stat().st_size if content is None else len(content)
    with Path(path).open("rb") if content is None else io.BytesIO(content) as file:
        try:
            _check_torch(file, size, stand_ins or {})
        except (ValueError, OSError, MemoryError):
            raise
        except Exception as error:  # a damaged pickle may raise anything
            raise UserError("it is truncated, or torch.save did not write it") from error
        file.seek(0)
        names: list[Any] = [(one, name) for name, one in (stand_ins or {}).items()]
        try:
            with torch.serialization.safe_globals(names):
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # Not torch's own words: they advise to unpickle whatever is in there.
            raise UserError(MORE_THAN_TENSORS) from error


def _check_torch(file: Any, size: int, stand_ins: Mapping[str, Any]) -> None:
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        _check_legacy(file, size, stand_ins)
        return
    with zipfile.ZipFile(file) as parts:
        if min((entry.header_offset for entry in parts.infolist()), default=0):
            raise UserError("other data comes before its archive, which torch.save does not do")
        entries = {entry.filename: entry for entry in parts.infolist()}
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values())
        if packed or len(entries) < len(parts.infolist()) or sum(one.file_size for one in entries.values()) > size:
            raise UserError("its parts are compressed, or overlap, which torch.save does not do")
        damaged = parts.testzip()
        if damaged is not None:
            raise UserError(f"the checksum of {damaged} is wrong: bits have changed since it was written")
        folder = next(iter(entries), "").partition("/")[0]
        unpickler = _Sizes(io.BytesIO(parts.read(f"{folder}/data.pkl")), stand_ins)
        unpickler.load()
    for key, needed in unpickler.storages.items():
        held = entries.get(f"{folder}/data/{key}")
        if held is None or held.file_size < needed:
            raise UserError(
                f"a tensor needs {needed:,} bytes, and {0 if held is None else held.file_size:,} are stored"
            )


def _check_legacy(file: Any, size: int, stand_ins: Mapping[str, Any]) -> None:
    """Check a file as torch wrote them before version 1.6: several pickles, then the numbers."""
    # A pickle may announce a text of any length, and a file allocates it before it is read.
    bounded = SimpleNamespace(read=lambda count: file.read(min(count, size)), readline=file.readline)
    if _Sizes(bounded, {}).load() != LEGACY:
        raise UserError("torch.save did not write it")
    for _ in range(2):  # the version of the format, and properties of the machine
        _Sizes(bounded, {}).load()
    unpickler = _Sizes(bounded, stand_ins)
    unpickler.load()
    needed, left = sum(unpickler.storages.values()), size - file.tell()
    if needed > left:
        raise UserError(f"it is truncated: its tensors need {needed:,} bytes, and {left:,} are stored")


class _Sizes(pickle._Unpickler):
    """Reads a pickle of torch without creating tensors, and finds how many bytes each storage must have.

    Written in Python, because the one written in C allocates memory for positions that a pickle merely names.
    """

    def __init__(self, file: Any, stand_ins: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.storages: dict[str, int] = {}
        functions = {f"torch._utils._rebuild_{name}": self._tensor for name in ("tensor", "tensor_v2", "tensor_v3")}
        first = {f"torch._utils._rebuild_{name}": _first for name in ("parameter", "parameter_with_state")}
        self._known = PLAIN | functions | first | dict(stand_ins)

    def load_build(self) -> None:
        """Leave out the state of an object: setting it could change a class."""
        self.stack.pop()  # type: ignore[attr-defined]

    def refuse(self) -> None:
        """Refuse an operation that torch does not write: this one allocates any number of bytes."""
        raise UserError("it holds a bytearray, which torch.save does not write")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: refuse,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a global of the pickle."""
        if module in {"torch", "torch.storage"} and name.removesuffix("Storage") in WIDTHS:
            return WIDTHS[name.removesuffix("Storage")]
        if f"{module}.{name}" not in self._known:
            if module.partition(".")[0] == "numpy":
                raise ObjectsError("it holds NumPy arrays or numbers, which are not read from a file of torch.save")
            raise UserError(MORE_THAN_TENSORS)
        return self._known[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        """Return the number of elements of a storage, and their size."""
        kind, width, key, _, count = pid[:5] if isinstance(pid, tuple) and len(pid) > 4 else [None] * 5
        if kind != "storage" or type(width) is not int or type(count) is not int or count < 0:
            raise UserError("a storage has no size")
        self.storages[str(key)] = max(self.storages.get(str(key), 0), count * width)
        return count * width, width

    def _tensor(self, storage: tuple[int, int], offset: int, shape: Any, strides: Any, *rest: Any) -> None:
        """Check that a tensor lies inside of its storage: torch would enlarge the storage."""
        numbers = [offset, *shape, *strides]
        if not all(type(one) is int and one >= 0 for one in numbers) or len(shape) != len(strides):
            raise UserError("a tensor has no shape")
        last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
        dtypes = [one for one in rest if isinstance(one, torch.dtype)]  # of types that came after typed storages
        held = storage[0] // (dtypes[0].itemsize if dtypes else storage[1])
        if 0 not in shape and last >= held:
            raise UserError(f"a tensor of shape {tuple(shape)} is larger than the {held:,} numbers stored for it")


def _first(value: Any, *_: Any) -> Any:
    return value


def _encode(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, by which a pickle of torch holds bytes."""
    if encoding != "latin1":
        raise UserError(f"bytes are encoded as {str(encoding)[:20]!r}")
    return text.encode("latin1")


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
# Bytes of one number in a storage.
WIDTHS = {
    "Untyped": 1, "Bool": 1, "Byte": 1, "Char": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
# Names in a pickle of torch that make neither tensors nor storages. Nothing is copied, however often a pickle asks.
PLAIN: dict[str, Any] = {
    "collections.OrderedDict": lambda *_: OrderedDict(),
    "collections.Counter": lambda *_: {},
    "builtins.set": lambda *_: set(),
    "__builtin__.set": lambda *_: set(),
    "torch.Size": _first,
    "torch.device": str,
    "_codecs.encode": _encode,
    "torch._tensor._rebuild_from_type_v2": lambda function, _, given, __: function(*given),
    "torch.nn.parameter.Parameter": None,
    **{str(dtype): dtype for dtype in DTYPES},
}


def to_safetensors(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Give the content of a safetensors file, with its checksum; equal contents make equal bytes."""
    content = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return _in_order(optional_module("safetensors.torch").save(content, metadata=sealed(words, content)))


def sealed(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Add to the words of a safetensors file the checksum of all that it holds."""
    return {**words, CHECKSUM: _checksum(words, tensors)}


def write_whole(path: Path, *content: bytes | memoryview, before: Path | None = None) -> None:
    """Write a file so that a reader, or a crash, never meets half of it.

    Args:
        path: where.
        content: what, in one piece or several.
        before: how the file that was there is called from then on; by default it is gone.
    """
    try:
        _write_whole(path, content, before)
    except OSError as error:
        if error.filename is not None:
            raise
        # A full disk does not say whose file it was.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write_whole(path: Path, content: Sequence[bytes | memoryview], before: Path | None) -> None:
    if path.is_symlink():
        path = path.resolve()  # the link stays, and what it points to is replaced
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(b"".join(content))  # a pipe or a device is no file that could be replaced
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, which ignores the umask. The name may be as long as a file system allows.
    temporary = path.parent / f".{path.name[:40]}.{secrets.token_hex(8)}{PART}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        if before is not None and path.is_file():
            also_called(path, before)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def also_called(path: Path, other: Path) -> None:
    """Give a file a second name, which may have been that of another file; at any moment both names have a file."""
    if other.exists() and other.samefile(path):
        return  # to rename one name of a file to another of its names does nothing, and would leave the link behind
    link = other.with_name(f".{other.name}{PART}")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # not every file system has links
        shutil.copyfile(path, link)
    link.replace(other)


def clear_parts(folder: Path) -> None:
    """Remove parts of files that a killed process has left in a folder; for who holds the folder's lock."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def _in_order(content: bytes) -> bytes:
    """Put the words of a safetensors file in order, so that equal predictions make equal bytes; it has them in none."""
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    head["__metadata__"] = dict(sorted(head["__metadata__"].items()))
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[end:]


def _checksum(words: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Give the CRC-32 of all that a safetensors file holds, whatever its order there."""
    shapes = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)]
    found = zlib.crc32(json.dumps([sorted(words.items()), shapes]).encode())
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
