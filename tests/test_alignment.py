"""Same samples in two predictions: reordering, splits, overlap of calibration and evaluated samples."""

import tracemalloc

import pytest
import torch

from fedlas.alignment import align_samples, samples_in_both
from fedlas.predictions import Predictions


def make_predictions(n: int, classes: int = 7, seed: int = 0) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator)
    return Predictions(logits, logits.softmax(1).multinomial(1, generator=generator)[:, 0])


def with_metadata(predictions, **metadata):
    return Predictions(predictions.logits, predictions.labels, **metadata)


@pytest.mark.parametrize("field", ["ids", "index"])
def test_equal_ids_and_labels_with_different_logits_are_not_overlap(field):
    """Regression: splits of equal size, sorted by class, with equal file names gave a false warning."""
    labels = torch.arange(600) // 200
    names = [f"img_{i:04}.png" for i in range(600)] if field == "ids" else torch.arange(600)
    for scale in (1.0, 5.0, 30.0):  # with the last one, most confidences are 1 and therefore equal
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(2, 600, 3, generator=generator) + torch.eye(3)[labels]
        evaluated, other = (Predictions(scale * logits, labels, **{field: names}) for logits in noise)
        assert samples_in_both(evaluated, other) == 0
        rounded = evaluated.probs.double().round(decimals=4)
        copied = Predictions.from_probs(rounded, labels, **{field: names})
        assert samples_in_both(evaluated, copied) == 600
        assert samples_in_both(copied, evaluated) == 600


@pytest.mark.parametrize("field", ["ids", "index", None])
def test_partial_overlap_is_counted(field):
    """Regression: with one corrected label or additional samples, the overlap was not detected."""
    predictions, additional = make_predictions(200), make_predictions(100, seed=1)
    names = [f"image {i}" for i in range(200)] if field == "ids" else torch.arange(200)
    metadata = {} if field is None else {field: names}
    labels = predictions.labels.clone()
    labels[7] = (labels[7] + 1) % predictions.num_classes
    evaluated = with_metadata(predictions, **metadata)
    assert samples_in_both(evaluated, Predictions(predictions.logits, labels, **metadata)) == 199
    logits, labels = (
        torch.cat([predictions.logits[:100], additional.logits]),
        torch.cat([predictions.labels[:100], additional.labels]),
    )
    assert samples_in_both(evaluated, Predictions(logits, labels, **metadata)) == 100


@pytest.mark.parametrize("field", ["ids", "index"])
def test_equal_rows_with_different_ids_are_counted_as_overlap(field):
    predictions = make_predictions(200)
    evaluated = with_metadata(predictions, **{field: range(200)})
    assert samples_in_both(evaluated, with_metadata(predictions[:100], **{field: range(200, 300)})) == 100
    assert samples_in_both(evaluated, with_metadata(predictions[:100], **{field: range(199, 99, -1)})) == 100


def test_overlap_compares_soft_labels():
    predictions = make_predictions(200)
    soft = (
        torch.nn.functional.one_hot(predictions.labels, predictions.num_classes) * 0.9 + 0.1 / predictions.num_classes
    )
    evaluated, other = (Predictions(predictions.logits, soft, index=range(200)) for _ in range(2))
    assert samples_in_both(evaluated, other[torch.arange(49, -1, -1)]) == 50
    assert samples_in_both(evaluated, with_metadata(predictions, index=range(200))) == 0


def test_overlap_of_many_samples_takes_little_memory():
    """Regression: a million samples took 3.7 seconds and 445 MiB."""
    generator = torch.Generator().manual_seed(0)
    predictions = Predictions(
        torch.randn(200_000, 3, generator=generator), torch.arange(200_000) % 3, index=range(200_000)
    )
    other = predictions[torch.randperm(200_000, generator=generator)]
    tracemalloc.start()
    overlap = samples_in_both(predictions, other)
    peak_memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert overlap == 200_000
    assert peak_memory < 2**22  # memory of lists, dicts and NumPy arrays, not of tensors


def test_chance_matches_of_rounded_rows_are_not_overlap():
    """Regression: two equal rows of sixty were reported as overlap."""
    labels = torch.arange(60) // 20
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        probs = (0.3 * torch.randn(2, 60, 3, generator=generator, dtype=torch.float64)).softmax(2).round(decimals=2)
        evaluated, other = (Predictions.from_probs(rows, labels) for rows in probs)
        assert samples_in_both(evaluated, other) == 0
        assert samples_in_both(evaluated, evaluated[torch.randperm(60, generator=generator)]) == 60


@pytest.mark.parametrize("field", ["ids", "index"])
def test_equal_ids_are_paired_across_split_names(field):
    """`fedlas predict` names splits by a hash of the data's keywords."""
    predictions, order = make_predictions(200), torch.randperm(200)
    names = torch.arange(200)
    first = Predictions(predictions.logits, predictions.labels, split="folder-all-9d7cc918", **{field: names})
    for split in ("folder-all-ef0f4e8f", "test", None):
        second = Predictions(predictions.logits[order], predictions.labels[order], split=split, **{field: names[order]})
        assert torch.equal(align_samples(first, second).logits, predictions.logits)


def test_pairing_different_splits_without_ids_raises():
    def predictions_of(split, **metadata):
        return Predictions(make_predictions(50).logits, make_predictions(50).labels, split=split, **metadata)

    rows = torch.arange(len(make_predictions(50)))
    for first, second in (("val", "test"), ("folder-val-9d7cc918", "folder-test"), ("train", "validation")):
        # Both may have the same index and order of classes, so only ids identify equal samples.
        for metadata in ({}, {"index": rows}):
            with pytest.raises(ValueError, match=f"split '{first}'.*'{second}'"):
                align_samples(predictions_of(first, **metadata), predictions_of(second, **metadata))
        assert len(align_samples(predictions_of(first, ids=rows), predictions_of(second, ids=rows))) == len(rows)
    with pytest.raises(ValueError, match="split 'folder-all-9d7cc918'"):
        align_samples(predictions_of("folder-all-9d7cc918"), predictions_of("folder-all-ef0f4e8f"))


def test_different_sample_ids_raise_with_an_example_of_each():
    first, second = (with_metadata(make_predictions(3), ids=ids) for ids in (["0", "1", "2"], ["0.0", "1.0", "2.0"]))
    with pytest.raises(ValueError, match=r"3 \(such as '0'\) .* 3 \(such as '0\.0'\)"):
        align_samples(first, second)
