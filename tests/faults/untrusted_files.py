"""Campaign on untrusted files: each file is read or rejected, and has no other effect.

    python tests/faults/untrusted_files.py        every hostile file, and 40 damaged copies of each valid one

Files are generated from a seed and opened one after the other in a separate process, which may not use more than
`EXTRA_BYTES` of memory beyond the libraries, nor more than `CPU_SECONDS` per file; running out of memory is a failure.
A Python audit hook reports every class that a pickle refers to, every subprocess and every file opened for writing. The
payload of each pickle would create a file. A rejected file must raise an expected error that names the file.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXTRA_BYTES = 2 * 2**30  # bytes of address space beyond that of the imports
MAX_MIB = 1500  # MiB of memory per file
CPU_SECONDS, WALL_SECONDS = 60, 600  # CPU seconds per file, and wall-clock seconds
EXPECTED_ERRORS = (ValueError, TypeError, OSError)
BOMB_BYTES = 2**31  # size of an unpacked bomb
MANY_COLUMNS = 1_000_000  # columns, or names
IMAGE_SUFFIXES = (".png", ".bmp", ".tiff", ".gif", ".jpg", ".webp")
PREDICTION_SUFFIXES = (
    ".safetensors", ".npz", ".npy", ".csv", ".tsv", ".txt", ".parquet", ".json", ".jsonl", ".pt", ".pth",
)  # fmt: skip
PREDICTIONS = {f"predictions{suffix}": suffix for suffix in PREDICTION_SUFFIXES}
IMAGES = {f"image{suffix}": suffix for suffix in IMAGE_SUFFIXES}
SUFFIXES = PREDICTIONS | IMAGES | {
    "calibrator": ".safetensors", "checkpoint": ".pt", "weights": ".pth", "official": ".pth", "report": ".json",
    "recipe": ".json", "log": ".jsonl", "ledger": ".jsonl", "idx": ".gz", "kept": ".npz", "program": ".pt2",
    "cifar": "", "archive.tar.gz": ".tar.gz", "archive.zip": ".zip",
}  # fmt: skip
# Files inside a run folder or ledger, where all links are rejected.
LINKS_REJECTED = ("recipe", "log", "ledger", "kept")
LINK = "a link to somebody's file"
# Audit events that indicate side effects of a file; the CIFAR unpickler resolves its few classes itself.
FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"}


class Payload:
    """Create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch '{self.path}'",)


# Valid files, from which damaged copies are made


def write_valid_files(folder: Path) -> dict[str, Path]:
    """Write one valid file of every kind."""
    import numpy as np
    import torch

    import fedlas

    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    predictions = fedlas.Predictions(
        torch.randn(20, 3, generator=draw), torch.arange(20) % 3, class_names=["a", "b", "c"], split="val"
    )
    files = {}
    for suffix in (".safetensors", ".npz", ".csv", ".parquet", ".jsonl"):
        files[f"predictions{suffix}"] = fedlas.write_predictions(predictions, folder / f"p{suffix}")
    columns = {"logits": predictions.logits, "labels": predictions.labels}
    (folder / "p.json").write_text(json.dumps({name: item.tolist() for name, item in columns.items()}))
    torch.save(columns, folder / "p.pt")
    torch.save(columns, folder / "p.pth", _use_new_zipfile_serialization=False)
    np.save(folder / "p.npy", predictions.probs.numpy())
    for suffix in (".tsv", ".txt"):
        (folder / f"p{suffix}").write_text((folder / "p.csv").read_text().replace(",", "\t"))
    text_suffixes = (".json", ".pt", ".pth", ".npy", ".tsv", ".txt")
    files |= {f"predictions{suffix}": folder / f"p{suffix}" for suffix in text_suffixes}
    fedlas.build_calibrator("temperature").fit(predictions).save(folder / "calibrator.safetensors")
    torch.save({"state_dict": {"fc.weight": torch.ones(3, 2)}}, folder / "weights.pth")
    fedlas.evaluate(predictions, intervals=False).save(folder / "report.json")
    (folder / "run").mkdir(exist_ok=True)
    recipe = fedlas.Recipe(data="digits", model="small_cnn", loss="ce")
    (folder / "run" / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    _train(folder / "trained")
    (folder / "ledger").mkdir(exist_ok=True)
    (folder / "ledger" / "digits-x.jsonl").write_text(ledger_line(recipe).to_json() + "\n")
    (folder / "images.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01" + struct.pack(">I", 5) + bytes(5)))
    (folder / "kept.npz").write_bytes(_stored_bytes(predictions))
    for suffix in IMAGE_SUFFIXES:
        (folder / f"picture{suffix}").write_bytes(picture(suffix))
    (folder / "data.tar.gz").write_bytes(tar_of({"inside/a.txt": b"hello"}))
    (folder / "data.zip").write_bytes(zip_of({"inside/a.txt": b"hello"}))
    return files | valid_files(folder)


def valid_files(folder: Path) -> dict[str, Path]:
    """Return where `write_valid_files` writes the files other than predictions."""
    return {
        "calibrator": folder / "calibrator.safetensors", "checkpoint": folder / "trained" / "checkpoint.pt",
        "weights": folder / "weights.pth", "official": folder / "weights.pth", "report": folder / "report.json",
        "recipe": folder / "run" / "recipe.json", "ledger": folder / "ledger" / "digits-x.jsonl",
        "log": folder / "trained" / "log.jsonl",
        "idx": folder / "images.gz", "kept": folder / "kept.npz", "archive.tar.gz": folder / "data.tar.gz",
        "archive.zip": folder / "data.zip",
    } | {f"image{suffix}": folder / f"picture{suffix}" for suffix in IMAGE_SUFFIXES}  # fmt: skip


def picture(suffix: str, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return an image file with a few colours."""
    from PIL import Image

    gradient, content = Image.radial_gradient("L").resize(size), io.BytesIO()
    Image.merge("RGB", (gradient, gradient.rotate(90), gradient)).save(content, Image.registered_extensions()[suffix])
    return content.getvalue()


def _train(folder: Path) -> None:
    """Train a small run, for its checkpoint."""
    import fedlas

    options: dict[str, Any] = {"batch_size": 50, "data_options": {"train_samples": 100}}
    fedlas.fit(fedlas.recipe_for("digits", loss="fedlas_ls", epochs=2, **options), out=folder, progress=False)


def ledger_line(recipe: Any) -> Any:
    from fedlas.experiments.ledger import SHOWN, Line, line_id

    name = line_id(recipe, None)
    stored = {"file": f"predictions/{name}.npz", "sha256": "0" * 64}
    metric_values = dict.fromkeys(SHOWN, (0.1, None, None))
    return Line(id=name, recipe=recipe, protocol="x", metrics=metric_values, predictions=stored)


def _stored_bytes(predictions: Any) -> bytes:
    from fedlas.experiments.stored_predictions import StoredPredictions

    return StoredPredictions.of(predictions).pack()


def tar_of(files: dict[str, bytes | tuple[str, str]]) -> bytes:
    """Pack files into an archive; a pair is a link type and its target."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, entry in files.items():
            member = tarfile.TarInfo(name)
            if isinstance(entry, tuple):
                member.type, member.linkname = (
                    {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}[entry[0]],
                    entry[1],
                )
                archive.addfile(member)
            else:
                member.size = len(entry)
                archive.addfile(member, io.BytesIO(entry))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, entry in files.items():
            archive.writestr(name, entry)
    return buffer.getvalue()


# Untrusted content


def write_hostile_files(
    folder: Path, payload_file: Path, bomb_bytes: int = BOMB_BYTES, many_columns: int = MANY_COLUMNS
) -> list[tuple[str, str, Path]]:
    """Write hostile files; return their kinds, faults and paths."""
    folder.mkdir(parents=True, exist_ok=True)
    result: list[tuple[str, str, Path]] = []

    def new_path(kind: str, fault: str) -> Path:
        path = folder / f"{len(result):03d}" / f"f{SUFFIXES[kind]}"
        path.parent.mkdir()
        result.append((kind, fault, path))
        return path

    def add(kind: str, fault: str, content: bytes) -> None:
        new_path(kind, fault).write_bytes(content)

    for kind, suffix in (PREDICTIONS | IMAGES).items():
        add(kind, "empty", b"")
        add(kind, "random bytes", random.Random(1).randbytes(5000))
        add(kind, "UTF-16", "logit_a,logit_b,label\n1,2,0\n".encode("utf-16"))
        add(kind, "zeros", bytes(4096))
        add(kind, "a pickle", pickle.dumps({"logits": Payload(payload_file)}, 2))
        add(kind, "a pickle, protocol 4", pickle.dumps(Payload(payload_file), 4))
        add(kind, "another kind of file", zip_of({"a": b"b"}) if suffix != ".npz" else b"PAR1" + bytes(99))
    valid = valid_files(folder.parent / "sound")
    for kind in SUFFIXES:
        for fault, make in _special_files(valid.get(kind)).items():
            make(new_path(kind, fault))
    _text_files(add, many_columns)
    _arrays(add, payload_file, bomb_bytes, many_columns)
    _tensors(add, payload_file, many_columns)
    _checkpoints(add, folder.parent / "sound" / "trained" / "checkpoint.pt")
    _metadata(add, payload_file, many_columns)
    _archives(add, bomb_bytes)
    _images(add)
    return result


def _special_files(valid_file: Path | None) -> dict[str, Callable[[Path], None]]:
    """Return faults that apply to any file, with functions that create them."""
    return {
        "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
        "a pipe that nobody writes to": os.mkfifo,
        "a link to itself": lambda path: path.symlink_to(path),
        "a folder": Path.mkdir,
    } | ({} if valid_file is None else {LINK: lambda path: path.symlink_to(valid_file)})


def _text_files(add: Callable[..., Path], many_columns: int) -> None:
    header = ",".join(f"logit_{i}" for i in range(many_columns))
    add("predictions.csv", "many columns", f"{header},label\n{','.join(['0'] * many_columns)},0\n".encode())
    add("predictions.csv", "many equal columns", (",".join(["logit_a"] * many_columns) + "\n1\n").encode())
    add("predictions.csv", "many unknown columns", (",".join(f"w{i}" for i in range(many_columns)) + "\n").encode())
    add("predictions.csv", "a cell without end", b"logit_a,logit_b,label\n1,2," + b"9" * (20 * many_columns) + b"\n")
    add("predictions.csv", "a quote without end", b'logit_a,logit_b,label\n1,"2' + b"\n0,0,0" * (many_columns // 2))
    add("predictions.csv", "infinite and missing numbers", b"logit_a,logit_b,label\n1e999,nan,0\n")
    add("predictions.csv", "NUL bytes", b"logit_a,logit_b,label\n1\x00,2,0\n")
    add("predictions.csv", "a label without end", b"logit_a,logit_b,label\n1,2," + b"9" * 5000 + b"\n")
    add("predictions.csv", "very low confidences", b"confidence,prediction,label\n0.001,a,b\n" * 3)
    for kind in (".json", ".jsonl"):
        name = f"predictions{kind}"
        add(name, "nested 100,000 deep", b"[" * 100_000 + b"]" * 100_000)
        add(name, "objects nested 100,000 deep", b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
        add(name, "a number of 100,000 digits", b'{"logits": [[' + b"9" * 100_000 + b', 1]], "labels": [0]}')
        add(name, "a number of 400 digits", b'{"logits": [[' + b"9" * 400 + b', 1]], "labels": [0]}')
        add(name, "a label of 400 digits", b'{"logits": [[2.0, 1.0]], "labels": [' + b"9" * 400 + b"]}")
        add(name, "NaN", b'{"logits": [[NaN, 1]], "labels": [0]}')
        add(name, "a lone surrogate", b'{"logits": [[0.5, 1.5]], "labels": ["\\ud800"]}')
        add(name, "many names", json.dumps({f"n{i}": [1] for i in range(many_columns)}).encode())
        add(name, "null", b"null")
        add(name, "strings in place of tables", b'{"logits": "abc", "labels": {"a": 1}, "class_names": 3}')
        add(name, "invalid class names", b'{"logits": [[1.0, 2.0]], "labels": [0], "class_names": [[1], null]}')
        add(name, "an index of strings", b'{"logits": [[1.0, 2.0]], "labels": [0], "index": ["a"]}')
        add(name, "a split that is not a string", b'{"logits": [[1.0, 2.0]], "labels": [0], "split": [1]}')


def _arrays(add: Callable[..., Path], payload_file: Path, bomb_bytes: int, many_columns: int) -> None:
    import numpy as np

    def npy(array: Any, **options: Any) -> bytes:
        content = io.BytesIO()
        np.lib.format.write_array(content, np.asarray(array), **options)
        return content.getvalue()

    objects = npy(np.array([Payload(payload_file)], dtype=object), allow_pickle=True)
    misdeclared = npy(np.zeros(3)).replace(b"(3,), ", f"({10**11},), ".encode())
    header = npy(np.zeros(1))[:128].replace(b"(1,), ", f"({bomb_bytes // 8},), ".encode())
    add("predictions.npz", "an array of objects", zip_of({"logits.npy": objects, "labels.npy": npy([0])}))
    add("predictions.npz", "objects as class names", zip_of(
        {"logits.npy": npy(np.zeros((1, 2))), "labels.npy": npy([0]), "class_names.npy": objects}))  # fmt: skip
    add("predictions.npz", "a wrong declared shape", zip_of({"logits.npy": misdeclared}))
    add("predictions.npz", "a name with parent folders", zip_of({"../../logits.npy": npy(np.zeros((1, 2)))}))
    add("predictions.npz", "a string in place of a table", zip_of({"logits.npy": npy("abc"), "labels.npy": npy(3)}))
    scalars = {"logits.npy": npy(1.0), "labels.npy": npy(0), "class_names.npy": npy("a"), "index.npy": npy(1.5)}
    add("predictions.npz", "tables without dimensions", zip_of(scalars))
    add("predictions.npz", "one array, no archive", npy(np.zeros((2, 2))))
    add("predictions.npz", "an array of objects, no archive", objects)
    for kind in ("predictions.npz", "kept"):
        content = io.BytesIO()
        with (
            zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("logits.npy", "w", force_zip64=True) as file,
        ):
            file.write(header)
            for _ in range(bomb_bytes // 2**24):
                file.write(bytes(2**24))
        add(kind, "a zip bomb", content.getvalue())
    add("kept", "an array of objects", zip_of({"labels.npy": objects, "logits.npy": objects}))
    add("kept", "a wrong declared shape", zip_of({"labels.npy": misdeclared, "logits.npy": misdeclared}))
    pyarrow, parquet = __import__("pyarrow"), __import__("pyarrow.parquet").parquet
    content = io.BytesIO()
    rows = 2**20
    table = pyarrow.table({"logit_a": np.zeros(rows), "logit_b": np.zeros(rows), "label": np.zeros(rows, np.int64)})
    with parquet.ParquetWriter(content, table.schema, compression="zstd") as writer:
        for _ in range(max(1, bomb_bytes // (24 * rows))):
            writer.write_table(table)
    add("predictions.parquet", "a bomb of equal rows", content.getvalue())
    content = io.BytesIO()
    parquet.write_table(
        pyarrow.table({f"logit_{i}": [0.0] for i in range(many_columns // 50)} | {"label": [0]}), content
    )
    add("predictions.parquet", "very many columns", content.getvalue())
    nested = pyarrow.array([[[[1.0]]]])
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({"logits": nested, "label": [0]}), content)
    add("predictions.parquet", "lists of lists of lists", content.getvalue())


def _tensors(add: Callable[..., Path], payload_file: Path, many_columns: int) -> None:
    import torch

    def torch_bytes(value: Any, **options: Any) -> bytes:
        content = io.BytesIO()
        torch.save(value, content, **options)
        return content.getvalue()

    stretched = torch.zeros(1).expand(10**6, 10**6)
    nested: Any = torch.zeros(1)
    for _ in range(200):
        nested = {"state_dict": nested}
    cyclic: dict[str, Any] = {}
    cyclic["state_dict"] = cyclic
    for kind in ("predictions.pt", "checkpoint", "weights", "official"):
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            format_name = "legacy" if options else "zip"
            add(kind, f"an object inside, {format_name}", torch_bytes({"logits": Payload(payload_file)}, **options))
            add(
                kind,
                f"an object as a key, {format_name}",
                torch_bytes({("a", 1): torch.ones(2), "format": Payload(payload_file)}, **options),
            )
        add(
            kind,
            "a tensor of 4 TB on 4 bytes",
            torch_bytes({"logits": stretched, "labels": torch.zeros(1), "state_dict": {"a": stretched}}),
        )
        add(kind, "nested 200 deep", torch_bytes(nested))
        add(kind, "a dictionary that contains itself", torch_bytes(cyclic))
        add(kind, "a list", torch_bytes([1, 2, 3]))
        add(kind, "a pickle", pickle.dumps(Payload(payload_file), 2))
        add(kind, "millions of opcodes", b"\x80\x02" + b"]" * (3 * many_columns) + b".")
    add(
        "predictions.pt", "a sparse table", torch_bytes({"logits": torch.eye(3).to_sparse(), "labels": torch.arange(3)})
    )
    add(
        "predictions.pt",
        "a complex table",
        torch_bytes({"logits": torch.eye(3).to(torch.cfloat), "labels": torch.arange(3)}),
    )
    add("predictions.pt", "no tensors", torch_bytes({"logits": "abc", "labels": None, "class_names": 3}))
    add("program", "a pickle", pickle.dumps(Payload(payload_file), 2))
    add("program", "a pickle among the constants", zip_of({
        "f/archive_format": b"pt2", "f/byteorder": b"little", "f/.data/serialization_id": b"1",
        "f/data/constants/opaque_obj_0": pickle.dumps(Payload(payload_file))}, zipfile.ZIP_STORED))  # fmt: skip


def _checkpoints(add: Callable[..., Path], file: Path) -> None:
    """Write checkpoints that torch reads but that no run has written."""
    import torch

    checkpoint: dict[str, Any] = torch.load(file, weights_only=True)
    step, (random_state, *_) = checkpoint["step"], checkpoint["random"]
    generator, state, position, *gauss = random_state["numpy"]

    def write(fault: str, content: Any) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        add("checkpoint", fault, buffer.getvalue())

    write("the right format alone", {"format": checkpoint["format"]})
    write("other names", {"format": checkpoint["format"], "step": 3, "weights": {"a": torch.ones(3)}})
    for name in checkpoint:
        write(f"no {name}", {key: value for key, value in checkpoint.items() if key != name})
        for invalid in ("x", None, [1], {3: "a"}, torch.ones(2), -7):
            write(f"{name} is {type(invalid).__name__}", checkpoint | {name: invalid})
    for name in step:
        write(
            f"no {name} in the step", checkpoint | {"step": {key: entry for key, entry in step.items() if key != name}}
        )
        for invalid in ("x", torch.full((), float("nan")), torch.ones(3, 3), {"a": 1}):
            write(f"{name} of the step is {type(invalid).__name__}", checkpoint | {"step": step | {name: invalid}})
    for epoch, position in ((10**9, 0), (1, 10**6), (2, 1), (1, 0), (0, 0)):
        write(f"epoch {epoch}, position {position}", checkpoint | {"epoch": epoch, "position": position})
    write("weights of another network", checkpoint | {"model": {"a": torch.ones(1)}, "best": {"a": torch.ones(1)}})
    write("no best weights", checkpoint | {"best": {}})
    write("best weights in other shapes", checkpoint | {"best": {name: torch.ones(1) for name in checkpoint["best"]}})
    stretched = {name: torch.ones(1).expand(10**6, 10**6) for name in checkpoint["model"]}
    write("weights of one number, stretched", checkpoint | {"model": stretched, "best": stretched})
    write("an optimizer that remembers nothing", checkpoint | {"optimizer": [{} for _ in checkpoint["optimizer"]]})
    write("an optimizer of fewer weights", checkpoint | {"optimizer": checkpoint["optimizer"][:1]})
    write(
        "sparse weights",
        checkpoint | {"model": {name: entry.to_sparse() for name, entry in checkpoint["model"].items()}},
    )
    write("a loss of other names", checkpoint | {"loss": {"a": torch.ones(1), "_extra_state": 5}})
    history = step["gate"]["history"] | {"_extra_state": [5]}
    write("a history of numbers", checkpoint | {"step": step | {"gate": step["gate"] | {"history": history}}})
    write("no generators", checkpoint | {"random": []})
    for name in random_state:
        for invalid in ("x", [1, 2, 3], torch.ones(3)):
            if name != "device":
                write(
                    f"generator {name} is {type(invalid).__name__}",
                    checkpoint | {"random": [random_state | {name: invalid}]},
                )
    numpy = [generator, state, 10**9, *gauss]
    write("a numpy position out of range", checkpoint | {"random": [random_state | {"numpy": numpy}]})


def _metadata(add: Callable[..., Path], payload_file: Path, many_columns: int) -> None:
    def tensors(metadata: dict[str, str], data: bytes = struct.pack("<4f", 0, 1, 2, 3)) -> bytes:
        header = json.dumps(
            {"__metadata__": metadata, "logits": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
        )
        return struct.pack("<Q", len(header)) + header.encode() + data

    nested = "[" * 100_000 + "]" * 100_000
    for kind, name in (("predictions.safetensors", "fedlas.predictions/1"), ("calibrator", "fedlas.calibrator/1")):
        valid_metadata = {"format": json.dumps(name)}
        add(kind, "a header without end", struct.pack("<Q", 2**62) + b"{}")
        add(kind, "deeply nested metadata", tensors(valid_metadata | {"split": nested, "name": nested}))
        add(kind, "metadata that is not JSON", tensors(valid_metadata | {"class_names": "{", "options": "{"}))
        invalid = {"class_names": "3", "ids": "7", "name": '"../../etc"', "options": "[]", "fitted": "[]"}
        add(kind, "metadata of wrong types", tensors(valid_metadata | invalid))
        add(kind, "offsets outside of the file", tensors(valid_metadata, b""))
    for name in ("temperature", "os.system", "__class__", "isotonic", ["a"], 3, None):
        calibrator_metadata = {
            "format": '"fedlas.calibrator/1"',
            "name": json.dumps(name),
            "options": '{"__class__": 1}',
            "fitted": "{}",
        }
        add("calibrator", f"the name {name!r}", tensors(calibrator_metadata))
    for kind in ("report", "recipe", "ledger", "log"):
        add(kind, "empty", b"")
        add(kind, "nested 100,000 deep", nested.encode())
        add(kind, "a list", b"[1, 2]")
        add(kind, "UTF-16", '{"a": 1}'.encode("utf-16"))
        add(kind, "a pickle", pickle.dumps(Payload(payload_file), 2))
        add(kind, "many names", json.dumps({f"n{i}": 1 for i in range(many_columns)}).encode())
        add(kind, "null everywhere", json.dumps(dict.fromkeys(("format", "states", "recipe", "id", "data"))).encode())
        add(
            kind,
            "numbers in place of strings",
            b'{"format": 1, "data": 2, "model": [], "loss": {}, "seed": 1e400, "epochs": -1}',
        )
        add(kind, "the right format alone", b'{"format": "fedlas.report/1", "states": [[]], "n": {}}')
    for line in (
        "5",
        "null",
        '"diverged"',
        "[[]]",
        "true",
        '{"epoch": 1}\n5',
        '{"epoch": "x", "diverged": 3}',
        "{}\n{}",
    ):
        add("log", f"the line {line!r}", f"{line}\n".encode())
    add(
        "recipe",
        "a name with parent folders",
        b'{"data": "../../x", "model": "/etc", "loss": "..", "cache": "/nowhere/x"}',
    )


def _archives(add: Callable[..., Path], bomb_bytes: int) -> None:
    bomb = zip_of({"inside/zeros": bytes(2**26)})
    add("idx", "a gzip bomb", gzip.compress(bytes(2**24)) * max(1, bomb_bytes // 2**24))
    add("idx", "a wrong declared shape", gzip.compress(b"\x00\x00\x08\xff" + b"\xff" * 1020))
    add("idx", "no gzip", b"abc")
    add("cifar", "a pickle", pickle.dumps(Payload(Path("/nowhere")), 2))
    add(
        "archive.zip",
        "names with parent folders",
        zip_of({"inside/a": b"", "../../climbed.txt": b"x", "/abs/climbed.txt": b"x"}),
    )
    add("archive.zip", "archives inside of an archive", zip_of({"inside/b.zip": bomb}))
    add("archive.tar.gz", "names with parent folders", tar_of({"inside/a": b"", "../../climbed.txt": b"x"}))
    add("archive.tar.gz", "an absolute name", tar_of({"inside/a": b"", "/climbed-absolute.txt": b"x"}))
    add(
        "archive.tar.gz",
        "a file written through a link",
        tar_of({"inside/out": ("symbolic", "../../.."), "inside/out/climbed.txt": b"x"}),
    )
    add("archive.tar.gz", "a link to a secret", tar_of({"inside/secret": ("symbolic", "/etc/passwd")}))
    add("archive.tar.gz", "a hard link to a secret", tar_of({"inside/secret": ("hard", "/etc/passwd")}))
    add("archive.tar.gz", "not a tar archive", gzip.compress(b"abc" * 1000))


def _images(add: Callable[..., Path]) -> None:
    for suffix in IMAGE_SUFFIXES:
        kind = f"image{suffix}"
        add(kind, "a text", b"no image\n" * 100)
        add(kind, "only a header", picture(suffix)[:60])
        for other_suffix in IMAGE_SUFFIXES:
            add(kind, f"of the kind {other_suffix}", picture(other_suffix))
    for side in (10_000, 13_000, 20_000, 2**31 - 1):
        add("image.png", f"a bomb of {side} x {side}", png_of(side))
    for suffix, position in ((".bmp", 18), (".gif", 6)):
        for size in (b"\xff" * 4, b"\xff\x3f\0\0", b"\0" * 4, b"\0\0\0\x80"):
            content = bytearray(picture(suffix))
            content[position : position + 4] = size
            add(f"image{suffix}", f"another size, {size.hex()}", bytes(content))


def png_of(side: int) -> bytes:
    """Return a small PNG file with a huge number of black pixels."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress(bytes(min(side, 20_000) * (1 + min(side, 20_000) // 8)), 9)
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", rows) + part(b"IEND", b"")


def damaged_copies(kind: str, path: Path, folder: Path, copies: int) -> list[tuple[str, str, Path]]:
    """Make truncated copies of a valid file, and copies with changed bytes."""
    content, rng = path.read_bytes(), random.Random(f"{kind}")
    result = []
    for number in range(copies):
        changed = bytearray(content)
        if number % 2:
            fault, changed = "cut short", changed[: rng.randrange(len(changed))]
        else:
            fault = "other bytes"
            for _ in range(rng.choice((1, 1, 3, 20))):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        target = folder / f"{kind}-{number}" / path.name
        target.parent.mkdir(parents=True)
        target.write_bytes(bytes(changed))
        result.append((kind, fault, target))
    return result


# Readers


def readers() -> dict[str, Callable[[Path], Any]]:
    """Return the function that opens each kind of file, as a user would."""
    import fedlas
    from fedlas.data.base.fetching import Source, checked_bytes, digest_of, unpack
    from fedlas.data.base.formats import plain_unpickled, read_idx
    from fedlas.data.base.images import Transform, decode
    from fedlas.evaluation_report import Report
    from fedlas.experiments.ledger import Ledger
    from fedlas.experiments.stored_predictions import load_stored_predictions
    from fedlas.integrations.export import load_program
    from fedlas.integrations.official import read_official
    from fedlas.io import READERS
    from fedlas.models.pretrained import read_weights
    from fedlas.training import checkpoint
    from fedlas.training.predict_run import predict_with
    from fedlas.training.run_folder import Run

    def recipe(path: Path) -> Any:
        if path.name != "recipe.json":
            path = path.rename(path.with_name("recipe.json"))
        result = Run(path.parent).recipe
        assert "/" not in result.name
        assert result.name not in {".", ".."}
        return result

    def resume_checkpoint(path: Path) -> Any:
        """Resume and predict with a checkpoint in a copy of its run."""
        trained = path.parents[2] / "sound" / "trained"
        result = checkpoint.load(path)
        for use in (
            lambda run: fedlas.fit(Run(run).recipe, out=run, resume=True, progress=False),
            lambda run: predict_with(run, "digits", out=run / "p.safetensors", progress=False),
        ):
            run = Path(tempfile.mkdtemp(dir=path.parent))
            for name in ("recipe.json", "environment.json", "log.jsonl"):
                shutil.copyfile(trained / name, run / name)
            shutil.copyfile(path, run / "checkpoint.pt")
            use(run)
        return result

    def resume_log(path: Path) -> Any:
        """Read a log, and resume a copy of the valid run with it."""
        run, trained = Path(tempfile.mkdtemp(dir=path.parent)), path.parents[2] / "sound" / "trained"
        for name in ("recipe.json", "environment.json", "checkpoint.pt"):
            shutil.copyfile(trained / name, run / name)
        if path.is_symlink() or not path.is_file():
            path.rename(run / "log.jsonl")
        else:
            shutil.copyfile(path, run / "log.jsonl")
        result = Run(run).log
        fedlas.fit(Run(run).recipe, out=run, resume=True, progress=False)
        return result

    def load_stored(path: Path) -> Any:
        line = ledger_line(fedlas.Recipe(data="digits", model="small_cnn", loss="ce"))
        # An untrusted line with the correct checksum.
        checksum = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        stored = {"file": path.name, "sha256": checksum}
        return load_stored_predictions(dataclasses.replace(line, predictions=stored), Ledger(path.parent))

    def archive(path: Path) -> Any:
        if path.name.startswith("."):
            raise ValueError(path)
        return unpack(
            Source((f"https://nowhere.invalid/{path.name}",), digest_of(path, "md5")),
            path.parent,
            "inside",
            download=False,
        )

    transform = Transform(size=8, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    result: dict[str, Callable[[Path], Any]] = {f"predictions{suffix}": fedlas.read_predictions for suffix in READERS}
    return result | {
        "calibrator": fedlas.load_calibrator, "checkpoint": resume_checkpoint, "weights": read_weights,
        "official": read_official, "report": Report.load, "recipe": recipe,
        "log": resume_log, "ledger": lambda path: Ledger(path.parent).lines, "idx": read_idx, "archive.tar.gz": archive,
        "archive.zip": archive, "program": load_program,
        "kept": load_stored, "cifar": lambda path: plain_unpickled(checked_bytes(path, None), path),
    } | {f"image{suffix}": lambda path: decode(path, transform) for suffix in IMAGE_SUFFIXES}  # fmt: skip


def peak() -> int:
    """Return the peak memory of this process since `reset_peak`, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def reset_peak() -> int:
    """Reset the peak, and return the current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def open_all(cases: list[list[str]], payload_file: Path, folder: Path) -> None:
    """Open files one after the other and print a record for each; called in a separate process."""
    import warnings

    import torch

    torch.set_num_threads(1)
    reader_of = readers()
    for kind, path in ((kind, path) for kind, fault, path in cases if fault == "sound"):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader_of[kind](Path(path))  # import lazily loaded modules before measuring
    tempfile.gettempdir()  # writes a test file at its first call
    events: list[str] = []
    writable = {"folder": folder}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            events.append(f"{event} {arguments[:2]}")
        if event != "open" or not isinstance(arguments[0], str) or not isinstance(arguments[2], int):
            return
        writes = arguments[2] & (os.O_WRONLY | os.O_RDWR) and not arguments[0].startswith("/proc/self")
        if writes and not Path(arguments[0]).resolve().is_relative_to(writable["folder"]):
            events.append(f"writes {arguments[0]}")

    sys.addaudithook(hook)
    size = 1024 * int(
        next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    for kind, fault, name in cases:
        path, start = Path(name), time.process_time()
        writable["folder"] = path.parent.resolve()
        events.clear()
        before = reset_peak()
        signal.alarm(WALL_SECONDS)
        faulthandler.dump_traceback_later(
            WALL_SECONDS + CPU_SECONDS, exit=True
        )  # also works if Python signal handlers cannot run
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        record: dict[str, Any] = {"kind": kind, "what": fault}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = reader_of[kind](path)
                record |= {"outcome": "read", "message": str(result)[:80]}
            except TimeoutError as error:
                record |= {"outcome": "BAD", "message": f"{error}"}
            except EXPECTED_ERRORS as error:
                text = str(error)
                names_file = str(path) in text or str(path.parent) in text
                record |= {
                    "outcome": "refused" if names_file else "BAD",
                    "message": f"{type(error).__name__}: {text[:300]}",
                }
            except BaseException as error:
                record |= {"outcome": "BAD", "message": f"{type(error).__name__}: {str(error)[:300]}"}
            finally:
                signal.alarm(0)
                faulthandler.cancel_dump_traceback_later()
                signal.setitimer(signal.ITIMER_PROF, 0)
        result = None
        record |= {"seconds": time.process_time() - start, "mib": (peak() - before) / 2**20, "events": [*events]}
        if payload_file.exists():
            record |= {"outcome": "BAD", "message": "the payload ran"}
            payload_file.unlink()
        if events:
            record["outcome"] = "BAD"
        print(json.dumps(record), flush=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took longer than {CPU_SECONDS} s")


def campaign(
    folder: Path, copies: int, bomb_bytes: int = BOMB_BYTES, many_columns: int = MANY_COLUMNS
) -> list[dict[str, Any]]:
    """Make all files, open them, and return the outcome of each."""
    payload_file = folder / "the-payload-ran"
    valid = write_valid_files(folder / "sound")
    cases = [(kind, "sound", path) for kind, path in valid.items()]
    cases += write_hostile_files(folder / "hostile", payload_file, bomb_bytes, many_columns)
    for kind, path in valid.items():
        cases += damaged_copies(kind, path, folder / "damaged", copies)
    before = set(folder.parent.iterdir())
    case_file = folder / "cases.json"
    case_file.write_text(json.dumps([[kind, fault, str(path)] for kind, fault, path in cases]))
    command = [sys.executable, __file__, "--open", str(case_file)]
    environment = os.environ | {"FEDLAS_COMMIT": "none"}  # avoids calls of git
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    records = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    if len(records) < len(cases):
        kind, fault, _ = cases[len(records)]
        message = f"the process died: {process.stderr[-500:]}"
        records.append({"kind": kind, "what": fault, "outcome": "BAD", "message": message, "seconds": 0.0, "mib": 0.0})
    for record in records:
        record.update(check_record(record))
    strays = [str(path) for path in folder.parent.iterdir() if path not in before]
    strays += [str(path) for path in folder.rglob("climbed*")] + [str(path) for path in Path("/tmp").glob("climbed*")]
    if strays:
        records.append(
            {"kind": "all", "what": "strays", "outcome": "BAD", "message": str(strays), "seconds": 0.0, "mib": 0.0}
        )
    return records


def check_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a failure for too much memory or time or a followed link, or an empty dictionary."""
    if record["mib"] >= MAX_MIB:
        return {"outcome": "BAD", "message": f"took {record['mib']:.0f} MiB; {record['message']}"}
    if record["seconds"] >= CPU_SECONDS:
        return {"outcome": "BAD", "message": f"took {record['seconds']:.0f} s; {record['message']}"}
    if record["kind"] in LINKS_REJECTED and record["what"] == LINK and record["outcome"] == "read":
        return {"outcome": "BAD", "message": f"was followed; {record['message']}"}
    return {}


def main() -> int:
    """Run the campaign; return a non-zero exit status after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=40)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        folder = arguments.open.parent
        open_all(json.loads(arguments.open.read_text()), folder / "the-payload-ran", folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        records = campaign(Path(temporary) / "campaign", arguments.copies)
    failures = [record for record in records if record["outcome"] == "BAD"]
    print(*failures, f"{len(records)} files, {len(failures)} handled wrongly", sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
