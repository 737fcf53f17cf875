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
def test_equal_names_and_labels_alone_are_not_the_same_samples(word):
    """Two splits of equal size, sorted by class, whose files are called alike, raised a false alarm."""
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
def test_overlap_is_found_among_different_samples(word):
    """One corrected label, or other samples among the evaluated ones, and none was noticed."""
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
def test_overlap_of_equal_rows_with_other_names_is_found(word):
    given = predictions(200)
    evaluated = unnamed(given, **{word: range(200)})
    assert samples_in_both(evaluated, unnamed(given[:100], **{word: range(200, 300)})) == 100
    assert samples_in_both(evaluated, unnamed(given[:100], **{word: range(199, 99, -1)})) == 100


def test_soft_labels_are_compared_too():
    given = predictions(200)
    soft = torch.nn.functional.one_hot(given.labels, given.num_classes) * 0.9 + 0.1 / given.num_classes
    evaluated, same = (Predictions(given.logits, soft, index=range(200)) for _ in range(2))
    assert samples_in_both(evaluated, same[torch.arange(49, -1, -1)]) == 50
    assert samples_in_both(evaluated, unnamed(given, index=range(200))) == 0


def test_many_samples_are_compared_without_lists():
    """A million took 3.7 seconds and 445 MiB."""
    make = torch.Generator().manual_seed(0)
    given = Predictions(torch.randn(200_000, 3, generator=make), torch.arange(200_000) % 3, index=range(200_000))
    other = given[torch.randperm(200_000, generator=make)]
    tracemalloc.start()
    found = samples_in_both(given, other)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == 200_000
    assert most < 2**22  # lists, dicts and NumPy arrays; tensors are not among it


def test_few_rows_of_two_digits_that_are_equal_by_chance_are_other_samples():
    """Two equal rows of sixty were more than expected."""
    labels = torch.arange(60) // 20
    for seed in range(20):
        make = torch.Generator().manual_seed(seed)
        probs = (0.3 * torch.randn(2, 60, 3, generator=make, dtype=torch.float64)).softmax(2).round(decimals=2)
        evaluated, other = (Predictions.from_probs(one, labels) for one in probs)
        assert samples_in_both(evaluated, other) == 0
        assert samples_in_both(evaluated, evaluated[torch.randperm(60, generator=make)]) == 60


@pytest.mark.parametrize("word", ["ids", "index"])
def test_the_same_samples_may_be_a_split_of_another_name(word):
    """`fedlas predict` names splits by a hash of the data's keywords."""
    given, order = predictions(200), torch.randperm(200)
    names = torch.arange(200)
    first = Predictions(given.logits, given.labels, split="folder-all-9d7cc918", **{word: names})
    for split in ("folder-all-ef0f4e8f", "test", None):
        second = Predictions(given.logits[order], given.labels[order], split=split, **{word: names[order]})
        assert torch.equal(align_samples(first, second).logits, given.logits)


def test_other_splits_raise_if_samples_have_no_ids():
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
