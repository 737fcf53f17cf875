"""Official file formats are read as published; damaged or malicious files raise."""

import builtins
import gzip
import hashlib
import pickle
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedlas
from data import synthetic
from fedlas.data import DamagedFileError, MissingFileError, Resident
from fedlas.data.base.formats import plain_unpickled, read_cifar_binary, read_cifar_pickle, read_idx

_reconstruct = np.empty(0).__reduce__()[0]


def escaped(path: Path) -> str:
    return re.escape(str(path))


# IDX


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)])
def test_read_idx_reads_plain_and_compressed_files(tmp_path, compressed, shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    path = tmp_path / ("a.gz" if compressed else "a")
    synthetic.idx(path, array, compressed)
    assert np.array_equal(read_idx(path), array)


@pytest.mark.parametrize("size", [0, 3, 4, 9, 16, 40, 75, 77])
def test_idx_file_of_another_size_raises(tmp_path, size):
    path = tmp_path / "images"
    synthetic.idx(path, np.zeros((3, 4, 5), np.uint8), compressed=False)
    path.write_bytes((path.read_bytes() + b"x")[:size])
    with pytest.raises(DamagedFileError, match=escaped(path) + (".*3 x 4 x 5.*61" if size == 77 else "")):
        read_idx(path)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:30] + b"xxxx" + b[34:], lambda _: b"no gzip"])
def test_damaged_gzip_file_raises(tmp_path, damage):
    path = tmp_path / "images.gz"
    synthetic.idx(path, np.random.default_rng(0).integers(0, 256, (30, 40), np.uint8), compressed=True)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedFileError, match=escaped(path)):
        read_idx(path)


def test_idx_file_of_another_dtype_raises(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack(">BBBBI", 0, 0, 13, 1, 1) + b"\0\0\0\0")
    with pytest.raises(DamagedFileError, match="00 00 0d 01"):
        read_idx(tmp_path / "a")


def test_idx_checksum_is_of_the_decompressed_content(tmp_path, monkeypatch):
    """Debian recompresses the files, so their compressed bytes have another checksum."""
    data = synthetic.build("fashion_mnist", tmp_path, monkeypatch)
    path = tmp_path / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=1, mtime=1))
    assert len(data.split("train"))


@pytest.mark.parametrize("folder", ["FashionMNIST/raw", "debian"])
def test_fashion_mnist_is_found_in_alternative_folders(tmp_path, monkeypatch, folder):
    data = synthetic.build("fashion_mnist", tmp_path, monkeypatch)
    monkeypatch.setattr(type(data), "folders", ("fashion-mnist", "FashionMNIST/raw", str(tmp_path / "debian")))
    (tmp_path / folder).parent.mkdir(exist_ok=True)
    (tmp_path / "fashion-mnist").rename(tmp_path / folder)
    assert len(data.split("test")) == 10 * synthetic.TEST


def test_fashion_mnist_searches_the_debian_package_folder():
    """Seen in the file list of the package dataset-fashion-mnist 0.0~git20200523; conftest replaces the path."""
    source = Path(fedlas.data.__file__).with_name("fashion_mnist.py").read_text(encoding="utf-8")
    assert '"/usr/share/datasets/fashion-mnist"' in source


def test_changed_pixel_fails_the_checksum(tmp_path, monkeypatch):
    data = synthetic.build("mnist", tmp_path, monkeypatch)
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DamagedFileError, match=f"{escaped(path)}.*MD5"):
        data.split("test")


# CIFAR


def test_cifar_binary_records_are_rgb_planes(tmp_path):
    record = bytes([9, 7]) + bytes([1] * 1024) + bytes([2] * 1024) + bytes([3] * 1023) + b"\xff"
    (tmp_path / "a").write_bytes(record * 2)
    images, labels = read_cifar_binary(tmp_path / "a", 2)
    assert labels.tolist() == [7, 7]
    assert images.shape == (2, 3, 32, 32)
    assert images[1, :, 0, 0].tolist() == [1, 2, 3]
    assert images[1, 2, 31, 31] == 255


@pytest.mark.parametrize("content", [b"", b"x" * 3073 + b"y"])
def test_cifar_file_with_partial_records_raises(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DamagedFileError, match="3073"):
        read_cifar_binary(tmp_path / "a", 1)


def test_truncated_cifar_batch_raises(tmp_path, monkeypatch):
    data = synthetic.build("cifar10", tmp_path, monkeypatch)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    with pytest.raises(DamagedFileError, match=f"{escaped(path)}.*MD5"):
        data.split("train")
    assert len(data.split("test"))


def test_missing_cifar_batch_raises(tmp_path, monkeypatch):
    data = synthetic.build("cifar10", tmp_path, monkeypatch)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(MissingFileError, match=r"data_batch_3\.bin"):
        data.split("train")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_pickle_and_binary_versions_are_equal(tmp_path, monkeypatch, name):
    binary = synthetic.build(name, tmp_path, monkeypatch).part("train")
    synthetic.pickled_cifar(tmp_path, monkeypatch, name, protocol=4)
    pickled = fedlas.build_data(name, root=tmp_path).part("train")
    assert torch.equal(binary.images, pickled.images)
    assert torch.equal(binary.labels, pickled.labels)


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as the Python 2 of 2009 pickled it: strings are bytes, numpy's module has its old name."""

    def text(data: bytes) -> bytes:
        return b"U" + bytes([len(data)]) + data

    def number(n: int) -> bytes:
        return b"J" + struct.pack("<i", n)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    content = b"T" + struct.pack("<i", images.size) + images.tobytes()
    shape = b"".join(map(number, images.shape)) + b"\x86"
    array += b"(" + number(1) + shape + dtype + b"\x89" + content + b"tb"
    items = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def test_python_2_pickle_is_read(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
    path = tmp_path / "data_batch_1"
    path.write_bytes(python2_pickle(images, [3, 1, 4, 1]))
    read_images, labels = read_cifar_pickle(path, "labels", synthetic.md5(path))
    assert np.array_equal(read_images.reshape(4, 3072), images)
    assert labels.tolist() == [3, 1, 4, 1]


class Evil:
    """Runs a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


EVIL = {
    "exec": Evil(builtins.exec, "raise SystemExit('ran')"),
    "open": Evil(builtins.open, "/dev/null", "w"),
    "getattr": Evil(builtins.getattr, "a", "upper"),
    "numpy function": Evil(np.fromfile, "/dev/null"),
    "class": np.random.default_rng,
    "inside": {"data": [Evil(builtins.exec, "raise SystemExit('ran')")]},
    "set": {1, 2},
    "object array": np.array([Evil(builtins.exec, "raise SystemExit('ran')")], dtype=object),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("payload", EVIL)
def test_malicious_pickle_is_not_executed(tmp_path, payload, protocol):
    """Also if its checksum is the expected one."""
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(EVIL[payload], protocol))
    called = "exec|open|getattr|fromfile|default_rng|set|encode"
    with pytest.raises(DamagedFileError, match=rf"{escaped(path)}.*\b({called})\b"):
        read_cifar_pickle(path, "labels", synthetic.md5(path))


def test_self_referential_pickle_terminates():
    recursive_list: list = []
    recursive_list.append(recursive_list)
    result = plain_unpickled(pickle.dumps(recursive_list, 2), Path("batch"))
    assert result[0] is result


def test_pickle_cannot_allocate_arrays_without_content():
    """A pickled array must include its contents; the array class cannot be called otherwise."""
    for payload in (Evil(np.ndarray, (1 << 20,)), Evil(_reconstruct, np.ndarray, (1 << 20,), b"b")):
        for protocol in (2, 4):
            with pytest.raises(DamagedFileError, match="batch"):
                plain_unpickled(pickle.dumps(payload, protocol), Path("batch"))
    hidden = np.zeros(1, dtype=[("a", "O")])
    with pytest.raises(DamagedFileError, match=r"batch.*ndarray"):
        plain_unpickled(pickle.dumps(hidden, 4), Path("batch"))


def test_pickle_with_a_wrong_checksum_is_not_opened(tmp_path, monkeypatch):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": 1}))
    monkeypatch.setattr("fedlas.data.base.formats.plain_unpickled", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(DamagedFileError, match="MD5"):
        read_cifar_pickle(path, "labels", "0" * 32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}),
        pickle.dumps({"data": np.zeros((2, 3072), np.float32), "labels": [1, 2]}),
        pickle.dumps({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2, 3]}),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]})[:-40],
    ],
)
def test_pickle_of_other_content_raises(tmp_path, content):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=escaped(path)):
        read_cifar_pickle(path, "labels", synthetic.md5(path))


# SVHN


def test_svhn_label_10_is_digit_0(tmp_path, monkeypatch):
    images, labels = synthetic.labelled(synthetic.TEST, 10, (32, 32, 3), 1)
    test = synthetic.build("svhn", tmp_path, monkeypatch).split("test")
    assert test.labels.tolist() == labels.tolist()
    assert np.array_equal(test.images.permute(0, 2, 3, 1).numpy(), images)


def test_changed_mat_file_fails_the_checksum(tmp_path, monkeypatch):
    data = synthetic.build("svhn", tmp_path, monkeypatch)
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedFileError, match=f"{escaped(path)}.*MD5"):
        data.split("test")


@pytest.mark.parametrize("content", [b"", b"x" * 500])
def test_unreadable_mat_file_raises(tmp_path, monkeypatch, content):
    data = synthetic.build("svhn", tmp_path, monkeypatch)
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.write_bytes(content)
    monkeypatch.setattr(type(data), "files", {path.name: synthetic.md5(path)})
    with pytest.raises(DamagedFileError, match=escaped(path)):
        data.split("test")


def svhn_with_rebuilt_crops(tmp_path, monkeypatch, **changes):
    cls = synthetic.expect(monkeypatch, "svhn", 10)
    images, labels = synthetic.labelled(synthetic.TEST, 10, (32, 32, 3), 1)
    monkeypatch.setattr(cls, "rebuilt_md5", hashlib.md5(images.tobytes()).hexdigest())
    (tmp_path / "svhn_rebuilt").mkdir()
    np.savez(tmp_path / "svhn_rebuilt" / "test.npz", **({"images": images, "labels": labels} | changes))
    return images, labels, fedlas.build_data("svhn", root=tmp_path, download=False)


def test_svhn_rebuilt_crops_are_read_and_named_in_the_title(tmp_path, monkeypatch):
    images, labels, data = svhn_with_rebuilt_crops(tmp_path, monkeypatch)
    assert data.title == "SVHN (rebuilt crops)"
    assert np.array_equal(data.split("test").images.permute(0, 2, 3, 1).numpy(), images)
    assert data.split("test").labels.tolist() == labels.tolist()
    with pytest.raises(MissingFileError, match=r"train_32x32\.mat"):
        data.split("train")


def test_svhn_prefers_the_official_file_over_rebuilt_crops(tmp_path, monkeypatch):
    _, _, data = svhn_with_rebuilt_crops(tmp_path, monkeypatch)
    synthetic.svhn(tmp_path, monkeypatch)
    (tmp_path / "svhn_rebuilt" / "test.npz").write_bytes(b"")
    assert data.title == "SVHN"
    assert len(data.split("test"))


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((60, 32, 32, 3), np.uint8)},
        {"images": np.zeros((60, 3, 32, 32), np.uint8)},
        {"images": np.zeros((60, 32, 32, 3), np.float32)},
        {"images": np.array([None] * 60)},
    ],
)
def test_damaged_rebuilt_crops_raise(tmp_path, monkeypatch, changes):
    _, _, data = svhn_with_rebuilt_crops(tmp_path, monkeypatch, **changes)
    with pytest.raises(DamagedFileError, match=escaped(tmp_path / "svhn_rebuilt" / "test.npz")):
        data.split("test")


@pytest.mark.parametrize("content", [b"", b"nothing"])
def test_npz_file_that_is_not_an_archive_raises(tmp_path, monkeypatch, content):
    _, _, data = svhn_with_rebuilt_crops(tmp_path, monkeypatch)
    (tmp_path / "svhn_rebuilt" / "test.npz").write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"test\.npz"):
        data.split("test")


# Tiny ImageNet


def test_tiny_imagenet_classes_are_sorted_by_name(tmp_path, monkeypatch):
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    assert data.class_names == ("n01", "n02", "n03")
    part = data.part("train")
    assert part.labels.tolist() == sorted(part.labels.tolist())
    for path, label in zip(part.images, part.labels.tolist(), strict=True):
        assert path.parts[-3] == data.class_names[label]
    # As text, 10 comes before 2; the published splits count in this order.
    assert [path.stem for path in part.images[:4]] == ["n01_0", "n01_1", "n01_10", "n01_11"]


def test_tiny_imagenet_test_labels_come_from_the_annotations(tmp_path, monkeypatch):
    """Reading the folder `val/images` as one class would give an accuracy of 0.5 %."""
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    test = data.split("test")
    assert test.labels.tolist() == [1, 0, 2] * synthetic.TEST
    assert [path.stem for path in test.images[:3]] == ["val_0", "val_1", "val_2"]


def test_tiny_imagenet_reads_only_labelled_images_of_the_official_layout(tmp_path, monkeypatch):
    """Bounding boxes, `words.txt` and the unlabelled images in `test/` are there, and not read."""
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    folder = tmp_path / "tiny-imagenet-200"
    assert {path.name for path in folder.iterdir()} == {"train", "val", "test", "wnids.txt", "words.txt"}
    train, test = data.part("train"), data.part("test")
    labelled = set(folder.glob("train/*/images/*.JPEG")) | set(folder.glob("val/images/*.JPEG"))
    assert {*train.images, *test.images} == labelled
    assert (len(train.images), len(test.images)) == (3 * synthetic.TRAIN, 3 * synthetic.TEST)
    assert data.split("test").decoded(data.transform).images.shape == (3 * synthetic.TEST, 3, 64, 64)


def test_tiny_imagenet_without_a_training_image_raises(tmp_path, monkeypatch):
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    (tmp_path / "tiny-imagenet-200" / "train" / "n03" / "images" / "n03_0.JPEG").unlink()
    with pytest.raises((DamagedFileError, MissingFileError), match=rf"\b{3 * synthetic.TRAIN}\b"):
        data.split("train")


def test_grey_images_are_converted_to_rgb(tmp_path, monkeypatch):
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    split = data.split("train").decoded(data.transform)
    assert split.images.shape[1:] == (3, 64, 64)
    grey = [n for n, path in enumerate(data.split("train").images) if path.stem.endswith("_3")]
    for n in grey:
        assert torch.equal(split.images[n, 0], split.images[n, 2])


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda _: b"", lambda _: b"no image"])
def test_damaged_image_raises_with_its_path(tmp_path, monkeypatch, damage):
    data = synthetic.build("tiny_imagenet", tmp_path, monkeypatch)
    path = tmp_path / "tiny-imagenet-200" / "val" / "images" / "val_4.JPEG"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedFileError, match=escaped(path)):
        Resident(data.split("test"), data.transform, train=False)


# CUB and Aircraft


def test_cub_classes_and_splits_follow_its_lists(tmp_path, monkeypatch):
    data = synthetic.build("cub200", tmp_path, monkeypatch)
    assert data.class_names == ("Bird_0", "Bird_1", "Bird_2")
    per_class = synthetic.TRAIN + synthetic.TEST
    test = data.split("test")
    assert test.index.tolist() == [c * per_class + n for c in range(3) for n in range(synthetic.TEST)]
    assert test.labels.tolist() == [n // per_class for n in test.index.tolist()]
    assert all(path.stem == f"bird_{n}" for path, n in zip(test.images, test.index.tolist(), strict=True))


def test_aircraft_classes_follow_the_variants_file(tmp_path, monkeypatch):
    data = synthetic.build("aircraft", tmp_path, monkeypatch)
    assert data.class_names == ("707-320", "A300B4", "F/A-18 x")
    assert data.part("train").labels[:3].tolist() == [1, 0, 2]
    assert len(data.split("train")) + len(data.split("val")) == 3 * synthetic.TRAIN


UNPACKED = {"tiny": "tiny-imagenet-200", "cub": "CUB_200_2011", "aircraft": "fgvc-aircraft-2013b/data"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tiny", lambda f: (f / "val" / "images" / "val_4.JPEG").unlink(), r"\b1 .*val_4\.JPEG"),
        ("tiny", lambda f: (f / "val" / "val_annotations.txt").unlink(), r"val_annotations\.txt"),
        ("tiny", lambda f: (f / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n"), "n99"),
        ("tiny", lambda f: (f / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe"), r"val_annotations\.txt"),
        ("tiny", lambda f: (f / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\n"), r"\b1 .*\b18\b"),
        ("tiny", lambda f: (f / "wnids.txt").write_text("n01\nn02\nn02\n"), r"wnids\.txt.*\b2 .*\b3\b"),
        ("cub", lambda f: (f / "train_test_split.txt").write_text("1 1\n"), "train_test_split"),
        ("cub", lambda f: (f / "classes.txt").write_text("one\n"), r"classes\.txt.*'one'"),
        ("cub", lambda f: (f / "images.txt").unlink(), r"images\.txt"),
        ("cub", lambda f: (f / "images" / "002.Bird_1" / "bird_28.jpg").unlink(), r"\b1 .*bird_28\.jpg"),
        ("aircraft", lambda f: (f / "images_variant_test.txt").write_text("0000000 Concorde\n"), "Concorde"),
        ("aircraft", lambda f: (f / "variants.txt").write_text("a\nb\n"), r"variants\.txt.*\b2 .*\b3\b"),
        ("aircraft", lambda f: (f / "images" / "0000064.jpg").unlink(), r"\b1 .*0000064\.jpg"),
    ],
)
def test_damaged_lists_and_missing_images_raise(tmp_path, monkeypatch, name, change, message):
    data = synthetic.build({"tiny": "tiny_imagenet", "cub": "cub200"}.get(name, name), tmp_path, monkeypatch)
    change(tmp_path / UNPACKED[name])
    with pytest.raises((DamagedFileError, MissingFileError), match=message):
        data.split("test")


@pytest.mark.parametrize("name", ["cub200", "aircraft"])
def test_validation_on_the_test_split_is_opt_in(tmp_path, monkeypatch, name):
    data = synthetic.build(name, tmp_path, monkeypatch)
    assert data.split("val").labels.bincount().tolist() == [synthetic.TRAIN // 10] * 3
    assert not set(data.split("val").images) & set(data.split("test").images)
    options = {"image_size": 24, "resize": 28, "root": tmp_path}
    official = fedlas.build_data(name, selection="official", **options)
    assert official.split("val").images == official.split("test").images
    assert len(official.split("train")) == 3 * synthetic.TRAIN
    with pytest.raises(ValueError, match=r"selection.*'test'"):
        fedlas.build_data(name, selection="test", **options)
    with pytest.raises(ValueError, match=r"'halve'.*'half'"):
        fedlas.build_data(name, normalisation="halve", **options)


@pytest.mark.parametrize("name", ["cub200", "aircraft"])
def test_natural_images_are_cropped_as_in_the_paper(name):
    default = fedlas.build_data(name).transform
    assert (default.size, default.resize, default.pad, default.flip) == (384, 448, 0, True)
    assert default.mean == (0.485, 0.456, 0.406)
    small = fedlas.build_data(name, image_size=224).transform
    assert (small.size, small.resize, small.centre) == (224, 256, 16)
    assert fedlas.build_data(name, normalisation="half").transform.std == (0.5, 0.5, 0.5)


def test_decode_resizes_images_of_any_shape(tmp_path):
    Image.fromarray(np.full((10, 40, 3), 200, np.uint8)).save(tmp_path / "a.png")
    from fedlas.data.base.images import Transform, decode

    transform = Transform(size=6, resize=8, channels=1, mean=(0.5,), std=(0.5,))
    assert torch.equal(decode(tmp_path / "a.png", transform), torch.full((1, 8, 8), 200, dtype=torch.uint8))
