"""One contract for every loss: what is refused, and that the message says what was wrong."""

import contextlib
import inspect
import math

import jaxtyping
import pytest
import torch
from loss_cases import CLASSES, LOSSES, assert_same, batch, choices, every, every_loss, is_number, keyword_types, run

import fedlas
from fedlas.losses import base as losses_base


@pytest.fixture
def unchecked():
    """Build as users do, without the type checker of the tests, which refuses a wrong word before the loss can."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# Inputs: what is wrong, how it is made of a good batch, what the message must say

WRONG = {
    "label too large": (lambda x: x._replace(labels=x.labels.index_fill(0, torch.tensor(3), CLASSES)),
                        rf"label {CLASSES} at position \[3\] is not one of {CLASSES} classes"),
    "label below zero": (lambda x: x._replace(labels=x.labels.index_fill(0, torch.tensor(0), -1)),
                         r"label -1 at position \[0\]"),
    "label too large in a narrow type": (lambda x: x._replace(labels=torch.full_like(x.labels, 200, dtype=torch.uint8)),
                                         r"label 200 at position"),
    "too few labels": (lambda x: x._replace(labels=x.labels[1:]), r"labels must have shape \(6,\)"),
    "labels in a column": (lambda x: x._replace(labels=x.labels[:, None]), r"labels must have shape \(6,\).*\(6, 1\)"),
    "labels of a map": (lambda x: x._replace(labels=x.labels[:, None, None]), r"labels must have shape \(6,\)"),
    "no batch dimension": (lambda x: x._replace(labels=x.labels[0]), r"labels must have shape \(6,\)"),
    "class numbers in floating point": (lambda x: x._replace(labels=x.labels.float()),
                                        r"class numbers must be integers|soft labels"),
    "labels that are truth values": (lambda x: x._replace(labels=x.labels > 0), r"labels must be integers.*bool"),
    "complex labels": (lambda x: x._replace(labels=x.labels.to(torch.complex64)), r"labels must be integers.*complex"),
    "whole-number logits": (lambda x: x._replace(logits=x.logits.long()), r"logits must be floating point.*int64"),
    "complex logits": (lambda x: x._replace(logits=x.logits.to(torch.complex64)), r"logits must be floating point"),
    "logits without classes": (lambda x: x._replace(logits=x.logits[:, 0]), r"logits must have shape \(N, C\).*\(6,\)"),
    "logits of no class": (lambda x: x._replace(logits=x.logits[:, :0]), r"at least one class.*\(6, 0\)"),
    "logits of another width": (lambda x: x._replace(logits=x.logits[:, 1:], labels=x.labels * 0),
                                r"built for 6 classes; logits have 5"),
    "whole-number features": (lambda x: x._replace(features=x.features.long()), r"features must be floating point"),
    "too few features": (lambda x: x._replace(features=x.features[1:]), r"features must have shape.*\(5, 7\)"),
    "features of a map": (lambda x: x._replace(features=x.features[..., None, None]), r"features must have shape"),
    "features without width": (lambda x: x._replace(features=x.features[:, 0]), r"features must have shape.*\(6,\)"),
    "index in floating point": (lambda x: x._replace(index=x.index.float()), r"index must be 6 integers.*float32"),
    "index of truth values": (lambda x: x._replace(index=x.index > 0), r"index must be 6 integers.*bool"),
    "too short an index": (lambda x: x._replace(index=x.index[1:]), r"index must be 6 integers.*\(5,\)"),
    "labels elsewhere": (lambda x: x._replace(labels=x.labels.to("meta")), r"labels are on meta, logits on cpu"),
    "features elsewhere": (lambda x: x._replace(features=x.features.to("meta")), r"features are on meta"),
    "index elsewhere": (lambda x: x._replace(index=x.index.to("meta")), r"index.* on meta"),
    "logits elsewhere": (lambda x: x._replace(logits=x.logits.to("meta")), r"on cpu, logits on meta"),
}  # fmt: skip
WRONG_AND_SOFT = {
    "rows that do not sum to one": (lambda x: x._replace(labels=x.labels * 1.01), r"sum to 1; row 0 sums to 1\.01"),
    "logits as labels": (lambda x: x._replace(labels=x.logits), r"non-negative and sum to 1"),
    "a negative share": (lambda x: x._replace(labels=2 * torch.eye(CLASSES) - 1 / CLASSES), r"non-negative"),
    "a share that is NaN": (lambda x: x._replace(labels=x.labels / math.nan), r"sum to 1; row 0 sums to nan"),
    "too few classes": (lambda x: x._replace(labels=x.labels[:, 1:]), r"shape of the logits, \(6, 6\), not \(6, 5\)"),
    "too few rows": (lambda x: x._replace(labels=x.labels[1:]), r"shape of the logits, \(6, 6\), not \(5, 6\)"),
}


@pytest.mark.parametrize("what", WRONG)
@every_loss
def test_wrong_inputs_are_named(case, what):
    make, message = WRONG[what]
    loss = case.build()
    with pytest.raises(ValueError, match=message):
        loss(*make(batch()))
    with pytest.raises(ValueError, match=message):
        loss.parts(*make(batch()))


@pytest.mark.parametrize("what", WRONG_AND_SOFT)
@every(LOSSES, lambda case: case.cls.takes_soft_labels)
def test_wrong_soft_labels_are_named(case, what):
    make, message = WRONG_AND_SOFT[what]
    with pytest.raises(ValueError, match=message):
        case.build()(*make(batch(soft=True)))


@every(LOSSES, lambda case: not case.cls.takes_maps)
def test_refused_maps_are_named(case):
    with pytest.raises(ValueError, match=rf"{case.record.name}.*not maps"):
        case.build()(*batch(space=(2, 3)))


def test_crl_refuses_maps():
    assert not fedlas.build_loss("crl").takes_maps


@every_loss
def test_a_wrong_label_in_a_map_is_found(case):
    inputs = batch(space=(2, 3))
    inputs.labels[4, 1, 2] = CLASSES
    with pytest.raises(ValueError, match=rf"label {CLASSES} at position \[4, 1, 2\]|not maps"):
        case.build()(*inputs)


@every(LOSSES, lambda case: case.has(lambda loss: loss.needs_features))
def test_missing_features_are_asked_for_by_name(case):
    logits, labels, _, index = batch()
    with pytest.raises(ValueError, match=rf"{case.record.name} needs features.*WithFeatures"):
        case.build()(logits, labels, index=index)


@every(LOSSES, lambda case: case.has(lambda loss: loss.needs_index))
def test_a_missing_index_is_asked_for_by_name(case):
    logits, labels, features, _ = batch()
    with pytest.raises(ValueError, match=rf"{case.record.name} needs index"):
        case.build()(logits, labels, features)


@pytest.mark.parametrize("wrong", [-1, 10**6])
@every(LOSSES, lambda case: case.has(lambda loss: loss.index_limit is not None))
def test_an_index_outside_of_the_training_split_is_named(case, wrong):
    inputs = batch()
    inputs.index[2] = wrong
    with pytest.raises(ValueError, match=rf"index {wrong} at position 2 is outside of the training split"):
        case.build()(*inputs)


@every_loss
def test_a_refused_batch_leaves_no_trace(case):
    loss, twin = case.build(), case.build()
    inputs = batch()
    with pytest.raises(ValueError, match="label"):
        loss(*inputs._replace(labels=inputs.labels + CLASSES))
    with pytest.raises(ValueError, match="features"):
        loss(*inputs._replace(features=inputs.features[1:]))
    assert_same(dict(loss.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.uint16], ids=str)
@every_loss
def test_labels_of_any_whole_number_type_are_taken(case, dtype):
    inputs = batch()
    narrow = inputs._replace(labels=inputs.labels.to(dtype), index=inputs.index.to(dtype))
    assert_same(run(case.build(), narrow), run(case.build(), inputs))


@every_loss
def test_narrow_labels_can_be_ignored(case):
    inputs = batch()
    inputs.labels[1] = 255
    narrow = inputs._replace(labels=inputs.labels.to(torch.uint8))
    assert_same(run(case.build(ignore_index=255), narrow), run(case.build(ignore_index=255), inputs))


# Names and keywords


@every_loss
def test_a_misspelt_name_is_answered_with_the_nearest(case):
    name = case.record.name
    with pytest.raises(ValueError, match=rf"'{name}x'; did you mean '{name}'\? Known: .*\b{name}\b"):
        fedlas.build_loss(f"{name}x")


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(ValueError, match="no loss is called 'zzzzzzzzzz'; Known: ") as error:
        fedlas.build_loss("zzzzzzzzzz")
    assert all(case.record.name in str(error.value) for case in LOSSES)


@every_loss
def test_an_unknown_keyword_is_answered_with_the_nearest(case):
    name = case.record.name
    with pytest.raises(TypeError, match=rf"'{name}' takes no 'num_clases'; did you mean 'num_classes'\?") as error:
        case.build(num_clases=3)
    assert all(keyword in str(error.value) for keyword in case.record.keywords)


@every_loss
def test_every_listed_keyword_is_taken(case):
    samples = {int: 1, float: 0.5}
    for keyword, kind in keyword_types(case.record).items():
        value = next(iter(choices(kind)), samples.get(kind))
        with contextlib.suppress(ValueError):  # the sample may be out of range, but the keyword is no mistake
            case.build(**{keyword: value})


@pytest.mark.usefixtures("unchecked")
@every_loss
def test_no_number_is_no_hyperparameter(case):
    numbers = [name for name, kind in keyword_types(case.record).items() if is_number(kind) and name != "ignore_index"]
    assert "num_classes" in numbers
    for keyword in numbers:
        with pytest.raises(ValueError, match=r"nan"):
            case.build(**{keyword: math.nan})


@pytest.mark.usefixtures("unchecked")
@every_loss
def test_an_unknown_word_is_answered_with_the_known_ones(case):
    words = {name: choices(kind) for name, kind in keyword_types(case.record).items()}
    words = {name: known for name, known in words.items() if known and all(isinstance(word, str) for word in known)}
    assert "reduction" in words
    for keyword, known in words.items():
        with pytest.raises(ValueError, match=rf"{keyword} 'zzz' is unknown; Known: .*{known[-1]}"):
            case.build(**{keyword: "zzz"})


REFUSED = [
    ("ls", {"alpha": -0.1}, "alpha must lie between 0 and 1"),
    ("ls", {"alpha": 1.1}, "alpha must lie between 0 and 1"),
    ("fedlas_ls", {"alpha": 0.6}, "alpha must lie between 0 and 0.5"),
    ("fedlas_mbls", {"lambda_": 0.6}, "lambda_ must lie between 0 and 0.5"),
    ("fedlas_ls", {"theta": 1.5}, "theta must lie between 0 and 1"),
    ("fedlas_ls", {"norm": 0.5}, "norm must be at least 1"),
    ("fedlas_ls", {"beta": -1.0}, "beta must be at least 0"),
    ("fedlas_ls", {"eps": -1.0}, "eps must be at least 0"),
    ("fedlas_ls", {"gate_width": 0}, "gate_width must be at least 1"),
    ("fedlas_ls", {"alpha_min": 0.2, "alpha_max": 0.1}, "alpha_m"),
    ("fedlas_mbls", {"margin": -1.0}, "margin must be at least 0"),
    ("ecp", {"alpha": -0.1}, "alpha must be at least 0"),
    ("mmce", {"lambda_": -1.0}, "lambda_ must be at least 0"),
    ("mdca", {"beta": -1.0}, "beta must be at least 0"),
    ("mdca", {"base": "focal", "gamma": -1.0}, "gamma must be at least 0"),
    ("cpc", {"lambda_bdc": -1.0}, "lambda_bdc must be at least 0"),
    ("cpc", {"lambda_bec": -1.0}, "lambda_bec must be at least 0"),
    ("crl", {"num_samples": 0}, "num_samples must be at least 1"),
    ("crl", {"rank_weight": -1.0}, "rank_weight must be at least 0"),
    ("focal", {"gamma": -1.0}, "gamma must be at least 0"),
    ("dual_focal", {"gamma": -1.0}, "gamma must be at least 0"),
    ("adafocal", {"bins": 0}, "bins must be at least 1"),
    ("adafocal", {"step": -1.0}, "step must be at least 0"),
    ("adafocal", {"switch": -1.0}, "switch must be at least 0"),
    ("adafocal", {"gamma_min": 2.0, "gamma_max": 1.0}, "gamma_max must be at least 2.0"),
    ("mbls", {"lambda_": -1.0}, "lambda_ must be at least 0"),
    ("mbls", {"margin": -1.0}, "margin must be at least 0"),
    ("acls", {"lambda_pos": -1.0}, "lambda_pos must be at least 0"),
    ("acls", {"lambda_neg": -1.0}, "lambda_neg must be at least 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED, ids=[f"{n}-{next(iter(o))}" for n, o, _ in REFUSED])
def test_a_hyperparameter_out_of_range_is_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        fedlas.build_loss(name, num_classes=CLASSES, **options)


@every_loss
def test_common_keywords_out_of_range_are_named(case):
    with pytest.raises(ValueError, match="num_classes must be at least 1"):
        case.build(num_classes=0)
    with pytest.raises(ValueError, match=rf"weight has 2 entries for {CLASSES} classes"):
        case.build(weight=[1.0, 2.0])
    with pytest.raises(ValueError, match="weight must be one floating-point number per class"):
        case.build(weight=torch.ones(CLASSES, dtype=torch.long))
    with pytest.raises(ValueError, match="weight must be one floating-point number per class"):
        case.build(weight=torch.ones(CLASSES, 1))


def test_weights_that_are_no_numbers_are_named():
    """As they come from a command line, past the checks of types that tests have."""
    for given in ("1,1,2", ["a", "b"], {"a": 1}):
        with pytest.raises(ValueError, match=r"one floating-point number per class, such as \[1\.0, .*, not ['\[{]"):
            inspect.unwrap(losses_base._class_weight)(given, None)


@every_loss
def test_weights_of_another_width_than_the_logits_are_named(case):
    with pytest.raises(ValueError, match=rf"{case.record.name} was built for \d+ classes; logits have {CLASSES}"):
        case.build(num_classes=3, weight=[1.0, 2.0, 3.0])(*batch())


@every_loss
def test_a_batch_of_one_row_may_not_lack_its_dimension(case):
    logits, labels, features, index = (tensor[0] for tensor in batch())
    with pytest.raises(ValueError, match=r"logits must have shape \(N, C\)"):
        case.build()(logits, labels, features, index)
