"""Contract of every loss: soft labels, class weights, ignored samples and the three reductions."""

import itertools
import math

import pytest
import torch
from loss_cases import (
    CASES,
    CLASSES,
    LOSSES,
    REDUCTIONS,
    SIZE,
    WEIGHT,
    Inputs,
    assert_close,
    assert_same,
    batch,
    every_case,
    every_exact_case,
    every_loss,
    parametrize_cases,
    parts,
    run,
    state,
)
from torch.nn import functional

import fedlas

GRAD_OUTPUT = torch.linspace(1, 2, SIZE, dtype=torch.float64)
WEIGHTS = (None, WEIGHT)


def one_hot(labels):
    return functional.one_hot(labels, CLASSES).double()


def kinds_of(case, *kinds):
    """Return the kinds of labels that the loss takes."""
    return [kind for kind in kinds if case.cls.takes_soft_labels or kind != "soft"]


def batch_with_labels(kind):
    """Return a batch with hard or soft labels or with two ignored samples, and its number of valid samples."""
    inputs = batch(soft=kind == "soft")
    if kind == "ignored":
        inputs.labels[1:3] = -100
    return inputs, SIZE - 2 if kind == "ignored" else SIZE


# Soft labels


@parametrize_cases(CASES, lambda case: case.cls.takes_soft_labels and not case.depends_on_other_labels)
def test_a_soft_label_averages_the_loss_over_the_classes(case):
    inputs = batch(soft=True)
    for weight in WEIGHTS:
        loss = case.trained(reduction="none", weight=weight).eval()
        class_results = [run(loss, inputs._replace(labels=torch.full((SIZE,), k)), GRAD_OUTPUT * y)
                    for k, y in enumerate(inputs.labels.t())]  # fmt: skip
        expected_value = sum(y * actual.value for y, actual in zip(inputs.labels.t(), class_results, strict=True))
        gradient = sum(actual.grad_logits for actual in class_results)
        expected_grad_parameters = [
            sum(gradients) for gradients in zip(*(actual.grad_parameters for actual in class_results), strict=True)
        ]
        soft = run(loss, inputs, GRAD_OUTPUT)
        assert_close(soft.value, expected_value)
        assert_close(soft.grad_logits, gradient)
        assert_close(soft.grad_parameters, expected_grad_parameters)


@parametrize_cases(CASES, lambda case: case.cls.takes_soft_labels)
def test_one_hot_labels_equal_hard_labels(case):
    inputs = batch()
    for reduction, weight in [("mean", None), ("none", None), ("sum", WEIGHT)]:  # weights divide the mean otherwise
        options = {"reduction": reduction, "weight": weight}
        hard, soft = case.trained(**options), case.trained(**options)
        grad_output = GRAD_OUTPUT if reduction == "none" else None
        expected = run(hard, inputs, grad_output)
        assert_close(run(soft, inputs._replace(labels=one_hot(inputs.labels)), grad_output), expected)
        assert_close(state(soft), state(hard))


@parametrize_cases(LOSSES, lambda case: not case.cls.takes_soft_labels)
def test_unsupported_soft_labels_raise(case):
    with pytest.raises(ValueError, match=rf"{case.record.name}.*soft labels"):
        case.build()(*batch(soft=True))


def test_losses_that_pair_classes_or_count_correct_predictions_take_hard_labels_only():
    assert {"cpc", "crl"} <= {case.record.name for case in LOSSES if not case.cls.takes_soft_labels}


def test_mdca_compares_mean_confidence_with_the_mean_label():
    inputs = batch(soft=True)
    result, logits = parts(fedlas.build_loss("mdca", beta=1.5), inputs)
    expected = 1.5 * (logits.softmax(1).mean(0) - inputs.labels.mean(0)).abs().mean()
    assert_close(result["difference"].mean(), expected)
    (gradient,) = torch.autograd.grad(expected, logits)
    assert_close(torch.autograd.grad(result["difference"].mean(), logits)[0], gradient)


# Class weights

AS_TORCH = [
    ("ce", {}, 0.0),
    ("ls", {"alpha": 0.3}, 0.3),
    ("fedlas_ls", {"alpha": 0.3, "beta": 0.0}, 0.3),
]


@pytest.mark.parametrize("kind", ["hard", "soft", "ignored"])
@pytest.mark.parametrize(("name", "options", "smoothing"), AS_TORCH, ids=[name for name, *_ in AS_TORCH])
def test_equals_torch_cross_entropy(name, options, smoothing, kind):
    for weight, reduction, space in itertools.product(WEIGHTS, REDUCTIONS, [(), (2, 3)]):
        common = {"weight": weight, "reduction": reduction, "ignore_index": 2 if kind == "ignored" else -100}
        loss = fedlas.build_loss(name, num_classes=CLASSES, **options, **common)
        inputs = batch(space=space, soft=kind == "soft")
        logits = inputs.logits.detach().requires_grad_()
        expected = functional.cross_entropy(logits, inputs.labels, label_smoothing=smoothing, **common)
        (gradient,) = torch.autograd.grad(expected.sum(), logits)
        actual = run(loss, inputs)
        assert_close(actual.value, expected.detach(), 1e-12)
        assert_close(actual.grad_logits, gradient, 1e-12)
        assert_close(fedlas.smoothed_cross_entropy(logits, inputs.labels, smoothing, **common), expected, 1e-12)


@every_case
def test_class_weights_do_not_affect_regularisers(case):
    for kind in kinds_of(case, "hard", "soft"):
        inputs, _ = batch_with_labels(kind)
        unweighted, _ = parts(case.trained().eval(), inputs)
        weighted, _ = parts(case.trained(weight=WEIGHT).eval(), inputs)
        assert "classification" in weighted
        assert weighted.keys() == unweighted.keys()
        for name in unweighted.keys() - {"classification"}:
            assert_close(weighted[name], unweighted[name])


@every_exact_case
def test_classification_term_is_weighted_like_cross_entropy_or_label_smoothing(case):
    inputs = batch()
    rows, labels = torch.arange(SIZE), inputs.labels

    def classification(weight):
        return parts(case.trained(weight=weight).eval(), inputs)[0]["classification"]

    by_class = torch.stack([classification(unit) for unit in torch.eye(CLASSES, dtype=torch.float64)], 1)
    assert_close(by_class.sum(1), classification(None))
    assert_close(by_class @ WEIGHT, classification(WEIGHT))
    assert (by_class[rows, labels] > 0).all()
    # The term of another class is its -log p times a weight that is equal for all other classes: 0 or alpha_i / C.
    weights = by_class / -inputs.logits.log_softmax(1)
    other_weights = weights[~one_hot(labels).bool()].reshape(SIZE, -1)
    assert_close(other_weights, other_weights[:, :1].expand_as(other_weights))


@every_loss
def test_weights_divide_the_mean_as_in_torch(case):
    for kind in kinds_of(case, "hard", "soft", "ignored"):
        inputs, valid_count = batch_with_labels(kind)
        terms, _ = parts(case.trained(weight=WEIGHT).eval(), inputs)
        totals = {name: part.sum() for name, part in terms.items()}
        divisors = dict.fromkeys(totals, valid_count)
        if kind != "soft":
            divisors["classification"] = sum(float(WEIGHT[label]) for label in inputs.labels if label >= 0)
        for reduction, expected in {
            "mean": sum(total / divisors[name] for name, total in totals.items()),
            "sum": sum(totals.values()),
            "none": sum(terms.values()),
        }.items():
            actual = run(case.trained(weight=WEIGHT, reduction=reduction).eval(), inputs)
            assert_close(actual.value, expected.detach())


# Ignored samples


def with_ignored_rows(inputs, ignore_index):
    """Insert ignored rows with NaN and infinite values between the rows of a batch."""
    position = torch.tensor([1, 2, 4, 5, 7, 8])  # 0, 3 and 6 are ignored
    padded = {
        "logits": torch.full((9, CLASSES), math.nan, dtype=torch.float64),
        "labels": torch.full((9,), ignore_index),
        "features": torch.full((9, inputs.features.shape[1]), math.nan, dtype=torch.float64),
        "index": inputs.index[:1].repeat(9),
    }
    padded["logits"][3], padded["features"][3] = math.inf, -math.inf
    padded["logits"][6, 0], padded["logits"][6, 1:], padded["features"][6] = 9, 1, 3  # looks like a valid row
    for name, tensor in padded.items():
        tensor[position] = getattr(inputs, name)
    return Inputs(**padded), position


@every_exact_case
def test_ignored_samples_equal_removed_samples(case):
    inputs = batch()
    for reduction, weight, ignore_index in [("mean", None, -100), ("mean", WEIGHT, 255), ("sum", None, 255),
                                            ("none", WEIGHT, -100)]:  # fmt: skip
        options = {"reduction": reduction, "weight": weight, "ignore_index": ignore_index}
        loss, reference = case.trained(**options), case.trained(**options)
        padded, position = with_ignored_rows(inputs, ignore_index)
        grad_output = None if reduction != "none" else GRAD_OUTPUT
        actual = run(
            loss, padded, None if grad_output is None else torch.ones(9).double().index_copy(0, position, grad_output)
        )
        expected = run(reference, inputs, grad_output)
        ignored = torch.ones(9, dtype=torch.bool).index_fill(0, position, False)
        if reduction == "none":
            assert_same(actual.value[ignored], torch.zeros(3).double())
            assert_close(actual.value[position], expected.value)
        else:
            assert_close(actual.value, expected.value)
        assert_same(actual.grad_logits[ignored], torch.zeros(3, CLASSES).double())
        assert_close(actual.grad_logits[position], expected.grad_logits)
        assert_close(actual.grad_parameters, expected.grad_parameters)
        assert_close(state(loss), state(reference))


@every_exact_case
def test_ignore_index_can_be_a_class(case):
    inputs = batch(12)
    valid = inputs.labels != 2
    assert 0 < valid.sum() < 12
    loss, reference = case.trained(ignore_index=2), case.trained(ignore_index=2)
    actual, expected = run(loss, inputs), run(reference, inputs.rows(valid))
    assert_close(actual.value, expected.value)
    assert_close(actual.grad_logits[valid], expected.grad_logits)
    assert_close(state(loss), state(reference))


@parametrize_cases(CASES, lambda case: case.random)  # the test above is stricter for the other losses
def test_nan_in_ignored_samples_has_no_effect(case):
    loss = case.trained()
    actual = run(loss, with_ignored_rows(batch(), -100)[0])
    for tensor in [actual.value, actual.grad_logits, *actual.grad_parameters, *state(loss).values()]:
        assert tensor.isfinite().all()


def batches_without_valid_samples():
    inputs = batch()
    yield "empty", Inputs(*(tensor[:0] for tensor in inputs))
    nan = torch.full_like(inputs.logits, math.nan)
    yield "all ignored", inputs._replace(labels=torch.full_like(inputs.labels, -100), logits=nan)
    yield "empty maps", Inputs(*(tensor[:0] for tensor in batch(space=(2, 3))))
    yield "maps of nothing", batch(space=(2, 0))
    yield "empty and soft", Inputs(*(tensor[:0] for tensor in batch(soft=True)))


NO_VALID_SAMPLES = dict(batches_without_valid_samples())


def accepts_batch_without_valid_samples(case, kind):
    if kind in ("empty", "all ignored"):
        return True
    return case in LOSSES and (case.cls.takes_maps or "maps" not in kind) and bool(kinds_of(case, kind.split()[-1]))


@every_case
def test_loss_of_a_batch_without_valid_samples_is_zero(case):
    every_option = ({}, {"weight": WEIGHT}, {"reduction": "sum"}, {"reduction": "none"})
    for kind, options in itertools.product(
        [kind for kind in NO_VALID_SAMPLES if accepts_batch_without_valid_samples(case, kind)], every_option
    ):
        inputs, loss = NO_VALID_SAMPLES[kind], case.trained(**options)
        before = state(loss)
        actual = run(loss, inputs)
        shape = (inputs.logits.shape[0], *inputs.logits.shape[2:]) if "none" in options.values() else ()
        assert_same(actual.value, torch.zeros(shape, dtype=torch.float64))
        assert_same(actual.grad_logits, torch.zeros_like(inputs.logits))
        assert_same(actual.grad_parameters, [torch.zeros_like(parameter) for parameter in loss.parameters()])
        assert_same(state(loss), before)


@parametrize_cases(LOSSES, lambda case: case.cls.takes_soft_labels)
def test_ignore_index_with_soft_labels_raises(case):
    with pytest.raises(ValueError, match=r"ignore_index.*soft labels"):
        case.build(ignore_index=2)(*batch(soft=True))


# Reductions


@every_case
def test_reductions_are_sums_and_means_over_samples(case):
    for kind in kinds_of(case, "hard", "soft", "ignored", "weighted"):
        inputs, valid_count = batch_with_labels(kind)
        weight = WEIGHT if kind == "weighted" else None
        results, states = {}, {}
        for reduction in REDUCTIONS:
            loss = case.trained(reduction=reduction, weight=weight)
            results[reduction] = run(loss, inputs)
            states[reduction] = state(loss)
        none, total, mean = (results[reduction] for reduction in ("none", "sum", "mean"))
        assert_close(none.value.sum(), total.value)
        assert_close(none.grad_logits, total.grad_logits)
        assert_close(none.grad_parameters, total.grad_parameters)
        if weight is None:
            assert_close(none.value.sum() / valid_count, mean.value)
            assert_close(none.grad_logits / valid_count, mean.grad_logits)
            assert_close([gradient / valid_count for gradient in none.grad_parameters], mean.grad_parameters)
        assert_close(states["none"], states["mean"])
        assert_close(states["sum"], states["mean"])


@every_case
def test_terms_can_be_differentiated_separately(case):
    inputs = batch()
    result, logits = parts(case.trained(), inputs)
    gradients = [torch.autograd.grad(part.mean(), logits, retain_graph=True)[0] for part in result.values()]
    assert_close(sum(gradients), run(case.trained(), inputs).grad_logits)
