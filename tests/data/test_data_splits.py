"""Splits equal the published ones sample by sample."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedlas
from data import synthetic
from fedlas.data import Transform, data_root
from fedlas.data.base import held_out, held_out_of_each_class

CIFAR_VAL = {
    1: ([26247, 35067, 34590, 16668, 12196], 122592196),
    2: ([23656, 27442, 40162, 8459, 8051], 124682602),
    3: ([35437, 16296, 23122, 9436, 11959], 122891264),
}
TINY_VAL = {
    1: ([431, 115, 465, 216, 264], 500015176),
    2: ([238, 52, 80, 450, 31], 499999046),
    3: ([350, 20, 293, 176, 335], 499990689),
}


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("seed", CIFAR_VAL)
def test_cifar_splits_equal_the_published_ones(name, seed):
    data = fedlas.build_data(name, seed=seed)
    train, val = data.halves(torch.zeros(data.sizes["train"], dtype=torch.int64))
    first, total = CIFAR_VAL[seed]
    assert (len(train), len(val)) == (45_000, 5_000)
    assert val[:5].tolist() == first
    assert int(val.sum()) == total
    assert torch.equal(torch.cat([val, train]), torch.from_numpy(np.random.RandomState(seed).permutation(50_000)))


@pytest.mark.parametrize("seed", TINY_VAL)
def test_tiny_imagenet_splits_equal_the_published_ones(seed):
    data = fedlas.build_data("tiny_imagenet", seed=seed)
    train, val = data.halves(torch.arange(200).repeat_interleave(500))
    first, total = TINY_VAL[seed]
    assert (len(train), len(val)) == (90_000, 10_000)
    assert val[:5].tolist() == first
    assert int(val.sum()) == total


def test_tiny_imagenet_files_give_the_published_split(tmp_path, monkeypatch):
    """Read files from disk up to `index`, with 500 one-pixel images per class."""
    from PIL import Image

    synthetic.expect(monkeypatch, "tiny_imagenet", 1, train=500)
    folder = tmp_path / "tiny-imagenet-200"
    (folder / "train" / "n01" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n01\n")
    Image.new("L", (1, 1)).save(folder / "one.jpg")
    content = (folder / "one.jpg").read_bytes()
    for n in range(500):
        (folder / "train" / "n01" / "images" / f"n01_{n}.JPEG").write_bytes(content)
    val = fedlas.build_data("tiny_imagenet", root=tmp_path, seed=1).split("val")
    assert val.index[:5].tolist() == TINY_VAL[1][0]
    # Files are in the order of their names as text: 0, 1, 10, 100, 101 ...
    names = sorted(range(500), key=str)
    assert [path.stem for path in val.images[:5]] == [f"n01_{names[n]}" for n in TINY_VAL[1][0]]


def test_held_out_of_each_class_takes_a_tenth_per_class():
    labels = torch.tensor([0] * 30 + [1] * 29 + [2] * 66 + [3])[torch.randperm(126)]
    train, val = held_out_of_each_class(labels, 7, 0.1)
    assert labels[val].bincount(minlength=4).tolist() == [3, 3, 7, 0]
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(126))


def test_splitting_no_samples_gives_empty_splits():
    for split in (held_out, held_out_of_each_class):
        assert [len(half) for half in split(torch.empty(0, dtype=torch.int64), 1, 0.1)] == [0, 0]


def test_cifar100_official_test_normalisation_is_opt_in():
    default, official = (fedlas.build_data("cifar100", official_test_normalisation=on) for on in (False, True))
    assert default.transform_for("test").mean == (0.4914, 0.4822, 0.4465)
    assert official.transform_for("train") == official.transform_for("val") == default.transform
    test = official.transform_for("test")
    assert (test.mean, test.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (test.size, test.pad, test.flip) == (32, 4, True)


def test_transforms_have_the_published_constants():
    transforms = {record.name: getattr(record.cls, "transform", None) for record in fedlas.list_data()}
    cifar = Transform(
        size=32, channels=3, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), pad=4, flip=True
    )
    assert transforms["cifar10"] == transforms["cifar100"] == cifar
    assert transforms["tiny_imagenet"] == Transform(
        size=64, channels=3, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), pad=4, flip=True
    )
    assert (transforms["svhn"].mean, transforms["svhn"].flip) == (cifar.mean, False)


# Digits


def test_digits_need_no_files(tmp_path):
    data = fedlas.build_data("digits", root=tmp_path / "nowhere", download=False)
    sizes = {split: len(data.split(split)) for split in data.splits}
    assert sizes == {"train": 800, "val": 200, "test": 797}
    assert data.split("test").index.tolist() == list(range(1000, 1797))
    images = data.part("train").images.float() / 255
    assert abs(images.mean() - data.transform.mean[0]) < 1e-3
    assert abs(images.std() - data.transform.std[0]) < 1e-3


def test_digits_equal_those_of_scikit_learn(monkeypatch):
    from_file = fedlas.build_data("digits").part("train")
    monkeypatch.setattr("fedlas.data.digits.find_spec", lambda _: None)  # as if scikit-learn had moved its files
    from_load_digits = fedlas.build_data("digits").part("train")
    assert torch.equal(from_file.images, from_load_digits.images)
    assert torch.equal(from_file.labels, from_load_digits.labels)


def test_digits_pixels_span_0_to_255():
    from sklearn.datasets import load_digits

    part = fedlas.build_data("digits").part("test")
    original = torch.from_numpy(load_digits().images[1000:])
    assert torch.equal((part.images[:, 0].double() / 255 * 16).round(), original)
    assert part.images.max() == 255


@pytest.mark.parametrize("noise", [0.1, 0.25, 1.0])
def test_label_noise_changes_only_training_labels(noise):
    clean, noisy = (fedlas.build_data("digits", label_noise=fraction) for fraction in (0.0, noise))
    assert torch.equal(clean.split("train").index, noisy.split("train").index)
    changed = clean.split("train").labels != noisy.split("train").labels
    assert int(changed.sum()) == round(800 * noise)
    assert torch.equal(noisy.split("train").labels, noisy.split("train").labels)
    for split in ("val", "test"):
        assert torch.equal(clean.split(split).labels, noisy.split(split).labels)
    other = fedlas.build_data("digits", label_noise=noise, seed=2)
    assert other.split("train").labels.tolist() != noisy.split("train").labels.tolist()


def test_label_noise_covers_every_other_class():
    clean, noisy = (fedlas.build_data("digits", label_noise=fraction).split("train").labels for fraction in (0.0, 1.0))
    assert ((noisy - clean) % 10).bincount(minlength=10).min() == 0
    assert ((noisy - clean) % 10).bincount(minlength=10)[1:].min() > 60


def test_train_samples_limits_only_the_training_split():
    limited = fedlas.build_data("digits", train_samples=50, label_noise=0.2)
    assert len(limited.split("train")) == 50
    assert len(limited.split("val")) == 200
    full = fedlas.build_data("digits")
    assert torch.equal(limited.split("train").index, full.split("train").index[:50])


@pytest.mark.parametrize(
    "options", [{"train_samples": 0}, {"train_samples": 801}, {"label_noise": -0.1}, {"label_noise": 1.1}]
)
def test_invalid_digits_options_raise(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        fedlas.build_data("digits", **options)


# Data folder


def test_data_root_follows_argument_then_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "a"))
    assert data_root() == tmp_path / "a"
    assert data_root(tmp_path / "b") == tmp_path / "b"
    assert fedlas.build_data("mnist").root == tmp_path / "a"
    monkeypatch.delenv("FEDLAS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert data_root() == tmp_path / "c" / "fedlas"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_root() == Path.home() / ".cache" / "fedlas"
    assert data_root("~/x") == Path.home() / "x"


@pytest.mark.parametrize(
    "invalid",
    [{"size": 9}, {"channels": 2}, {"mean": (0.5,)}, {"std": (0.5, 0.5, 0.0)}, {"pad": -1}, {"size": 0}],
)
def test_invalid_transform_raises(invalid):
    valid = {"size": 8, "resize": 8, "channels": 3, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with pytest.raises(ValueError, match=r"channels|std|pixels"):
        Transform(**(valid | invalid))


def test_split_columns_of_different_lengths_raise():
    split = fedlas.build_data("digits").split("val")
    with pytest.raises(ValueError, match="1 images, 200 labels, 200 indices"):
        type(split)("val", (Path("a.png"),), split.labels, split.index, split.class_names, "digits")
    assert repr(split) == "Split(digits val, n=200, classes=10)"
