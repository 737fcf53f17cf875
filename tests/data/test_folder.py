"""Image folders and CSV files of the user."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlas
from data import synthetic
from fedlas.data import DamagedFileError, MissingFileError
from fedlas.data.base.images import decode


def write_images(folder: Path, counts: dict[str, int]) -> None:
    random = np.random.default_rng(0)
    for name, count in counts.items():
        for n in range(count):
            synthetic.picture(folder / name / f"{n}.png", (20, 20), random)


def test_each_subdirectory_is_a_class(tmp_path):
    write_images(tmp_path, {"dog": 30, "cat": 20, "deep/er": 10, ".hidden": 2})
    (tmp_path / "dog" / "notes.txt").write_text("no image")
    data = fedlas.build_data("folder", path=tmp_path, image_size=16)
    assert data.class_names == ("cat", "deep", "dog")
    assert data.num_classes == 3
    assert data.split("train").labels.bincount().tolist() == [16, 8, 24]
    assert data.split("val").labels.bincount().tolist() == [2, 1, 3]
    assert data.split("test").labels.bincount().tolist() == [2, 1, 3]
    assert len(data.split("all")) == 60
    assert data.title == tmp_path.name


@pytest.mark.parametrize("class_names", [["cat", "cow", "dog"], "cat,cow,dog", "[cat, cow, dog]"])
def test_class_names_accepts_a_list_or_a_string(tmp_path, class_names):
    write_images(tmp_path, {"dog": 2, "cat": 2})
    data = fedlas.build_data("folder", path=tmp_path, class_names=class_names)
    assert data.class_names == ("cat", "cow", "dog")
    assert data.split("all").labels.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("class_names", "message"), [("cat,dog,cat", "cat, dog, cat"), ("cat,,dog", "empty"), ("", "empty")]
)
def test_empty_and_duplicate_class_names_raise(tmp_path, class_names, message):
    with pytest.raises(ValueError, match=f"class_names.*{message}"):
        fedlas.build_data("folder", path=tmp_path, class_names=class_names)


def test_too_few_images_for_a_split_raise(tmp_path):
    write_images(tmp_path, {"dog": 3, "cat": 4})
    data = fedlas.build_data("folder", path=tmp_path)
    for name in ("val", "test"):
        with pytest.raises(ValueError, match=f"{name}.*cat 4, dog 3"):
            data.split(name)
    assert len(data.split("all")) == 7


def test_split_directories_define_the_splits(tmp_path):
    write_images(tmp_path / "train", {"a": 20, "b": 20})
    write_images(tmp_path / "test", {"a": 3, "c": 4})
    data = fedlas.build_data("folder", path=tmp_path)
    assert data.class_names == ("a", "b", "c")
    with pytest.warns(UserWarning, match=f"{tmp_path}.*: c$"):
        train = data.split("train")
    write_images(tmp_path / "train", {"c": 10})
    data = fedlas.build_data("folder", path=tmp_path)
    assert {split: len(data.split(split)) for split in data.splits} == {"train": 45, "val": 5, "test": 7, "all": 57}
    write_images(tmp_path / "val", {"a": 5})
    data = fedlas.build_data("folder", path=tmp_path)
    assert {split: len(data.split(split)) for split in data.splits} == {"train": 50, "val": 5, "test": 7, "all": 62}
    assert "train" in train.images[0].parts


@pytest.mark.parametrize(("name", "expected"), [("Train", "train"), ("valid", "val"), ("Validation", "val")])
def test_misnamed_split_directory_raises_with_a_suggestion(tmp_path, name, expected):
    write_images(tmp_path / name, {"a": 2, "b": 2})
    write_images(tmp_path / "test", {"a": 2, "b": 2})
    with pytest.raises(ValueError, match=rf"{name}\b.* {expected}"):
        fedlas.build_data("folder", path=tmp_path).split("test")


def test_class_directory_may_have_the_name_of_a_split(tmp_path):
    write_images(tmp_path, {"train": 20, "bus": 20, "train/.checkpoints": 2})
    data = fedlas.build_data("folder", path=tmp_path)
    assert (data.class_names, len(data.split("all"))) == (("bus", "train"), 40)
    write_images(tmp_path, {"train/steam": 3})
    with pytest.warns(UserWarning, match=r"split.*bus"):
        assert fedlas.build_data("folder", path=tmp_path).class_names == ("steam",)


def test_hidden_files_and_folders_are_ignored(tmp_path):
    write_images(tmp_path, {"a": 10, "b": 10, "a/.copies": 3})
    (tmp_path / "b" / "._0.png").write_text("left by another system")
    assert len(fedlas.build_data("folder", path=tmp_path).split("all")) == 20


def test_class_names_need_no_existing_folder(tmp_path):
    names = fedlas.build_data("folder", path=tmp_path / "gone", class_names=["b", "a"]).class_names
    assert names == ("b", "a")


def test_missing_split_directory_raises(tmp_path):
    write_images(tmp_path / "test", {"a": 3, "c": 4})
    data = fedlas.build_data("folder", path=tmp_path)
    assert len(data.split("test")) == 7
    for split in ("train", "val"):
        with pytest.raises(MissingFileError, match=r"train.*test"):
            data.split(split)


def table(folder: Path, text: str) -> Path:
    write_images(folder, {"x": 4})
    (folder / "list.csv").write_text(text)
    return folder / "list.csv"


def test_csv_lists_paths_labels_and_splits(tmp_path):
    path = table(tmp_path, "path,label,split\nx/0.png,10,train\nx/1.png,9,train\nx/2.png,9,test\n")
    data = fedlas.build_data("folder", path=path)
    assert data.class_names == ("9", "10")  # as numbers
    assert data.split("test").labels.tolist() == [0]
    assert data.split("test").index.tolist() == [2]
    assert data.split("all").labels.tolist() == [1, 0, 0]
    assert data.title == "list"


def test_csv_accepts_absolute_paths_without_splits(tmp_path):
    path = table(tmp_path, f"label,path\nb,{tmp_path}/x/0.png\na,x/1.png\n")
    data = fedlas.build_data("folder", path=path)
    assert data.split("all").labels.tolist() == [1, 0]
    assert data.split("all").images[0] == tmp_path / "x" / "0.png"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\nx/0.png,a\n", "path.*label.*file, label"),
        ("", "path.*label.*none"),
        ("path,label\nx/0.png\n", "line 2"),
        ("path,label\nx/0.png,\n", "line 2.*label"),
        ("path,label\nx/0.png,a\n ,a\n", "line 3.*path"),
        ("path,label\nx/0.png,a\nx/1.png,a,b\n", "line 3"),
        ("path,label,split\nx/0.png,a,training\n", "split.*train, val.*test.*'training'"),
        ("path,label,split\nx/0.png,a,train\nx/1.png,a,\n", "split.*train, val.*test"),
    ],
)
def test_invalid_csv_raises(tmp_path, text, message):
    with pytest.raises(DamagedFileError, match=message):
        fedlas.build_data("folder", path=table(tmp_path, text)).split("all")


def test_csv_in_another_encoding_raises(tmp_path):
    path = table(tmp_path, "")
    path.write_bytes("path,label\nx/0.png,Kätzchen\n".encode("latin-1"))
    with pytest.raises(DamagedFileError, match=r"list\.csv.*UTF-8"):
        fedlas.build_data("folder", path=path).split("all")


def test_csv_without_rows_raises(tmp_path):
    with pytest.raises(DamagedFileError, match=r"list\.csv.*header"):
        fedlas.build_data("folder", path=table(tmp_path, "path,label\n")).split("all")


def test_missing_folder_error_names_both_searched_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingFileError, match=rf"{tmp_path}/pets\b.*{tmp_path}/root/pets\b"):
        fedlas.build_data("folder", path="pets", root=tmp_path / "root").split("all")
    with pytest.raises(MissingFileError, match=rf"{tmp_path}/pets\b(?!.*/pets)"):
        fedlas.build_data("folder", path=tmp_path / "pets").split("all")


def test_directories_without_images_warn(tmp_path):
    write_images(tmp_path, {"dog": 3, "cat": 3})
    (tmp_path / "owl").mkdir()
    with pytest.warns(UserWarning, match="owl"):
        assert fedlas.build_data("folder", path=tmp_path).class_names == ("cat", "dog")


def test_pipes_and_devices_are_not_read_as_images(tmp_path):
    """Regression: opening a pipe blocked forever."""
    write_images(tmp_path / "images", {"a": 2, "b": 2})
    pipe = tmp_path / "images" / "a" / "p.png"
    os.mkfifo(pipe)
    (tmp_path / "images" / "a" / "folder.png").mkdir()
    (tmp_path / "images" / "b" / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "images" / "b" / "link.png").symlink_to(tmp_path / "images" / "a" / "0.png")
    data = fedlas.build_data("folder", path=tmp_path / "images", image_size=16)
    assert len(data.split("all")) == 5  # with the link to an image
    for path in (pipe, tmp_path / "images" / "b" / "endless.png", tmp_path):
        with pytest.raises(DamagedFileError, match=f"{path} .*device"):
            decode(path, data.transform)
    (tmp_path / "t.csv").write_text("path,label\nimages/a/0.png,a\nimages/a/p.png,a\n")
    with pytest.raises(DamagedFileError, match=r"\b1 .*t\.csv.*device.*p\.png"):
        fedlas.build_data("folder", path=tmp_path / "t.csv").split("all")
    (tmp_path / "images" / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(MissingFileError, match=r"gone\.png"):
        fedlas.build_data("folder", path=tmp_path / "images").split("all")


def test_folder_without_subdirectories_is_one_class(tmp_path):
    """docs/train.md predicts on ~/pictures, which usually has no directory per class."""
    write_images(tmp_path, {"pictures": 3})
    data = fedlas.build_data("folder", path=tmp_path / "pictures")
    assert data.class_names == ("pictures",)
    assert len(data.split("all")) == 3


def test_image_size_zero_raises(tmp_path):
    with pytest.raises(ValueError, match=r"image_size.*1.*0"):
        fedlas.build_data("folder", path=tmp_path, image_size=0)


def test_missing_images_error_names_them(tmp_path):
    path = table(tmp_path, "path,label\nx/0.png,a\nx/77.png,a\n")
    with pytest.raises(MissingFileError, match=r"\b1 .*list\.csv.*77\.png"):
        fedlas.build_data("folder", path=path).split("all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingFileError, match="/empty"):
        fedlas.build_data("folder", path=tmp_path / "empty").split("all")


def test_class_names_set_order_and_number_of_classes(tmp_path):
    write_images(tmp_path, {"dog": 3, "cat": 3})
    data = fedlas.build_data("folder", path=tmp_path, class_names=["dog", "bird", "cat"])
    assert data.num_classes == 3
    assert data.split("all").labels.tolist() == [2, 2, 2, 0, 0, 0]
    with pytest.raises(ValueError, match=r"class_names.*dog"):
        fedlas.build_data("folder", path=tmp_path, class_names=["cat"]).split("all")


def test_relative_path_prefers_the_working_directory_over_root(tmp_path, monkeypatch):
    write_images(tmp_path / "root" / "pets", {"a": 3, "b": 3})
    monkeypatch.chdir(tmp_path)
    assert len(fedlas.build_data("folder", path="pets", root=tmp_path / "root").split("all")) == 6
    write_images(tmp_path / "pets", {"a": 1, "b": 1})
    assert len(fedlas.build_data("folder", path="pets", root=tmp_path / "root").split("all")) == 2


@pytest.mark.parametrize("extension", ["png", "tiff", "pgm"])
def test_grey_16_bit_images_keep_their_levels(tmp_path, extension):
    """Regression: Pillow clips at 255, so these images were white."""
    image = pytest.importorskip("PIL.Image")
    grey = np.linspace(0, 65535, 16 * 16).astype(np.uint16).reshape(16, 16)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        image.fromarray(grey).save(tmp_path / name / f"1.{extension}")
    data = fedlas.build_data("folder", path=tmp_path, image_size=16, resize=16)
    pixels = decode(data.split("all").images[0], data.transform)
    assert torch.equal(pixels, torch.from_numpy((grey >> 8).astype(np.uint8)).expand(3, -1, -1))


def test_float_and_int32_images_raise(tmp_path):
    image = pytest.importorskip("PIL.Image")
    transform = fedlas.build_data("folder", path=tmp_path).transform
    for number, pixels in enumerate((np.ones((4, 4), np.float32), np.full((4, 4), 1 << 20, np.int32))):
        image.fromarray(pixels).save(tmp_path / f"{number}.tiff")
        with pytest.raises(DamagedFileError, match=rf"{number}\.tiff"):
            decode(tmp_path / f"{number}.tiff", transform)


def test_options_set_the_transform(tmp_path):
    transform = fedlas.build_data(
        "folder", path=tmp_path, image_size=32, resize=40, normalisation="half", flip=False, antialias=False
    ).transform
    assert (transform.size, transform.resize, transform.flip, transform.antialias) == (32, 40, False, False)
    assert transform.mean == (0.5, 0.5, 0.5)
    with pytest.raises(TypeError, match="path"):
        fedlas.build_data("folder")
