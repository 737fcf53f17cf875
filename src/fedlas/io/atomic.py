"""Atomic writes: a reader, or a crash, never meets a partial file."""

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

PARTIAL = ".part"  # suffix of a file that is being written


def write_atomic(path: Path, *content: bytes | memoryview, backup: Path | None = None) -> None:
    """Write a file atomically.

    Args:
        path: the file; its folder is created.
        content: its content, in one or several parts.
        backup: new name of the file that was there before; by default that file is replaced.
    """
    try:
        _write(path, content, backup)
    except OSError as error:
        if error.filename is not None:
            raise
        # The error about a full disk does not name the file.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write(path: Path, content: Sequence[bytes | memoryview], backup: Path | None) -> None:
    if path.is_symlink():
        path = path.resolve()  # keep the link, replace its target
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(b"".join(content))  # a pipe or a device cannot be replaced
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, which ignores the umask. The name may be as long as a file system allows.
    temporary = path.parent / f".{path.name[:40]}.{secrets.token_hex(8)}{PARTIAL}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        if backup is not None and path.is_file():
            link_atomic(path, backup)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def link_atomic(path: Path, other: Path) -> None:
    """Give a file a second name, which may replace another file; both names exist at any moment."""
    if other.exists() and other.samefile(path):
        return  # renaming one hard link to another of the same file does nothing, and would leave the link
    link = other.with_name(f".{other.name}{PARTIAL}")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # not every file system has hard links
        shutil.copyfile(path, link)
    link.replace(other)


def remove_partial_files(folder: Path) -> None:
    """Remove partial files that a killed process left; the caller must hold the lock of the folder."""
    for path in folder.glob(f".*{PARTIAL}"):
        path.unlink(missing_ok=True)
