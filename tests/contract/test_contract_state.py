"""One contract for every loss: its state is saved, copied, moved and restored exactly, and moves only in training."""

import copy
import io
import pickle

import pytest
import torch
from loss_cases import (
    CASES,
    LOSSES,
    WEIGHT,
    assert_close,
    assert_same,
    batch,
    every,
    every_case,
    every_loss,
    run,
    seed,
    state,
    train,
)

import fedlas


def restored(state_dict, fresh):
    fresh.load_state_dict(state_dict, strict=True)
    return fresh


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


COPIES = {
    "deepcopy": lambda loss, fresh: copy.deepcopy(loss),
    "pickle": lambda loss, fresh: pickle.loads(pickle.dumps(loss)),
    "torch.save": lambda loss, fresh: torch.load(saved(loss), weights_only=False),
    "state_dict": lambda loss, fresh: restored(loss.state_dict(), fresh),
    "saved state_dict": lambda loss, fresh: restored(torch.load(saved(loss.state_dict()), weights_only=True), fresh),
}


@every_case
def test_a_copy_goes_on_as_the_original_would(case):
    loss = train(case.build(weight=WEIGHT), epochs=1)
    kinds = COPIES if case in LOSSES else ("deepcopy", "state_dict")
    twins = [COPIES[kind](loss, case.build(weight=WEIGHT)) for kind in kinds]
    before = state(loss)
    outcome, after = run(loss, batch()), state(train(loss, epochs=1))
    for twin in twins:  # which shares no tensor with the original, or it would have moved with it
        assert_same(state(twin), before)
        assert_same(run(twin, batch()), outcome)
        assert_same(state(train(twin, epochs=1)), after)


@every(LOSSES, lambda case: case.has(lambda loss: loss.state_dict()))
def test_loading_is_strict(case):
    saved_state = case.trained().state_dict()
    missing = dict(list(saved_state.items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        case.build().load_state_dict(missing)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        case.build().load_state_dict({**saved_state, "something_else": torch.zeros(1)})


def layout(loss):
    """Return shape, type and address of every parameter and buffer."""
    return {name: (value.shape, value.dtype, value.data_ptr()) for name, value in loss.state_dict().items()}


@every_case
def test_training_changes_all_of_the_state_in_place(case):
    loss = case.build()
    start, before = layout(loss), state(loss)
    train(loss)
    assert layout(loss) == start
    if case in LOSSES:
        after = loss.state_dict()
        assert not [name for name, v in before.items() if torch.equal(v, after[name]) and v.dtype != torch.bool]
    assert not any(value.requires_grad for value in loss.buffers())
    assert not any(term.requires_grad for term in loss.last_terms.values())


@every_case
def test_evaluation_changes_nothing(case):
    loss = case.trained().eval()
    before = state(loss)
    first, second = run(loss, batch()), run(loss, batch())
    assert_same(first, second)
    loss.parts(*batch())
    with torch.no_grad():
        loss(*batch())
    assert_same(state(loss), before)


@every(CASES, lambda case: not case.has(lambda loss: loss.state_dict()))
def test_without_state_training_is_evaluation(case):
    loss, twin = train(case.build()), case.build().eval()
    assert_same(run(loss, batch()), run(twin, batch()))
    assert not loss.state_dict()


@every_case
def test_a_value_without_gradient_moves_the_state_as_one_with(case):
    loss, twin = case.trained(), case.trained()
    expected = run(twin, batch())
    seed(0)
    with torch.no_grad():
        assert_same(loss(*batch()), expected.value)
    assert_same(state(loss), state(twin))


@every_case
def test_a_double_loss_is_the_same_loss(case):
    single, double = case.build(), case.build().to(torch.float64)
    assert all(parameter.dtype == torch.float64 for parameter in double.parameters())
    outcome, expected = run(double, batch()), run(single, batch())
    assert_close(outcome.value, expected.value, 1e-6)
    assert_close(outcome.by_logits, expected.by_logits, 1e-6)


@every_loss
def test_the_end_of_an_epoch_needs_nothing_or_says_what(case):
    loss, said = case.build(), ""
    try:
        loss.end_epoch()
    except ValueError as error:
        said = str(error)
    assert not said or (case.record.name in said and "validation" in said)
    loss.end_epoch(validation=fedlas.Predictions(*batch(20)[:2]))
