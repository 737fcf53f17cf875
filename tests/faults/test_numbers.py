"""Short version of the campaign on numbers, and regression tests of bugs that the long version found."""

import random

import jaxtyping
import more_cases
import number_cases
import numpy as np
import pytest
import torch
from number_cases import CLASSES, SAMPLES, Target

import fedlas
from fedlas import metrics, ood
from fedlas.metrics import accuracy, ece, nll, top_k
from fedlas.metrics.intervals import inversion
from fedlas.predictions.arrays import as_tensor

SLOW = {"smooth_curve", "smooth_ece", "bootstrap", "paired_bootstrap"}  # tens of milliseconds each
# These take bins, results or names, or are composed of fuzzed functions.
NOT_FUZZED = {
    "across_seeds",
    "bin_statistics",
    "clopper_pearson",
    "equal_mass_edges",
    "equal_width_edges",
} | {"detect", "detect_scores", "score_names", "score_of"}
LOSSES = [record.name for record in fedlas.list_losses()]


@pytest.fixture(autouse=True)
def unchecked():
    """Disable the type checker of the tests, which would reject invalid input before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.campaign
@pytest.mark.parametrize("target", more_cases.targets(), ids=lambda target: f"{target.kind}-{target.name}")
def test_valid_input_gives_exact_values_and_invalid_input_an_error(target: Target):
    rng, executions = random.Random(1), 10 if target.name in SLOW else 200
    outcomes = {target(rng.randbytes(rng.choice((8, 40, 120, 160)))) for _ in range(executions)}
    assert "right" in outcomes


@pytest.mark.campaign
def test_all_public_functions_are_fuzzed():
    """Every export of `fedlas.metrics` is fuzzed, composed of fuzzed functions, or takes no probabilities."""
    fuzzed = {target.name for target in more_cases.targets()}
    assert set(LOSSES) <= fuzzed
    not_fuzzed = {
        name
        for package in (metrics, ood)
        for name in package.__all__
        if name not in fuzzed and not isinstance(getattr(package, name), type)
    }
    assert not_fuzzed == NOT_FUZZED


@pytest.mark.campaign
@pytest.mark.parametrize("call", [lambda *x: 0.1, lambda *x: 1 / 0], ids=["a number", "another error"])
def test_accepted_invalid_input_is_detected(call):
    invalid = (torch.full((2, 2), torch.nan), torch.tensor([0, 1]))
    with pytest.raises(number_cases.FindingError):
        number_cases.check_result("x", lambda: call(*invalid), False, number_cases.Description(*invalid))


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["ece", "smooth_ece", "noise_floor", "smooth_curve"])
def test_a_wrong_metric_value_is_detected(name):
    """Guard against a check that always passes; the last three were once compared only with themselves."""

    def slightly_wrong(*inputs, **options):
        return [value + 1e-6 for value in number_cases.numbers(getattr(metrics, name)(*inputs, **options))]

    target = Target(name, "metric", lambda draw: number_cases.check_metric(name, slightly_wrong, draw))
    with pytest.raises(number_cases.FindingError, match="instead of"):
        target(bytes(60))


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["auroc", "aupr", "fpr_at_tpr"])
def test_a_wrong_ood_metric_is_detected(name, monkeypatch):
    original = getattr(ood, name)

    def slightly_wrong(*inputs, **options):
        result = original(*inputs, **options)
        return metrics.Result(float(result) * (1 - 1e-9), result.definition, result.interval)

    monkeypatch.setattr(ood, name, slightly_wrong)
    with pytest.raises(number_cases.FindingError, match="instead of"):
        more_cases.check_detection(name, number_cases.Draw(bytes([0, 0, 0, 1, 0, *range(40)])))


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dual_focal", "4000070020202416000000000000ce0000000000000000ffffffffff"),  # is 0 below 5e-324?
        ("fedlas_mbls", "556c256c6c6c6c03106c6c6c6c6c6c627f7f7f7f6e656c"),  # logits in float64, a gate in float32
        ("nll", "ff0008000f64ff00000000ffffff0000646464646464677a"),  # losses of 1e308, which add up to infinity
    ],
)
def test_regressions_of_the_reference_implementation(name, content):
    target = next(target for target in more_cases.targets() if target.name == name)
    assert target(bytes.fromhex(content)) in {"right", "taken"}


# What the campaign found


def test_arrays_with_negative_strides_are_accepted():
    label = np.array([2, 1])[:1][::-1]
    assert as_tensor(label, "labels").tolist() == [2]
    assert accuracy(torch.eye(3)[2:], np.array([2])[::-1]) == 1


@pytest.mark.parametrize("kind", ["meta", "sparse", "complex"])
@pytest.mark.parametrize("which", ["probs", "labels"])
def test_meta_sparse_and_complex_tensors_raise(kind, which):
    conversions = {
        "meta": lambda x: x.to("meta"),
        "sparse": lambda x: x.to_sparse(),
        "complex": lambda x: x.to(torch.cfloat),
    }
    inputs = {"probs": torch.eye(3), "labels": torch.arange(3)}
    inputs[which] = conversions[kind](inputs[which])
    with pytest.raises(TypeError, match=f"{which}.*{kind}"):
        ece(**inputs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", [0, 1])
def test_losses_raise_for_sparse_tensors(name, which):
    record = next(item for item in fedlas.list_losses() if item.name == name)
    sizes = {"num_classes": CLASSES, "num_samples": SAMPLES, "epochs": 5}
    loss = fedlas.build_loss(name, **{option: size for option, size in sizes.items() if option in record.keywords})
    inputs = [torch.zeros(3, CLASSES), torch.arange(3), torch.ones(3, 2), torch.arange(3)]
    inputs[which] = inputs[which].to_sparse()
    with pytest.raises(TypeError, match=rf"{['logits', 'labels'][which]}.*torch\.sparse_coo"):
        loss(*inputs)


def test_invalid_soft_labels_with_gradient_raise_without_a_warning():
    labels = torch.full((2, 3), 0.5, requires_grad=True)
    with pytest.raises(ValueError, match=r"1\.5"):
        fedlas.build_loss("ce")(torch.zeros(2, 3), labels)


def test_dual_focal_accepts_noncontiguous_logits_without_a_warning():
    logits, labels = torch.randn(5, 4), torch.full((4, 5), 0.2)
    loss = fedlas.build_loss("dual_focal")
    torch.testing.assert_close(loss(logits.t(), labels), loss(logits.t().contiguous(), labels))


@pytest.mark.parametrize("weight", [6e-8, 1e-30, 1e-39, 5e-324])
@pytest.mark.parametrize("double_normalise", [True, False])
def test_mmce_is_finite_for_almost_no_correct_predictions(weight, double_normalise):
    loss = fedlas.build_loss("mmce", variant="w", double_normalise=double_normalise)
    labels = torch.tensor([[1.0, weight], [1.0, weight]], dtype=torch.float64)
    assert loss(torch.tensor([[0.0, 3.0], [0.0, 5.0]]), labels).isfinite()
    assert loss(torch.tensor([[0.0, 3.0], [0.0, 5.0]], dtype=torch.float64), labels).isfinite()


def test_probabilities_in_half_precision_are_summed_exactly():
    labels = torch.tensor([[1 / 7, 6 / 7]]).half()
    assert float(top_k(torch.tensor([[0.5, 0.5]]), labels, 2)) == float(labels.double().sum())


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_scalar_logits_raise(value):
    with pytest.raises(ValueError, match="logits"):
        nll.accumulator().update_logits(torch.tensor(value), torch.tensor([0]))


@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 0]), torch.ones(3)], ids=["hard", "soft"])
def test_one_dimensional_logits_raise(labels):
    """Regression: the NLL of one-dimensional logits raised IndexError."""
    with pytest.raises(ValueError, match=r"logits.*\(3,\)"):
        nll.accumulator().update_logits(torch.zeros(3), labels)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e308, 5e-324])
@pytest.mark.parametrize(("p", "length"), [(1.0, 2.0), (2.0, 2**0.5), (3.0, 2 ** (1 / 3)), (float("inf"), 1.0)])
def test_features_of_any_scale_have_the_correct_norm(size, p, length):
    """Regression: squares overflowed above 1e154 and underflowed below 1e-162."""
    norm = -float(ood.feature_norm(torch.tensor([[size, -size, 0.0]], dtype=torch.float64), p))
    assert norm == pytest.approx(size * length, rel=1e-14, abs=5e-324)


@pytest.mark.parametrize("size", [1e200, 1e-200, 1e300, 2.3e-308, 5e-324])
def test_features_of_any_scale_have_the_correct_direction(size):
    """Regression: a row whose square over- or underflowed had distance 1 to all others, like a zero row."""
    features = torch.tensor([[size, 0.0]], dtype=torch.float64)
    known = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert float(ood.knn(features, known, 1)) == pytest.approx(2**0.5)
    assert float(ood.knn(features, known, 2)) == pytest.approx(2)


@pytest.mark.parametrize("labels", [torch.tensor(1), torch.zeros(2, 3), torch.eye(2)[None], torch.zeros(2, 2)])
@pytest.mark.parametrize("scope", ["positive", "confidence"])
def test_binary_labels_of_a_wrong_shape_raise(scope, labels):
    """Regression: a scalar raised IndexError, and the last column of a table was taken as labels."""
    with pytest.raises(ValueError, match="labels"):
        ece(torch.tensor([0.2, 0.9]), labels, scope=scope)


@pytest.mark.parametrize(
    ("probs", "labels"),
    [
        ([[0, 0, 1], [0, 0, 1], [0, 0.75, 0.25], [0, 0.1, 0.9], [0, 0, 1]], [1, 1, 0, 0, 0]),
        ([[0, 0, 1], [0, 0, 1], [0, 0, 1], [4 / 15, 11 / 15, 0], [0, 0.6, 0.4]], [0, 0, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("resamples", [20, 1000])
def test_interval_of_an_always_incorrect_class_is_ordered(probs, labels, resamples):
    """Regression: a rounding error of 1e-17 in a bin gave a class-wise ECE interval of 2.6 to 1."""
    inputs = torch.tensor(probs, dtype=torch.float64), torch.tensor(labels)
    result = metrics.bootstrap(metrics.classwise_ece, *inputs, resamples=resamples)
    assert 0 <= result.interval.low <= result <= result.interval.high <= 1


def test_interval_of_sums_rounded_below_zero_does_not_warn():
    """Regression: the confidences of the first bin summed to -1e-17, whose square root warned."""
    probs = torch.tensor([[1, 0], [1 / 3, 2 / 3], [0, 1], [1, 0]], dtype=torch.float64)
    result = metrics.bootstrap(metrics.classwise_ece, probs, torch.zeros(4, dtype=torch.int64), resamples=20)
    assert 0 <= result.interval.low <= result.interval.high <= 1


@pytest.mark.parametrize("furthest", [15.0, 1e3, 1e5, 1e12])
@pytest.mark.parametrize("end", [-7.5, 0.3, 4.0])
def test_interval_end_is_found_for_any_search_range(furthest, end):
    assert inversion._last(lambda shift: shift <= end, -12.0, furthest) == pytest.approx(end, abs=0.02)


def test_interval_of_an_error_rounded_above_one_ends_at_one():
    probs = torch.tensor([[1e-20, 1.0]] * 3)
    labels = torch.tensor([[1.0, 6e-8]] * 3).bfloat16()
    result = metrics.bootstrap(metrics.classwise_ece, probs, labels, resamples=20)
    assert result.interval.low <= result.interval.high <= 1


def test_invalid_probability_in_a_two_class_map_raises():
    """Regression: only the second class of a two-class map was checked, so [inf, 0.3] was accepted."""
    maps = torch.tensor([[[[0.75, torch.inf]], [[0.25, 0.25]]]])
    with pytest.raises(ValueError, match="inf"):
        accuracy(maps, torch.tensor([[[1, 0]]]), scope="positive")


def test_two_column_soft_labels_are_accepted_for_binary_probabilities():
    probs = torch.tensor([0.25, 0.875])
    expected = ece(probs, torch.tensor([0.0, 1.0]), scope="positive")
    assert ece(probs, torch.eye(2), scope="positive") == expected
    assert ece(probs[:, None], torch.tensor([[0], [1]]), scope="positive") == expected


def test_soft_label_maps_are_accepted_for_binary_probabilities():
    """Regression: soft labels of maps were counted twice ("labels has 8 rows for 4 samples")."""
    probs, labels = torch.rand(4, 2, 3).softmax(1), torch.rand(4, 2, 3).softmax(1)
    tables = [maps.movedim(1, -1).reshape(-1, 2) for maps in (probs, labels)]
    assert ece(probs, labels, scope="positive") == ece(*tables, scope="positive")


def test_two_columns_may_sum_to_one_within_rounding():
    """Regression: [1.0000001, 0] was accepted for the top label but rejected for class 1."""
    probs = torch.tensor([[0.0, 1 + 1e-7], [0.5, 0.5]], dtype=torch.float64)
    hard = torch.tensor([1, 0])
    assert ece(probs, hard, scope="positive").value == pytest.approx(0.25, abs=1e-6)
    assert ece(probs[1:], probs[:1], scope="positive").value == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ValueError, match=r"probs: row 0\b.*0.*1"):
        ece(probs[:, 1], hard, scope="positive")


def test_smooth_curve_accepts_a_confidence_rounded_above_one():
    """Regression: a negative weight of the last cell but one was dropped, giving 0.49997 instead of 0.5."""
    probs = torch.tensor([[1.0, 0.0], [0.0, 1.0000001]])
    assert float((metrics.smooth_curve(probs, torch.tensor([0, 0])).accuracy - 0.5).abs().max()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_soft_label_of_class_0_is_not_rounded(dtype):
    """Regression: the label of class 0 was 1 - y in the dtype of the labels, with errors of 1e-3 in bfloat16."""
    labels = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]]).to(dtype)
    probs = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    positive = labels[:, 1].double()
    risks = torch.stack([positive[0], 1 - positive[2], positive[1]])  # most confident first
    expected = (risks.cumsum(0) / torch.arange(1, 4)).mean()
    assert metrics.aurc(probs, labels, scope="positive").value == pytest.approx(float(expected), abs=1e-12)


def test_single_sample_updates_are_merged():
    """Regression: many small updates kept more tensors than a process may have open files."""
    stream, probs, labels = metrics.aurc.accumulator(), torch.randn(3000, 3).softmax(1), torch.arange(3000) % 3
    for row in range(3000):
        stream.update(probs[row : row + 1], labels[row : row + 1])
    assert len(stream.confidence) <= 13
    assert len(stream.correct) <= 13
    assert stream.compute() == metrics.aurc(probs, labels)


def test_updates_of_mixed_dtypes_stay_in_order():
    stream, probs = metrics.aurc.accumulator(), torch.rand(9, 3, dtype=torch.float64).softmax(1)
    truth = torch.eye(3, dtype=torch.float64)
    for row, label in enumerate([0, 1, 2, 0, 1, 2, 0, 1, 2]):
        kind = torch.float64 if row % 3 else torch.float32
        soft = truth[label][None] if row % 2 else torch.tensor([label])
        stream.update(probs[row : row + 1].to(kind), soft)
    assert float(stream.compute()) == pytest.approx(float(metrics.aurc(probs, torch.arange(9) % 3)), abs=1e-6)
