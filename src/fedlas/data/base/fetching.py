"""Download, verify and unpack the files of data sets.

A download is written to `NAME.part` and renamed when it is complete and its checksum is correct; an interrupted
download is resumed. A lock, which is released when its process ends, prevents two processes from downloading the same
file.
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

from fedlas.errors import UserError
from fedlas.https import HTTPSRedirectHandler
from fedlas.progress import Progress

BLOCK = 1 << 20
TRIES = 3
PATIENCE = 30.0  # timeout of the connection in seconds


class MissingFileError(FileNotFoundError):
    """A data file is missing; the message names the file and its folder."""


class DamagedFileError(UserError):
    """A data file differs from the official one; the message names it."""


@dataclass(frozen=True)
class Source:
    """A file to download: its URLs, in order of preference, and its checksums.

    An MD5 detects damage but not an attack on an unencrypted connection, because another file with the same MD5 can be
    constructed. A file that may be downloaded without TLS should have a SHA-256 too; without one there is a warning.
    """

    urls: tuple[str, ...]
    md5: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.urls[0].rpartition("/")[2]

    def advice(self, folder: Path) -> str:
        """Return instructions for a download by hand."""
        return f"put {self.name} into {folder} by hand: it is at {' or '.join(self.urls)} (MD5 {self.md5})"

    def checksum_error(self, path: Path) -> str | None:
        """Describe the first wrong checksum, or return None."""
        return _checksum_error(self.md5, self.sha256, lambda kind: digest_of(path, kind))


def regular(path: Path, *, ours: bool = False) -> Path:
    """Raise if the path is a folder, pipe or device, or, for files created by fedlas (`ours`), a link."""
    if ours and path.is_symlink():
        raise DamagedFileError(f"{path} is a link, which fedlas never creates: remove it")
    if path.exists() and not path.is_file():
        raise DamagedFileError(f"{path} is a folder, a pipe or a device, not a file")
    return path


def digest_of(path: Path, kind: str) -> str:
    """Return the digest of a file, such as its "md5"."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _checksum_error(md5: str | None, sha256: str | None, digest_of: Callable[[str], str]) -> str | None:
    for kind, name, expected in (("md5", "MD5", md5), ("sha256", "SHA-256", sha256)):
        if expected is not None and (actual := digest_of(kind)) != expected:
            return f"its {name} is {actual}, the published one {expected}"
    return None


def checked_bytes(path: Path, md5: str | None, sha256: str | None = None) -> bytes:
    """Read a file once, and verify its checksums."""
    try:
        content = regular(path).read_bytes()
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there: remove {path.parent} and unpack it again") from None
    checksum_error = _checksum_error(
        md5, sha256, lambda kind: hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    )
    if checksum_error is not None:
        raise DamagedFileError(f"{path} is damaged: {checksum_error}")
    return content


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a path; wait if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with regular(path.parent / f".{path.name}.lock", ours=True).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(source: Source, folder: Path, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return the path of a file in a folder; download it first if it does not exist."""
    path = folder / source.name
    if path.exists():
        return path
    if not download:
        raise MissingFileError(f"{path} is not there and download is off; {source.advice(folder)}")
    try:
        with locked(path):
            if not path.exists():  # another process may have downloaded it while we waited
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
                f"{url} has no TLS, and only the MD5 of the file is known: an attacker on the network could put "
                "another file in its place",
                stacklevel=2,
            )
        for _ in range(TRIES):
            try:
                part = _fetch_part(url, path, progress)
            except urllib.error.HTTPError as error:
                reasons.append(f"{url}: {error}")
                break  # the server responded with an error: do not retry
            except (OSError, http.client.HTTPException) as error:
                reasons.append(f"{url}: {error}")
                continue
            checksum_error = source.checksum_error(part)
            if checksum_error is None:
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(path)
                return
            part.unlink()  # the next try starts from the beginning
            reasons.append(f"{url}: the downloaded file is damaged: {checksum_error}")
    tried = "; ".join(dict.fromkeys(reasons))
    raise MissingFileError(f"{path} could not be fetched ({tried}); {source.advice(path.parent)}")


def _fetch_part(url: str, path: Path, progress: Progress | None) -> Path:
    """Download the missing rest of a file, and return the complete `NAME.part`."""
    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url} is not a web address")
    part = regular(path.with_name(f"{path.name}.part"), ours=True)
    downloaded = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={downloaded}-"} if downloaded else {})  # noqa: S310
    try:
        reply = urllib.request.build_opener(HTTPSRedirectHandler).open(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            error.close()
            return part  # nothing is left to download; the checksum is verified by the caller
        raise
    with reply:
        resumed = reply.status == http.HTTPStatus.PARTIAL_CONTENT
        downloaded = downloaded if resumed else 0
        length = reply.headers.get("Content-Length")
        total = None if length is None else downloaded + int(length)
        with part.open("ab" if resumed else "wb") as file:
            while block := reply.read(BLOCK):
                file.write(block)
                downloaded += len(block)
                if progress is not None:
                    progress(f"downloading {path.name}", None if total is None else downloaded / total)
    if total is not None and downloaded < total:
        raise ConnectionError(f"the connection was closed after {downloaded} of {total} bytes")
    return part


def unpack(source: Source, root: Path, inside: str, *, download: bool = True, progress: Progress | None = None) -> Path:
    """Return the folder that an archive contains; download and unpack the archive if the folder does not exist.

    Args:
        source: the archive.
        root: the parent folder of the archive and of the unpacked folder.
        inside: the folder's name in the archive.
        download: whether the archive may be downloaded.
        progress: called during the download.
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
        checksum_error = source.checksum_error(archive)
        if checksum_error is not None:
            raise DamagedFileError(f"{archive} is damaged: {checksum_error}")
        temporary = Path(tempfile.mkdtemp(prefix=f".{inside}.", dir=root))
        try:
            with _named(archive):
                _extract(archive, temporary)
            if not (temporary / inside).is_dir():
                raise DamagedFileError(f"{archive} holds no folder {inside}")
            os.sync()  # syncing many thousand small files one by one would take minutes
            (temporary / inside).replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def _named(archive: Path) -> Iterator[None]:
    """Name the archive in errors about its content; errors about the disk are not changed."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise
        raise DamagedFileError(f"{archive} cannot be unpacked: {error}") from error


def _extract(archive: Path, folder: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)  # noqa: S202
        return
    with tarfile.open(archive) as packed:
        # Early releases of Python 3.11 have no filters; the checksum of the archive was verified before.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        packed.extractall(folder)  # noqa: S202
