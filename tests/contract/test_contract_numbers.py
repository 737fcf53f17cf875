"""Contract of every loss: finite for extreme inputs, correct gradients, float32 or better for any input dtype."""

import itertools
import math

import torch
from loss_cases import (
    CASES,
    CLASSES,
    EXACT_CASES,
    LOSSES,
    SIZE,
    Case,
    Inputs,
    assert_close,
    assert_finite,
    assert_same,
    batch,
    every_case,
    every_loss,
    parametrize_cases,
    parts,
    run,
    state,
)
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import fedlas

# Extremes: rows of logits in units of a scale, and the labels


ROWS = {
    "one high": [1, 0, 0, 0, 0, 0],
    "two low": [-1, -1, 0, 0, 0, 0],
    "largest difference": [1, -1, -1, -1, -1, -1],
    "four high": [-1, -1, 1, 1, 1, 1],
    "two high, two low": [1, 1, 0, 0, -1, -1],
    "equal and high": [1, 1, 1, 1, 1, 1],
    "equal and low": [-1, -1, -1, -1, -1, -1],
    "equal": [0, 0, 0, 0, 0, 0],
    "in steps": [-1, -0.5, 0, 0.25, 0.5, 1],
}
SCALES = [20.0, 90.0, 1000.0, 1e4]  # float32 softmax: almost, just, and exactly one-hot
LABELS = {
    "correct": lambda logits: logits.argmax(1),
    "incorrect": lambda logits: logits.argmin(1),
    "mixed": lambda logits: torch.where(torch.arange(len(logits)) % 3 == 0, logits.argmax(1), logits.argmin(1)),
    "first": lambda logits: torch.zeros(len(logits), dtype=torch.long),
}


def extremes(dtype, labels):
    logits = torch.cat([scale * torch.tensor(list(ROWS.values()), dtype=dtype) for scale in SCALES])
    features = batch(len(logits)).features.to(dtype)
    return Inputs(logits, LABELS[labels](logits), features, torch.arange(len(logits)) % 12)


def assert_all_finite(loss, inputs):
    actual = run(loss, inputs)
    assert actual.value.dtype == inputs.logits.dtype
    assert_finite(actual.value, actual.grad_logits, *actual.grad_parameters, *state(loss).values())


@every_case
def test_loss_of_huge_logits_is_finite(case):
    loss = case.trained()
    for dtype, labels in itertools.product((torch.float32, torch.float64), LABELS):
        inputs = extremes(dtype, labels)
        assert_all_finite(loss.train(), inputs)
        assert_all_finite(loss.eval(), inputs.rows(slice(2, 3)))
        if case.cls.takes_soft_labels:
            one_hot = functional.one_hot(inputs.labels, CLASSES).to(dtype)
            assert_all_finite(loss, inputs._replace(labels=one_hot))
            assert_all_finite(loss, inputs._replace(labels=(one_hot + 1 / CLASSES) / 2))


@parametrize_cases(CASES, lambda case: "gamma" in case.record.keywords)
def test_loss_is_finite_for_any_gamma(case):
    for gamma, dtype in itertools.product([0.0, 0.01, 0.5, 1.0, 3.0], (torch.float32, torch.float64)):
        loss = Case(case.record, {**case.options, "gamma": gamma}).build()
        for labels in LABELS:
            assert_all_finite(loss, extremes(dtype, labels))


def test_adafocal_is_finite_with_negative_exponents():
    for gamma, dtype in itertools.product([-2.0, -0.5, -0.2], (torch.float32, torch.float64)):
        loss = fedlas.build_loss("adafocal", gamma=gamma)
        assert (loss.gammas < 0).all()
        for labels in LABELS:
            assert_all_finite(loss, extremes(dtype, labels))


def test_mmce_clamps_the_square_root_at_zero():
    """One correct and two incorrect predictions of confidence 2/3: the official code takes the root of -3e-7."""
    logits = torch.tensor([4.0, 1.0, 1.0], dtype=torch.float64).log().repeat(3, 1).requires_grad_()
    value = fedlas.build_loss("mmce", variant="w")(logits, torch.tensor([0, 1, 2]))
    assert_finite(value, *torch.autograd.grad(value, logits))


@every_loss
def test_huge_logits_are_exact_in_float32(case):
    for labels in LABELS:
        single, double = extremes(torch.float32, labels), extremes(torch.float64, labels)
        assert_close(case.build()(*single).double(), case.build()(*double), 1e-5)
        # The gradient of a regulariser may jump at equal logits; that of the classification term must not.
        gradients = []
        for inputs in (single, double):
            result, logits = parts(case.build().eval(), inputs)
            gradients.append(torch.autograd.grad(result["classification"].mean(), logits)[0].double())
        assert_close(gradients[0], gradients[1], 1e-4)


@every_loss
def test_the_classification_term_of_huge_logits_is_their_difference(case):
    """A loss that clips probabilities would be finite but bounded for very incorrect predictions."""
    logits = torch.zeros(SIZE, CLASSES, dtype=torch.float64)
    logits[:, 0] = 1e4
    inputs = batch()._replace(logits=logits, labels=torch.ones(SIZE, dtype=torch.long))
    actual = run(case.build().eval(), inputs)
    assert float(actual.value) > 5e3
    assert (actual.grad_logits[:, 1] < -0.1 / SIZE).all()


@parametrize_cases(CASES, lambda case: case.has(lambda loss: loss.needs_features))
def test_loss_of_extreme_features_is_finite(case):
    inputs = batch()
    for value in (0.0, 1e30, 1e-30, math.nan, math.inf):
        loss = case.trained()
        for rows in (slice(0, 1), slice(None)):
            features = inputs.features.clone()
            features[rows] = value
            actual = run(loss, inputs._replace(features=features))
            assert_finite(actual.value, actual.grad_logits, *actual.grad_parameters, *state(loss).values())


# Gradients


class FrozenConstants(TorchFunctionMode):
    """Repeat the detached tensors and masks of the first call in all later calls.

    Autograd treats detached tensors as constants, so finite differences must not change them either.
    """

    def __init__(self):
        super().__init__()
        self.constants, self.position, self.recording = [], 0, True

    def __exit__(self, *error):
        self.position, self.recording = 0, False
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or (func is not torch.Tensor.detach and result.dtype != torch.bool):
            return result
        if self.recording:
            self.constants.append(result.clone())  # gradcheck moves its input in place
        self.position += 1
        return self.constants[self.position - 1]


@parametrize_cases(EXACT_CASES)
def test_gradients_equal_finite_differences(case):
    loss = case.trained(reduction="none").eval()
    for soft in (False, True) if case in LOSSES and case.cls.takes_soft_labels else (False,):
        inputs = batch(3, soft=soft)
        constants = FrozenConstants()

        def values(logits, inputs=inputs, constants=constants):
            with constants:
                return loss(logits, *inputs[1:])

        values(inputs.logits)
        assert torch.autograd.gradcheck(values, inputs.logits.requires_grad_(), check_undefined_grad=False)


@parametrize_cases(EXACT_CASES, lambda case: case.has(lambda loss: list(loss.parameters())))
def test_parameter_gradients_equal_finite_differences(case):
    loss, inputs, constants = case.trained().eval(), batch(3), FrozenConstants()
    names, parameters = zip(*loss.named_parameters(), strict=True)

    def value(*tensors):
        with constants:
            return torch.func.functional_call(loss, dict(zip(names, tensors, strict=True)), tuple(inputs))

    value(*parameters)
    assert torch.autograd.gradcheck(value, parameters, check_undefined_grad=False)
    assert any(gradient.abs().max() > 0 for gradient in run(loss, inputs).grad_parameters)


# Precision


LOW_PRECISION = (torch.bfloat16, torch.float16)


def rounded(dtype):
    """Return a batch in low precision, and the same numbers in float32."""
    low = batch(dtype=torch.float32).to(dtype)
    return low, low.to(torch.float32)


@every_case
def test_low_precision_is_computed_in_float32(case):
    for dtype in LOW_PRECISION:
        low, single = rounded(dtype)
        loss, reference = case.build(), case.build()
        actual, expected = run(loss, low), run(reference, single)
        assert actual.value.dtype == expected.value.dtype == torch.float32
        assert_close(actual.value, expected.value, 1e-6)
        assert actual.grad_logits.dtype == dtype
        assert_close(actual.grad_logits, expected.grad_logits.to(dtype), 1e-6)
        assert_close(actual.grad_parameters, expected.grad_parameters, 1e-6)
        assert_close(state(loss), state(reference), 1e-6)


@parametrize_cases(LOSSES, lambda case: case.cls.takes_soft_labels)
def test_low_precision_soft_labels_are_computed_in_float32(case):
    sixteenths = torch.tensor([8, 4, 2, 1, 1, 0]) / 16  # exact in every dtype
    for dtype in LOW_PRECISION:
        low, single = rounded(dtype)
        labels = torch.stack([sixteenths.roll(shift) for shift in range(SIZE)]).to(dtype)
        expected = run(case.build(), single._replace(labels=labels.float()))
        for inputs in (low, single):
            actual = run(case.build(), inputs._replace(labels=labels))
            assert_close(actual.value, expected.value, 1e-6)


@every_case
def test_autocast_does_not_change_loss_or_gradients(case):
    inputs = batch(dtype=torch.float32)
    loss, reference = case.build(), case.build()
    for training in (True, False):
        actual = run(loss.train(training), inputs, autocast=True)
        assert_same(actual, run(reference.train(training), inputs))
        assert_same(state(loss), state(reference))


@every_case
def test_float64_input_gives_a_float64_loss(case):
    assert case.build()(*batch()).dtype == torch.float64
    mixed = batch()._replace(features=batch(dtype=torch.float32).features)
    assert run(case.build(), mixed).value.dtype == torch.float64


@every_case
def test_a_cast_loss_keeps_its_running_statistics(case):
    for dtype in (*LOW_PRECISION, torch.float32, torch.float64):
        loss = case.trained()
        buffers = {name: value.clone() for name, value in loss.named_buffers()}
        loss.to(dtype)
        assert_same(dict(loss.named_buffers()), buffers)
        assert all(parameter.dtype == dtype for parameter in loss.parameters())
        actual = run(loss, batch(dtype=torch.float32).to(dtype))
        assert actual.value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_finite(actual.value, actual.grad_logits)
        for name, value in loss.named_buffers():
            assert value.dtype == buffers[name].dtype


@every_loss
def test_running_statistics_are_float64_or_whole_numbers(case):
    for name, value in case.build().named_buffers():
        if name in case.cls.identical_buffers:  # stored predictions, which are replaced and not accumulated
            continue
        assert value.dtype == torch.float64 or not value.is_floating_point(), name
