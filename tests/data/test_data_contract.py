"""Contract of every data set in the catalogue."""

import re

import numpy as np
import pytest
import torch

import fedlas
from data import synthetic
from fedlas.data import DamagedFileError, Loader, MissingFileError, Resident

RECORDS = {record.name: record for record in fedlas.list_data()}
NAMES = list(RECORDS)
OPTIONS = {"folder": {"path": "nowhere"}}
FILES = [name for name in NAMES if name != "digits"]  # digits come with scikit-learn
# Data sets with published class counts; the others have no reference
WITH_CLASS_COUNTS = [name for name in NAMES if RECORDS[name].cls.per_class]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_every_data_set_has_synthetic_files():
    assert set(synthetic.WRITERS) == set(NAMES)


def test_catalogue_lists_all_data_sets():
    assert len(NAMES) >= 10
    assert fedlas.data.CIFAR10 is RECORDS["cifar10"].cls
    assert "CIFAR10" in dir(fedlas.data)


def test_record_has_summary_citation_and_common_keywords(name):
    record = RECORDS[name]
    assert record.name == name
    assert re.fullmatch(r"[A-Z].*\.", record.summary)
    assert record.citation.endswith(".")
    assert {"root", "seed", "download", "progress"} <= set(record.keywords)


def test_building_a_data_set_reads_no_files(name, tmp_path):
    data = fedlas.build_data(name, root=tmp_path / "nowhere", **OPTIONS.get(name, {}))
    assert not (tmp_path / "nowhere").exists()
    assert "nowhere" in repr(data)


@pytest.mark.parametrize("name", FILES)
def test_missing_files_error_names_folder_url_and_checksum(name, tmp_path):
    data = fedlas.build_data(name, root=tmp_path / "nowhere", download=False, **OPTIONS.get(name, {}))
    with pytest.raises(MissingFileError, match=re.escape(str(tmp_path / "nowhere"))) as error:
        data.split("train")
    if name != "folder":
        assert re.search(r"https?://\S+ .*MD5 \w{32}", str(error.value))


def test_misspelt_keyword_raises_with_a_suggestion(name):
    with pytest.raises(TypeError, match=f"'{name}'.*'sed'.*'seed'"):
        fedlas.build_data(name, sed=1)


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_invalid_seed_raises(name, seed):
    with pytest.raises(ValueError, match="seed"):
        fedlas.build_data(name, seed=seed, **OPTIONS.get(name, {}))


def test_class_names_and_transform_are_consistent(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    assert len(data.class_names) == data.num_classes == len(set(data.class_names))
    assert data.title
    assert data.transform.channels == len(data.transform.mean)
    with pytest.raises(ValueError, match=r"'tset'.*'test'"):
        data.split("tset")
    with pytest.raises(ValueError, match="'tset'"):
        data.transform_for("tset")


def test_published_class_counts_add_up_to_split_sizes(name):
    cls = RECORDS[name].cls
    for part, expected in cls.per_class.items():
        if isinstance(expected, range):
            assert expected[0] * cls.num_classes <= cls.sizes[part] <= expected[-1] * cls.num_classes
        else:
            assert len(expected) == cls.num_classes
            assert sum(expected) == cls.sizes[part]


def test_published_options_are_accepted(name, tmp_path, monkeypatch):
    assert set(RECORDS[name].cls.official_options) <= set(RECORDS[name].keywords)
    data = synthetic.build(name, tmp_path, monkeypatch, **RECORDS[name].cls.official_options)
    assert len(data.split("val"))


def test_all_splits_share_one_transform(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    assert {data.transform_for(split) for split in data.splits} == {data.transform}


def test_splits_have_consistent_images_labels_and_index(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
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
    train_val_index = torch.cat([train.index, val.index]).sort().values
    if name == "folder":
        assert torch.equal(torch.cat([train_val_index, test.index]).sort().values, data.split("all").index)
    else:
        part = data.part("train")
        expected_index = torch.arange(len(part.labels)) if part.index is None else part.index
        assert torch.equal(train_val_index, expected_index)


def test_labels_stay_aligned_with_images_after_splitting(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    part = data.part("all" if name == "folder" else "train")
    part_index = torch.arange(len(part.labels)) if part.index is None else part.index
    rows = {sample: position for position, sample in enumerate(part_index.tolist())}
    for split in (data.split("train"), data.split("val")):
        for position in range(0, len(split), 7):
            row = rows[int(split.index[position])]
            assert split.labels[position] == part.labels[row]
            equal = split.images[position] == part.images[row]
            assert equal.all() if isinstance(equal, torch.Tensor) else equal


def test_seed_changes_only_the_train_val_split(name, tmp_path, monkeypatch):
    first = synthetic.build(name, tmp_path, monkeypatch, seed=1)
    options = {"path": "pets"} if name == "folder" else {}
    same_seed = fedlas.build_data(name, root=tmp_path, seed=1, **options)
    other = fedlas.build_data(name, root=tmp_path, seed=2, **options)
    assert torch.equal(first.split("val").index, same_seed.split("val").index)
    assert torch.equal(first.split("train").index, same_seed.split("train").index)
    assert set(first.split("val").index.tolist()) != set(other.split("val").index.tolist())
    assert torch.equal(first.split("test").index, other.split("test").index)


def test_resident_and_loader_give_equal_batches(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    split = data.split("train")
    resident = Resident(split, data.transform, train=True, seed=5)
    loader = Loader(split, data.transform, batch_size=7, train=True, seed=5, workers=0)
    resident.set_epoch(2)
    loader.set_epoch(2)
    assert len(loader) == -(-len(split) // 7)
    for resident_batch, loader_batch in zip(resident.batches(7), loader, strict=True):
        assert resident_batch.images.shape[1:] == (data.transform.channels, data.transform.size, data.transform.size)
        for a, b in zip(resident_batch, loader_batch, strict=True):
            assert torch.equal(a, b)


def test_evaluation_batches_have_the_index_of_the_split(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    split = data.split("val")
    for batches in (
        Resident(split, data.transform, train=False).batches(4),
        Loader(split, data.transform, batch_size=4, train=False, workers=0),
    ):
        all_batches = list(batches)
        assert torch.equal(torch.cat([batch.index for batch in all_batches]), split.index)
        assert torch.equal(torch.cat([batch.labels for batch in all_batches]), split.labels)


def test_ood_images_are_resized_to_the_transform_of_the_training_data(name, tmp_path, monkeypatch):
    """OOD images of any size and number of channels get the size and normalisation of the training data."""
    data = synthetic.build(name, tmp_path / "a", monkeypatch)
    split = data.split("test")
    for training_name in ("cifar10", "mnist"):
        transform = RECORDS[training_name].cls.transform
        images = next(Resident(split, transform, train=False).batches(8)).images
        assert images.shape == (min(8, len(split)), transform.channels, transform.size, transform.size)
        scale, shift = transform.constants()
        assert (images >= shift - 1e-6).all()
        assert (images <= shift + 255 * scale + 1e-6).all()


@pytest.mark.parametrize("name", WITH_CLASS_COUNTS)
def test_missing_sample_raises(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    cls = RECORDS[name].cls
    monkeypatch.setattr(cls, "sizes", {part: size + 1 for part, size in cls.sizes.items()})
    with pytest.raises(DamagedFileError, match=rf"train.*\b{cls.sizes['train']}\b"):
        data.split("train")


@pytest.mark.parametrize("name", WITH_CLASS_COUNTS)
def test_class_with_missing_samples_raises(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    cls = RECORDS[name].cls
    monkeypatch.setattr(cls, "per_class", {"test": (*cls.per_class["test"][:-1], 99)})
    with pytest.raises(DamagedFileError, match=f"class {cls.num_classes - 1} .*{synthetic.TEST} .*99"):
        data.split("test")
    monkeypatch.setattr(cls, "per_class", {"test": range(70, 80)})
    with pytest.raises(DamagedFileError, match=f"class 0 .*{synthetic.TEST} .*70.*79"):
        data.split("test")


def test_out_of_range_label_raises(name, tmp_path, monkeypatch):
    data = synthetic.build(name, tmp_path, monkeypatch)
    with pytest.raises(DamagedFileError, match=r"labels.*0.*3000"):
        data.check("test", torch.tensor(np.array([0, 3000])))
