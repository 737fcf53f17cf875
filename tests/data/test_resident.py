"""Data sets on the device: augmentation equals torchvision and is independent of batch, rank and device."""

import numpy as np
import pytest
import scipy.stats
import torch
import torch._dynamo
from torchvision.transforms import v2

import fedlas
from data import synthetic
from fedlas.data import Resident, Transform
from fedlas.data.base.keyed import bits, crops, mixed, order

CIFAR = Transform(size=32, channels=3, mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), pad=4, flip=True)
PHOTO = Transform(size=6, resize=9, channels=3, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), flip=True)


def by_torchvision(image, transform: Transform, top: int, left: int, mirrored: bool):
    """Return one image transformed by torchvision with the given crop."""
    image = v2.functional.pad(image, [transform.pad] * 4, fill=0)
    image = v2.functional.crop(image, top, left, transform.size, transform.size)
    image = v2.functional.horizontal_flip(image) if mirrored else image
    return v2.functional.normalize(image.float().div(255), list(transform.mean), list(transform.std))


@pytest.mark.parametrize("transform", [CIFAR, PHOTO], ids=["pad", "resize"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_augmented_images_equal_torchvision(transform, channels_last):
    split = synthetic.split_of(transform)
    data = Resident(split, transform, train=True, seed=3, channels_last=channels_last)
    for epoch in range(4):
        data.set_epoch(epoch)
        top, left, mirrored = crops(torch.arange(20), 3, epoch, transform.largest_offset, flip=True)
        images = data.batch(torch.arange(20))
        for n in range(20):
            expected = by_torchvision(split.images[n], transform, int(top[n]), int(left[n]), bool(mirrored[n]))
            torch.testing.assert_close(images[n], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("transform", [CIFAR, PHOTO], ids=["pad", "resize"])
def test_crop_distribution_equals_torchvision(transform):
    """Every crop position and direction is as frequent as with torchvision."""
    offsets, samples = transform.largest_offset + 1, 40_000
    top, left, mirrored = crops(torch.arange(samples), 1, 0, transform.largest_offset, flip=True)
    fedlas_counts = np.bincount(((top * offsets + left) * 2 + mirrored).numpy(), minlength=2 * offsets * offsets)
    assert len(fedlas_counts) == 2 * offsets * offsets
    assert scipy.stats.chisquare(fedlas_counts).pvalue > 1e-3
    # For torchvision, an image of distinct pixel values shows the position of the crop.
    grid = torch.arange(transform.stored**2).view(1, transform.stored, transform.stored) + 1
    augment = v2.Compose([v2.RandomCrop(transform.size, padding=transform.pad or None), v2.RandomHorizontalFlip()])
    padded_size = transform.stored + 2 * transform.pad
    padded_grid = v2.functional.pad(torch.arange(1, transform.stored**2 + 1).view_as(grid), [transform.pad] * 4)[0]
    torchvision_counts = np.zeros((offsets, offsets, 2), int)
    for _ in range(4000):
        cropped = augment(grid)[0]
        center_value = int(cropped[transform.size // 2, transform.size // 2])
        row, column = (int(v) for v in (padded_grid == center_value).nonzero()[0])
        flipped = int(cropped[transform.size // 2, transform.size // 2 - 1] > center_value)
        offset = transform.size - 1 - transform.size // 2 if flipped else transform.size // 2
        torchvision_counts[row - transform.size // 2, column - offset, flipped] += 1
    assert padded_size - transform.size == transform.largest_offset
    offset_counts = np.stack(
        [fedlas_counts.reshape(offsets, offsets, 2).sum(2).ravel(), torchvision_counts.sum(2).ravel()]
    )
    assert scipy.stats.chi2_contingency(offset_counts).pvalue > 1e-3
    flip_rates = torchvision_counts[..., 1].sum() / 4000, fedlas_counts[1::2].sum() / samples
    assert abs(flip_rates[0] - flip_rates[1]) < 0.03


def test_hash_draws_are_uncorrelated():
    """Draws are uncorrelated between samples, epochs, seeds and purposes."""
    samples = torch.arange(20_000)
    first = bits(samples, 2, 1, 0)
    assert first.min() >= 0
    assert first.max() < 1 << 32
    assert len(first.unique()) == len(first)
    other_draws = [bits(samples, 2, 1, 1), bits(samples, 2, 2, 0), bits(samples, 1, 1, 0), first.roll(1), first.roll(2)]
    other_draws += [bits(samples, 2, 1 << 32, 0), bits(samples, 2, 1 + (1 << 32), 0)]
    for other in other_draws:
        assert abs(np.corrcoef(first.numpy(), other.numpy())[0, 1]) < 0.03
        table = np.histogram2d(first.numpy() >> 29, other.numpy() >> 29, 8)[0]
        assert scipy.stats.chi2_contingency(table).pvalue > 1e-4
    for bit in range(32):
        assert abs(((first >> bit) & 1).float().mean() - 0.5) < 0.02
    # One sample over many epochs and seeds.
    draws = torch.cat([bits(torch.tensor([5]), 2, seed, epoch) for seed in range(20) for epoch in range(50)])
    assert scipy.stats.kstest(draws.numpy() / 2**32, "uniform").pvalue > 1e-3


def test_hash_mixing_does_not_overflow():
    """Compare with Python integers, which do not overflow."""

    def exact(value: int) -> int:
        value = (value ^ value >> 16) * 0x21F0AAAD % 2**32
        value = (value ^ value >> 15) * 0x735A2D97 % 2**32
        return value ^ value >> 15

    values = [0, 1, 2**31, 2**32 - 1, 123456789, 0x9E3779B9]
    assert mixed(torch.tensor(values)).tolist() == [exact(value) for value in values]


def test_hash_and_order_have_pinned_values():
    """Changing the hash would make earlier runs irreproducible."""
    assert bits(torch.arange(3), 2, 1, 0).tolist() == [2681283421, 2042754636, 1404774542]
    assert order(8, 1, 0).tolist() == [6, 0, 3, 1, 7, 4, 2, 5]


@pytest.mark.parametrize("samples", [1, 2, 1000])
def test_order_is_a_permutation(samples):
    permutation = order(samples, 1, 0)
    assert permutation.sort().values.tolist() == list(range(samples))
    if samples > 2:
        assert permutation.tolist() != order(samples, 1, 1).tolist()
        assert permutation.tolist() != order(samples, 2, 0).tolist()
        assert permutation.tolist() == order(samples, torch.tensor(1), torch.tensor(0)).tolist()


def test_orders_are_uniform_over_epochs():
    first = torch.stack([order(6, 1, epoch) for epoch in range(1200)])
    for position in range(6):
        assert scipy.stats.chisquare(first[:, position].bincount(minlength=6).numpy()).pvalue > 1e-3


def test_augmentation_is_independent_of_the_batch():
    split = synthetic.split_of(CIFAR)
    data = Resident(split, CIFAR, train=True, seed=1)
    data.set_epoch(3)
    all_images = data.batch(torch.arange(20))
    for index in ([7], [7, 3], [0, 7, 7, 19], list(range(19, -1, -1))):
        assert torch.equal(data.batch(torch.tensor(index)), all_images[index])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("train", [True, False])
def test_ranks_partition_the_samples(world, train):
    split = synthetic.split_of(CIFAR)
    data = [Resident(split, CIFAR, train=train, seed=1) for _ in range(world + 1)]
    for item in data:
        item.set_epoch(1)
    expected = list(data[-1].batches(8))
    by_rank = [list(data[rank].batches(8, rank=rank, world=world)) for rank in range(world)]
    if train:  # the same steps, and together the same batch
        for step, batch in enumerate(expected):
            for field in range(3):
                assert torch.equal(torch.cat([by_rank[rank][step][field] for rank in range(world)]), batch[field])
    else:
        index = torch.cat([batch.index for rank in by_rank for batch in rank])
        assert torch.equal(index, split.index)


def test_rank_beyond_the_world_size_raises():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        next(Resident(synthetic.split_of(CIFAR), CIFAR, train=True).batches(8, rank=2, world=2))


def test_training_epoch_visits_every_sample_once():
    split = synthetic.split_of(CIFAR)
    data = Resident(split, CIFAR, train=True, seed=1)
    epochs = []
    for epoch in range(2):
        data.set_epoch(epoch)
        batches = list(data.batches(8))
        assert [len(batch.labels) for batch in batches] == [8, 8, 4]
        assert [len(batch.labels) for batch in data.batches(8, drop_last=True)] == [8, 8]
        epochs.append(torch.cat([batch.index for batch in batches]))
        assert epochs[-1].sort().values.tolist() == list(range(20))
        assert torch.equal(torch.cat([batch.labels for batch in batches]), split.labels[epochs[-1]])
    assert not torch.equal(epochs[0], epochs[1])


def test_evaluation_uses_center_crops():
    split = synthetic.split_of(PHOTO)
    data = Resident(split, PHOTO, train=False)
    before = data.batch(torch.arange(20))
    data.set_epoch(5)
    assert torch.equal(data.batch(torch.arange(20)), before)
    for n in range(20):
        cropped = v2.functional.center_crop(split.images[n], [6, 6]).float() / 255
        torch.testing.assert_close(before[n], v2.functional.normalize(cropped, list(PHOTO.mean), list(PHOTO.std)))


def test_padding_is_black_before_normalisation():
    split = synthetic.split_of(CIFAR, 60)
    split.images.fill_(255)
    data = Resident(split, CIFAR, train=True, seed=1)
    images = data.batch(torch.arange(60))
    for channel in range(3):
        black, white = (torch.tensor((v - CIFAR.mean[channel]) / CIFAR.std[channel]) for v in (0, 1))
        distance = (images[:, channel] - black).abs().minimum((images[:, channel] - white).abs())
        assert distance.max() < 1e-6
        assert ((images[:, channel] - black).abs() < 1e-6).any()


def test_flip_false_never_mirrors():
    assert not crops(torch.arange(1000), 1, 0, 8, flip=False)[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_resident_applies_dtype_and_channels_last(dtype, channels_last):
    data = Resident(synthetic.split_of(CIFAR), CIFAR, train=True, dtype=dtype, channels_last=channels_last)
    exact = Resident(synthetic.split_of(CIFAR), CIFAR, train=True)
    images = data.batch(torch.arange(8))
    assert images.dtype == dtype
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.is_contiguous(memory_format=layout)
    assert torch.equal(images, exact.batch(torch.arange(8)).to(dtype))


def test_epoch_and_seed_may_be_tensors():
    first, second = (Resident(synthetic.split_of(CIFAR), CIFAR, train=True, seed=seed) for seed in (1, 4))
    first.set_epoch(torch.tensor(6), torch.tensor(4))
    second.set_epoch(6)
    assert torch.equal(first.batch(torch.arange(20)), second.batch(torch.arange(20)))
    assert torch.equal(first.order(), second.order())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.campaign)])
def test_batch_compiles_once_as_one_graph(backend):
    torch._dynamo.reset()
    data = Resident(synthetic.split_of(CIFAR), CIFAR, train=True, channels_last=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        batch = torch.compile(data.batch, fullgraph=True, backend=backend)
        for epoch in range(3):
            data.set_epoch(epoch)
            index = data.order()[:8]
            torch.testing.assert_close(batch(index), data.batch(index), rtol=0, atol=1e-6)


def test_ood_images_are_resized():
    """OOD images get the size, channels and constants of the training images."""
    digits = fedlas.build_data("digits").split("test")
    images = Resident(digits, CIFAR, train=False).batch(torch.arange(5))
    enlarged = v2.functional.resize(digits.images[:5].expand(-1, 3, -1, -1), [32, 32], antialias=True)
    expected = v2.functional.normalize(enlarged / 255, list(CIFAR.mean), list(CIFAR.std))
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
