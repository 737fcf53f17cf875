"""Contract of every loss: properties of any batch, tested with hypothesis."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loss_cases import CLASSES, LOSSES, assert_close, batch, parametrize_cases, run, state
from torch.nn import functional

import fedlas
from fedlas.losses.mmce import kernel_sums
from losses import plain

few_examples = settings(max_examples=10)
OF_RAW_LOGITS = {"acls"}  # its positive term depends on the logit itself, as in the official code
numbers = st.floats(-30, 30, allow_nan=False).map(lambda x: round(x, 3))


@st.composite
def batches(draw, least=1):
    """Draw a batch, often with equal logits, rows or labels."""
    n = draw(st.integers(least, 7))
    row = st.lists(st.one_of(st.sampled_from([-6.0, 0.0, 1.0, 6.0]), numbers), min_size=CLASSES, max_size=CLASSES)
    logits = torch.tensor(draw(st.lists(row, min_size=n, max_size=n)), dtype=torch.float64)
    labels = torch.tensor(draw(st.lists(st.integers(0, CLASSES - 1), min_size=n, max_size=n)))
    return batch(n)._replace(logits=logits, labels=labels)


@parametrize_cases(LOSSES, lambda case: not case.cls.needs_index)
@given(inputs=batches(), random=st.randoms(use_true_random=False))
@few_examples
def test_loss_is_invariant_to_sample_order(case, inputs, random):
    permutation = list(range(len(inputs.labels)))
    random.shuffle(permutation)
    loss, reference = case.trained(reduction="none"), case.trained(reduction="none")
    actual, expected = run(loss, inputs.rows(torch.tensor(permutation))), run(reference, inputs)
    assert_close(actual.value, expected.value[permutation])
    assert_close(actual.grad_logits, expected.grad_logits[permutation])
    assert_close(actual.grad_parameters, expected.grad_parameters)
    assert_close(state(loss), state(reference))


@parametrize_cases(LOSSES)
@given(inputs=batches(), shift=numbers)
@few_examples
def test_loss_is_invariant_to_a_shift_of_logits(case, inputs, shift):
    loss = case.trained().eval()
    with torch.no_grad():
        for parameter in loss.parameters():  # learned parameters may depend on raw logits
            parameter.zero_()
    shifted = inputs._replace(logits=inputs.logits + shift)
    terms, shifted_terms = loss.parts(*inputs), loss.parts(*shifted)
    assert_close(shifted_terms["classification"], terms["classification"], 1e-7)
    if case.record.name not in OF_RAW_LOGITS:
        assert_close(shifted_terms, terms, 1e-7)


def test_acls_depends_on_the_raw_logit():
    loss, inputs = fedlas.build_loss("acls"), batch()
    assert float(loss(*inputs._replace(logits=inputs.logits + 5))) > float(loss(*inputs)) + 0.1


# The kernel sums of MMCE in O(n log n) against two loops

confidences = st.one_of(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.floats(0, 1, allow_nan=False))


@given(points=st.lists(st.tuples(confidences, st.floats(-1, 1, allow_nan=False)), max_size=12))
@example(points=[(0.5, 1.0)] * 4)
@example(points=[])
@settings(max_examples=100)
def test_kernel_sums_equal_two_loops(points):
    position = torch.tensor([a for a, _ in points], dtype=torch.float64).requires_grad_()
    weights = torch.tensor([w for _, w in points], dtype=torch.float64).requires_grad_()
    fast = kernel_sums(position, weights.unsqueeze(1)).squeeze(1)
    rows = [sum(w * (-(a - b).abs() / 0.4).exp() for b, w in zip(position, weights, strict=True)) for a in position]
    slow = torch.stack(rows) if rows else fast.detach()
    assert_close(fast, slow)
    if rows:
        grad_output = torch.linspace(1, 2, len(rows), dtype=torch.float64)
        inputs = [position, weights]
        assert_close(torch.autograd.grad(fast @ grad_output, inputs), torch.autograd.grad(slow @ grad_output, inputs))


@pytest.mark.parametrize("double_normalise", [True, False])
@pytest.mark.parametrize("variant", ["m", "w"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@given(inputs=batches())
@few_examples
def test_mmce_equals_two_loops(inputs, soft, variant, double_normalise):
    if soft:
        inputs = inputs._replace(labels=batch(len(inputs.labels), soft=True).labels)
    loss = fedlas.build_loss("mmce", variant=variant, double_normalise=double_normalise, lambda_=1.5)
    loss(*inputs)
    confidence = inputs.logits.softmax(1).amax(1).tolist()
    prediction = inputs.logits.argmax(1)
    label_probs = inputs.labels if soft else functional.one_hot(inputs.labels, CLASSES).double()
    correct = label_probs[torch.arange(len(prediction)), prediction].tolist()
    expected = 1.5 * plain.mmce_penalty(confidence, correct, variant, double_normalise)
    assert_close(float(loss.last_terms["kernel"]), expected, 1e-7)


def test_mmce_of_200000_samples_needs_no_pairwise_matrix():
    n = 200_000
    logits = torch.randn(n, 3)
    value = fedlas.build_loss("mmce")(logits, torch.randint(3, (n,)))
    assert value.isfinite()
