"""Loader of image files: batches are independent of the number of workers, and decoded images are cached on disk."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch

import fedlas
from data import twins
from fedlas.data import DamagedFileError, Loader
from fedlas.data.base.images import decode
from fedlas.data.loading import usual_workers

# Python 3.12 and later warn of any fork in a process with threads; the workers do not touch what the threads hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def batches(loader):
    return [tuple(field.clone() for field in batch) for batch in loader]


def same(one, two):
    return len(one) == len(two) and all(
        torch.equal(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def birds(tmp_path, monkeypatch):
    return twins.build("cub200", tmp_path / "root", monkeypatch)


def test_worker_processes_do_not_change_batches(birds):
    split = birds.split("train")
    plain, forked = (
        Loader(split, birds.transform, batch_size=8, train=True, seed=3, workers=workers) for workers in (0, 2)
    )
    epochs = []
    for epoch in range(2):  # the second with the same workers
        plain.set_epoch(epoch)
        forked.set_epoch(epoch)
        epochs.append(batches(plain))
        assert same(epochs[-1], batches(forked))
    assert not same(*epochs)
    plain.set_epoch(0)
    assert same(epochs[0], batches(plain))


def test_ranks_split_each_batch(birds):
    split = birds.split("train")
    options = {"batch_size": 8, "train": True, "workers": 0}
    alone = batches(Loader(split, birds.transform, **options))
    ranks = [batches(Loader(split, birds.transform, **options, rank=rank, world=2)) for rank in range(2)]
    both = [tuple(torch.cat(pair) for pair in zip(*steps, strict=True)) for steps in zip(*ranks, strict=True)]
    assert same(alone, both)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_evaluation_loads_each_sample_once_over_all_ranks(birds, world):
    split = birds.split("test")
    loaders = [
        Loader(split, birds.transform, batch_size=4, train=False, workers=0, rank=rank, world=world)
        for rank in range(world)
    ]
    seen = torch.cat([batch.index for loader in loaders for batch in loader])
    assert torch.equal(seen, split.index)


def test_rank_without_samples_has_no_batches(birds):
    split = birds.split("test").picked(torch.tensor([0]))
    loader = Loader(split, birds.transform, batch_size=4, train=False, workers=0, rank=1, world=2)
    assert len(loader) == len(list(loader)) == 0


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [20, 20, 14]), (True, [20, 20])])
def test_drop_last_drops_the_incomplete_batch(birds, drop_last, sizes):
    loader = Loader(birds.split("train"), birds.transform, batch_size=20, train=True, workers=0, drop_last=drop_last)
    assert [len(batch.labels) for batch in loader] == sizes
    assert len(loader) == len(sizes)


def test_loader_applies_dtype_and_channels_last(birds):
    loader = Loader(
        birds.split("val"),
        birds.transform,
        batch_size=4,
        train=False,
        workers=0,
        dtype=torch.bfloat16,
        channels_last=True,
    )
    images = next(iter(loader)).images
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_decoded_images_are_cached(birds, tmp_path, monkeypatch):
    split, cache = birds.split("train"), tmp_path / "kept"
    plain = batches(Loader(split, birds.transform, batch_size=9, train=True, workers=0))
    assert same(plain, batches(Loader(split, birds.transform, batch_size=9, train=True, workers=0, cache=cache)))
    files = [path for path in cache.iterdir() if path.suffix == ".npy"]
    assert len(files) == 1
    monkeypatch.setattr("fedlas.data.base.images.decode", lambda *_: pytest.fail("decoded again"))
    assert same(plain, batches(Loader(split, birds.transform, batch_size=9, train=True, workers=2, cache=cache)))
    files[0].write_bytes(files[0].read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match=str(files[0])):
        split.decoded(birds.transform, cache=cache)


def test_image_cache_is_shared_by_splits_and_seeds(birds, tmp_path, monkeypatch):
    cache = tmp_path / "kept"
    other = fedlas.build_data("cub200", root=birds.root, seed=7)
    plain = [data.split(name) for data in (birds, other) for name in ("train", "val")]
    expected = [split.decoded(birds.transform).images for split in plain]
    plain[0].decoded(birds.transform, cache=cache)
    assert len(list(cache.glob("*.npy"))) == 1
    monkeypatch.setattr("fedlas.data.base.images.decode", lambda *_: pytest.fail("decoded again"))
    for split, images in zip(plain, expected, strict=True):
        assert torch.equal(split.decoded(birds.transform, cache=cache).images, images)
        few = split.picked(torch.tensor([2, 0]))
        assert torch.equal(few.decoded(birds.transform, cache=cache).images, images[[2, 0]])
    assert len(list(cache.glob("*.npy"))) == 1


def test_closing_a_loader_ends_its_workers(birds):
    loader = Loader(birds.split("train"), birds.transform, batch_size=8, train=True, workers=2)
    passing = iter(loader)
    next(passing)  # in the middle of a pass, where a run may be stopped
    children = list(loader._loader._iterator._workers)
    assert all(child.is_alive() for child in children)
    loader.close()
    assert not any(child.is_alive() for child in children)
    loader.close()
    assert len(batches(loader)) == len(loader)  # another pass starts new ones
    loader.close()


def test_evaluation_workers_end_with_the_pass(birds):
    before = {child.pid for child in multiprocessing.active_children()}
    batches(Loader(birds.split("val"), birds.transform, batch_size=4, train=False, workers=2))
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_skipped_batches_are_not_decoded(birds, monkeypatch):
    loader = Loader(birds.split("train"), birds.transform, batch_size=8, train=True, workers=0)
    loader.set_epoch(1)
    whole = batches(loader)
    read = []
    monkeypatch.setattr("fedlas.data.loading.decode", lambda path, _: read.append(path) or decode(path, _))
    loader.set_epoch(1, 5)
    assert same(whole[5:], batches(loader))
    assert len(read) == sum(len(batch[1]) for batch in whole[5:])
    forked = Loader(birds.split("train"), birds.transform, batch_size=8, train=True, workers=1)
    forked.set_epoch(1, len(whole))  # a run that was stopped after the last step of an epoch
    assert batches(forked) == []
    forked.set_epoch(1, 6)
    assert same(whole[6:], batches(forked))
    forked.close()


def test_default_workers_are_divided_among_local_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (usual_workers(train=True), usual_workers(train=False)) == (16, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (usual_workers(train=True), usual_workers(train=False)) == (4, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert (usual_workers(train=True), usual_workers(train=False)) == (1, 1)


def test_changed_image_invalidates_the_cache(birds, tmp_path):
    split, cache = birds.split("val"), tmp_path / "kept"
    before = split.decoded(birds.transform, cache=cache).images
    twins.picture(split.images[0], (33, 44), np.random.default_rng(9))
    os.utime(split.images[0], (time.time() + 5,) * 2)
    after = split.decoded(birds.transform, cache=cache).images
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_failed_cache_leaves_no_files(birds, tmp_path):
    split, cache = birds.split("val"), tmp_path / "kept"
    split.images[1].write_bytes(b"no image")
    with pytest.raises(DamagedFileError, match=str(split.images[1])):
        split.decoded(birds.transform, cache=cache)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_damaged_image_error_in_a_worker_names_the_file(birds):
    split = birds.split("val")
    split.images[1].write_bytes(b"no image")
    loader = Loader(split, birds.transform, batch_size=4, train=False, workers=1)
    with pytest.raises(DamagedFileError, match=str(split.images[1])):
        list(loader)


def test_loader_accepts_in_memory_images():
    data = fedlas.build_data("digits")
    loader = Loader(data.split("train"), data.transform, batch_size=100, train=True, workers=0)
    assert sum(len(batch.labels) for batch in loader) == 800


def test_antialias_changes_decoded_images(birds):
    from dataclasses import replace

    sharp = replace(birds.transform, antialias=False)
    split = birds.split("val")
    assert not torch.equal(split.decoded(birds.transform).images, split.decoded(sharp).images)
