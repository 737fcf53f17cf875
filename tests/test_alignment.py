"""Same samples in two predictions: reordering, splits, overlap of calibration and evaluated samples."""

import tracemalloc

import pytest
import torch

from fedlas.alignment import align_samples, samples_in_both
from fedlas.predictions import Predictions


def predictions(n: int, classes: int = 7, seed: int = 0) -> Predictions:
    make = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=make)
    return Predictions(logits, logits.softmax(1).multinomial(1, generator=make)[:, 0])


def unnamed(given, **rest):
    return Predictions(given.logits, given.labels, **rest)


@pytest.mark.parametrize("word", ["ids", "index"])
def test_equal_ids_and_labels_with_different_logits_are_not_overlap(word):
    """Regression: splits of equal size, sorted by class, with equal file names gave a false warning."""
    labels = torch.arange(600) // 200
    names = [f"img_{i:04}.png" for i in range(600)] if word == "ids" else torch.arange(600)
    for scale in (1.0, 5.0, 30.0):  # at the last one most confidences are one, and agree
        make = torch.Generator().manual_seed(0)
        noise = torch.randn(2, 600, 3, generator=make) + torch.eye(3)[labels]
        evaluated, other = (Predictions(scale * logits, labels, **{word: names}) for logits in noise)
        assert samples_in_both(evaluated, other) == 0
        rounded = evaluated.probs.double().round(decimals=4)
        copied = Predictions.from_probs(rounded, labels, **{word: names})
        assert samples_in_both(evaluated, copied) == 600
        assert samples_in_both(copied, evaluated) == 600


@pytest.mark.parametrize("word", ["ids", "index", None])
def test_partial_overlap_is_counted(word):
    """Regression: with one corrected label or additional samples, the overlap was not detected."""
    given, more = predictions(200), predictions(100, seed=1)
    names = [f"image {i}" for i in range(200)] if word == "ids" else torch.arange(200)
    rest = {} if word is None else {word: names}
    labels = given.labels.clone()
    labels[7] = (labels[7] + 1) % given.num_classes
    evaluated = unnamed(given, **rest)
    assert samples_in_both(evaluated, Predictions(given.logits, labels, **rest)) == 199
    logits, labels = torch.cat([given.logits[:100], more.logits]), torch.cat([given.labels[:100], more.labels])
    assert samples_in_both(evaluated, Predictions(logits, labels, **rest)) == 100


@pytest.mark.parametrize("word", ["ids", "index"])
def test_equal_rows_with_different_ids_are_counted_as_overlap(word):
    given = predictions(200)
    evaluated = unnamed(given, **{word: range(200)})
    assert samples_in_both(evaluated, unnamed(given[:100], **{word: range(200, 300)})) == 100
    assert samples_in_both(evaluated, unnamed(given[:100], **{word: range(199, 99, -1)})) == 100


def test_overlap_compares_soft_labels():
    given = predictions(200)
    soft = torch.nn.functional.one_hot(given.labels, given.num_classes) * 0.9 + 0.1 / given.num_classes
    evaluated, same = (Predictions(given.logits, soft, index=range(200)) for _ in range(2))
    assert samples_in_both(evaluated, same[torch.arange(49, -1, -1)]) == 50
    assert samples_in_both(evaluated, unnamed(given, index=range(200))) == 0


def test_overlap_of_many_samples_takes_little_memory():
    """Regression: a million samples took 3.7 seconds and 445 MiB."""
    make = torch.Generator().manual_seed(0)
    given = Predictions(torch.randn(200_000, 3, generator=make), torch.arange(200_000) % 3, index=range(200_000))
    other = given[torch.randperm(200_000, generator=make)]
    tracemalloc.start()
    found = samples_in_both(given, other)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 200_000
    assert most < 2**22  # lists, dicts and NumPy arrays; tensors are not among it


def test_chance_matches_of_rounded_rows_are_not_overlap():
    """Regression: two equal rows of sixty were reported as overlap."""
    labels = torch.arange(60) // 20
    for seed in range(20):
        make = torch.Generator().manual_seed(seed)
        probs = (0.3 * torch.randn(2, 60, 3, generator=make, dtype=torch.float64)).softmax(2).round(decimals=2)
        evaluated, other = (Predictions.from_probs(one, labels) for one in probs)
        assert samples_in_both(evaluated, other) == 0
        assert samples_in_both(evaluated, evaluated[torch.randperm(60, generator=make)]) == 60


@pytest.mark.parametrize("word", ["ids", "index"])
def test_equal_ids_are_paired_across_split_names(word):
    """`fedlas predict` names splits by a hash of the data's keywords."""
    given, order = predictions(200), torch.randperm(200)
    names = torch.arange(200)
    first = Predictions(given.logits, given.labels, split="folder-all-9d7cc918", **{word: names})
    for split in ("folder-all-ef0f4e8f", "test", None):
        second = Predictions(given.logits[order], given.labels[order], split=split, **{word: names[order]})
        assert torch.equal(align_samples(first, second).logits, given.logits)


def test_pairing_different_splits_without_ids_raises():
    def of(split, **rest):
        return Predictions(predictions(50).logits, predictions(50).labels, split=split, **rest)

    rows = torch.arange(len(predictions(50)))
    for first, second in (("val", "test"), ("folder-val-9d7cc918", "folder-test"), ("train", "validation")):
        # Both may be counted from zero and sorted by class, so only words can tell that they are the same.
        for rest in ({}, {"index": rows}):
            with pytest.raises(ValueError, match=f"split '{first}'.*'{second}'"):
                align_samples(of(first, **rest), of(second, **rest))
        assert len(align_samples(of(first, ids=rows), of(second, ids=rows))) == len(rows)
    with pytest.raises(ValueError, match="split 'folder-all-9d7cc918'"):
        align_samples(of("folder-all-9d7cc918"), of("folder-all-ef0f4e8f"))


def test_different_sample_ids_raise_with_an_example_of_each():
    first, second = (unnamed(predictions(3), ids=ids) for ids in (["0", "1", "2"], ["0.0", "1.0", "2.0"]))
    with pytest.raises(ValueError, match=r"3 \(such as '0'\) .* 3 \(such as '0\.0'\)"):
        align_samples(first, second)
