"""What every data set of the catalogue can do, asked of each of them."""

import re

import numpy as np
import pytest
import torch

import fedlas
from data import twins
from fedlas.data import DamagedFileError, Loader, MissingFileError, Resident

RECORDS = {record.name: record for record in fedlas.list_data()}
NAMES = list(RECORDS)
OPTIONS = {"folder": {"path": "nowhere"}}
FILES = [name for name in NAMES if name != "digits"]  # digits come with scikit-learn
COUNTED = [name for name in NAMES if RECORDS[name].cls.per_class]  # the others have nothing to be compared with


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_entry_has_a_twin():
    assert set(twins.TWINS) == set(NAMES)


def test_the_catalogue_knows_all_ten():
    assert len(NAMES) >= 10
    assert fedlas.data.CIFAR10 is RECORDS["cifar10"].cls
    assert "CIFAR10" in dir(fedlas.data)


def test_the_record_tells_what_it_is(name):
    record = RECORDS[name]
    assert record.name == name
    assert re.fullmatch(r"[A-Z].*\.", record.summary)
    assert record.citation.endswith(".")
    assert {"root", "seed", "download", "progress"} <= set(record.keywords)


def test_building_reads_nothing(name, tmp_path):
    data = fedlas.build_data(name, root=tmp_path / "nowhere", **OPTIONS.get(name, {}))
    assert not (tmp_path / "nowhere").exists()
    assert "nowhere" in repr(data)


@pytest.mark.parametrize("name", FILES)
def test_without_files_it_says_what_to_put_where(name, tmp_path):
    data = fedlas.build_data(name, root=tmp_path / "nowhere", download=False, **OPTIONS.get(name, {}))
    with pytest.raises(MissingFileError, match=re.escape(str(tmp_path / "nowhere"))) as caught:
        data.split("train")
    if name != "folder":
        assert re.search(r"https?://\S+ .*MD5 \w{32}", str(caught.value))


def test_a_wrong_keyword_is_named(name):
    with pytest.raises(TypeError, match=f"'{name}'.*'sed'.*'seed'"):
        fedlas.build_data(name, sed=1)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_is_checked(name, seed):
    with pytest.raises(ValueError, match="seed"):
        fedlas.build_data(name, seed=seed, **OPTIONS.get(name, {}))


def test_facts_agree_with_each_other(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    assert len(data.class_names) == data.num_classes == len(set(data.class_names))
    assert data.title
    assert data.transform.channels == len(data.transform.mean)
    with pytest.raises(ValueError, match=r"'tset'.*'test'"):
        data.split("tset")
    with pytest.raises(ValueError, match="'tset'"):
        data.transform_for("tset")


def test_published_facts_agree_with_each_other(name):
    cls = RECORDS[name].cls
    for part, expected in cls.per_class.items():
        if isinstance(expected, range):
            assert expected[0] * cls.num_classes <= cls.sizes[part] <= expected[-1] * cls.num_classes
        else:
            assert len(expected) == cls.num_classes
            assert sum(expected) == cls.sizes[part]


def test_published_options_can_be_used(name, tmp_path, monkeypatch):
    assert set(RECORDS[name].cls.published) <= set(RECORDS[name].keywords)
    data = twins.build(name, tmp_path, monkeypatch, **RECORDS[name].cls.published)
    assert len(data.split("val"))


def test_every_split_has_one_normalisation(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    assert {data.transform_for(split) for split in data.splits} == {data.transform}


def test_splits_are_what_they_say(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    train, val, test = (data.split(split) for split in ("train", "val", "test"))
    for split in (train, val, test):
        assert split.labels.dtype == split.index.dtype == torch.int64
        assert len(split.images) == len(split.labels) == len(split.index) == len(split) > 0
        assert split.class_names == data.class_names
        assert 0 <= split.labels.min() <= split.labels.max() < data.num_classes
        if isinstance(split.images, torch.Tensor):
            assert split.images.dtype == torch.uint8
            assert split.images.is_contiguous()
        else:
            assert all(path.is_file() for path in split.images)
    assert not set(train.index.tolist()) & set(val.index.tolist())
    both = torch.cat([train.index, val.index]).sort().values
    if name == "folder":
        assert torch.equal(torch.cat([both, test.index]).sort().values, data.split("all").index)
    else:
        part = data.part("train")
        whole = torch.arange(len(part.labels)) if part.index is None else part.index
        assert torch.equal(both, whole)


def test_labels_follow_their_images(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    part = data.part("all" if name == "folder" else "train")
    whole = torch.arange(len(part.labels)) if part.index is None else part.index
    places = {number: place for place, number in enumerate(whole.tolist())}
    for split in (data.split("train"), data.split("val")):
        for place in range(0, len(split), 7):
            there = places[int(split.index[place])]
            assert split.labels[place] == part.labels[there]
            same = split.images[place] == part.images[there]
            assert same.all() if isinstance(same, torch.Tensor) else same


def test_the_seed_decides_the_splits_and_nothing_else(name, tmp_path, monkeypatch):
    first = twins.build(name, tmp_path, monkeypatch, seed=1)
    options = {"path": "pets"} if name == "folder" else {}
    again = fedlas.build_data(name, root=tmp_path, seed=1, **options)
    other = fedlas.build_data(name, root=tmp_path, seed=2, **options)
    assert torch.equal(first.split("val").index, again.split("val").index)
    assert torch.equal(first.split("train").index, again.split("train").index)
    assert set(first.split("val").index.tolist()) != set(other.split("val").index.tolist())
    assert torch.equal(first.split("test").index, other.split("test").index)


def test_both_ways_to_a_batch_give_the_same_numbers(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    split = data.split("train")
    resident = Resident(split, data.transform, train=True, seed=5)
    loader = Loader(split, data.transform, batch_size=7, train=True, seed=5, workers=0)
    resident.set_epoch(2)
    loader.set_epoch(2)
    assert len(loader) == -(-len(split) // 7)
    for here, there in zip(resident.batches(7), loader, strict=True):
        assert here.images.shape[1:] == (data.transform.channels, data.transform.size, data.transform.size)
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a, b)


def test_evaluation_gives_the_index_of_the_data_set(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    split = data.split("val")
    for batches in (
        Resident(split, data.transform, train=False).batches(4),
        Loader(split, data.transform, batch_size=4, train=False, workers=0),
    ):
        seen = list(batches)
        assert torch.equal(torch.cat([batch.index for batch in seen]), split.index)
        assert torch.equal(torch.cat([batch.labels for batch in seen]), split.labels)


def test_ood_images_are_resized_to_the_transform_of_the_training_data(name, tmp_path, monkeypatch):
    """Grey or coloured, small or large: what a network sees has the size and constants it was trained with."""
    data = twins.build(name, tmp_path / "a", monkeypatch)
    split = data.split("test")
    for home in ("cifar10", "mnist"):
        transform = RECORDS[home].cls.transform
        seen = next(Resident(split, transform, train=False).batches(8)).images
        assert seen.shape == (min(8, len(split)), transform.channels, transform.size, transform.size)
        scale, shift = transform.constants()
        assert (seen >= shift - 1e-6).all()
        assert (seen <= shift + 255 * scale + 1e-6).all()


@pytest.mark.parametrize("name", COUNTED)
def test_a_sample_that_is_missing_is_noticed(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    cls = RECORDS[name].cls
    monkeypatch.setattr(cls, "sizes", {part: size + 1 for part, size in cls.sizes.items()})
    with pytest.raises(DamagedFileError, match=rf"train.*\b{cls.sizes['train']}\b"):
        data.split("train")


@pytest.mark.parametrize("name", COUNTED)
def test_a_class_that_lacks_samples_is_named(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    cls = RECORDS[name].cls
    monkeypatch.setattr(cls, "per_class", {"test": (*cls.per_class["test"][:-1], 99)})
    with pytest.raises(DamagedFileError, match=f"class {cls.num_classes - 1} .*{twins.TEST} .*99"):
        data.split("test")
    monkeypatch.setattr(cls, "per_class", {"test": range(70, 80)})
    with pytest.raises(DamagedFileError, match=f"class 0 .*{twins.TEST} .*70.*79"):
        data.split("test")


def test_a_label_out_of_range_is_noticed(name, tmp_path, monkeypatch):
    data = twins.build(name, tmp_path, monkeypatch)
    with pytest.raises(DamagedFileError, match=r"labels.*0.*3000"):
        data.check("test", torch.tensor(np.array([0, 3000])))
