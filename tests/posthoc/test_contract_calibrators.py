"""Contract of every calibrator in the catalogue."""

import re
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from calibrator_cases import binary_problem, problem
from torch.nn import functional

from fedlas import posthoc
from fedlas.io import read_predictions, write_predictions
from fedlas.posthoc import AbstractCalibrator
from fedlas.predictions import Predictions, TopLabelPredictions

RECORDS = {record.name: record for record in posthoc.list_calibrators()}
NAMES = list(RECORDS)
MULTICLASS = [name for name in NAMES if name != "platt"]  # platt is for two classes
WITH_SOFT_LABELS = [name for name in MULTICLASS if name != "probmetrics"]
SAVEABLE = [name for name in NAMES if name != "probmetrics"]  # those that can be saved


def build(name: str) -> AbstractCalibrator:
    if name == "probmetrics":
        pytest.importorskip("probmetrics")
    return posthoc.build_calibrator(name)


@cache
def fitted(name: str) -> AbstractCalibrator:
    return build(name).fit(*problem(classes=2 if name == "platt" else 4))


def test_all_calibrators_are_listed():
    expected = {"temperature", "vector_scaling", "matrix_scaling", "dirichlet", "histogram_binning", "isotonic"}
    assert expected | {"ensemble_temperature", "platt", "probmetrics"} <= set(NAMES)
    assert posthoc.Temperature is RECORDS["temperature"].cls


@pytest.mark.parametrize("name", NAMES)
def test_calibrator_has_a_summary_and_a_citation(name: str):
    record = RECORDS[name]
    assert record.summary.endswith(".")
    assert re.search(r"(19|20)\d\d", record.citation)
    for keyword in record.keywords:
        assert f"{keyword}:" in (record.cls.__doc__ or ""), f"{keyword} is not explained"


@pytest.mark.parametrize("name", NAMES)
def test_overconfident_logits_are_calibrated(name: str):
    classes = 2 if name == "platt" else 4
    logits, labels = problem(2000, classes)
    new_logits, new_labels = problem(2000, classes, seed=1)
    calibrator = build(name).fit(logits, labels)
    assert calibrator.fitted is not None
    assert calibrator.fitted.after < calibrator.fitted.before
    before, after = (
        functional.cross_entropy(new_logits, new_labels),
        functional.cross_entropy(calibrator.transform(new_logits), new_labels),
    )
    assert after < 0.85 * before


@pytest.mark.parametrize("name", NAMES)
def test_calibrators_that_promise_to_keep_the_order_of_classes_do(name: str):
    calibrator = fitted(name)
    new_logits, _ = problem(500, 2 if name == "platt" else 4, seed=1)
    if RECORDS[name].cls.keeps_order:
        assert torch.equal(calibrator.transform(new_logits).argsort(1), new_logits.argsort(1))


@pytest.mark.parametrize("name", MULTICLASS)
def test_numpy_and_torch_agree_and_keep_their_type(name: str):
    calibrator = fitted(name)
    new_logits, _ = problem(50, seed=1)
    as_torch, as_numpy = calibrator.transform(new_logits), calibrator.transform(new_logits.numpy())
    assert isinstance(as_torch, torch.Tensor)
    assert isinstance(as_numpy, np.ndarray)
    assert np.array_equal(as_torch.numpy(), as_numpy)
    assert as_torch.shape == new_logits.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MULTICLASS)
def test_outputs_are_float32_or_better(name: str, dtype: torch.dtype):
    calibrator = fitted(name)
    new_logits, _ = problem(50, seed=1)
    calibrated = calibrator.transform(new_logits.to(dtype))
    assert calibrated.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.isfinite(calibrated).all()


@pytest.mark.parametrize("name", MULTICLASS)
def test_maps_match_rows(name: str):
    logits, labels = problem(600)
    maps = logits.view(6, 10, 10, 4).movedim(-1, 1)
    map_labels = labels.view(6, 10, 10)
    row_calibrator, map_calibrator = build(name).fit(logits, labels), build(name).fit(maps, map_labels)
    expected = row_calibrator.transform(logits).view(6, 10, 10, 4).movedim(-1, 1)
    torch.testing.assert_close(map_calibrator.transform(maps), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MULTICLASS)
def test_ignored_samples_do_not_change_the_fit(name: str):
    logits, labels = problem(600)
    extended_labels = torch.cat([labels, torch.full((50,), 255)])
    extended_logits = torch.cat([logits, 100 * torch.randn(50, 4, dtype=torch.float64)])
    without_ignored, with_ignored = (
        build(name).fit(logits, labels),
        build(name).fit(extended_logits, extended_labels, ignore_index=255),
    )
    torch.testing.assert_close(without_ignored.transform(logits), with_ignored.transform(logits), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_one_logit_head_is_a_binary_classifier(name: str):
    score, labels = binary_problem()
    two_columns = torch.stack([torch.zeros_like(score), score], dim=1)
    expected = build(name).fit(two_columns, labels).transform(two_columns)
    for one_logit in (score, score[:, None]):
        calibrated = build(name).fit(one_logit, labels).transform(one_logit)
        assert calibrated.shape == one_logit.shape
        torch.testing.assert_close(calibrated.reshape(-1), expected[:, 1] - expected[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", WITH_SOFT_LABELS)
def test_one_hot_labels_match_class_indices(name: str):
    logits, labels = problem()
    of_class_indices, of_one_hot = (
        build(name).fit(logits, labels),
        build(name).fit(logits, functional.one_hot(labels, 4).double()),
    )
    torch.testing.assert_close(of_class_indices.transform(logits), of_one_hot.transform(logits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WITH_SOFT_LABELS)
def test_soft_labels_are_used(name: str):
    logits, _ = problem(2000)
    soft_labels = (logits / 3).softmax(1)
    calibrated_probs = build(name).fit(logits, soft_labels).transform(logits).softmax(1)
    assert (calibrated_probs - soft_labels).abs().mean() < 0.6 * (logits.softmax(1) - soft_labels).abs().mean()


@pytest.mark.parametrize("name", SAVEABLE)
def test_calibrator_round_trips_through_its_file_without_pickle(name: str, tmp_path: Path):
    calibrator = fitted(name)
    path = tmp_path / "calibrator.safetensors"
    calibrator.save(path)
    new_logits, _ = problem(50, 2 if name == "platt" else 4, seed=1)
    for loaded in (posthoc.load_calibrator(path), type(calibrator).load(path)):
        assert type(loaded) is type(calibrator)
        assert loaded.options == calibrator.options
        assert loaded.fitted == calibrator.fitted
        assert torch.equal(loaded.transform(new_logits), calibrator.transform(new_logits))
    assert b"pickle" not in path.read_bytes()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", SAVEABLE)
def test_loading_non_finite_parameters_raises(name: str, tmp_path: Path):
    calibrator = fitted(name)
    parameters = calibrator.learned
    try:
        for parameter in [parameter for parameter, value in parameters.items() if value.is_floating_point()]:
            calibrator.learned = parameters | {parameter: torch.full_like(parameters[parameter], -torch.inf)}
            calibrator.save(tmp_path / "c.safetensors")
            with pytest.raises(ValueError, match=rf"c\.safetensors.*{parameter}"):
                posthoc.load_calibrator(tmp_path / "c.safetensors")
    finally:
        calibrator.learned = parameters


def test_loading_the_file_of_another_calibrator_raises(tmp_path: Path):
    fitted("temperature").save(tmp_path / "one")
    with pytest.raises(ValueError, match=r"'temperature'.*'platt'"):
        posthoc.Platt.load(tmp_path / "one")
    logits, labels = problem(10)
    write_predictions(Predictions(logits, labels), tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"two.*predictions.*fedlas calibrate fit"):
        posthoc.load_calibrator(tmp_path / "two.safetensors")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"prob_a,prob_b\n0.3,0.7\n", ""), (b"", "empty"), (b"PK\3\4", "")],
)
def test_loading_a_file_that_holds_no_calibrator_raises(tmp_path: Path, content: bytes, reason: str):
    """Regression: the raw error of safetensors, "header too large", was shown."""
    (tmp_path / "one.csv").write_bytes(content)
    with pytest.raises(ValueError, match=rf"one\.csv.*{reason}.*fedlas calibrate fit") as error:
        posthoc.load_calibrator(tmp_path / "one.csv")
    assert "header" not in str(error.value)


def test_reading_predictions_from_a_calibrator_raises(tmp_path: Path):
    fitted("temperature").save(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=r"one\.safetensors.*fedlas\.calibrator/1"):
        read_predictions(tmp_path / "one.safetensors")


@pytest.mark.parametrize("name", SAVEABLE)
def test_fitting_on_the_test_split_warns_and_is_recorded(name: str):
    logits, labels = problem(100, 2)
    with pytest.warns(UserWarning, match="'test'"):
        calibrator = build(name).fit(Predictions(logits, labels, split="test"))
    assert calibrator.fitted is not None
    assert calibrator.fitted.split == "test"
    with pytest.warns(UserWarning, match="'Test-2'"):
        build(name).fit(logits, labels, split="Test-2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(name).fit(Predictions(logits, labels, split="val")).fitted.split == "val"


@pytest.mark.parametrize("name", MULTICLASS)
def test_transform_of_predictions_returns_predictions(name: str):
    logits, labels = problem()
    predictions = Predictions(
        logits, labels, features=logits, index=torch.arange(600), class_names=list("abcd"), split="val"
    )
    transformed = fitted(name).transform(predictions)
    assert isinstance(transformed, Predictions)
    assert (transformed.split, transformed.class_names) == ("val", tuple("abcd"))
    assert torch.equal(transformed.labels, labels)
    assert torch.equal(transformed.index, torch.arange(600))
    assert torch.equal(transformed.features, logits)
    assert torch.equal(transformed.logits, fitted(name).transform(logits))


def fitted_with_class_names(name: str, letters: str = "abcd") -> AbstractCalibrator:
    classes = 2 if name == "platt" else 4
    return build(name).fit(Predictions(*problem(classes=classes), class_names=list(letters[:classes]), split="val"))


@pytest.mark.parametrize("name", NAMES)
def test_other_class_names_or_another_order_raise(name: str):
    classes = 2 if name == "platt" else 4
    names = tuple("abcd")[:classes]
    calibrator = fitted_with_class_names(name)
    assert calibrator.fitted.class_names == names
    logits, labels = problem(50, classes, seed=1)
    reversed_classes = Predictions(logits.flip(1), classes - 1 - labels, class_names=names[::-1])
    if RECORDS[name].cls.by_class:
        with pytest.raises(ValueError, match=f"order.*0.*'a'.*'{names[-1]}'"):
            calibrator.transform(reversed_classes)
        with pytest.raises(ValueError, match=r"1.*'b'.*'x'"):
            calibrator.transform(Predictions(logits, labels, class_names=["a", "x", "c", "d"][:classes]))
    else:  # treats all classes alike: names and order of columns do not matter
        torch.testing.assert_close(calibrator.transform(reversed_classes).logits, calibrator.transform(logits).flip(1))
    for new_names in (names, None):
        transformed = calibrator.transform(Predictions(logits, labels, class_names=new_names))
        assert torch.equal(transformed.logits, calibrator.transform(logits))


@pytest.mark.parametrize("name", SAVEABLE)
def test_class_names_round_trip(name: str, tmp_path: Path):
    path = tmp_path / "calibrator.safetensors"
    calibrator = fitted_with_class_names(name)
    calibrator.save(path)
    assert posthoc.load_calibrator(path).fitted == calibrator.fitted


@pytest.mark.parametrize("name", MULTICLASS)
def test_invalid_input_raises_an_error_that_names_it(name: str):
    logits, labels = problem(20)
    calibrator = build(name)
    with pytest.raises(RuntimeError, match=r"fit\("):
        calibrator.transform(logits)
    with pytest.raises((RuntimeError, ValueError)):
        calibrator.save("nowhere")
    logits_with_nan = logits.clone()
    logits_with_nan[7, 1] = torch.nan
    with pytest.raises(ValueError, match=r"logits.*row 7"):
        calibrator.fit(logits_with_nan, labels)
    with pytest.raises(ValueError, match=r"labels.*19.*20"):
        calibrator.fit(logits, labels[:19])
    with pytest.raises(ValueError, match=r"labels.*row 3.*4"):
        calibrator.fit(logits, labels.index_fill(0, torch.tensor([3]), 4))
    with pytest.raises(TypeError, match="labels"):
        calibrator.fit(logits)
    with pytest.raises(ValueError, match="sample"):
        calibrator.fit(logits, torch.full((20,), -100), ignore_index=-100)
    calibrator = fitted(name)
    with pytest.raises(ValueError, match=r"5 classes.* 4"):
        calibrator.transform(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"logits.*row 7"):
        calibrator.transform(logits_with_nan)


def test_fitting_on_top_label_predictions_raises():
    predictions = TopLabelPredictions([0.7, 0.8], labels=[0, 1], prediction=[0, 1])
    with pytest.raises(ValueError, match=r"logits.*probabilities"):
        posthoc.Temperature().fit(predictions)


@pytest.mark.parametrize("name", [name for name in MULTICLASS if name != "probmetrics"])
def test_fit_to_one_sample_is_finite(name: str):
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5], [0.5, 1.0, 0.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        calibrated = build(name).fit(logits[:1], torch.tensor([1])).transform(logits)
    assert torch.isfinite(calibrated).all()


@pytest.mark.parametrize("name", MULTICLASS)
def test_fit_does_not_change_its_input_and_works_without_gradients(name: str):
    logits, labels = problem()
    original = logits.clone()
    with torch.no_grad():
        calibrated = build(name).fit(logits, labels).transform(logits)
    torch.testing.assert_close(calibrated, fitted(name).transform(logits))
    assert not calibrated.requires_grad
    assert torch.equal(logits, original)


def test_an_unknown_name_or_keyword_raises_with_a_suggestion():
    with pytest.raises(ValueError, match=r"'temprature'.*'temperature'"):
        posthoc.build_calibrator("temprature")
    with pytest.raises(TypeError, match=r"'objektive'.*'objective'"):
        posthoc.build_calibrator("temperature", objektive="nll")


@pytest.mark.parametrize("name", SAVEABLE)
def test_a_calibrator_of_few_samples_round_trips(name: str, tmp_path: Path):
    """Of 60 samples some bins are empty, for which histogram binning holds NaN."""
    logits, labels = problem(60, 2 if name == "platt" else 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrator = build(name).fit(3 * logits, labels)
    calibrator.save(tmp_path / "few.safetensors")
    loaded = posthoc.load_calibrator(tmp_path / "few.safetensors")
    assert torch.equal(loaded.transform(logits), calibrator.transform(logits))
