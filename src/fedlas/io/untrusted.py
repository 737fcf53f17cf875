"""Untrusted files: checks before reading, limits of unpacked sizes, and errors that name the file.

A reader never waits for a pipe, allocates far more memory than the file has bytes, or unpickles objects.
"""

import gzip
import io
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlas.errors import FROM_FILE, RowError, UserError, UserTypeError
from fedlas.progress import Progress

ALLOCATOR = "DefaultCPUAllocator: "  # begins the message of torch about memory
BATCH = 2**15  # bytes of a text file that are read together: their cells fit into a cache
# A file whose content is larger than both limits is rejected: bytes, and multiple of the size of the file.
MAX_UNPACKED, MAX_RATIO = 2**28, 100


class ObjectsError(UserError):
    """A file holds Python objects, which are never read: it is not damaged, and must be written in another way."""


def check_file(path: str | Path) -> None:
    """Raise if the path exists and is not a regular file: reading a pipe would block, a device may have no end."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return  # opening it raises the error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        raise UserError(f"{path} is a {kinds.get(stat.S_IFMT(mode), 'device')}, not a file")


def path_inside(folder: Path, name: str | Path, owner: str) -> Path:
    """Return the path of a file of a folder; raise if it leads elsewhere, by `..` or by a link.

    Otherwise an untrusted folder could make any file be read or overwritten. The folder itself may be a link.

    Args:
        folder: such as a run folder.
        name: path of the file, relative to the folder.
        owner: what the folder is, for errors.
    """
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise UserError(f"{folder / name} lies outside of {folder}")
    path = folder
    for part in parts:
        path /= part
        if path.is_symlink():
            raise UserError(f"{path} is a link; files of {owner} are never links: remove it, or copy its target")
    return path


def memory_message(error: BaseException) -> str | None:
    """Return the message of a RuntimeError of torch about exhausted memory; None for other errors."""
    _, allocator, message = str(error).partition(ALLOCATOR)
    return message.strip() if allocator and isinstance(error, RuntimeError) else None


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise a MemoryError where torch raises a RuntimeError about exhausted memory."""
    try:
        yield
    except RuntimeError as error:
        message = memory_message(error)
        if message is None:
            raise
        raise MemoryError(message) from error


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Raise if the path is not a regular file; name it in the errors of a parser, which mean that it is damaged."""
    check_file(path)
    try:
        with memory_errors():
            yield
    except MemoryError:
        raise  # which is not the fault of the file
    except ObjectsError as error:
        raise ObjectsError(f"{path}: {error}") from error
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise  # a missing file names itself; a parser's OSError without a number means damage
        # NumPy's message about Python objects advises to load them.
        reason = "it holds no arrays of numbers" if "allow_pickle" in str(error) else error
        raise UserError(f"{path} is damaged, or not a file of this kind: {reason}") from error


@contextmanager
def content_errors(path: str | Path, lines: Sequence[int] | None = None) -> Iterator[None]:
    """Name the file in errors about its content; whatever its content breaks becomes a `UserError`.

    Args:
        path: the file, or a text that describes another source.
        lines: of a text file, the line of each row.
    """
    before = FROM_FILE.set(isinstance(path, Path))
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
    """Raise if the content of a small file would fill the memory."""
    packed = Path(path).stat().st_size
    if size > max(MAX_UNPACKED, MAX_RATIO * packed):
        raise UserError(f"its {packed:,} bytes would unpack to {size:,}, which no predictions do")


class _Unpacked(io.RawIOBase):
    """The content of a gzip file; raises if it is too large for the size of the file."""

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


def format_suffix(path: str | Path) -> str:
    """Return the suffix that names the format of a file, in lower case; .gz is skipped."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() == ".gz" else path).suffix.lower()


def open_text(path: str | Path, newline: str | None = None) -> io.TextIOWrapper:
    """Open a text file in UTF-8, compressed if its name ends in .gz."""
    if Path(path).suffix.lower() != ".gz":
        return Path(path).open(newline=newline, encoding="utf-8-sig")
    content = io.BufferedReader(_Unpacked(Path(path)), 2**16)
    return io.TextIOWrapper(content, newline=newline, encoding="utf-8-sig")


def read_batches(file: io.TextIOWrapper, path: str | Path, progress: Progress | None = None) -> Iterator[list[str]]:
    """Read the lines of a text, some at a time; report progress as a fraction of the file, unless it is compressed."""
    progress = progress if file.seekable() else None
    size = max(1, Path(path).stat().st_size)
    try:
        while lines := file.readlines(BATCH):
            if progress is not None:
                progress(f"reading {Path(path).name}", min(1.0, file.buffer.tell() / size))  # type: ignore[attr-defined]
            yield lines
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text in UTF-8 ({error}); save it in that encoding") from error
