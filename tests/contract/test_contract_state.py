"""Contract of every loss: state is saved, copied, moved and restored exactly, and changes only in training."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from loss_cases import (
    CASES,
    LOSSES,
    WEIGHT,
    assert_close,
    assert_same,
    batch,
    every_case,
    every_loss,
    parametrize_cases,
    run,
    seed,
    state,
    train,
)

import fedlas


def restored(state_dict, new_loss):
    new_loss.load_state_dict(state_dict, strict=True)
    return new_loss


def saved_file(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


COPIES = {
    "deepcopy": lambda loss, new_loss: copy.deepcopy(loss),
    "pickle": lambda loss, new_loss: pickle.loads(pickle.dumps(loss)),
    "torch.save": lambda loss, new_loss: torch.load(saved_file(loss), weights_only=False),
    "state_dict": lambda loss, new_loss: restored(loss.state_dict(), new_loss),
    "saved state_dict": lambda loss, new_loss: restored(
        torch.load(saved_file(loss.state_dict()), weights_only=True), new_loss
    ),
}


@pytest.mark.filterwarnings("ignore:crl counted")  # a batch between two epochs
@every_case
def test_a_copy_continues_like_the_original(case):
    loss = train(case.build(weight=WEIGHT), epochs=1)
    kinds = COPIES if case in LOSSES else ("deepcopy", "state_dict")
    copies = [COPIES[kind](loss, case.build(weight=WEIGHT)) for kind in kinds]
    before = state(loss)
    expected, expected_state = run(loss, batch()), state(train(loss, epochs=1))
    for copied_loss in copies:  # it shares no tensor with the original; otherwise training would have changed it
        assert_same(state(copied_loss), before)
        assert_same(run(copied_loss, batch()), expected)
        assert_same(state(train(copied_loss, epochs=1)), expected_state)


@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.state_dict()))
def test_load_state_dict_is_strict(case):
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
def test_training_updates_all_state_in_place(case):
    loss = case.build()
    initial_layout, before = layout(loss), state(loss)
    train(loss)
    assert layout(loss) == initial_layout
    if case in LOSSES:
        after = loss.state_dict()
        assert not [name for name, v in before.items() if torch.equal(v, after[name]) and v.dtype != torch.bool]
    assert not any(value.requires_grad for value in loss.buffers())
    assert not any(term.requires_grad for term in loss.last_terms.values())


@every_case
def test_eval_mode_does_not_change_the_state(case):
    loss = case.trained().eval()
    before = state(loss)
    first, second = run(loss, batch()), run(loss, batch())
    assert_same(first, second)
    loss.parts(*batch())
    with torch.no_grad():
        loss(*batch())
    assert_same(state(loss), before)


@parametrize_cases(CASES, lambda case: not case.has(lambda loss: loss.state_dict()))
def test_stateless_loss_is_equal_in_train_and_eval_mode(case):
    loss, reference = train(case.build()), case.build().eval()
    assert_same(run(loss, batch()), run(reference, batch()))
    assert not loss.state_dict()


@every_case
def test_train_mode_under_no_grad_does_not_update_the_state(case):
    """A validation batch in a loop without `loss.eval()` must not change the statistics."""
    loss, reference = case.trained(), case.trained().eval()
    before = state(loss)
    for disabled in (torch.no_grad, torch.inference_mode):
        with disabled():
            seed(0)
            value = loss(*batch()).clone()
        assert_same(value, run(reference, batch()).value)
    assert_same(state(loss), before)


@every_case
def test_a_loss_in_float64_equals_float32(case):
    single, double = case.build(), case.build().to(torch.float64)
    assert all(parameter.dtype == torch.float64 for parameter in double.parameters())
    actual, expected = run(double, batch()), run(single, batch())
    assert_close(actual.value, expected.value, 1e-6)
    assert_close(actual.grad_logits, expected.grad_logits, 1e-6)


@every_loss
def test_end_epoch_requires_validation_data_if_declared(case):
    loss = case.build()
    expected = (
        pytest.raises(ValueError, match=rf"{case.record.name}.*validation=") if loss.needs_validation else nullcontext()
    )
    with expected:
        loss.end_epoch()
    before = state(loss)
    loss.end_epoch(validation=fedlas.Predictions(*batch(20)[:2]))
    changed = [name for name, value in loss.state_dict().items() if not torch.equal(value, before[name])]
    assert bool(changed) == loss.learns_between_epochs


def test_validation_predictions_with_other_classes_raise():
    loss = fedlas.build_loss("closed_loop", num_classes=5, num_samples=8)
    with pytest.raises(ValueError, match=r"5 classes.*validation.*3"):
        loss.end_epoch(validation=fedlas.Predictions(torch.randn(8, 3), torch.randint(3, (8,))))


# What is saved beside the state


@pytest.mark.filterwarnings("ignore:the loaded state")  # of their parts
def test_loading_the_state_of_another_loss_raises():
    for name, other_name in [("focal", "ls"), ("fedlas_ls", "fedlas_mbls"), ("ce", "fedlas_ls"), ("fedlas_ls", "ce")]:
        loss, other_loss = (fedlas.build_loss(loss_name, num_classes=3) for loss_name in (name, other_name))
        with pytest.raises(RuntimeError, match=type(other_loss).__name__):
            loss.load_state_dict(torch.load(saved_file(other_loss.state_dict()), weights_only=True))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ls", {"alpha": 0.2}),
        ("fedlas_ls", {"theta": 0.5}),
        ("fedlas_ls", {"gate_positive_index": 0}),
        ("adafocal", {"step": 0.5}),
    ],
)
def test_loading_the_state_of_other_hyperparameters_warns(name, options):
    """Also within a larger module and from a file; a format that stores only tensors cannot warn."""
    keyword, value = next(iter(options.items()))
    keyword = keyword.removeprefix("gate_")
    source = torch.nn.ModuleDict({"loss": fedlas.build_loss(name, num_classes=3, **options)})
    target = torch.nn.ModuleDict({"loss": fedlas.build_loss(name, num_classes=3, reduction="none")})
    with pytest.warns(UserWarning, match=rf"{keyword}={value!r}"):
        target.load_state_dict(torch.load(saved_file(source.state_dict()), weights_only=True))
    assert_same(state(target), state(source))
    target.load_state_dict(dict(source.state_dict()))


# torch.func


@every_loss
def test_per_sample_gradients_by_vmap(case):
    loss = case.trained().eval()
    by_sample = torch.func.vmap(torch.func.grad(lambda *sample: loss(*(value[None] for value in sample))))
    inputs = batch()
    expected = [run(loss, inputs.rows(slice(row, row + 1))).grad_logits[0] for row in range(len(inputs.logits))]
    torch.testing.assert_close(by_sample(*inputs), torch.stack(expected))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(term) for term in loss.last_terms.values())


@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.state_dict() and not loss.needs_validation))
def test_an_update_inside_a_transform_raises(case):
    loss = case.build()
    with pytest.raises(RuntimeError, match=r"loss\.eval\(\)"):
        torch.func.grad(lambda logits: loss(logits, *batch()[1:]))(batch().logits)
