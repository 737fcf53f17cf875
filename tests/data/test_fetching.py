"""Files are downloaded once, completely and verified; errors name a remedy."""

import gzip
import hashlib
import http.server
import io
import multiprocessing
import re
import socket
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

import fedlas
from data import synthetic
from fedlas.data import DamagedFileError, MissingFileError
from fedlas.data.base import fetching
from fedlas.data.base.fetching import Source, digest_of, fetch, locked, unpack
from serving import serving

# Python 3.12 and later warn of any fork in a process with threads; the children only fetch.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
CONTENT = bytes(range(256)) * 2000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serve bytes, with ranges if enabled; close the connection after the numbers of bytes in `break_after`."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if server.ranges and (byte_range := self.headers.get("Range")):
            start = int(re.fullmatch(r"bytes=(\d+)-", byte_range)[1])
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if server.lengths:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        time.sleep(server.delay)
        stop = start + server.break_after.pop(0) if server.break_after else len(content)
        self.wfile.write(content[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    attributes = {
        "files": {"/a.bin": CONTENT},
        "requests": [],
        "break_after": [],
        "ranges": True,
        "lengths": True,
        "delay": 0.0,
    }
    with serving(Handler, **attributes) as running_server:
        yield running_server


def source(server, path="/a.bin", md5=None):
    return source_with_checksums(server.files.get(path, b""), server.url + path, md5=md5)


def source_with_checksums(content, *urls, md5=None):
    """Return a source with both checksums, because plain HTTP without SHA-256 warns."""
    return Source(urls, md5 or hashlib.md5(content).hexdigest(), hashlib.sha256(content).hexdigest())


def file_names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_download_is_fsynced_before_it_is_renamed(server, tmp_path, monkeypatch):
    files_at_fsync = []
    monkeypatch.setattr(fetching.os, "fsync", lambda _: files_at_fsync.append(file_names_in(tmp_path)))
    fetch(source(server), tmp_path)
    assert files_at_fsync == [["a.bin.part"]]
    assert file_names_in(tmp_path) == ["a.bin"]


def test_file_is_downloaded_once_with_progress(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "BLOCK", 100_000)
    calls = []
    for _ in range(2):
        path = fetch(source(server), tmp_path / "new", progress=lambda *call: calls.append(call))
    assert path.read_bytes() == CONTENT
    assert [round(512_000 * call[1]) for call in calls] == [100_000, 200_000, 300_000, 400_000, 500_000, 512_000]
    assert {call[0] for call in calls} == {"downloading a.bin"}
    assert len(server.requests) == 1
    assert file_names_in(tmp_path / "new") == ["a.bin"]


def test_partial_download_is_resumed(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/a.bin", "bytes=1000-")]
    assert file_names_in(tmp_path) == ["a.bin"]


def test_broken_connection_is_resumed(server, tmp_path):
    server.break_after = [1000, 2000]
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT
    assert [byte_range for _, byte_range in server.requests] == [None, "bytes=1000-", "bytes=3000-"]


def test_partial_file_is_kept_after_repeated_failures(server, tmp_path):
    server.break_after = [1000] * 3
    with pytest.raises(MissingFileError, match=r"1000.*512000.*a\.bin"):
        fetch(source(server), tmp_path)
    assert (tmp_path / "a.bin.part").stat().st_size == 3000
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT


def test_download_restarts_if_the_server_has_no_ranges(server, tmp_path):
    server.ranges = False
    (tmp_path / "a.bin.part").write_bytes(b"something else")
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT


def test_download_works_without_content_length(server, tmp_path):
    server.lengths = False
    fractions = []
    assert fetch(source(server), tmp_path, progress=lambda *call: fractions.append(call[1])).read_bytes() == CONTENT
    assert set(fractions) == {None}


def test_complete_partial_file_is_accepted(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT


def test_wrong_partial_file_is_discarded(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(b"x" * 1000)
    assert fetch(source(server), tmp_path).read_bytes() == CONTENT
    assert [byte_range for _, byte_range in server.requests] == ["bytes=1000-", None]


def test_wrong_checksum_leaves_no_file(server, tmp_path):
    with pytest.raises(MissingFileError, match=f"MD5 is {hashlib.md5(CONTENT).hexdigest()}"):
        fetch(source(server, md5="0" * 32), tmp_path)
    assert file_names_in(tmp_path) == []


def test_wrong_sha256_raises_despite_a_correct_md5(server, tmp_path):
    """MD5 collisions can be constructed."""
    forged = Source((f"{server.url}/a.bin",), hashlib.md5(CONTENT).hexdigest(), "0" * 64)
    with pytest.raises(MissingFileError, match=f"SHA-256 is {hashlib.sha256(CONTENT).hexdigest()}"):
        fetch(forged, tmp_path)
    assert file_names_in(tmp_path) == []
    (tmp_path / "x.tar.gz").write_bytes(tar_of({"inside/b.txt": b"hello"}))
    archive = Source(("https://example.org/x.tar.gz",), digest_of(tmp_path / "x.tar.gz", "md5"), "0" * 64)
    with pytest.raises(DamagedFileError, match=r"x\.tar\.gz.*SHA-256.*0{64}"):
        unpack(archive, tmp_path, "inside")
    (tmp_path / "a.mat").write_bytes(CONTENT)
    with pytest.raises(DamagedFileError, match=r"a\.mat.*SHA-256.*0{64}"):
        fetching.checked_bytes(tmp_path / "a.mat", hashlib.md5(CONTENT).hexdigest(), "0" * 64)


def test_plain_http_with_md5_only_warns(server, tmp_path):
    md5_only = Source((f"{server.url}/a.bin",), hashlib.md5(CONTENT).hexdigest())
    with pytest.warns(UserWarning, match=r"/a\.bin.*TLS.*MD5"):
        fetch(md5_only, tmp_path)
    fetch(md5_only, tmp_path)  # the file exists: no download and no warning


def test_sources_without_tls_have_a_sha256(tmp_path, monkeypatch):
    sources = []

    def record_source(file_source, *_, **__):
        sources.append(file_source)
        raise MissingFileError("not here")

    monkeypatch.setattr("fedlas.data.base.dataset.fetch", record_source)
    monkeypatch.setattr(fetching, "fetch", record_source)
    for record in fedlas.list_data():
        if record.name not in {"digits", "folder"}:
            for part in ("train", "test"):
                with pytest.raises(MissingFileError):
                    fedlas.build_data(record.name, root=tmp_path / record.name).split(part)
    without_tls = {file_source for file_source in sources if any(url.startswith("http://") for url in file_source.urls)}
    assert {file_source.name for file_source in without_tls} >= {
        "train_32x32.mat",
        "test_32x32.mat",
        "tiny-imagenet-200.zip",
    }
    assert all(re.fullmatch("[0-9a-f]{64}", file_source.sha256 or "") for file_source in without_tls)
    # Five archives, and three data sets with a file for each part
    assert len({file_source.urls[0] for file_source in sources}) == 5 + 3 * 2
    for cls in (fedlas.data.MNIST, fedlas.data.FashionMNIST, fedlas.data.SVHN):
        assert set(cls.sha256) == set(cls.files)


def test_next_mirror_is_tried_after_a_404(server, tmp_path):
    server.files["/b/a.bin"] = CONTENT
    mirrors = source_with_checksums(CONTENT, f"{server.url}/gone/a.bin", f"{server.url}/b/a.bin")
    assert fetch(mirrors, tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/gone/a.bin", "/b/a.bin"]


def test_http_404_is_not_retried(server, tmp_path):
    with pytest.raises(MissingFileError, match=r"404.*gone\.bin.*http"):
        fetch(source(server, "/gone.bin"), tmp_path)
    assert len(server.requests) == 1


def test_refused_connection_error_names_file_and_url(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    unreachable = source_with_checksums(b"", f"http://127.0.0.1:{port}/a.bin")
    with pytest.raises(MissingFileError, match=rf"{tmp_path}/a\.bin.*refused.*{tmp_path}.*http://127.0.0.1:{port}"):
        fetch(unreachable, tmp_path)


def test_download_false_makes_no_request(server, tmp_path):
    with pytest.raises(MissingFileError, match="download"):
        fetch(source(server), tmp_path, download=False)
    assert server.requests == []
    assert not (tmp_path / "new").exists()


def test_unwritable_download_folder_raises(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MissingFileError, match=r"file/a\.bin"):
        fetch(source(server), tmp_path / "file")


def test_file_url_raises(tmp_path):
    with pytest.raises(ValueError, match="file:///etc/passwd"):
        fetch(Source(("file:///etc/passwd",), "0" * 32), tmp_path)


def fetch_in_process(file_source, folder, results):
    results.put(str(fetch(file_source, Path(folder))))


def test_concurrent_processes_download_once(server, tmp_path):
    server.delay = 0.3
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = (source(server), str(tmp_path), results)
    processes = [context.Process(target=fetch_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    assert {results.get(timeout=120) for _ in processes} == {str(tmp_path / "a.bin")}
    for process in processes:
        process.join(60)
    assert len(server.requests) == 1


def hold(path, ready, release):
    with locked(Path(path)):
        ready.set()
        release.wait(120)


def test_lock_is_released_when_its_process_is_killed(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "a"), ready, release))
    process.start()
    assert ready.wait(120)
    process.kill()
    process.join(60)
    with locked(tmp_path / "a"):
        pass


def tar_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize(("pack", "name"), [(tar_of, "/x.tar.gz"), (zip_of, "/x.zip")])
def test_archive_is_downloaded_and_unpacked_once(server, tmp_path, pack, name):
    server.files[name] = pack({"inside/a/b.txt": b"hello", "other.txt": b""})
    for _ in range(2):
        folder = unpack(source(server, name), tmp_path, "inside")
    assert (folder / "a" / "b.txt").read_bytes() == b"hello"
    assert file_names_in(tmp_path) == ["inside", name[1:]]
    assert len(server.requests) == 1


def test_manually_placed_archive_is_used(server, tmp_path):
    content = tar_of({"inside/b.txt": b"hello"})
    (tmp_path / "x.tar.gz").write_bytes(content)
    archive = Source(("https://example.org/x.tar.gz",), hashlib.md5(content).hexdigest())
    assert (unpack(archive, tmp_path, "inside", download=False) / "b.txt").exists()


def test_damaged_archive_raises(tmp_path):
    content = tar_of({"inside/b.txt": b"hello"})
    (tmp_path / "x.tar.gz").write_bytes(content[:-4])
    archive = Source(("https://example.org/x.tar.gz",), hashlib.md5(content).hexdigest())
    with pytest.raises(DamagedFileError, match=rf"{tmp_path}/x\.tar\.gz.*MD5"):
        unpack(archive, tmp_path, "inside")
    assert file_names_in(tmp_path) == ["x.tar.gz"]


def test_archive_without_the_expected_folder_raises(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(tar_of({"outside/b.txt": b"hello"}))
    archive = Source(("https://example.org/x.tar.gz",), digest_of(tmp_path / "x.tar.gz", "md5"))
    with pytest.raises(DamagedFileError, match=r"x\.tar\.gz.*inside"):
        unpack(archive, tmp_path, "inside")
    assert file_names_in(tmp_path) == ["x.tar.gz"]


def test_archive_cannot_write_outside_the_destination(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "x.tar.gz").write_bytes(tar_of({"inside/a": b"", "../../evil.txt": b"hello"}))
    archive = Source(("https://example.org/x.tar.gz",), digest_of(tmp_path / "root" / "x.tar.gz", "md5"))
    with pytest.raises(DamagedFileError, match=r"x\.tar\.gz.*outside the destination"):
        unpack(archive, tmp_path / "root", "inside")
    assert file_names_in(tmp_path / "root") == ["x.tar.gz"]
    assert not list(tmp_path.rglob("evil.txt"))


def test_missing_archive_error_names_url_and_destination(tmp_path):
    archive = Source(("https://example.org/x.tar.gz",), "0" * 32)
    with pytest.raises(MissingFileError, match=rf"{tmp_path}/inside.*x\.tar\.gz.*{tmp_path}.*https://example\.org"):
        unpack(archive, tmp_path, "inside", download=False)


def test_cifar10_is_downloaded_from_its_url(server, tmp_path, monkeypatch):
    synthetic.cifar(tmp_path / "made", monkeypatch, "cifar10")
    folder = tmp_path / "made" / "cifar-10-batches-bin"
    server.files["/cifar-10-binary.tar.gz"] = tar_of(
        {f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    )
    monkeypatch.setattr("fedlas.data.cifar10.CIFAR10.archive", source(server, "/cifar-10-binary.tar.gz"))
    calls = []
    data = fedlas.build_data("cifar10", root=tmp_path / "root", progress=lambda *call: calls.append(call))
    assert len(data.split("test")) == 10 * synthetic.TEST
    assert calls[-1][1] == 1.0
    assert file_names_in(tmp_path / "root") == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_mnist_files_are_downloaded_from_their_urls(server, tmp_path, monkeypatch):
    synthetic.WRITERS["mnist"](tmp_path / "made", monkeypatch)
    cls, files, sha256 = fedlas.data.MNIST, {}, {}
    for name, (_, content) in cls.files.items():
        path = tmp_path / "made" / "mnist" / name
        compressed_path = path.with_name(f"{name}.gz")
        compressed = compressed_path.read_bytes() if compressed_path.exists() else gzip.compress(path.read_bytes())
        server.files[f"/{name}.gz"] = compressed
        files[name] = (hashlib.md5(compressed).hexdigest(), content)
        sha256[name] = hashlib.sha256(compressed).hexdigest()
    monkeypatch.setattr(cls, "files", files)
    monkeypatch.setattr(cls, "sha256", sha256)
    monkeypatch.setattr(cls, "addresses", (server.url,))
    data = fedlas.build_data("mnist", root=tmp_path / "root")
    assert len(data.split("test")) == 10 * synthetic.TEST
    assert file_names_in(tmp_path / "root" / "mnist") == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
