"""Files that others publish: finding them, fetching them once, checking and unpacking them.

A fetched file appears under its name only when it is complete and its checksum is right; until then it is `NAME.part`,
and a fetch that broke off goes on where it stopped. A lock, which dies with its process, keeps two processes from
fetching the same file.
"""

import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fedlas.errors import UserError

# Called while a file is fetched, with its name, the bytes there are, and the bytes there will be if that is known.
Progress: TypeAlias = Callable[[str, int, int | None], None]

BLOCK = 1 << 20
TRIES = 3
PATIENCE = 30.0  # seconds without a byte


class MissingFileError(FileNotFoundError):
    """A data file is not there; the message says which file to put where."""


class DamagedFileError(UserError):
    """A data file does not hold what was published; the message names it."""


@dataclass(frozen=True)
class Source:
    """A file that others publish: its addresses, best first, and the MD5 of its bytes.

    An MD5 finds damage, but somebody on the way could make another file that has it. So a file that may come without
    TLS should have a SHA-256 too; fetching one that has none gives a warning.
    """

    urls: tuple[str, ...]
    md5: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        """What the file is called."""
        return self.urls[0].rpartition("/")[2]

    def advice(self, folder: Path) -> str:
        """Tell a person what to do when the file cannot be fetched."""
        return f"put {self.name} into {folder} by hand: it is at {' or '.join(self.urls)} (MD5 {self.md5})"

    def fault(self, path: Path) -> tuple[str, str, str] | None:
        """Say which checksum of a file is not the published one, what it is and what it should be."""
        return _fault(self.md5, self.sha256, lambda kind: _digest_of(path, kind))


def regular(path: Path, *, ours: bool = False) -> Path:
    """Refuse pipes, devices and folders in the place of a file; data may be links, but no lock or part of ours."""
    if ours and path.is_symlink():
        raise DamagedFileError(f"{path} is a link, which nobody here makes: remove it")
    if path.exists() and not path.is_file():
        raise DamagedFileError(f"{path} is a folder, a pipe or a device, not a file")
    return path


def md5_of(path: Path) -> str:
    """Hash a file."""
    return _digest_of(path, "md5")


def _digest_of(path: Path, kind: str) -> str:
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _fault(md5: str | None, sha256: str | None, found: Callable[[str], str]) -> tuple[str, str, str] | None:
    for kind, name, wanted in (("md5", "MD5", md5), ("sha256", "SHA-256", sha256)):
        if wanted is not None and (there := found(kind)) != wanted:
            return name, there, wanted
    return None


def checked_bytes(path: Path, md5: str | None, sha256: str | None = None) -> bytes:
    """Read a file, once, and make sure of its checksums."""
    try:
        content = regular(path).read_bytes()
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there: remove {path.parent} and unpack it again") from None
    fault = _fault(md5, sha256, lambda kind: hashlib.new(kind, content, usedforsecurity=False).hexdigest())
    if fault is not None:
        raise DamagedFileError(f"{path} is damaged: its {fault[0]} is {fault[1]}, the published one {fault[2]}")
    return content


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock that belongs to a path, waiting for whoever has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with regular(path.parent / f".{path.name}.lock", ours=True).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(source: Source, folder: Path, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return where a published file lies in a folder, and fetch it first if it is not there."""
    path = folder / source.name
    if path.exists():
        return path
    if not download:
        raise MissingFileError(f"{path} is not there and download is off; {source.advice(folder)}")
    try:
        with locked(path):
            if not path.exists():  # another process may have fetched it while we waited
                _fetch_from_any(source, path, progress)
    except OSError as error:
        if isinstance(error, MissingFileError):
            raise
        raise MissingFileError(
            f"{path} is not there and could not be fetched ({error}); {source.advice(folder)}"
        ) from error
    return path


def _fetch_from_any(source: Source, path: Path, progress: Progress | None) -> None:
    reasons = []
    for url in source.urls:
        if url.startswith("http://") and source.sha256 is None:
            warnings.warn(
                f"{url} has no TLS, and only an MD5 is known of what it should give: somebody on the way could put "
                "another file in its place",
                stacklevel=2,
            )
        for _ in range(TRIES):
            try:
                part = _fetch_part(url, path, progress)
            except urllib.error.HTTPError as error:
                reasons.append(f"{url}: {error}")
                break  # the server has answered; asking again will not change its mind
            except (OSError, http.client.HTTPException) as error:
                reasons.append(f"{url}: {error}")
                continue
            fault = source.fault(part)
            if fault is None:
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(path)
                return
            part.unlink()  # nothing to go on from: another try starts anew
            reasons.append(f"{url}: what came has the {fault[0]} {fault[1]}")
    tried = "; ".join(dict.fromkeys(reasons))
    raise MissingFileError(f"{path} could not be fetched ({tried}); {source.advice(path.parent)}")


def _fetch_part(url: str, path: Path, progress: Progress | None) -> Path:
    """Fetch what is still missing of a file, and return the complete `NAME.part`."""
    from fedlas.https import HTTPSRedirectHandler  # noqa: PLC0415  only downloads need it

    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url} is no web address")
    part = regular(path.with_name(f"{path.name}.part"), ours=True)
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})  # noqa: S310
    try:
        reply = urllib.request.build_opener(HTTPSRedirectHandler).open(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            error.close()
            return part  # there is nothing after what we have; the checksum tells whether it is the whole
        raise
    with reply:
        goes_on = reply.status == http.HTTPStatus.PARTIAL_CONTENT
        have = have if goes_on else 0
        length = reply.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with part.open("ab" if goes_on else "wb") as file:
            while block := reply.read(BLOCK):
                file.write(block)
                have += len(block)
                if progress is not None:
                    progress(path.name, have, total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection broke off after {have} of {total} bytes")
    return part


def unpack(source: Source, root: Path, inside: str, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return a folder that comes in a published archive, and fetch and unpack the archive if it is not there.

    Args:
        source: the archive.
        root: where the archive lies and the folder belongs.
        inside: the folder's name in the archive.
        download: whether the archive may be fetched.
        progress: told about the fetching.
    """
    folder = root / inside
    if folder.exists():
        return folder
    try:
        archive = fetch(source, root, download=download, progress=progress)
    except MissingFileError as error:
        raise MissingFileError(f"{folder} is not there. {error}; or unpack it to {folder}") from error
    with locked(folder):
        if folder.exists():
            return folder
        fault = source.fault(archive)
        if fault is not None:
            raise DamagedFileError(f"{archive} is damaged: its {fault[0]} is {fault[1]}, the published one {fault[2]}")
        room = Path(tempfile.mkdtemp(prefix=f".{inside}.", dir=root))
        try:
            with _named(archive):
                _extract(archive, room)
            if not (room / inside).is_dir():
                raise DamagedFileError(f"{archive} holds no folder {inside}")
            os.sync()  # one by one, many thousand small files would take minutes
            (room / inside).replace(folder)
        finally:
            shutil.rmtree(room, ignore_errors=True)
    return folder


@contextmanager
def _named(archive: Path) -> Iterator[None]:
    """Name the archive in whatever error is about it; one about the disk stays what it is."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise
        raise DamagedFileError(f"{archive} cannot be unpacked: {error}") from error


def _extract(archive: Path, room: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(room)  # noqa: S202
        return
    with tarfile.open(archive) as packed:
        # Early 3.11 has no filters; the checksum of the archive has been checked either way.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        packed.extractall(room)  # noqa: S202
