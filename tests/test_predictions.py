"""Predictions as arrays: accepted types, checks, slices."""

import copy
import inspect
import math
import pickle
import warnings

import numpy as np
import pytest
import torch

from fedlas.errors import RowError
from fedlas.io import as_predictions, read_predictions, write_predictions
from fedlas.metrics import nll
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.predictions.arrays import ENOUGH, as_tensor
from fedlas.predictions.probabilities import least_prob

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def test_properties_are_derived_from_logits_and_labels():
    predictions = Predictions(LOGITS, LABELS, split="test", class_names=["cat", "dog", "emu"])
    assert (len(predictions), predictions.num_classes, predictions.split) == (2, 3, "test")
    assert torch.equal(predictions.probs, LOGITS.softmax(1))
    assert predictions.prediction.tolist() == [0, 2]
    assert predictions.correct.tolist() == [True, False]
    assert torch.equal(predictions.confidence, LOGITS.softmax(1).amax(1))
    assert repr(predictions) == "Predictions(split='test', n=2, classes=3, float32)"
    with pytest.raises(AttributeError):
        predictions.logits = LOGITS


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()])
def test_tensors_arrays_and_lists_are_accepted(make):
    predictions = Predictions(logits=make(LOGITS), labels=make(LABELS), index=make(torch.tensor([5, 3])))
    assert predictions.logits.tolist() == LOGITS.tolist()
    assert predictions.labels.dtype == torch.int64
    assert predictions.index.tolist() == [5, 3]


def test_read_only_arrays_and_tensors_with_gradient_are_accepted():
    array = LOGITS.numpy().copy()
    array.flags.writeable = False
    assert Predictions(array, LABELS).logits.tolist() == LOGITS.tolist()
    assert not Predictions(LOGITS.clone().requires_grad_(), LABELS).logits.requires_grad


def test_half_precision_is_softened_in_float32():
    predictions = Predictions(LOGITS.bfloat16(), LABELS)
    assert predictions.logits.dtype == torch.bfloat16
    assert predictions.probs.dtype == torch.float32


def test_a_one_logit_head_is_binary():
    for logits in (torch.tensor([-1.0, 2.0]), torch.tensor([[-1.0], [2.0]])):
        predictions = Predictions(logits, torch.tensor([0, 1]))
        assert predictions.num_classes == 2
        assert torch.allclose(predictions.probs[:, 1], torch.tensor([-1.0, 2.0]).sigmoid())


def test_soft_labels_give_fractional_correctness():
    soft = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    predictions = Predictions(LOGITS, soft)
    assert predictions.correct.tolist() == [0.5, 1.0]


def test_equal_probabilities_predict_the_first_class():
    assert Predictions(torch.zeros(1, 4), torch.tensor([0])).prediction.tolist() == [0]


def test_given_probabilities_are_not_recomputed():
    """softmax(log p) differs from p in the last digits, which matters for a confidence on the edge of a bin."""
    probs = torch.tensor([[0.2, 0.8], [1.0, 0.0], [2 / 3, 1 / 3]])
    predictions = Predictions.from_probs(probs, torch.tensor([0, 0, 1]))
    assert torch.equal(predictions.probs, probs)
    assert torch.isfinite(predictions.logits).all()
    assert torch.allclose(predictions.logits.softmax(1), probs, atol=1e-6)
    vector = Predictions.from_probs([0.25, 0.5], [0, 1])
    assert vector.probs.tolist() == [[0.75, 0.25], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        ([[0.0, 1.0], [math.nan, 0.0]], [0, 1], {}, "logits.*row 1"),
        ([[0.0, math.inf]], [0], {}, "logits.*row 0"),
        ([[0.0, 1.0], [1.0, 0.0]], [0, 2], {}, "labels.*row 1.*2"),
        ([[0.0, 1.0]], [-1], {}, "labels.*row 0"),
        ([[0.0, 1.0]], [0, 1], {}, "labels.*2.*1"),
        ([[0.0, 1.0]], [0.5], {}, "labels.*1 integers"),
        ([[0.0, 1.0]], [[0.5, 0.6]], {}, "labels.*row 0.*distribution"),
        ([[0.0, 1.0]], [0], {"class_names": ["a"]}, "class_names.*1.*2"),
        ([[0.0, 1.0]], [0], {"features": [[1.0], [2.0]]}, "features.*2.*1"),
        ([[0.0, 1.0]], [0], {"index": [1, 2]}, "index.*2.*1"),
    ],
)
def test_invalid_values_raise_an_error_that_names_the_row(logits, labels, options, message):
    with pytest.raises(ValueError, match=message):
        Predictions(
            np.array(logits),
            np.array(labels),
            **{k: np.array(v) if k != "class_names" else v for k, v in options.items()},
        )


@pytest.mark.parametrize("rows", [2, ENOUGH + 5])
def test_predictions_without_classes_raise(rows):
    """Regression: torch raised an error about the minimum of an empty tensor."""
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=rf"\({rows}, 0\)"):
            make(torch.zeros(rows, 0), torch.zeros(rows, dtype=torch.long))


def test_empty_or_wrongly_typed_or_shaped_predictions_raise():
    with pytest.raises(ValueError, match=r"logits.*rows"):
        Predictions(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(TypeError, match="floating-point"):
        Predictions(torch.zeros(2, 3, dtype=torch.long), LABELS)
    with pytest.raises(TypeError, match=r"logits.*<U1"):
        Predictions(np.array([["a", "b"]]), [0])
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=r"\(2, 3, 4\).*\.movedim\(1, -1\)\.flatten\(0, -2\).*labels\.flatten"):
            make(torch.zeros(2, 3, 4), LABELS)


def test_the_advice_for_maps_pairs_logits_and_labels():
    logits, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    flattened = Predictions(logits.movedim(1, -1).flatten(0, -2), labels.flatten())
    assert torch.equal(flattened.logits.argmax(1) == flattened.labels, (logits.argmax(1) == labels).flatten())


def test_rows_that_do_not_sum_to_one_raise():
    with pytest.raises(ValueError, match=r"probs.*row 1.*distribution.*\[0\.9, 0\.9\]"):
        Predictions.from_probs([[0.5, 0.5], [0.9, 0.9]], [0, 1])
    with pytest.raises(ValueError, match="row 0"):
        Predictions.from_probs([[1.2, -0.2]], [0])
    assert len(Predictions.from_probs([[0.9, 0.09]], [0])) == 1  # two decimals


def test_as_tensor_does_not_copy():
    array = np.zeros(3)
    as_tensor(array, "x")[0] = 1
    assert array[0] == 1


def test_an_unknown_keyword_raises() -> None:
    with pytest.raises(TypeError, match=r"'spilt'.*split"):
        Predictions(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), spilt="test")


@pytest.mark.parametrize("rows", [slice(1, 2), torch.tensor([1]), torch.tensor([False, True])])
def test_samples_are_selected_by_slices_and_masks(rows):
    all_samples = Predictions(LOGITS, LABELS, features=LOGITS, index=[7, 8], class_names=list("abc"), split="val")
    selected = all_samples[rows]
    assert len(selected) == 1
    assert torch.equal(selected.logits, LOGITS[1:])
    assert torch.equal(selected.labels, LABELS[1:])
    assert torch.equal(selected.features, LOGITS[1:])
    assert selected.index.tolist() == [8]
    assert (selected.split, selected.class_names) == ("val", ("a", "b", "c"))
    assert torch.equal(selected.confidence, all_samples.confidence[1:])
    probs = Predictions.from_probs(LOGITS.softmax(1))[rows]
    assert torch.equal(probs.given_probs, LOGITS.softmax(1)[1:])


def test_indexing_by_an_integer_raises():
    with pytest.raises(TypeError, match=r"slice.*mask.*str"):
        inspect.unwrap(Predictions.__getitem__)(Predictions(LOGITS, LABELS), "a")


@pytest.mark.parametrize("rows", [np.array([False, True]), np.array([1]), [1], slice(None, 0, -1)])
def test_selection_by_numpy_arrays_and_lists(rows):
    assert torch.equal(Predictions(LOGITS, LABELS)[rows].logits, LOGITS[1:])


def test_selecting_no_samples_raises():
    with pytest.raises(ValueError, match="sample"):
        Predictions(LOGITS, LABELS)[:0]


def test_arrays_that_torch_cannot_share_are_copied():
    array = LOGITS.numpy()
    for view in (array[::-1][::-1], array[::-1], array.astype(">f4"), array.astype(np.longdouble)):
        assert np.allclose(as_tensor(view, "a").numpy(), np.asarray(view, dtype=np.float64))


def test_masked_and_ragged_arrays_raise():
    with pytest.raises(TypeError, match=r"logits.*masked"):
        Predictions(np.ma.masked_array(LOGITS.numpy(), mask=LOGITS.numpy() > 2.5), LABELS)
    with pytest.raises(ValueError, match="logits"):
        Predictions([[1.0, 2.0], [1.0]], [0, 1])


def test_a_row_that_is_not_a_distribution_raises_an_error_with_its_sum():
    with pytest.raises(ValueError, match=r"1\.5.*logits=.*normalize="):
        Predictions.from_probs([[0.5, 0.5], [0.75, 0.75]], [0, 1])


def test_rounded_percentages_are_detected():
    """Regression: a row that sums to 94 was reported as logits."""
    rows = [[90.0, 1.0, 1.0, 1.0, 1.0], [95.0, 1.0, 1.0, 1.0, 0.0], [50.0, 48.0, 0.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"94.*percentages.*100"):
        Predictions.from_probs(rows, [0, 1, 2])
    with pytest.raises(ValueError, match=r"94.*logits="):
        Predictions.from_probs([[94.0, 0.0], [0.5, 0.5], [0.5, 0.5]], [0, 1, 1])


def test_a_transposed_table_is_detected():
    """Regression: probabilities were taken for percentages, because 300 of them sum to about 100."""
    probs = torch.full((300, 3), 1 / 3)
    labels = torch.arange(300) % 3
    for labels_argument in (labels, labels.numpy(), labels.tolist(), torch.eye(3)[labels]):
        with pytest.raises(ValueError, match=r"^probs.*3.*300.*transposed"):
            Predictions.from_probs(probs.T, labels_argument, class_names=["a", "b", "c"])
        with pytest.raises(ValueError, match=r"^labels.*300.*3.*transposed"):
            Predictions(probs.log().T, labels_argument, class_names=["a", "b", "c"], index=torch.arange(300))
    with pytest.raises(ValueError, match=r"^probs.*1.*300.*transposed"):
        Predictions.from_probs(probs[:, :1].T, labels)
    with pytest.raises(ValueError, match=r"^labels((?!transposed).)*299((?!transposed).)*300((?!transposed).)*$"):
        Predictions(probs.log(), labels[1:])
    assert len(Predictions.from_probs(probs[:3], labels[:3])) == 3  # as many rows as columns


def test_values_up_to_one_are_not_percentages():
    probs = torch.full((3, 300), 1 / 3)
    with pytest.raises(ValueError, match=r"100.*logits="):
        Predictions.from_probs(probs)
    with pytest.raises(ValueError, match=r"95.*logits="):
        Predictions.from_probs(probs * 0.95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Predictions(probs * torch.tensor([0.9999, 1.0, 1.0])[:, None])
    with pytest.raises(ValueError, match=r"100.*percentages"):
        Predictions.from_probs([[99.0, 0.5, 0.5], [0.2, 0.3, 0.5]])


def test_soft_labels_that_are_not_a_distribution_raise():
    with pytest.raises(ValueError, match=r"labels.*row 0((?!logits).)*1\.5((?!logits).)*$"):
        Predictions(torch.zeros(1, 2), [[0.75, 0.75]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_probabilities_passed_as_logits_warn(dtype):
    probs = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype)
    with pytest.warns(UserWarning, match="from_probs"):
        Predictions(probs, torch.zeros(50, dtype=torch.int64))


def test_logits_with_some_rows_that_are_distributions_do_not_warn():
    probs = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).softmax(1)
    last_row_differs = probs.clone()
    last_row_differs[-1] += 0.1
    few_rows = probs[: ENOUGH - 1]  # too few rows for a warning
    for logits in (last_row_differs, few_rows, 2 * probs, -probs, probs.log(), torch.zeros(50, 7)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Predictions(logits, torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_probability_of_zero_has_a_logit_where_small_numbers_are_flushed(dtype):
    """Regression: the floor was subnormal, and its logarithm was minus infinity."""
    probs, soft = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[0.5, 0.5]], dtype=dtype)
    unflushed = Predictions.from_probs(probs, [1])
    expected = [float(nll(probs, labels)) for labels in ([1], soft)]
    torch.set_flush_denormal(True)  # without an effect on some processors
    try:
        flushed = Predictions.from_probs(probs, [1])
        losses = [nll(probs, labels) for labels in ([1], soft)]
    finally:
        torch.set_flush_denormal(False)
    assert torch.isfinite(flushed.logits).all()
    assert torch.equal(flushed.logits, unflushed.logits)
    assert unflushed.logits[0, 1] == pytest.approx(math.log(least_prob(dtype)))
    assert [float(loss) for loss in losses] == pytest.approx(expected)
    assert [loss.details["floored"] for loss in losses] == [1, 1]


def test_duplicate_class_names_raise():
    """Regression: duplicate names were accepted and rejected only when saving."""
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=r"name.*'a'"):
            make(LOGITS.softmax(1), LABELS, class_names=["a", "b", "a"])


@pytest.mark.parametrize("copy_error", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_about_a_row_can_be_copied_and_pickled(copy_error):
    """Regression: such errors could not be sent between processes."""
    error = RowError("p.csv: ", 3, " has label 'x'")
    copied = copy_error(error)
    assert (type(copied), str(copied)) == (RowError, str(error))
    assert str(copied.at_line([2, 3, 4, 9])) == "p.csv: line 9 has label 'x'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decimals", [1, 2, 4, 6])
@pytest.mark.filterwarnings("ignore:.*normalized")
def test_rounding_to_decimals_is_detected(dtype, decimals):
    generator = torch.Generator().manual_seed(0)
    probs = (4 * torch.randn(300, 5, generator=generator, dtype=torch.float64)).softmax(1)
    labels = probs.argmin(1)
    rounded = Predictions.from_probs(probs.round(decimals=decimals).to(dtype), labels)
    assert rounded.decimals == rounded[5:9].decimals == decimals
    floor = math.log(0.5 * 10**-decimals)
    assert rounded.logits[rounded.zeros].unique().tolist() == pytest.approx([floor])
    loss = nll(rounded)
    assert loss.details["floored"] > 0
    assert loss.details["floor"] == pytest.approx(math.exp(floor))
    assert float(loss) == pytest.approx(-float(rounded.logits.double().gather(1, labels[:, None]).mean()), rel=1e-5)


def test_unrounded_tables_have_no_decimals():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(300, 5, generator=generator)
    votes = torch.multinomial(torch.ones(300, 5), 7, replacement=True, generator=generator)
    tables = {
        "softmax": scores.softmax(1),
        "saturated": (60 * scores).softmax(1),
        "seventh": torch.stack([(votes == k).sum(1) for k in range(5)], 1) / 7,
        "certain": torch.eye(5).repeat(60, 1),
        "few": torch.tensor([[0.5, 0.5], [0.25, 0.75]]),
    }
    predictions = {
        name: Predictions.from_probs(table, torch.zeros(len(table)).long()) for name, table in tables.items()
    }
    assert {name: parsed.decimals for name, parsed in predictions.items()} == dict.fromkeys(tables)


class Array:
    """An array of another library, such as JAX."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values if dtype is None else self.values.astype(dtype)

    def __len__(self):
        return len(self.values)


def test_arrays_of_other_libraries_are_accepted():
    predictions = as_predictions(Array(LOGITS.softmax(1)), Array(LABELS))
    assert torch.equal(predictions.probs, LOGITS.softmax(1))
    assert predictions.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize("kind", [Predictions, TopLabelPredictions])
def test_metadata_columns_are_stored(kind, tmp_path):
    scores = LOGITS if kind is Predictions else [0.9, 0.5]
    metadata = {"site": ["a", "b"], "age": range(30, 32)}
    predictions = kind(scores, LABELS, metadata=metadata)
    assert predictions.metadata == {"site": ("a", "b"), "age": (30, 31)}
    assert predictions[[1]].metadata == predictions[1:].metadata == {"site": ("b",), "age": (31,)}
    loaded = read_predictions(write_predictions(predictions, tmp_path / "p.safetensors"))
    assert loaded.metadata == predictions.metadata
    with pytest.raises(ValueError, match="site has 1 rows"):
        kind(scores, LABELS, metadata={"site": ["a"]})
    with pytest.raises(TypeError, match="metadata"):
        kind(scores, LABELS, metadata=["a", "b"])


@pytest.mark.parametrize(
    "column", [torch.tensor([7, 7, 9]), np.array([7, 7, 9]), [7, 7, 9]], ids=["torch", "numpy", "list"]
)
def test_ids_and_metadata_of_any_array_type_are_plain_values(column):
    predictions = Predictions(torch.zeros(3, 2), [0, 1, 0], ids=column, metadata={"camera": column})
    assert predictions.ids == ("7", "7", "9")
    assert len(set(predictions.metadata["camera"])) == 2
