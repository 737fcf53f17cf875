"""Small files with huge declared sizes or repeated values are read in little memory or raise before allocating."""

import io
import pickle
import subprocess
import sys
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlas
from fedlas.integrations.official import read_official
from fedlas.io import read_predictions, write_predictions
from fedlas.models.pretrained import read_weights
from fedlas.training import RunError, checkpoint

LONG = 100_000  # letters of one label
ROWS = 3_000


class Storage:
    """Stands for a storage of `count` numbers in a pickle of torch."""

    def __init__(self, count: int) -> None:
        self.count = count


class Rebuilt:
    """Stands for a tensor in a pickle of torch."""

    def __init__(self, stored: int, shape: int) -> None:
        self.stored, self.shape = stored, shape

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (Storage(self.stored), 0, (self.shape, 1), (1, 1), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments


class Pickler(pickle._Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", obj.count) if isinstance(obj, Storage) else None


def pickled(content: Any) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, 2).dump(content)
    return stream.getvalue()


def zipped(path: Path, content: bytes, numbers: bytes = bytes(4), packing: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", packing) as file:
        for name, part in {"data.pkl": content, "byteorder": b"little", "data/0": numbers, "version": b"3\n"}.items():
            file.writestr(f"a/{name}", part)
    return path


def a_function_call(path: Path) -> Path:
    """Call `bytearray` with the number of bytes to allocate, which torch allows in a pickle."""
    return zipped(path, b"\x80\x02}X\x06\x00\x00\x00logitsc__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x04\x85Rs.")


def a_stretched_storage(path: Path) -> Path:
    """Name a tensor that is larger than its storage, which torch enlarges."""
    return zipped(path, pickled({"logits": Rebuilt(1, 2**32)}))


def a_legacy_file(path: Path) -> Path:
    """Name a large storage in the format of torch 1.5, which allocates it before it reads the numbers."""
    parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    content = b"".join(pickle.dumps(part, 2) for part in parts)
    path.write_bytes(content + pickled({"logits": Rebuilt(2**32, 2**32)}) + pickle.dumps(["0"], 2))
    return path


def a_compressed_file(path: Path) -> Path:
    """Compress zeros, which torch unpacks."""
    return zipped(path, pickled({"logits": Rebuilt(2**20, 2**20)}), bytes(2**22), zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    ("make_file", "reason"),
    [
        (a_function_call, "more than tensors"),
        (a_stretched_storage, r"4294967296.* 1 "),
        (a_legacy_file, "17,179,869,184"),
        (a_compressed_file, "compressed"),
    ],
)
def test_a_torch_file_is_refused_before_torch_allocates_memory(
    tmp_path, monkeypatch, make_file: Callable[[Path], Path], reason: str
):
    path = make_file(tmp_path / "p.pt")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    for read in (read_predictions, read_weights, read_official):
        with pytest.raises(ValueError, match=rf"p\.pt.*{reason}"):
            read(path)
    with pytest.raises(RunError, match=r"p\.pt"):
        checkpoint.load(path)


CALLS = {
    "global": b"cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "stack global": b"X\x05\x00\x00\x00posixX\x06\x00\x00\x00system\x93X\x04\x00\x00\x00true\x85R.",
    "inst": b"(X\x04\x00\x00\x00trueiposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nX\x04\x00\x00\x00trueo.",
    "newobj": b"cposix\nsystem\n)\x81.",
    "attribute": b"ctorch\nnn.Module\n)R.",
    "storage": b"ctorch\nhub\n.",
    "codec": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "extension": b"\x82\x01.",
}


@pytest.mark.parametrize("call", CALLS)
def test_the_check_of_a_torch_file_imports_and_calls_nothing(tmp_path, monkeypatch, call):
    monkeypatch.setattr("os.system", lambda _: pytest.fail("it was called"))
    monkeypatch.setattr("posix.system", lambda _: pytest.fail("it was called"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    content = b"\x80\x04" + CALLS[call]
    for path in (zipped(tmp_path / "zip.pt", content), tmp_path / "legacy.pt"):
        if path.stem == "legacy":
            path.write_bytes(b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {})) + content)
        for read in (read_predictions, read_weights, read_official, checkpoint.load):
            with pytest.raises((ValueError, RunError), match=rf"{path.stem}\.pt"):
                read(path)


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_torch_save_files_are_read_unchanged(tmp_path, options):
    table = torch.randn(4, 3)
    content = {
        "state_dict": OrderedDict(a=torch.nn.Parameter(table), b=table.T[1:], c=torch.empty(0, 3), d=table.bfloat16()),
        "names": {"x", "y"}, "bytes": b"\x00\xff", "shape": table.shape, "device": torch.device("cpu"),
        "dtype": torch.float16, "half": torch.ones(2, dtype=torch.float16), "none": [None, True, 1.5, (2**70, -1)],
    }  # fmt: skip
    torch.save(content, tmp_path / "w.pth", **options)
    weights = read_weights(tmp_path / "w.pth")
    new = {"a": torch.arange(6).to(torch.uint16), "b": torch.ones(3).to(torch.float8_e4m3fn)}
    torch.save(new, tmp_path / "new.pth")  # torch reads these dtypes only in the newer format
    assert {name: item.dtype for name, item in read_weights(tmp_path / "new.pth").items()} == {
        name: item.dtype for name, item in new.items()
    }
    assert weights.keys() == content["state_dict"].keys()
    assert all(torch.equal(weights[name], item) for name, item in content["state_dict"].items())


def test_flipped_bits_in_a_torch_file_are_detected(tmp_path):
    torch.save({"logits": torch.randn(50, 4), "labels": torch.zeros(50, dtype=torch.long)}, tmp_path / "p.pt")
    content = bytearray((tmp_path / "p.pt").read_bytes())
    content[content.index(b"/data/0") + 200] ^= 1
    (tmp_path / "p.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"p\.pt.*data/0"):
        read_predictions(tmp_path / "p.pt")


@pytest.mark.parametrize("read", [read_predictions, read_weights, read_official])
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_truncated_torch_file_is_reported_as_truncated(tmp_path, read, options):
    content = {"logits": torch.randn(50, 4), "labels": torch.zeros(50, dtype=torch.long)}
    torch.save(content, tmp_path / "p.pt", **options)
    content = (tmp_path / "p.pt").read_bytes()
    for length in (0, 12, 100, len(content) // 2, len(content) - 30):
        (tmp_path / "p.pt").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"p\.pt.*(truncated|EOF)"):
            read(tmp_path / "p.pt")


ANNOUNCED = {
    "binbytes8": b"\x80\x04\x8e",
    "unicode8": b"\x80\x04\x8d",
    "frame": b"\x80\x04\x95",
    "bytearray8": b"\x80\x05\x96",
}


@pytest.mark.parametrize("operation", ANNOUNCED)
@pytest.mark.parametrize("write", [zipped, Path.write_bytes])
def test_pickle_with_a_huge_declared_length_allocates_nothing(tmp_path, operation, write):
    path = tmp_path / "p.pt"
    write(path, ANNOUNCED[operation] + (2**62).to_bytes(8, "little"))
    for read in (read_predictions, read_weights, read_official):
        with pytest.raises(ValueError, match=r"p\.pt.*(truncated|bytearray)"):
            read(path)


def test_the_check_of_a_torch_file_changes_no_class_and_copies_nothing(tmp_path):
    """Pickled state could set class attributes, and repeated copies could fill the memory."""
    build = b"\x80\x02ccollections\nCounter\n(N}X\x0b\x00\x00\x00most_commonNstb."
    copies = b"\x80\x02(" + b"K\x01" * 100_000 + b"tq\x000" + b"ctorch\nSize\nh\x00\x85R0" * 300 + b"N."
    for content in (build, copies):
        tracemalloc.start()
        with pytest.raises((ValueError, TypeError)):
            read_predictions(zipped(tmp_path / "p.pt", content))
        assert tracemalloc.get_traced_memory()[1] < 50e6
        tracemalloc.stop()
    assert callable(Counter.most_common)


def test_torch_archive_after_other_data_raises(tmp_path):
    path = zipped(tmp_path / "p.pt", pickled({"probs": 1}))
    path.write_bytes(b"PK\x03\x04" + bytes(60) + path.read_bytes())
    with pytest.raises(ValueError, match=r"before its archive"):
        read_predictions(path)


def long_label(folder: Path, suffix: str) -> Path:
    """Write a table in which one label is very long."""
    path = folder / f"p{suffix}"
    labels = ["a" * LONG] + ["b"] * (ROWS - 1)
    if suffix == ".csv":
        path.write_text("prob_b,label\n" + "".join(f"0.5,{label}\n" for label in labels))
    elif suffix == ".jsonl":
        path.write_text("".join(f'{{"prob_b": 0.5, "label": "{label}"}}\n' for label in labels))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        column = arrow.array(["a" * LONG] * ROWS).dictionary_encode()
        parquet.write_table(arrow.table({"prob_b": np.full(ROWS, 0.5), "label": column}), path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_very_long_label_is_not_copied_into_every_row(tmp_path, suffix):
    path = long_label(tmp_path, suffix)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"row 0|line [12]|a{80}"):
            read_predictions(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50 * 2**20  # 1,200 MB before


POOLS: list[Any] = []  # kept alive: pyarrow frees buffers through the pool that they came from


def repeated_parquet(path: Path, name: str, kind: str, rows: int) -> Path:
    """Write a parquet table with a column of one value of 200 bytes in every row, which is stored once."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    types = {"fixed": arrow.binary(200), "lists": arrow.list_(arrow.string())}
    value = b"a" * 200 if kind == "fixed" else ["a" * 200]
    column = arrow.array([value], type=types[kind]).take(arrow.array(np.zeros(rows, dtype=np.int64)))
    columns = {"prob_b": np.full(rows, 0.5), "label": np.zeros(rows, dtype=np.int64)} | {name: column}
    parquet.write_table(arrow.table(columns), path, compression="zstd")
    return path


@pytest.mark.parametrize("kind", ["fixed", "lists"])
def test_only_needed_parquet_columns_are_decoded(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    pool = arrow.default_memory_pool()
    counted = arrow.proxy_memory_pool(pool)
    POOLS.append(counted)
    unread = repeated_parquet(tmp_path / "unread.parquet", "comment", kind, 50_000)
    needed = [repeated_parquet(tmp_path / f"{name}.parquet", name, kind, 50_000) for name in ("label", "id", "label.x")]
    arrow.set_memory_pool(counted)
    try:
        assert read_predictions(unread).columns.unread == ["comment"]
        for path in needed:
            with pytest.raises(ValueError, match=rf"{path.name}.*{path.stem} holds"):
                read_predictions(path)
    finally:
        arrow.set_memory_pool(pool)
    assert counted.max_memory() < 5e6  # 10 MB for each such column


def test_very_long_class_name_is_not_repeated_in_every_npz_row(tmp_path):
    names, n = ("a" * LONG, "b"), 2_000
    predictions = fedlas.Predictions(
        torch.randn(n, 2), torch.ones(n).long(), class_names=names, ids=["c" * LONG, *range(n - 1)]
    )
    with pytest.raises(ValueError, match=r"ids.*\.parquet"):
        write_predictions(predictions, tmp_path / "p.npz")
    tracemalloc.start()
    try:
        write_predictions(predictions, tmp_path / "p.csv")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50 * 2**20


def test_one_low_confidence_does_not_expand_to_a_class_table(tmp_path):
    rows = "".join("0.9,0,0\n" for _ in range(2_000))
    (tmp_path / "p.csv").write_text(f"confidence,prediction,label\n{rows}0.001,1,1\n")
    with pytest.warns(UserWarning, match="prob_1"):
        result = read_predictions(tmp_path / "p.csv")
    assert isinstance(result, fedlas.TopLabelPredictions)
    assert result.num_classes == 2
    assert result.scores.shape == (2_001,)


LIMITED = """
import resource, sys
import fedlas, fedlas.report.evaluation_result, fedlas.integrations.official
from fedlas.io import read_predictions
size = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, size + 2**29))
for path in sys.argv[1:]:
    try:
        print(path, len(read_predictions(path)))
    except ValueError as error:
        print(path, "refused")
"""


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a process is read from /proc")
def test_hostile_files_are_read_within_half_a_gigabyte(tmp_path, monkeypatch):
    """Regression: each of these files took 9 GB or more."""
    monkeypatch.setattr(sys.modules[__name__], "ROWS", 30_000)
    files = [long_label(tmp_path, suffix) for suffix in (".csv", ".jsonl", ".parquet")]
    files += [repeated_parquet(tmp_path / f"{kind}.parquet", "label", kind, 3_000_000) for kind in ("fixed", "lists")]
    files += [
        make_file(tmp_path / f"{make_file.__name__}.pt")
        for make_file in (a_function_call, a_stretched_storage, a_legacy_file)
    ]
    (tmp_path / "top.csv").write_text("confidence,prediction,label\n" + "0.9,0,0\n" * 300_000 + "0.001,1,1\n")
    command = [sys.executable, "-c", LIMITED, *map(str, files), str(tmp_path / "top.csv")]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert [line.split()[-1] for line in process.stdout.splitlines()] == ["refused"] * 8 + ["300001"]
