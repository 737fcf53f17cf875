"""Contract of every loss: shapes of inputs and outputs."""

import itertools

import torch
from loss_cases import (
    CASES,
    CLASSES,
    REDUCTIONS,
    SIZE,
    WEIGHT,
    Inputs,
    as_rows,
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
from torch import nn


def assert_maps_are_rows(case, maps, reduction):
    rows, space = as_rows(maps), maps.logits.shape[2:]
    loss, reference = case.trained(reduction=reduction), case.trained(reduction=reduction)
    grad_output = torch.linspace(1, 2, len(rows.logits), dtype=torch.float64) if reduction == "none" else None
    of_maps = run(loss, maps, None if grad_output is None else grad_output.reshape(SIZE, *space))
    of_rows = run(reference, rows, grad_output)
    assert of_maps.value.shape == ((SIZE, *space) if reduction == "none" else ())
    assert_close(of_maps.value.flatten(), of_rows.value.flatten())
    assert_close(of_maps.grad_logits.movedim(1, -1).flatten(0, -2), of_rows.grad_logits)
    assert_close(of_maps.grad_parameters, of_rows.grad_parameters)
    assert_close(state(loss), state(reference))


@parametrize_cases(CASES, lambda case: case.cls.takes_maps)
def test_maps_equal_flattened_rows(case):
    for reduction, space in [("mean", (3,)), ("none", (2, 3))]:
        maps = batch(space=space)
        maps.labels[0, 1] = -100
        assert_maps_are_rows(case, maps, reduction)
    if case.cls.takes_soft_labels:
        assert_maps_are_rows(case, batch(space=(2, 3), soft=True), "none")


@every_loss
def test_optional_inputs_are_not_required(case):
    loss = case.build()
    logits, labels, features, index = batch()
    assert isinstance(loss, nn.Module)
    if loss.needs_index:
        value = loss(logits, labels, features, index)
    elif loss.needs_features:
        value = loss(logits, labels, features)
    else:
        value = loss(logits, labels)
    assert value.shape == ()
    assert_same(case.build()(logits, labels, features=features, index=index), value)


@every_case
def test_the_terms_sum_to_the_value(case):
    inputs = batch()
    for reduction, weight in itertools.product(REDUCTIONS, (None, WEIGHT.tolist())):
        loss = case.trained(reduction=reduction, weight=weight).eval()
        value, terms = run(loss, inputs).value, parts(loss, inputs)[0]
        assert all(part.shape == (SIZE,) for part in terms.values())
        if reduction == "none":
            assert_close(sum(terms.values()).detach(), value)
        else:
            assert_close(sum(loss.last_terms.values()), value)
            assert loss.last_terms.keys() == terms.keys()
            assert not any(term.requires_grad for term in loss.last_terms.values())


@every_loss
def test_loss_is_independent_of_memory_layout(case):
    logits, labels, features, index = inputs = batch()
    strided = inputs._replace(
        logits=logits.t().contiguous().t(),
        labels=torch.stack([labels, labels], 1)[:, 0],
        features=torch.cat([features, features], 1)[:, : features.shape[1]],
        index=torch.stack([index, index], 1)[:, 0],
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert_close(run(case.trained(), strided), run(case.trained(), inputs))


@every_loss
def test_expanded_inputs_are_accepted(case):
    logits, labels, features, index = batch()
    first_row = [logits[:1], labels[:1], features[:1]]
    expanded = Inputs(*(tensor.expand(SIZE, *tensor.shape[1:]) for tensor in first_row), index)
    copied = Inputs(*(tensor.contiguous() for tensor in expanded))
    assert_close(run(case.trained(), expanded), run(case.trained(), copied))


@every_case
def test_inputs_are_not_modified(case):
    inputs, original = batch(), batch()
    inputs.labels[1] = original.labels[1] = -100
    run(case.trained(), inputs)
    assert_same(inputs, original)


@every_case
def test_loss_is_finite_for_small_and_large_sizes(case):
    for n, classes in [(1, CLASSES), (SIZE, 2), (1, 2), (4, 1000)]:
        loss = case.build(num_classes=classes)
        for training in (True, False):
            result = run(loss.train(training), batch(n, classes, dtype=torch.float32))
            assert result.grad_logits.shape == (n, classes)
            assert_finite(result.value, result.grad_logits, *result.grad_parameters, *state(loss).values())
    if case.cls.takes_soft_labels:
        result = run(case.build(num_classes=2), batch(classes=2, soft=True))
        assert_finite(result.value, result.grad_logits, *result.grad_parameters)
