"""Contract of every loss: invalid input raises, and the message names the error."""

import inspect
import math
import re

import jaxtyping
import pytest
import torch
from loss_cases import (
    CLASSES,
    LOSSES,
    SAMPLES,
    assert_same,
    batch,
    choices,
    every_loss,
    is_number,
    keyword_types,
    parametrize_cases,
    run,
)

import fedlas
from fedlas.losses.base.functional import class_weight


@pytest.fixture
def unchecked():
    """Disable the type checker of the tests, which would reject an invalid option before the loss does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Inputs: the error, a function that makes it from a valid batch, and a pattern of the message

INVALID_INPUTS = {
    "label too large": (lambda x: x._replace(labels=x.labels.index_fill(0, torch.tensor(3), CLASSES)),
                        rf"label {CLASSES} .*\[3\].*{CLASSES} classes"),
    "label below zero": (lambda x: x._replace(labels=x.labels.index_fill(0, torch.tensor(0), -1)), r"label -1 .*\[0\]"),
    "uint8 label too large": (lambda x: x._replace(labels=torch.full_like(x.labels, 200, dtype=torch.uint8)),
                              "label 200 "),
    "too few labels": (lambda x: x._replace(labels=x.labels[1:]), r"labels.*\(6,\).*\(5,\)"),
    "labels in a column": (lambda x: x._replace(labels=x.labels[:, None]), r"labels.*\(6,\).*\(6, 1\)"),
    "labels of a map": (lambda x: x._replace(labels=x.labels[:, None, None]), r"labels.*\(6,\).*\(6, 1, 1\)"),
    "no batch dimension": (lambda x: x._replace(labels=x.labels[0]), r"labels.*\(6,\).*\(\)"),
    "hard labels in floating point": (lambda x: x._replace(labels=x.labels.float()), r"labels.*\(6, 6\).*\(6,\).*long"),
    "bool labels": (lambda x: x._replace(labels=x.labels > 0), r"labels.*bool"),
    "complex labels": (lambda x: x._replace(labels=x.labels.to(torch.complex64)), r"labels.*complex64"),
    "integer logits": (lambda x: x._replace(logits=x.logits.long()), r"logits.*int64"),
    "complex logits": (lambda x: x._replace(logits=x.logits.to(torch.complex64)), r"logits.*complex64"),
    "logits without classes": (lambda x: x._replace(logits=x.logits[:, 0]), r"logits.*\(N, C\).*\(6,\)"),
    "logits of no class": (lambda x: x._replace(logits=x.logits[:, :0]), r"logits.*\(N, C\).*\(6, 0\)"),
    "a single logit": (lambda x: x._replace(logits=x.logits[:, :1], labels=x.labels * 0), r"2 classes.*\(6, 1\).*cat"),
    "logits of another width": (lambda x: x._replace(logits=x.logits[:, 1:], labels=x.labels * 0),
                                r"6 classes.*logits.*5"),
    "integer features": (lambda x: x._replace(features=x.features.long()), r"features.*int64"),
    "too few features": (lambda x: x._replace(features=x.features[1:]), r"features.*\(5, 7\)"),
    "features of a map": (lambda x: x._replace(features=x.features[..., None, None]), r"features.*\(6, 7, 1, 1\)"),
    "features without width": (lambda x: x._replace(features=x.features[:, 0]), r"features.*\(6,\)"),
    "index in floating point": (lambda x: x._replace(index=x.index.float()), r"index.*6.*float32"),
    "bool index": (lambda x: x._replace(index=x.index > 0), r"index.*6.*bool"),
    "too short an index": (lambda x: x._replace(index=x.index[1:]), r"index.*6.*\(5,\)"),
    "labels on another device": (lambda x: x._replace(labels=x.labels.to("meta")), r"labels.*meta.*logits.*cpu"),
    "features on another device": (lambda x: x._replace(features=x.features.to("meta")), r"features.*meta.*cpu"),
    "index on another device": (lambda x: x._replace(index=x.index.to("meta")), r"index.*meta.*logits.*cpu"),
    "logits on another device": (lambda x: x._replace(logits=x.logits.to("meta")), r"cpu.*logits.*meta"),
}  # fmt: skip
INVALID_SOFT_INPUTS = {
    "rows that do not sum to one": (lambda x: x._replace(labels=x.labels * 1.01), r"soft labels.*row 0.*1\.01"),
    "logits as labels": (lambda x: x._replace(labels=x.logits), r"soft labels.*row 0"),
    "a negative probability": (
        lambda x: x._replace(labels=2 * torch.eye(CLASSES) - 1 / CLASSES),
        r"soft labels.*-0\.1",
    ),
    "a probability that is NaN": (lambda x: x._replace(labels=x.labels / math.nan), r"soft labels.*row 0.*nan"),
    "too few classes": (lambda x: x._replace(labels=x.labels[:, 1:]), r"labels.*\(6, 6\).*\(6, 5\)"),
    "too few rows": (lambda x: x._replace(labels=x.labels[1:]), r"labels.*\(6, 6\).*\(5, 6\)"),
}


def inputs_without_a_clear_error(call, invalid_inputs, inputs):
    """Return the invalid inputs that are accepted, or rejected with a message that does not match the pattern."""
    unclear_messages = {}
    for kind, (make, pattern) in invalid_inputs.items():
        try:
            message = f"accepted: {call(*make(inputs))}"
        except ValueError as error:
            message = str(error)
        if not re.search(pattern, message):
            unclear_messages[kind] = message
    return unclear_messages


@every_loss
def test_wrong_inputs_raise(case):
    loss = case.build()
    assert not inputs_without_a_clear_error(loss, INVALID_INPUTS, batch())
    assert not inputs_without_a_clear_error(loss.parts, INVALID_INPUTS, batch())
    if case.cls.takes_soft_labels:
        assert not inputs_without_a_clear_error(loss, INVALID_SOFT_INPUTS, batch(soft=True))


@parametrize_cases(LOSSES, lambda case: not case.cls.takes_maps)
def test_unsupported_maps_raise(case):
    with pytest.raises(ValueError, match=rf"{case.record.name}.*maps.*\(6, 6, 2, 3\)"):
        case.build()(*batch(space=(2, 3)))


@every_loss
def test_a_wrong_label_in_a_map_raises(case):
    inputs = batch(space=(2, 3))
    inputs.labels[4, 1, 2] = CLASSES
    with pytest.raises(ValueError, match=rf"label {CLASSES} .*\[4, 1, 2\]|maps"):
        case.build()(*inputs)


@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.needs_features))
def test_missing_features_raise(case):
    logits, labels, _, index = batch()
    with pytest.raises(ValueError, match=rf"{case.record.name}.*features.*WithFeatures"):
        case.build()(logits, labels, index=index)


@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.needs_index))
def test_a_missing_index_raises(case):
    logits, labels, features, _ = batch()
    with pytest.raises(ValueError, match=rf"{case.record.name}.*index="):
        case.build()(logits, labels, features)


def test_crl_requires_num_samples():
    with pytest.raises(TypeError, match=r"crl.*num_samples="):
        fedlas.build_loss("crl", num_classes=3)


@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.needs_index))
def test_eval_mode_ignores_the_index(case):
    logits, labels, features, index = batch()
    loss = case.trained().eval()
    assert_same(loss(logits, labels, features), loss(logits, labels, features, index + SAMPLES))


@pytest.mark.parametrize("invalid_index", [-1, SAMPLES])
@parametrize_cases(LOSSES, lambda case: case.has(lambda loss: loss.index_limit is not None))
def test_an_index_outside_of_the_training_split_raises(case, invalid_index):
    inputs = batch()
    inputs.index[2] = invalid_index
    with pytest.raises(ValueError, match=rf"index {invalid_index} .*\b2\b.*num_samples"):
        case.build()(*inputs)


@every_loss
def test_an_invalid_batch_does_not_change_the_state(case):
    loss, reference = case.build(), case.build()
    inputs = batch()
    with pytest.raises(ValueError, match="label"):
        loss(*inputs._replace(labels=inputs.labels + CLASSES))
    with pytest.raises(ValueError, match="features"):
        loss(*inputs._replace(features=inputs.features[1:]))
    assert_same(dict(loss.state_dict()), dict(reference.state_dict()))


@every_loss
def test_labels_of_any_integer_type_are_accepted(case):
    inputs = batch()
    expected = run(case.build(), inputs)
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.uint16):
        cast_inputs = inputs._replace(labels=inputs.labels.to(dtype), index=inputs.index.to(dtype))
        assert_same(run(case.build(), cast_inputs), expected)
    inputs.labels[1] = 255
    cast_inputs = inputs._replace(labels=inputs.labels.to(torch.uint8))
    assert_same(run(case.build(ignore_index=255), cast_inputs), run(case.build(ignore_index=255), inputs))


# Names and keywords


@every_loss
def test_misspelt_loss_name_raises_with_a_suggestion(case):
    name = case.record.name
    with pytest.raises(ValueError, match=rf"'{name}x'.*'{name}'.*\b{name}\b"):
        fedlas.build_loss(f"{name}x")


def test_an_unknown_name_raises_with_all_names():
    with pytest.raises(ValueError, match="'zzzzzzzzzz'") as error:
        fedlas.build_loss("zzzzzzzzzz")
    assert all(case.record.name in str(error.value) for case in LOSSES)


@every_loss
def test_misspelt_keyword_raises_with_a_suggestion(case):
    name = case.record.name
    with pytest.raises(TypeError, match=rf"'{name}'.*'num_clases'.*'num_classes'") as error:
        case.build(num_clases=3)
    assert all(keyword in str(error.value) for keyword in case.record.keywords)


@pytest.mark.usefixtures("unchecked")
@every_loss
def test_non_numeric_hyperparameters_raise(case):
    numbers = [name for name, kind in keyword_types(case.record).items() if is_number(kind) and name != "ignore_index"]
    assert "num_classes" in numbers
    for keyword in numbers:
        with pytest.raises(ValueError, match=r"nan"):
            case.build(**{keyword: math.nan})


@pytest.mark.usefixtures("unchecked")
@every_loss
def test_unknown_choice_raises_with_the_allowed_values(case):
    choices_by_keyword = {name: choices(kind) for name, kind in keyword_types(case.record).items()}
    choices_by_keyword = {
        name: allowed
        for name, allowed in choices_by_keyword.items()
        if allowed and all(isinstance(text, str) for text in allowed)
    }
    assert "reduction" in choices_by_keyword
    for keyword, allowed in choices_by_keyword.items():
        with pytest.raises(ValueError, match=rf"{keyword} 'zzz'.*{allowed[-1]}"):
            case.build(**{keyword: "zzz"})


# A loss, the option out of range (the last one), and the limits that the message names
OUT_OF_RANGE = [
    ("ls", {"alpha": -0.1}, "0.*1"),
    ("ls", {"alpha": 1.1}, "0.*1"),
    ("fedlas_ls", {"alpha": 0.6}, "0.*0.5"),
    ("fedlas_mbls", {"lambda_": 0.6}, "0.*0.5"),
    ("fedlas_ls", {"theta": 1.5}, "0.*1"),
    ("fedlas_ls", {"norm": 0.5}, "1"),
    ("fedlas_ls", {"beta": -1.0}, "0"),
    ("fedlas_ls", {"eps": -1.0}, "0"),
    ("fedlas_ls", {"gate_width": 0}, "1"),
    ("fedlas_ls", {"alpha_min": 0.2, "alpha_max": 0.1}, "0.2"),
    ("fedlas_mbls", {"margin": -1.0}, "0"),
    ("ecp", {"alpha": -0.1}, "0"),
    ("mmce", {"lambda_": -1.0}, "0"),
    ("mdca", {"beta": -1.0}, "0"),
    ("mdca", {"base": "focal", "gamma": -1.0}, "0"),
    ("cpc", {"lambda_bdc": -1.0}, "0"),
    ("cpc", {"lambda_bec": -1.0}, "0"),
    ("crl", {"num_samples": 0}, "1"),
    ("crl", {"num_samples": 2, "rank_weight": -1.0}, "0"),
    ("focal", {"gamma": -1.0}, "0"),
    ("dual_focal", {"gamma": -1.0}, "0"),
    ("adafocal", {"bins": 0}, "1"),
    ("adafocal", {"step": -1.0}, "0"),
    ("adafocal", {"switch": -1.0}, "0"),
    ("adafocal", {"gamma_min": 2.0, "gamma_max": 1.0}, "2.0"),
    ("closed_loop", {"num_samples": 0}, "1"),
    ("closed_loop", {"num_samples": 2, "bins": 0}, "1"),
    ("closed_loop", {"num_samples": 2, "step": -1.0}, "0"),
    ("closed_loop", {"num_samples": 2, "alpha_min": -0.1}, "0"),
    ("closed_loop", {"num_samples": 2, "alpha_min": 0.5, "alpha_max": 0.4}, "0.5"),
    ("closed_loop", {"num_samples": 2, "alpha_max": 1.1}, "0.*1"),
    ("closed_loop", {"num_samples": 2, "start": 0.95}, "0.*0.9"),
    ("pskd", {"num_samples": 2, "epochs": 0}, "1"),
    ("pskd", {"num_samples": 2, "epochs": 2, "alpha": 1.1}, "0.*1"),
    ("mbls", {"lambda_": -1.0}, "0"),
    ("mbls", {"margin": -1.0}, "0"),
    ("acls", {"lambda_pos": -1.0}, "0"),
    ("acls", {"lambda_neg": -1.0}, "0"),
]


@pytest.mark.parametrize(
    ("name", "options", "limits"), OUT_OF_RANGE, ids=[f"{n}-{next(iter(o))}" for n, o, _ in OUT_OF_RANGE]
)
def test_a_hyperparameter_out_of_range_raises(name, options, limits):
    keyword, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"\b{keyword}\b.*{limits}.*{value}"):
        fedlas.build_loss(name, num_classes=CLASSES, **options)


@every_loss
def test_common_keywords_out_of_range_raise(case):
    for too_few in (0, 1):
        with pytest.raises(ValueError, match=rf"num_classes.*2.*{too_few}"):
            case.build(num_classes=too_few)
    with pytest.raises(ValueError, match=rf"weight.*2.*{CLASSES} classes"):
        case.build(weight=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"weight.*int64"):
        case.build(weight=torch.ones(CLASSES, dtype=torch.long))
    with pytest.raises(ValueError, match=r"weight.*\(6, 1\)"):
        case.build(weight=torch.ones(CLASSES, 1))


def test_non_numeric_weights_raise():
    """Weights may come from a command line, where no type checker runs."""
    for weight in ("1,1,2", ["a", "b"], {"a": 1}):
        with pytest.raises(ValueError, match=rf"weight.*{re.escape(repr(weight))}"):
            inspect.unwrap(class_weight)(weight, None)


@every_loss
def test_weights_of_another_length_raise(case):
    with pytest.raises(ValueError, match=rf"{case.record.name}.*3 classes.*logits.*{CLASSES}"):
        case.build(num_classes=3, weight=[1.0, 2.0, 3.0])(*batch())


@every_loss
def test_logits_without_a_batch_dimension_raise(case):
    logits, labels, features, index = (tensor[0] for tensor in batch())
    with pytest.raises(ValueError, match=r"logits.*\(N, C\)"):
        case.build()(logits, labels, features, index)


def test_integer_one_hot_labels_raise_with_a_remedy():
    with pytest.raises(ValueError, match=r"one-hot.*argmax\(1\)"):
        fedlas.build_loss("ce")(torch.randn(4, 3), torch.eye(3, dtype=torch.int64)[[0, 1, 2, 0]])


def test_weight_of_another_size_is_named():
    with pytest.raises(ValueError, match=r"weight.*4 classes.*5"):
        fedlas.build_loss("ls", weight=torch.ones(4))(torch.randn(2, 5), torch.tensor([0, 1]))
