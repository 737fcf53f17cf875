"""Files of `torch.save`: tensors and plain values are read, and nothing is unpickled beyond these."""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from fedlas.errors import UserError
from fedlas.io.columns import ReadOptions
from fedlas.io.table import Table
from fedlas.io.untrusted import ObjectsError, check_unpacked, file_errors, memory_errors
from fedlas.progress import Progress

MORE_THAN_TENSORS = "it holds more than tensors, numbers and words, which is never loaded"
LEGACY = 0x1950A86A20F9469CFC6C  # begins a file of torch before 1.6


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read a dictionary of tensors."""
    del options, progress
    with file_errors(path):
        try:
            with memory_errors():
                content = read_torch(path)
        except (MemoryError, FileNotFoundError, PermissionError):
            raise
        except ObjectsError as error:
            raise ObjectsError(f"{error}; save tensors (torch.from_numpy), or a .npz file (numpy.savez)") from error
        except Exception as error:
            raise UserError(f"{error}; save a dictionary of tensors: torch.save({{'logits': ...}})") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: a dictionary of tensors is expected, not {type(content).__name__}")
    # A tensor may be larger than its storage, by a stride of zero.
    check_unpacked(path, sum(value.nbytes for value in content.values() if isinstance(value, torch.Tensor)))
    return Table({str(name): value for name, value in content.items()})


def read_torch(path: str | Path, content: bytes | None = None, stand_ins: Mapping[str, Any] | None = None) -> Any:
    """Read a file of `torch.save`: tensors and plain values, which take no more memory than the file.

    The pickle is first read without creating any tensor, because torch allocates whatever size a pickle names.

    Args:
        path: the file.
        content: its bytes, if they have been read already.
        stand_ins: replacements of further names in the pickle, such as "numpy.dtype".
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
        names: list[Any] = [(value, name) for name, value in (stand_ins or {}).items()]
        try:
            with torch.serialization.safe_globals(names):
                return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # torch's message advises to unpickle everything.
            raise UserError(MORE_THAN_TENSORS) from error


def _check_torch(file: Any, size: int, stand_ins: Mapping[str, Any]) -> None:
    """Raise if a tensor of a file needs more bytes than are stored, or the file holds other objects."""
    if file.read(4) != b"PK\x03\x04":
        file.seek(0)
        _check_legacy(file, size, stand_ins)
        return
    with zipfile.ZipFile(file) as parts:
        if min((entry.header_offset for entry in parts.infolist()), default=0):
            raise UserError("other data comes before its archive, which torch.save does not do")
        entries = {entry.filename: entry for entry in parts.infolist()}
        compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values())
        stored = sum(entry.file_size for entry in entries.values())
        if compressed or len(entries) < len(parts.infolist()) or stored > size:
            raise UserError("its parts are compressed, or overlap, which torch.save does not do")
        damaged = parts.testzip()
        if damaged is not None:
            raise UserError(f"the checksum of {damaged} is wrong: bits have changed since it was written")
        folder = next(iter(entries), "").partition("/")[0]
        unpickler = _Sizes(io.BytesIO(parts.read(f"{folder}/data.pkl")), stand_ins)
        unpickler.load()
    for key, needed in unpickler.storages.items():
        entry = entries.get(f"{folder}/data/{key}")
        stored = 0 if entry is None else entry.file_size
        if entry is None or stored < needed:
            raise UserError(f"a tensor needs {needed:,} bytes, and {stored:,} are stored")


def _check_legacy(file: Any, size: int, stand_ins: Mapping[str, Any]) -> None:
    """Check a file of torch before 1.6: several pickles, then the numbers."""
    # A pickle may announce a text of any length, and `file.read` allocates it first.
    bounded = SimpleNamespace(read=lambda count: file.read(min(count, size)), readline=file.readline)
    if _Sizes(bounded, {}).load() != LEGACY:
        raise UserError("torch.save did not write it")
    for _ in range(2):  # version of the format, properties of the machine
        _Sizes(bounded, {}).load()
    unpickler = _Sizes(bounded, stand_ins)
    unpickler.load()
    needed, left = sum(unpickler.storages.values()), size - file.tell()
    if needed > left:
        raise UserError(f"it is truncated: its tensors need {needed:,} bytes, and {left:,} are stored")


class _Sizes(pickle._Unpickler):
    """Read a pickle of torch without creating tensors, and find how many bytes each storage must have.

    Derived from the unpickler in Python: the one in C allocates memory for any memo position that a pickle names.
    """

    def __init__(self, file: Any, stand_ins: Mapping[str, Any]) -> None:
        super().__init__(file)
        self.storages: dict[str, int] = {}
        functions = {f"torch._utils._rebuild_{name}": self._tensor for name in ("tensor", "tensor_v2", "tensor_v3")}
        first = {f"torch._utils._rebuild_{name}": _first for name in ("parameter", "parameter_with_state")}
        self._known = PLAIN | functions | first | dict(stand_ins)

    def load_build(self) -> None:
        """Skip the state of an object: setting it could change a class."""
        self.stack.pop()  # type: ignore[attr-defined]

    def reject(self) -> None:
        """Reject an operation that torch does not write, and that allocates any number of bytes."""
        raise UserError("it holds a bytearray, which torch.save does not write")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: reject,
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
        """Raise if a tensor is larger than its storage, which torch would enlarge."""
        numbers = [offset, *shape, *strides]
        if not all(type(number) is int and number >= 0 for number in numbers) or len(shape) != len(strides):
            raise UserError("a tensor has no shape")
        last = offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
        dtypes = [value for value in rest if isinstance(value, torch.dtype)]  # of types newer than typed storages
        stored = storage[0] // (dtypes[0].itemsize if dtypes else storage[1])
        if 0 not in shape and last >= stored:
            raise UserError(f"a tensor of shape {tuple(shape)} is larger than the {stored:,} numbers stored for it")


def _first(value: Any, *_: Any) -> Any:
    return value


def _encode(text: str, encoding: str) -> bytes:
    """Replace `_codecs.encode`, which makes the bytes objects of a pickle."""
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
# Replacements of names in a pickle that create neither tensors nor storages; none of them copies anything.
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
