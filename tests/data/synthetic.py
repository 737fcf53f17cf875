"""Synthetic versions of the published data sets: random pixels in the official layouts.

Each function writes such files below a root, and patches the counts and checksums of the class accordingly. It returns
further keywords to build the data set with.
"""

import gzip
import hashlib
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedlas
from fedlas.data import Split, Transform

TRAIN, TEST = 20, 6  # samples of each class


def cls_of(name: str) -> Any:
    return next(record.cls for record in fedlas.list_data() if record.name == name)


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def labelled(per_class: int, classes: int, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.permutation(np.repeat(np.arange(classes), per_class)).astype(np.uint8)
    return random.integers(0, 256, (len(labels), *shape), dtype=np.uint8), labels


def expect(patch: pytest.MonkeyPatch, name: str, classes: int, train: int = TRAIN, test: int = TEST) -> Any:
    cls = cls_of(name)
    patch.setattr(cls, "num_classes", classes)
    patch.setattr(cls, "sizes", {"train": train * classes, "test": test * classes})
    patch.setattr(cls, "per_class", {"train": (train,) * classes, "test": (test,) * classes})
    return cls


def idx(path: Path, array: np.ndarray, compressed: bool) -> None:
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if compressed else content)


def idx_writer(name: str, folder: str) -> Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]:
    def make(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
        cls = expect(patch, name, 10)
        files = {}
        for seed, (prefix, per_class) in enumerate((("train", TRAIN), ("t10k", TEST))):
            images, labels = labelled(per_class, 10, (28, 28), seed)
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                path = root / folder / f"{prefix}-{kind}-ubyte"
                idx(path, array, compressed=False)
                files[path.name] = ("", md5(path))
                if prefix == "train":  # one split compressed, because both forms are common
                    idx(path.with_name(f"{path.name}.gz"), array, compressed=True)
                    path.unlink()
        patch.setattr(cls, "files", files)
        patch.setattr(cls, "sha256", {})
        return {}

    return make


def cifar(root: Path, patch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    cls = expect(patch, name, cls_of(name).num_classes)
    coarse = name == "cifar100"
    folder = root / ("cifar-100-binary" if coarse else "cifar-10-batches-bin")
    folder.mkdir(parents=True)
    files = {}
    for seed, (part, per_class) in enumerate((("train", TRAIN), ("test", TEST))):
        images, labels = labelled(per_class, cls.num_classes, (3072,), seed)
        head = np.stack([255 - labels, labels], 1) if coarse else labels[:, None]
        rows = np.concatenate([head, images], 1)
        names = [key for key in cls.files if key.startswith("test") == (part == "test")]
        for key, piece in zip(names, np.array_split(rows, len(names)), strict=True):
            (folder / f"{key}.bin").write_bytes(piece.tobytes())
            files[key] = (md5(folder / f"{key}.bin"), "")
    patch.setattr(cls, "files", files)
    return {}


def pickled_cifar(root: Path, patch: pytest.MonkeyPatch, name: str, protocol: int = 2) -> None:
    """Turn the binary files of CIFAR into pickled ones."""
    cls = cls_of(name)
    coarse = name == "cifar100"
    old, new = ("cifar-100-binary", "cifar-100-python") if coarse else ("cifar-10-batches-bin", "cifar-10-batches-py")
    (root / new).mkdir()
    files = {}
    for key in cls.files:
        rows = np.frombuffer((root / old / f"{key}.bin").read_bytes(), np.uint8).reshape(-1, 3074 if coarse else 3073)
        labels = [int(n) for n in rows[:, 1 if coarse else 0]]
        batch = {"data": rows[:, -3072:].copy(), "fine_labels" if coarse else "labels": labels, "filenames": ["a"]}
        (root / new / key).write_bytes(pickle.dumps(batch, protocol))
        (root / old / f"{key}.bin").unlink()
        files[key] = ("", md5(root / new / key))
    (root / old).rmdir()
    patch.setattr(cls, "files", files)


def svhn(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    import scipy.io

    cls = expect(patch, "svhn", 10)
    (root / "svhn").mkdir(parents=True)
    files = {}
    for seed, (part, per_class) in enumerate((("train", TRAIN), ("test", TEST))):
        images, labels = labelled(per_class, 10, (32, 32, 3), seed)
        path = root / "svhn" / f"{part}_32x32.mat"
        y = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        scipy.io.savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
        files[path.name] = md5(path)
    patch.setattr(cls, "files", files)
    patch.setattr(cls, "sha256", {})
    return {}


def picture(path: Path, size: tuple[int, int], random: np.random.Generator, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8), mode=None).save(path)


def tiny_imagenet(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    expect(patch, "tiny_imagenet", 3)
    random = np.random.default_rng(0)
    folder = root / "tiny-imagenet-200"
    wnids = ["n02", "n01", "n03"]  # not in order, as in the official file
    lines = []
    for wnid in wnids:
        for n in range(TRAIN):
            mode = "L" if n == 3 else "RGB"
            picture(folder / "train" / wnid / "images" / f"{wnid}_{n}.JPEG", (64, 64), random, mode)
        boxes = "".join(f"{wnid}_{n}.JPEG\t0\t0\t63\t63\n" for n in range(TRAIN))
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(boxes)
    picture(folder / "test" / "images" / "test_0.JPEG", (64, 64), random)  # without labels, not read
    (folder / "words.txt").write_text("".join(f"{wnid}\tanimal, beast\n" for wnid in [*wnids, "n04"]))
    for n in range(TEST * len(wnids)):
        picture(folder / "val" / "images" / f"val_{n}.JPEG", (64, 64), random)
        lines.append(f"val_{n}.JPEG\t{wnids[n % 3]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "wnids.txt").write_text("\n".join(wnids) + "\n")
    return {}


def cub200(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    expect(patch, "cub200", 3)
    random = np.random.default_rng(0)
    folder = root / "CUB_200_2011"
    images, labels, training = [], [], []
    for n in range((TRAIN + TEST) * 3):
        number, name = n // (TRAIN + TEST), f"00{n // (TRAIN + TEST) + 1}.Bird_{n // (TRAIN + TEST)}/bird_{n}.jpg"
        picture(folder / "images" / name, (50 + n % 7, 40), random)
        images.append(f"{n + 1} {name}\n")
        labels.append(f"{n + 1} {number + 1}\n")
        training.append(f"{n + 1} {int(n % (TRAIN + TEST) >= TEST)}\n")
    (folder / "images.txt").write_text("".join(images))
    (folder / "image_class_labels.txt").write_text("".join(labels))
    (folder / "train_test_split.txt").write_text("".join(training))
    (folder / "classes.txt").write_text("1 001.Bird_0\n2 002.Bird_1\n3 003.Bird_2\n")
    return {"image_size": 24, "resize": 28}


def aircraft(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    expect(patch, "aircraft", 3)
    random = np.random.default_rng(0)
    folder = root / "fgvc-aircraft-2013b" / "data"
    variants = ["A300B4", "707-320", "F/A-18 x"]
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for n in range((TRAIN + TEST) * 3):
        picture(folder / "images" / f"{n:07d}.jpg", (60, 40 + n % 5), random)
        lists["trainval" if n // 3 < TRAIN else "test"].append(f"{n:07d} {variants[n % 3]}\n")
    for name, lines in lists.items():
        (folder / f"images_variant_{name}.txt").write_text("".join(lines))
    (folder / "variants.txt").write_text("\n".join(variants) + "\n")
    return {"image_size": 24, "resize": 28}


def folder(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    random = np.random.default_rng(0)
    for name in ("dog", "cat"):
        for n in range(TRAIN):
            picture(root / "pets" / name / f"{n}.png", (30 + n % 4, 26), random)
    return {"path": "pets", "image_size": 16}


def digits(root: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {}


WRITERS: dict[str, Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]] = {
    "aircraft": aircraft,
    "cifar10": lambda root, patch: cifar(root, patch, "cifar10"),
    "cifar100": lambda root, patch: cifar(root, patch, "cifar100"),
    "cub200": cub200,
    "digits": digits,
    "fashion_mnist": idx_writer("fashion_mnist", "fashion-mnist"),
    "folder": folder,
    "mnist": idx_writer("mnist", "mnist"),
    "svhn": svhn,
    "tiny_imagenet": tiny_imagenet,
}


def build(name: str, root: Path, patch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Write a synthetic data set and build the class that reads it."""
    extra_options = WRITERS[name](root, patch)
    return fedlas.build_data(name, root=root, download=False, **extra_options, **options)


def split_of(transform: Transform, samples: int = 20, seed: int = 0) -> Split:
    random = np.random.default_rng(seed)
    shape = (samples, transform.channels, transform.stored, transform.stored)
    labels = torch.from_numpy(random.integers(0, 10, samples))
    index = torch.from_numpy(random.permutation(1000)[:samples])
    images = torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8))
    return Split("train", images, labels, index, tuple("0123456789"), "made up")
