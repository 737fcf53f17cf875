"""Campaign on untrusted files: each file is read or rejected, and has no other effect.

    python tests/faults/untrusted_files.py        every hostile file, and 40 damaged copies of each sound one
    python tests/faults/untrusted_files.py --copies 5   a short one

Files are generated from a seed and opened one after the other in a separate process, which may not use more than `ROOM`
bytes of memory beyond the libraries, nor more than `PATIENCE` CPU seconds per file; running out of memory is a failure.
A Python audit hook reports every class that a pickle refers to, every subprocess and every file opened for writing. The
payload of each pickle would create a file, and targets of links must not change. A rejected file must raise an expected
error that names the file.
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

ROOM = 2 * 2**30  # bytes of address space beyond that of the imports
MOST = 1500  # MiB of memory per file
PATIENCE, WAIT = 60, 600  # CPU seconds per file, and wall-clock seconds
CLEAR = (ValueError, TypeError, OSError)
BIG = 2**31  # bytes that a bomb unpacks to
MANY = 1_000_000  # columns, or names
PICTURES = (".png", ".bmp", ".tiff", ".gif", ".jpg", ".webp")
# Kinds of files other than predictions and images, and their suffixes.
OTHERS = {
    "calibrator": ".safetensors", "checkpoint": ".pt", "weights": ".pth", "official": ".pth", "report": ".json",
    "recipe": ".json", "log": ".jsonl", "ledger": ".jsonl", "idx": ".gz", "kept": ".npz", "program": ".pt2",
    "cifar": "", "archive.tar.gz": ".tar.gz", "archive.zip": ".zip",
}  # fmt: skip
# Files inside a run folder or ledger, where all links are rejected.
OWN = ("recipe", "log", "ledger", "kept", "run", "results")
LINK = "a link to somebody's file"
RUN_FILES = ("recipe.json", "environment.json", "log.jsonl", "checkpoint.pt", "checkpoint-before.pt", ".lock")
RUN_FILES += ("predictions/best-test.safetensors", "predictions/last-val.safetensors")
# Audit events that indicate side effects of a file; the CIFAR unpickler resolves its few classes itself.
FORBIDDEN = {"pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"}


class Payload:
    """Create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, (f"touch '{self.path}'",)


# Valid files, from which damaged copies are made


def sound(folder: Path) -> dict[str, Path]:
    """Write one valid file of every kind."""
    import numpy as np
    import torch

    import fedlas

    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    given = fedlas.Predictions(
        torch.randn(20, 3, generator=draw), torch.arange(20) % 3, class_names=["a", "b", "c"], split="val"
    )
    result = {}
    for ending in (".safetensors", ".npz", ".csv", ".parquet", ".jsonl"):
        result[f"predictions{ending}"] = fedlas.write_predictions(given, folder / f"p{ending}")
    columns = {"logits": given.logits, "labels": given.labels}
    (folder / "p.json").write_text(json.dumps({name: item.tolist() for name, item in columns.items()}))
    torch.save(columns, folder / "p.pt")
    torch.save(columns, folder / "p.pth", _use_new_zipfile_serialization=False)
    np.save(folder / "p.npy", given.probs.numpy())
    for ending in (".tsv", ".txt"):
        (folder / f"p{ending}").write_text((folder / "p.csv").read_text().replace(",", "\t"))
    written = (".json", ".pt", ".pth", ".npy", ".tsv", ".txt")
    result |= {f"predictions{ending}": folder / f"p{ending}" for ending in written}
    fedlas.build_calibrator("temperature").fit(given).save(folder / "calibrator.safetensors")
    torch.save({"state_dict": {"fc.weight": torch.ones(3, 2)}}, folder / "weights.pth")
    fedlas.evaluate(given, intervals=False).save(folder / "report.json")
    (folder / "run").mkdir(exist_ok=True)
    recipe = fedlas.Recipe(data="digits", model="small_cnn", loss="ce")
    (folder / "run" / "recipe.json").write_text(json.dumps(recipe.to_dict()))
    _train(folder / "trained")
    _copied(folder / "trained", folder / "again")
    (folder / "ledger").mkdir(exist_ok=True)
    (folder / "ledger" / "digits-x.jsonl").write_text(_ledger_line(recipe).to_json() + "\n")
    (folder / "results").mkdir(exist_ok=True)
    (folder / "images.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01" + struct.pack(">I", 5) + bytes(5)))
    (folder / "kept.npz").write_bytes(_kept(given))
    for ending in PICTURES:
        (folder / f"picture{ending}").write_bytes(picture(ending))
    (folder / "data.tar.gz").write_bytes(tar_of({"inside/a.txt": b"hello"}))
    (folder / "data.zip").write_bytes(zip_of({"inside/a.txt": b"hello"}))
    return result | sound_files(folder)


def sound_files(folder: Path) -> dict[str, Path]:
    """Return where `sound` writes the files other than predictions."""
    return {
        "calibrator": folder / "calibrator.safetensors", "checkpoint": folder / "trained" / "checkpoint.pt",
        "weights": folder / "weights.pth", "official": folder / "weights.pth", "report": folder / "report.json",
        "recipe": folder / "run" / "recipe.json", "ledger": folder / "ledger" / "digits-x.jsonl",
        "log": folder / "trained" / "log.jsonl",
        "idx": folder / "images.gz", "kept": folder / "kept.npz", "archive.tar.gz": folder / "data.tar.gz",
        "archive.zip": folder / "data.zip", "run": folder / "again", "results": folder / "results",
    } | {f"image{ending}": folder / f"picture{ending}" for ending in PICTURES}  # fmt: skip


def picture(ending: str, size: tuple[int, int] = (40, 30)) -> bytes:
    """Return an image file with a few colours."""
    from PIL import Image

    made, content = Image.radial_gradient("L").resize(size), io.BytesIO()
    Image.merge("RGB", (made, made.rotate(90), made)).save(content, Image.registered_extensions()[ending])
    return content.getvalue()


def _train(folder: Path) -> None:
    """Train a small run, for its checkpoint."""
    import fedlas

    options: dict[str, Any] = {"batch_size": 50, "data_options": {"train_samples": 100}}
    fedlas.fit(fedlas.recipe_for("digits", loss="fedlas_ls", epochs=2, **options), out=folder, progress=False)


def _copied(trained: Path, folder: Path) -> Path:
    """Copy a finished run without its predictions, so that resuming computes them again."""
    return Path(shutil.copytree(trained, folder, ignore=lambda *_: ["predictions", ".lock"]))


def _ledger_line(recipe: Any) -> Any:
    from fedlas.experiments.ledger import SHOWN, Line, line_id

    name = line_id(recipe, None)
    held = {"file": f"predictions/{name}.npz", "sha256": "0" * 64}
    measures = dict.fromkeys(SHOWN, (0.1, None, None))
    return Line(id=name, recipe=recipe, protocol="x", metrics=measures, predictions=held)


def _kept(given: Any) -> bytes:
    from fedlas.experiments.stored_predictions import StoredPredictions

    return StoredPredictions.of(given).pack()


def tar_of(files: dict[str, bytes | tuple[str, str]]) -> bytes:
    """Pack files into an archive; a pair is a link type and its target."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for name, held in files.items():
            about = tarfile.TarInfo(name)
            if isinstance(held, tuple):
                about.type, about.linkname = {"symbolic": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}[held[0]], held[1]
                packed.addfile(about)
            else:
                about.size = len(held)
                packed.addfile(about, io.BytesIO(held))
    return content.getvalue()


def zip_of(files: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", how) as packed:
        for name, held in files.items():
            packed.writestr(name, held)
    return content.getvalue()


# Untrusted content


def hostile(folder: Path, canary: Path, big: int = BIG, many: int = MANY) -> list[tuple[str, str, Path]]:
    """Write hostile files; return their kinds, faults and paths."""
    folder.mkdir(parents=True, exist_ok=True)
    result: list[tuple[str, str, Path]] = []

    def add(kind: str, what: str, ending: str, content: bytes) -> Path:
        path = folder / f"{len(result):03d}" / f"f{ending}"
        path.parent.mkdir()
        path.write_bytes(content)
        result.append((kind, what, path))
        return path

    endings = (".safetensors", ".npz", ".npy", ".csv", ".tsv", ".txt", ".parquet", ".json", ".jsonl", ".pt", ".pth")
    for kind, ending in [(f"predictions{item}", item) for item in endings] + [
        (f"image{item}", item) for item in PICTURES
    ]:
        add(kind, "empty", ending, b"")
        add(kind, "random bytes", ending, random.Random(1).randbytes(5000))
        add(kind, "UTF-16", ending, "logit_a,logit_b,label\n1,2,0\n".encode("utf-16"))
        add(kind, "zeros", ending, bytes(4096))
        add(kind, "a pickle", ending, pickle.dumps({"logits": Payload(canary)}, 2))
        add(kind, "a pickle, protocol 4", ending, pickle.dumps(Payload(canary), 4))
        add(kind, "another kind of file", ending, zip_of({"a": b"b"}) if ending != ".npz" else b"PAR1" + bytes(99))
    kinds = {f"predictions{item}": item for item in endings} | {f"image{item}": item for item in PICTURES} | OTHERS
    good = sound_files(folder.parent / "sound")
    for kind, ending in kinds.items():
        for what, make in _no_files(good.get(kind)).items():
            path = folder / f"{len(result):03d}" / f"f{ending}"
            path.parent.mkdir()
            make(path)
            result.append((kind, what, path))
    for kind, what, make in _folders(folder.parent / "sound", folder.parent / "victims"):
        path = folder / f"{len(result):03d}" / "f"
        path.parent.mkdir()
        make(path)
        result.append((kind, what, path))
    _text_files(add, many)
    _arrays(add, canary, big, many)
    _tensors(add, canary, many)
    _checkpoints(add, folder.parent / "sound" / "trained" / "checkpoint.pt")
    _words(add, canary, many)
    _archives(add, big)
    _images(add)
    return result


def _no_files(good: Path | None) -> dict[str, Callable[[Path], None]]:
    """Return faults that apply to any file, with functions that create them."""
    return {
        "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
        "a pipe that nobody writes to": os.mkfifo,
        "a link to itself": lambda path: path.symlink_to(path),
        "a folder": Path.mkdir,
    } | ({} if good is None else {LINK: lambda path: path.symlink_to(good)})


def _folders(sound: Path, victims: Path) -> list[tuple[str, str, Callable[[Path], None]]]:
    """Write run folders and ledgers that contain links to other files or folders, or pipes."""
    victims.mkdir()

    def victim(name: str, copy: Path | None) -> Path:
        made = victims / f"{len(list(victims.iterdir()))}-{name}"
        if copy is not None and copy.is_file():
            shutil.copyfile(copy, made)
        else:
            made.write_text("mine")
        return made

    def make(kind: str, name: str, how: str, path: Path) -> None:
        copy = sound / "trained" / name if kind == "run" else next((sound / "ledger").glob(name), None)
        if kind == "run":
            _copied(sound / "trained", path)
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if how == "pipe":
            os.mkfifo(target)
        elif how == "folder":
            there = victims / f"{len(list(victims.iterdir()))}-folder"
            there.mkdir()
            (there / ".mine.part").write_text("mine")
            target.symlink_to(there)
        else:
            target.symlink_to(victim(target.name, copy) if how == "file" else victims / f"new-{target.name}")

    held = next(iter(json.loads(line) for line in (sound / "ledger" / "digits-x.jsonl").read_text().splitlines()))
    files = {"run": RUN_FILES, "results": ("digits-x.jsonl", ".lock", held["predictions"]["file"])}
    chosen = [
        (kind, name, how) for kind, names in files.items() for name in names for how in ("file", "nothing", "pipe")
    ]
    chosen += [(kind, "predictions", "folder") for kind in files]
    kinds = {"file": LINK, "folder": LINK, "nothing": "a link to nothing", "pipe": "a pipe"}
    return [
        (kind, f"{kinds[how]}: {name}", lambda path, given=(kind, name, how): make(*given, path))
        for kind, name, how in chosen
    ]


def _text_files(add: Callable[..., Path], many: int) -> None:
    wide = ",".join(f"logit_{i}" for i in range(many))
    add("predictions.csv", "many columns", ".csv", f"{wide},label\n{','.join(['0'] * many)},0\n".encode())
    add("predictions.csv", "many equal columns", ".csv", (",".join(["logit_a"] * many) + "\n1\n").encode())
    add(
        "predictions.csv",
        "many columns of words",
        ".csv",
        (",".join(f"w{i}" for i in range(many)) + "\n").encode(),
    )
    add("predictions.csv", "a cell without end", ".csv", b"logit_a,logit_b,label\n1,2," + b"9" * (20 * many) + b"\n")
    add("predictions.csv", "a quote without end", ".csv", b'logit_a,logit_b,label\n1,"2' + b"\n0,0,0" * (many // 2))
    add("predictions.csv", "numbers beyond all", ".csv", b"logit_a,logit_b,label\n1e999,nan,0\n")
    add("predictions.csv", "NUL bytes", ".csv", b"logit_a,logit_b,label\n1\x00,2,0\n")
    add("predictions.csv", "a label without end", ".csv", b"logit_a,logit_b,label\n1,2," + b"9" * 5000 + b"\n")
    add("predictions.csv", "confidences of nothing", ".csv", b"confidence,prediction,label\n0.001,a,b\n" * 3)
    for kind in (".json", ".jsonl"):
        name = f"predictions{kind}"
        add(name, "nested 100,000 deep", kind, b"[" * 100_000 + b"]" * 100_000)
        add(name, "objects nested 100,000 deep", kind, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
        add(name, "a number of 100,000 digits", kind, b'{"logits": [[' + b"9" * 100_000 + b', 1]], "labels": [0]}')
        add(name, "a number of 400 digits", kind, b'{"logits": [[' + b"9" * 400 + b', 1]], "labels": [0]}')
        add(name, "a label of 400 digits", kind, b'{"logits": [[2.0, 1.0]], "labels": [' + b"9" * 400 + b"]}")
        add(name, "NaN", kind, b'{"logits": [[NaN, 1]], "labels": [0]}')
        add(name, "a lone surrogate", kind, b'{"logits": [[0.5, 1.5]], "labels": ["\\ud800"]}')
        add(name, "many names", kind, json.dumps({f"n{i}": [1] for i in range(many)}).encode())
        add(name, "null", kind, b"null")
        add(name, "words for tables", kind, b'{"logits": "abc", "labels": {"a": 1}, "class_names": 3}')
        add(
            name,
            "class names that are none",
            kind,
            b'{"logits": [[1.0, 2.0]], "labels": [0], "class_names": [[1], null]}',
        )
        add(name, "an index of words", kind, b'{"logits": [[1.0, 2.0]], "labels": [0], "index": ["a"]}')
        add(name, "a split that is no word", kind, b'{"logits": [[1.0, 2.0]], "labels": [0], "split": [1]}')


def _arrays(add: Callable[..., Path], canary: Path, big: int, many: int) -> None:
    import numpy as np

    def npy(array: Any, **options: Any) -> bytes:
        content = io.BytesIO()
        np.lib.format.write_array(content, np.asarray(array), **options)
        return content.getvalue()

    objects = npy(np.array([Payload(canary)], dtype=object), allow_pickle=True)
    lying = npy(np.zeros(3)).replace(b"(3,), ", f"({10**11},), ".encode())
    header = npy(np.zeros(1))[:128].replace(b"(1,), ", f"({big // 8},), ".encode())
    add("predictions.npz", "an array of objects", ".npz", zip_of({"logits.npy": objects, "labels.npy": npy([0])}))
    add("predictions.npz", "objects as class names", ".npz", zip_of(
        {"logits.npy": npy(np.zeros((1, 2))), "labels.npy": npy([0]), "class_names.npy": objects}))  # fmt: skip
    add("predictions.npz", "a shape that is not there", ".npz", zip_of({"logits.npy": lying}))
    add("predictions.npz", "a name that climbs", ".npz", zip_of({"../../logits.npy": npy(np.zeros((1, 2)))}))
    add("predictions.npz", "a word for a table", ".npz", zip_of({"logits.npy": npy("abc"), "labels.npy": npy(3)}))
    flat = {"logits.npy": npy(1.0), "labels.npy": npy(0), "class_names.npy": npy("a"), "index.npy": npy(1.5)}
    add("predictions.npz", "tables without dimensions", ".npz", zip_of(flat))
    add("predictions.npz", "one array, no archive", ".npz", npy(np.zeros((2, 2))))
    add("predictions.npz", "an array of objects, no archive", ".npz", objects)
    for kind in ("predictions.npz", "kept"):
        content = io.BytesIO()
        with (
            zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as packed,
            packed.open("logits.npy", "w", force_zip64=True) as file,
        ):
            file.write(header)
            for _ in range(big // 2**24):
                file.write(bytes(2**24))
        add(kind, "a zip bomb", ".npz", content.getvalue())
    add("kept", "an array of objects", ".npz", zip_of({"labels.npy": objects, "logits.npy": objects}))
    add("kept", "a shape that is not there", ".npz", zip_of({"labels.npy": lying, "logits.npy": lying}))
    pyarrow, parquet = __import__("pyarrow"), __import__("pyarrow.parquet").parquet
    content = io.BytesIO()
    rows = 2**20
    table = pyarrow.table({"logit_a": np.zeros(rows), "logit_b": np.zeros(rows), "label": np.zeros(rows, np.int64)})
    with parquet.ParquetWriter(content, table.schema, compression="zstd") as writer:
        for _ in range(max(1, big // (24 * rows))):
            writer.write_table(table)
    add("predictions.parquet", "a bomb of equal rows", ".parquet", content.getvalue())
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({f"logit_{i}": [0.0] for i in range(many // 50)} | {"label": [0]}), content)
    add("predictions.parquet", "very many columns", ".parquet", content.getvalue())
    nested = pyarrow.array([[[[1.0]]]])
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({"logits": nested, "label": [0]}), content)
    add("predictions.parquet", "lists of lists of lists", ".parquet", content.getvalue())


def _tensors(add: Callable[..., Path], canary: Path, many: int) -> None:
    import torch

    def saved(what: Any, **options: Any) -> bytes:
        content = io.BytesIO()
        torch.save(what, content, **options)
        return content.getvalue()

    stretched = torch.zeros(1).expand(10**6, 10**6)
    deep: Any = torch.zeros(1)
    for _ in range(200):
        deep = {"state_dict": deep}
    circle: dict[str, Any] = {}
    circle["state_dict"] = circle
    for kind, ending in (("predictions.pt", ".pt"), ("checkpoint", ".pt"), ("weights", ".pth"), ("official", ".pth")):
        for options in ({}, {"_use_new_zipfile_serialization": False}):
            way = "legacy" if options else "zip"
            add(kind, f"an object inside, {way}", ending, saved({"logits": Payload(canary)}, **options))
            add(
                kind,
                f"an object as a key, {way}",
                ending,
                saved({("a", 1): torch.ones(2), "format": Payload(canary)}, **options),
            )
        add(
            kind,
            "a tensor of 4 TB on 4 bytes",
            ending,
            saved({"logits": stretched, "labels": torch.zeros(1), "state_dict": {"a": stretched}}),
        )
        add(kind, "nested 200 deep", ending, saved(deep))
        add(kind, "itself inside of itself", ending, saved(circle))
        add(kind, "a list", ending, saved([1, 2, 3]))
        add(kind, "a pickle", ending, pickle.dumps(Payload(canary), 2))
        add(kind, "opcodes without end", ending, b"\x80\x02" + b"]" * (3 * many) + b".")
    add(
        "predictions.pt",
        "a sparse table",
        ".pt",
        saved({"logits": torch.eye(3).to_sparse(), "labels": torch.arange(3)}),
    )
    add(
        "predictions.pt",
        "a complex table",
        ".pt",
        saved({"logits": torch.eye(3).to(torch.cfloat), "labels": torch.arange(3)}),
    )
    add("predictions.pt", "no tensors", ".pt", saved({"logits": "abc", "labels": None, "class_names": 3}))
    add("program", "a pickle", ".pt2", pickle.dumps(Payload(canary), 2))
    add("program", "a pickle among the constants", ".pt2", zip_of({
        "f/archive_format": b"pt2", "f/byteorder": b"little", "f/.data/serialization_id": b"1",
        "f/data/constants/opaque_obj_0": pickle.dumps(Payload(canary))}, zipfile.ZIP_STORED))  # fmt: skip


def _checkpoints(add: Callable[..., Path], file: Path) -> None:
    """Write checkpoints that torch reads but that no run has written."""
    import torch

    good: dict[str, Any] = torch.load(file, weights_only=True)
    step, (random, *_) = good["step"], good["random"]
    kind, words, position, *gauss = random["numpy"]

    def write(what: str, content: Any) -> None:
        made = io.BytesIO()
        torch.save(content, made)
        add("checkpoint", what, ".pt", made.getvalue())

    write("the right format alone", {"format": good["format"]})
    write("other names", {"format": good["format"], "step": 3, "weights": {"a": torch.ones(3)}})
    for name in good:
        write(f"no {name}", {other: value for other, value in good.items() if other != name})
        for odd in ("x", None, [1], {3: "a"}, torch.ones(2), -7):
            write(f"{name} is {type(odd).__name__}", good | {name: odd})
    for name in step:
        write(
            f"no {name} in the step", good | {"step": {other: first for other, first in step.items() if other != name}}
        )
        for odd in ("x", torch.full((), float("nan")), torch.ones(3, 3), {"a": 1}):
            write(f"{name} of the step is {type(odd).__name__}", good | {"step": step | {name: odd}})
    for epoch, position in ((10**9, 0), (1, 10**6), (2, 1), (1, 0), (0, 0)):
        write(f"epoch {epoch}, position {position}", good | {"epoch": epoch, "position": position})
    write("weights of another network", good | {"model": {"a": torch.ones(1)}, "best": {"a": torch.ones(1)}})
    write("no best weights", good | {"best": {}})
    write("best weights in other shapes", good | {"best": {name: torch.ones(1) for name in good["best"]}})
    stretched = {name: torch.ones(1).expand(10**6, 10**6) for name in good["model"]}
    write("weights of one number, stretched", good | {"model": stretched, "best": stretched})
    write("an optimizer that remembers nothing", good | {"optimizer": [{} for _ in good["optimizer"]]})
    write("an optimizer of fewer weights", good | {"optimizer": good["optimizer"][:1]})
    write("sparse weights", good | {"model": {name: first.to_sparse() for name, first in good["model"].items()}})
    write("a loss of other names", good | {"loss": {"a": torch.ones(1), "_extra_state": 5}})
    history = step["gate"]["history"] | {"_extra_state": [5]}
    write("a history of numbers", good | {"step": step | {"gate": step["gate"] | {"history": history}}})
    write("no generators", good | {"random": []})
    for name in random:
        for odd in ("x", [1, 2, 3], torch.ones(3)):
            if name != "device":
                write(f"generator {name} is {type(odd).__name__}", good | {"random": [random | {name: odd}]})
    numpy = [kind, words, 10**9, *gauss]
    write("numpy beyond its words", good | {"random": [random | {"numpy": numpy}]})


def _words(add: Callable[..., Path], canary: Path, many: int) -> None:
    def tensors(about: dict[str, str], data: bytes = struct.pack("<4f", 0, 1, 2, 3)) -> bytes:
        head = json.dumps({"__metadata__": about, "logits": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}})
        return struct.pack("<Q", len(head)) + head.encode() + data

    deep = "[" * 100_000 + "]" * 100_000
    for kind, name in (("predictions.safetensors", "fedlas.predictions/1"), ("calibrator", "fedlas.calibrator/1")):
        sound_words = {"format": json.dumps(name)}
        add(kind, "a header without end", ".safetensors", struct.pack("<Q", 2**62) + b"{}")
        add(kind, "nested words", ".safetensors", tensors(sound_words | {"split": deep, "name": deep}))
        add(kind, "words that are no JSON", ".safetensors", tensors(sound_words | {"class_names": "{", "options": "{"}))
        odd = {"class_names": "3", "ids": "7", "name": '"../../etc"', "options": "[]", "fitted": "[]"}
        add(kind, "words of another kind", ".safetensors", tensors(sound_words | odd))
        add(kind, "offsets outside of the file", ".safetensors", tensors(sound_words, b""))
    for name in ("temperature", "os.system", "__class__", "isotonic", ["a"], 3, None):
        words = {
            "format": '"fedlas.calibrator/1"',
            "name": json.dumps(name),
            "options": '{"__class__": 1}',
            "fitted": "{}",
        }
        add("calibrator", f"the name {name!r}", ".safetensors", tensors(words))
    for kind, ending in (("report", ".json"), ("recipe", ".json"), ("ledger", ".jsonl"), ("log", ".jsonl")):
        add(kind, "empty", ending, b"")
        add(kind, "nested 100,000 deep", ending, deep.encode())
        add(kind, "a list", ending, b"[1, 2]")
        add(kind, "UTF-16", ending, '{"a": 1}'.encode("utf-16"))
        add(kind, "a pickle", ending, pickle.dumps(Payload(canary), 2))
        add(kind, "many names", ending, json.dumps({f"n{i}": 1 for i in range(many)}).encode())
        add(
            kind,
            "null everywhere",
            ending,
            json.dumps(dict.fromkeys(("format", "states", "recipe", "id", "data"))).encode(),
        )
        add(
            kind,
            "numbers for words",
            ending,
            b'{"format": 1, "data": 2, "model": [], "loss": {}, "seed": 1e400, "epochs": -1}',
        )
        add(kind, "the right format alone", ending, b'{"format": "fedlas.report/1", "states": [[]], "n": {}}')
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
        add("log", f"the line {line!r}", ".jsonl", f"{line}\n".encode())
    add(
        "recipe",
        "a name that climbs",
        ".json",
        b'{"data": "../../x", "model": "/etc", "loss": "..", "cache": "/nowhere/x"}',
    )


def _archives(add: Callable[..., Path], big: int) -> None:
    bomb = zip_of({"inside/zeros": bytes(2**26)})
    add("idx", "a gzip bomb", ".gz", gzip.compress(bytes(2**24)) * max(1, big // 2**24))
    add("idx", "a shape that is not there", ".gz", gzip.compress(b"\x00\x00\x08\xff" + b"\xff" * 1020))
    add("idx", "no gzip", ".gz", b"abc")
    add("cifar", "a pickle", "", pickle.dumps(Payload(Path("/nowhere")), 2))
    add(
        "archive.zip",
        "names that climb",
        ".zip",
        zip_of({"inside/a": b"", "../../climbed.txt": b"x", "/abs/climbed.txt": b"x"}),
    )
    add("archive.zip", "archives inside of an archive", ".zip", zip_of({"inside/b.zip": bomb}))
    add("archive.tar.gz", "names that climb", ".tar.gz", tar_of({"inside/a": b"", "../../climbed.txt": b"x"}))
    add("archive.tar.gz", "an absolute name", ".tar.gz", tar_of({"inside/a": b"", "/climbed-absolute.txt": b"x"}))
    add(
        "archive.tar.gz",
        "a way out over a link",
        ".tar.gz",
        tar_of({"inside/out": ("symbolic", "../../.."), "inside/out/climbed.txt": b"x"}),
    )
    add("archive.tar.gz", "a link to a secret", ".tar.gz", tar_of({"inside/secret": ("symbolic", "/etc/passwd")}))
    add("archive.tar.gz", "a hard link to a secret", ".tar.gz", tar_of({"inside/secret": ("hard", "/etc/passwd")}))
    add("archive.tar.gz", "a tar that is none", ".tar.gz", gzip.compress(b"abc" * 1000))


def _images(add: Callable[..., Path]) -> None:
    for ending in PICTURES:
        kind = f"image{ending}"
        add(kind, "a text", ending, b"no image\n" * 100)
        add(kind, "a head alone", ending, picture(ending)[:60])
        for other in PICTURES:
            add(kind, f"of the kind {other}", ending, picture(other))
    for side in (10_000, 13_000, 20_000, 2**31 - 1):
        add("image.png", f"a bomb of {side} x {side}", ".png", png_of(side))
    for ending, position in ((".bmp", 18), (".gif", 6)):
        for size in (b"\xff" * 4, b"\xff\x3f\0\0", b"\0" * 4, b"\0\0\0\x80"):
            made = bytearray(picture(ending))
            made[position : position + 4] = size
            add(f"image{ending}", f"another size, {size.hex()}", ending, bytes(made))


def png_of(side: int) -> bytes:
    """Return a small PNG file with a huge number of black pixels."""

    def part(name: bytes, held: bytes) -> bytes:
        return struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))

    rows = zlib.compress(bytes(min(side, 20_000) * (1 + min(side, 20_000) // 8)), 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")


def damaged(kind: str, path: Path, folder: Path, copies: int) -> list[tuple[str, str, Path]]:
    """Make truncated copies of a valid file, and copies with changed bytes."""
    content, source = path.read_bytes(), random.Random(f"{kind}")
    result = []
    for number in range(copies):
        made = bytearray(content)
        if number % 2:
            subject, made = "cut short", made[: source.randrange(len(made))]
        else:
            subject = "other bytes"
            for _ in range(source.choice((1, 1, 3, 20))):
                made[source.randrange(len(made))] = source.randrange(256)
        target = folder / f"{kind}-{number}" / path.name
        target.parent.mkdir(parents=True)
        target.write_bytes(bytes(made))
        result.append((kind, subject, target))
    return result


# Readers


def readers() -> dict[str, Callable[[Path], Any]]:
    """Return the function that opens each kind of file, as a user would."""
    import fedlas
    from fedlas.data.base.fetching import Source, checked_bytes, md5_of, unpack
    from fedlas.data.base.formats import plain_unpickled, read_idx
    from fedlas.data.base.images import Transform, decode
    from fedlas.evaluation import Report
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

    def stood(path: Path) -> Any:
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

    def logged(path: Path) -> Any:
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

    def kept(path: Path) -> Any:
        line = _ledger_line(fedlas.Recipe(data="digits", model="small_cnn", loss="ce"))
        # An untrusted line with the correct checksum.
        checksum = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        held = {"file": path.name, "sha256": checksum}
        return load_stored_predictions(dataclasses.replace(line, predictions=held), Ledger(path.parent))

    def added(path: Path) -> Any:
        return Ledger(path).add([_ledger_line(fedlas.Recipe(data="digits", model="small_cnn", loss="ce"))], b"content")

    def archive(path: Path) -> Any:
        if path.name.startswith("."):
            raise ValueError(path)
        return unpack(
            Source((f"https://nowhere.invalid/{path.name}",), md5_of(path)), path.parent, "inside", download=False
        )

    seen = Transform(size=8, channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    result: dict[str, Callable[[Path], Any]] = {f"predictions{ending}": fedlas.read_predictions for ending in READERS}
    return result | {
        "calibrator": fedlas.load_calibrator, "checkpoint": stood, "weights": read_weights,
        "official": read_official, "report": Report.load, "recipe": recipe,
        "log": logged, "ledger": lambda path: Ledger(path.parent).lines, "idx": read_idx, "archive.tar.gz": archive,
        "archive.zip": archive, "program": load_program,
        "kept": kept, "cifar": lambda path: plain_unpickled(checked_bytes(path, None), path),
        "run": lambda path: fedlas.fit(Run(path).recipe, out=path, resume=True, progress=False), "results": added,
    } | {f"image{ending}": lambda path: decode(path, seen) for ending in PICTURES}  # fmt: skip


def peak() -> int:
    """Return the peak memory of this process since `forget_peak`, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


def forget_peak() -> int:
    """Reset the peak, and return the current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def open_all(cases: list[list[str]], canary: Path, own: Path) -> None:
    """Open files one after the other and print a record for each; called in a separate process."""
    import warnings

    import torch

    torch.set_num_threads(1)
    known = readers()
    for kind, path in ((kind, path) for kind, subject, path in cases if subject == "sound"):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            known[kind](Path(path))  # import lazily loaded modules before measuring
    tempfile.gettempdir()  # writes a test file at its first call
    seen: list[str] = []
    here = {"folder": own}

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in FORBIDDEN:
            seen.append(f"{event} {given[:2]}")
        if event != "open" or not isinstance(given[0], str) or not isinstance(given[2], int):
            return
        writes = given[2] & (os.O_WRONLY | os.O_RDWR) and not given[0].startswith("/proc/self")
        if writes and not Path(given[0]).resolve().is_relative_to(here["folder"]):
            seen.append(f"writes {given[0]}")

    sys.addaudithook(hook)
    size = 1024 * int(
        next(x.split()[1] for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize"))
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    for kind, subject, name in cases:
        path, start = Path(name), time.process_time()
        here["folder"] = path.parent.resolve()
        seen.clear()
        before = forget_peak()
        signal.alarm(WAIT)
        faulthandler.dump_traceback_later(WAIT + PATIENCE, exit=True)  # also works if Python signal handlers cannot run
        signal.setitimer(signal.ITIMER_PROF, PATIENCE)
        record: dict[str, Any] = {"kind": kind, "what": subject}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = known[kind](path)
                record |= {"outcome": "read", "message": str(result)[:80]}
            except TimeoutError as error:
                record |= {"outcome": "BAD", "message": f"{error}"}
            except CLEAR as error:
                text = str(error)
                good = str(path) in text or str(path.parent) in text
                record |= {"outcome": "refused" if good else "BAD", "message": f"{type(error).__name__}: {text[:300]}"}
            except BaseException as error:
                record |= {"outcome": "BAD", "message": f"{type(error).__name__}: {str(error)[:300]}"}
            finally:
                signal.alarm(0)
                faulthandler.cancel_dump_traceback_later()
                signal.setitimer(signal.ITIMER_PROF, 0)
        result = None
        record |= {"seconds": time.process_time() - start, "mib": (peak() - before) / 2**20, "events": [*seen]}
        if canary.exists():
            record |= {"outcome": "BAD", "message": "the payload ran"}
            canary.unlink()
        if seen:
            record["outcome"] = "BAD"
        print(json.dumps(record), flush=True)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took longer than {PATIENCE} s")


def campaign(folder: Path, copies: int, big: int = BIG, many: int = MANY) -> list[dict[str, Any]]:
    """Make all files, open them, and return the outcome of each."""
    canary = folder / "the-payload-ran"
    good = sound(folder / "sound")
    cases = [(kind, "sound", path) for kind, path in good.items()]
    cases += hostile(folder / "hostile", canary, big, many)
    for kind, path in good.items():
        if path.is_dir():
            continue
        cases += damaged(kind, path, folder / "damaged", copies)
    before, mine = set(folder.parent.iterdir()), _content(folder / "victims")
    listed = folder / "cases.json"
    listed.write_text(json.dumps([[kind, subject, str(path)] for kind, subject, path in cases]))
    command = [sys.executable, __file__, "--open", str(listed)]
    about = os.environ | {"FEDLAS_COMMIT": "none"}  # avoids calls of git
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=about)
    records = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    if len(records) < len(cases):
        kind, subject, _ = cases[len(records)]
        died = f"the process died: {ran.stderr[-500:]}"
        records.append({"kind": kind, "what": subject, "outcome": "BAD", "message": died, "seconds": 0.0, "mib": 0.0})
    for record in records:
        record.update(check_record(record))
    strays = [str(path) for path in folder.parent.iterdir() if path not in before]
    strays += [str(path) for path in folder.rglob("climbed*")] + [str(path) for path in Path("/tmp").glob("climbed*")]
    strays += [str(path) for path, _ in mine ^ _content(folder / "victims")]
    if strays:
        records.append(
            {"kind": "all", "what": "strays", "outcome": "BAD", "message": str(strays), "seconds": 0.0, "mib": 0.0}
        )
    return records


def check_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a failure for too much memory or time or a followed link, or an empty dictionary."""
    if record["mib"] >= MOST:
        return {"outcome": "BAD", "message": f"took {record['mib']:.0f} MiB; {record['message']}"}
    if record["seconds"] >= PATIENCE:
        return {"outcome": "BAD", "message": f"took {record['seconds']:.0f} s; {record['message']}"}
    special = record["what"].startswith((LINK, "a link to nothing", "a pipe"))
    if record["kind"] in OWN and special and record["outcome"] == "read":
        return {"outcome": "BAD", "message": f"was followed; {record['message']}"}
    return {}


def _content(folder: Path) -> set[tuple[Path, bytes]]:
    return {(path, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the results with a row for each kind of file."""
    rows = ["| kind | files | refused | read | bad | slowest, s | most memory, MiB |", "|---|--:|--:|--:|--:|--:|--:|"]
    for kind in sorted({item["kind"] for item in records}):
        own = [item for item in records if item["kind"] == kind and item["what"] != "sound"]
        count = {name: sum(item["outcome"] == name for item in own) for name in ("refused", "read", "BAD")}
        slow, much = max((item["seconds"] for item in own), default=0), max((item["mib"] for item in own), default=0)
        rows.append(
            f"| {kind} | {len(own)} | {count['refused']} | {count['read']} | {count['BAD']} | {slow:.1f} | {much:.0f} |"
        )
    return "\n".join(rows)


def main() -> int:
    """Run the campaign; return a non-zero exit status after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=40)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        folder = given.open.parent
        open_all(json.loads(given.open.read_text()), folder / "the-payload-ran", folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        records = campaign(Path(temporary) / "campaign", given.copies)
    for one in records:
        if one["outcome"] == "BAD":
            print(one)
    print(table(records))
    slow = sorted(records, key=lambda one: -one["mib"])[:5]
    print("\n".join(f"{one['kind']}, {one['what']}: {one['mib']:.0f} MiB, {one['seconds']:.1f} s" for one in slow))
    return int(any(one["outcome"] == "BAD" for one in records))


if __name__ == "__main__":
    sys.exit(main())
