"""Loader of image files: batches are independent of the number of workers, and decoded images are cached on disk."""

import multiprocessing
import os
import subprocess
import time

import numpy as np
import pytest
import torch

import fedlas
from data import synthetic
from fedlas.data import DamagedFileError, Loader
from fedlas.data.base.images import decode
from fedlas.data.loading import usual_workers

# Python 3.12 and later warn of any fork in a process with threads; the workers do not use the locks of the threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def batches(loader):
    return [tuple(field.clone() for field in batch) for batch in loader]


def equal_batches(first, second):
    return len(first) == len(second) and all(
        torch.equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    return synthetic.build("cub200", tmp_path / "root", monkeypatch)


def test_worker_processes_do_not_change_batches(dataset):
    split = dataset.split("train")
    single_process, with_workers = (
        Loader(split, dataset.transform, batch_size=8, train=True, seed=3, workers=workers) for workers in (0, 2)
    )
    epochs = []
    for epoch in range(2):  # the second with the same workers
        single_process.set_epoch(epoch)
        with_workers.set_epoch(epoch)
        epochs.append(batches(single_process))
        assert equal_batches(epochs[-1], batches(with_workers))
    assert not equal_batches(*epochs)
    single_process.set_epoch(0)
    assert equal_batches(epochs[0], batches(single_process))


def test_ranks_split_each_batch(dataset):
    split = dataset.split("train")
    options = {"batch_size": 8, "train": True, "workers": 0}
    expected = batches(Loader(split, dataset.transform, **options))
    ranks = [batches(Loader(split, dataset.transform, **options, rank=rank, world=2)) for rank in range(2)]
    merged = [tuple(torch.cat(pair) for pair in zip(*steps, strict=True)) for steps in zip(*ranks, strict=True)]
    assert equal_batches(expected, merged)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_evaluation_loads_each_sample_once_over_all_ranks(dataset, world):
    split = dataset.split("test")
    loaders = [
        Loader(split, dataset.transform, batch_size=4, train=False, workers=0, rank=rank, world=world)
        for rank in range(world)
    ]
    index = torch.cat([batch.index for loader in loaders for batch in loader])
    assert torch.equal(index, split.index)


def test_rank_without_samples_has_no_batches(dataset):
    split = dataset.split("test").picked(torch.tensor([0]))
    loader = Loader(split, dataset.transform, batch_size=4, train=False, workers=0, rank=1, world=2)
    assert len(loader) == len(list(loader)) == 0


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [20, 20, 14]), (True, [20, 20])])
def test_drop_last_drops_the_incomplete_batch(dataset, drop_last, sizes):
    loader = Loader(
        dataset.split("train"), dataset.transform, batch_size=20, train=True, workers=0, drop_last=drop_last
    )
    assert [len(batch.labels) for batch in loader] == sizes
    assert len(loader) == len(sizes)


def test_loader_applies_dtype_and_channels_last(dataset):
    loader = Loader(
        dataset.split("val"),
        dataset.transform,
        batch_size=4,
        train=False,
        workers=0,
        dtype=torch.bfloat16,
        channels_last=True,
    )
    images = next(iter(loader)).images
    assert images.dtype == torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_decoded_images_are_cached(dataset, tmp_path, monkeypatch):
    split, cache = dataset.split("train"), tmp_path / "cache"
    expected = batches(Loader(split, dataset.transform, batch_size=9, train=True, workers=0))
    assert equal_batches(
        expected, batches(Loader(split, dataset.transform, batch_size=9, train=True, workers=0, cache=cache))
    )
    files = [path for path in cache.iterdir() if path.suffix == ".npy"]
    assert len(files) == 1
    monkeypatch.setattr("fedlas.data.base.images.decode", lambda *_: pytest.fail("decoded again"))
    assert equal_batches(
        expected, batches(Loader(split, dataset.transform, batch_size=9, train=True, workers=2, cache=cache))
    )
    files[0].write_bytes(files[0].read_bytes()[:-100])
    with pytest.raises(DamagedFileError, match=str(files[0])):
        split.decoded(dataset.transform, cache=cache)


def test_image_cache_is_shared_by_splits_and_seeds(dataset, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    other = fedlas.build_data("cub200", root=dataset.root, seed=7)
    splits = [data.split(name) for data in (dataset, other) for name in ("train", "val")]
    expected = [split.decoded(dataset.transform).images for split in splits]
    splits[0].decoded(dataset.transform, cache=cache)
    assert len(list(cache.glob("*.npy"))) == 1
    monkeypatch.setattr("fedlas.data.base.images.decode", lambda *_: pytest.fail("decoded again"))
    for split, images in zip(splits, expected, strict=True):
        assert torch.equal(split.decoded(dataset.transform, cache=cache).images, images)
        subset = split.picked(torch.tensor([2, 0]))
        assert torch.equal(subset.decoded(dataset.transform, cache=cache).images, images[[2, 0]])
    assert len(list(cache.glob("*.npy"))) == 1


def test_closing_a_loader_ends_its_workers(dataset):
    loader = Loader(dataset.split("train"), dataset.transform, batch_size=8, train=True, workers=2)
    iterator = iter(loader)
    next(iterator)  # in the middle of an epoch, where a run may be stopped
    children = list(loader._loader._iterator._workers)
    assert all(child.is_alive() for child in children)
    loader.close()
    assert not any(child.is_alive() for child in children)
    loader.close()
    assert len(batches(loader)) == len(loader)  # another epoch starts new workers
    loader.close()


def test_workers_end_on_sigterm_of_their_parent_alone(dataset):
    loader = Loader(dataset.split("train"), dataset.transform, batch_size=8, train=True, workers=2)
    iterator = iter(loader)
    next(iterator)
    children = list(loader._loader._iterator._workers)
    subprocess.run(["sh", "-c", f"kill -TERM {' '.join(str(child.pid) for child in children)}"], check=True)
    assert len(list(iterator)) == len(loader) - 1
    for child in children:
        child.terminate()
        child.join(60)
        assert child.exitcode == 0
    loader.close()


def test_evaluation_workers_end_with_the_pass(dataset):
    before = {child.pid for child in multiprocessing.active_children()}
    batches(Loader(dataset.split("val"), dataset.transform, batch_size=4, train=False, workers=2))
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_skipped_batches_are_not_decoded(dataset, monkeypatch):
    loader = Loader(dataset.split("train"), dataset.transform, batch_size=8, train=True, workers=0)
    loader.set_epoch(1)
    all_batches = batches(loader)
    decoded_paths = []
    monkeypatch.setattr("fedlas.data.loading.decode", lambda path, _: decoded_paths.append(path) or decode(path, _))
    loader.set_epoch(1, 5)
    assert equal_batches(all_batches[5:], batches(loader))
    assert len(decoded_paths) == sum(len(batch[1]) for batch in all_batches[5:])
    with_worker = Loader(dataset.split("train"), dataset.transform, batch_size=8, train=True, workers=1)
    with_worker.set_epoch(1, len(all_batches))  # a run that was stopped after the last step of an epoch
    assert batches(with_worker) == []
    with_worker.set_epoch(1, 6)
    assert equal_batches(all_batches[6:], batches(with_worker))
    with_worker.close()


def test_default_workers_are_divided_among_local_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (usual_workers(train=True), usual_workers(train=False)) == (16, 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (usual_workers(train=True), usual_workers(train=False)) == (4, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert (usual_workers(train=True), usual_workers(train=False)) == (1, 1)


def test_changed_image_invalidates_the_cache(dataset, tmp_path):
    split, cache = dataset.split("val"), tmp_path / "cache"
    before = split.decoded(dataset.transform, cache=cache).images
    synthetic.picture(split.images[0], (33, 44), np.random.default_rng(9))
    os.utime(split.images[0], (time.time() + 5,) * 2)
    after = split.decoded(dataset.transform, cache=cache).images
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_failed_cache_leaves_no_files(dataset, tmp_path):
    split, cache = dataset.split("val"), tmp_path / "cache"
    split.images[1].write_bytes(b"no image")
    with pytest.raises(DamagedFileError, match=str(split.images[1])):
        split.decoded(dataset.transform, cache=cache)
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == []


def test_damaged_image_error_in_a_worker_names_the_file(dataset):
    split = dataset.split("val")
    split.images[1].write_bytes(b"no image")
    loader = Loader(split, dataset.transform, batch_size=4, train=False, workers=1)
    with pytest.raises(DamagedFileError, match=str(split.images[1])):
        list(loader)


def test_antialias_changes_decoded_images(dataset):
    from dataclasses import replace

    without_antialias = replace(dataset.transform, antialias=False)
    split = dataset.split("val")
    assert not torch.equal(split.decoded(dataset.transform).images, split.decoded(without_antialias).images)
