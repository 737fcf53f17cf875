"""`evaluate`: equal to single metrics, cross-fitting, warnings about leakage, and round trips through files."""

import copy
import inspect
import json
import math
import pickle
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlas
from fedlas import evaluation, metrics, ood, posthoc
from fedlas.comparison import compare_models
from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report
from fedlas.metrics.result import Result
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.html import report_page


def make_predictions(
    n: int = 900, classes: int = 7, seed: int = 0, scale: float = 3.0, split: str = "val"
) -> Predictions:
    """Return logits of an over-confident model, and labels drawn from the calibrated probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    features = torch.rand(n, 5, generator=random)
    return Predictions(scale * logits, labels, features=features, split=split)


METRIC_FUNCTIONS = {
    "accuracy": metrics.accuracy,
    "ece": metrics.ece,
    "aece": metrics.aece,
    "over_ece": metrics.over_ece,
    "under_ece": metrics.under_ece,
    "signed_ece": metrics.signed_ece,
    "classwise_ece": metrics.classwise_ece,
    "mce": metrics.mce,
    "rms_error": metrics.rms_error,
    "debiased_l2": metrics.debiased_l2,
    "smooth_ece": metrics.smooth_ece,
    "nll": metrics.nll,
    "brier": metrics.brier,
    "top_5": metrics.top_k,
    "aurc": metrics.aurc,
    "e_aurc": metrics.e_aurc,
    "augrc": metrics.augrc,
    "ks_test": metrics.ks_test,
    "kuiper_test": metrics.kuiper_test,
    "spiegelhalter_test": metrics.spiegelhalter_test,
}


@pytest.fixture
def in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of 100 samples, so that every metric is computed from several."""
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)


@cache
def in_type(dtype: torch.dtype) -> tuple[Predictions, Report]:
    predictions = make_predictions()
    predictions = Predictions(predictions.logits.to(dtype), predictions.labels, split="val")
    return predictions, evaluate(predictions, intervals=False)


@pytest.mark.usefixtures("in_small_chunks")
@pytest.mark.parametrize("name", METRIC_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_report_metrics_equal_the_single_metrics(name: str, dtype: torch.dtype):
    predictions, report = in_type(dtype)
    result, expected = report[name], METRIC_FUNCTIONS[name](predictions, **({"bins": 15} if name == "brier" else {}))
    assert isinstance(result, Result)
    assert float(result) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    assert result.definition == expected.definition
    assert set(result.details) == set(expected.details)


def test_a_report_contains_every_metric():
    assert set(evaluate(make_predictions(), intervals=False).before.results) == set(METRIC_FUNCTIONS)


@pytest.mark.usefixtures("in_small_chunks")
@pytest.mark.parametrize("name", ["accuracy", "ece", "aece", "signed_ece", "classwise_ece", "nll", "brier"])
def test_report_intervals_equal_the_bootstrap(name: str):
    predictions = make_predictions()
    result = evaluate(predictions, resamples=500, level=0.9, seed=3)[name]
    expected = metrics.bootstrap(METRIC_FUNCTIONS[name], predictions, resamples=500, level=0.9, seed=3)
    assert result.interval == expected.interval
    assert result.details.get("noise_floor") == expected.details.get("noise_floor")


def test_class_wise_ece_of_too_many_probabilities_has_no_interval(monkeypatch: pytest.MonkeyPatch):
    predictions = make_predictions(300)
    assert evaluate(predictions, resamples=50)["classwise_ece"].interval is not None
    monkeypatch.setattr("fedlas.metrics.evaluation_accumulator.MAX_PROBS", predictions.logits.numel() - 1)
    assert evaluate(predictions, resamples=50)["classwise_ece"].interval is None


def test_over_and_under_ece_add_up_to_ece_and_have_intervals():
    report = evaluate(make_predictions(), resamples=200)
    assert report["over_ece"] + report["under_ece"] == pytest.approx(report["ece"])
    assert report["over_ece"].interval.high > report["over_ece"]


@pytest.mark.usefixtures("in_small_chunks")
@pytest.mark.parametrize("name", ["temperature", "isotonic", "ensemble_temperature"])
def test_fitted_calibrator_is_not_refitted(name: str):
    predictions, val = make_predictions(), make_predictions(seed=1)
    calibrator = posthoc.build_calibrator(name).fit(val.logits, val.labels, split="other")
    state = evaluate(predictions, posthoc=[calibrator], intervals=False).after[name]
    after = calibrator.transform(predictions)
    for metric in ("ece", "nll", "brier", "classwise_ece", "accuracy"):
        assert float(state[metric]) == pytest.approx(float(METRIC_FUNCTIONS[metric](after)), rel=1e-9)
    assert state.fits == (calibrator.fitted,)


def test_calibrator_of_other_classes_raises_also_after_saving(tmp_path: Path):
    def with_class_names(names: str, split: str) -> Predictions:
        predictions = make_predictions(300, seed=len(split), split=split)
        return Predictions(predictions.logits, predictions.labels, class_names=list(names), split=split)

    calibrator = posthoc.build_calibrator("vector_scaling").fit(with_class_names("abcdefg", "other"))
    evaluate(with_class_names("abcdefg", "val"), posthoc=[calibrator], intervals=False).save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").after["vector_scaling"].fits == (calibrator.fitted,)
    with pytest.raises(ValueError, match=r"order.*0.*'a'.*'g'"):
        evaluate(with_class_names("gfedcba", "val"), posthoc=[calibrator], intervals=False)


@pytest.mark.usefixtures("in_small_chunks")
def test_saved_states_keep_their_confidence_correctness_pairs():
    predictions, val = make_predictions(), make_predictions(500, seed=1, split="other")
    report = evaluate(predictions, posthoc="temperature", calibration=val, intervals=False)
    after = posthoc.Temperature().fit(val).transform(predictions)
    for state, expected in ((report.before, predictions), (report.after["temperature"], after)):
        assert torch.equal(state.pairs.confidence, expected.confidence)
        assert torch.equal(state.pairs.correct, expected.correct)
        assert state.pairs.definition.n == len(predictions)
    loaded = Report.from_dict(json.loads(report.to_json()))
    for state, expected in zip(loaded.states, report.states, strict=True):
        for name in ("confidence", "correct", "log_uncertainty"):
            assert torch.equal(getattr(state.pairs, name), getattr(expected.pairs, name))
        assert state.pairs.definition == expected.pairs.definition
    assert Report.from_dict(report.to_dict(samples=False)).before.pairs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"confidence": None}, "no confidence"),
        ({"confidence": {"dtype": "float32", "base64": "AABAQAAAQEA="}, "log_uncertainty": None}, "length"),
        ({"correct": {"dtype": "object", "base64": ""}}, "type.*object"),
    ],
)
def test_invalid_pairs_in_a_report_raise(change, message):
    report = evaluate(make_predictions(), intervals=False).to_dict()
    report["states"][0]["pairs"] |= change
    with pytest.raises(ValueError, match=message):
        Report.from_dict(report)


def test_named_calibrators_are_fitted_on_calibration_data():
    predictions, val = make_predictions(), make_predictions(500, seed=1, split="other")
    state = evaluate(predictions, posthoc=["temperature"], calibration=val, intervals=False).after["temperature"]
    expected = posthoc.Temperature().fit(val)
    assert state.parameters["temperature"] == expected.temperature
    assert state.fits[0].n == 500
    assert float(state["nll"]) == pytest.approx(float(metrics.nll(expected.transform(predictions))), rel=1e-9)


@pytest.mark.usefixtures("in_small_chunks")
def test_without_calibration_data_calibrators_are_cross_fitted():
    """Random labels cannot be predicted, except by a calibrator that was fitted on them."""
    predictions = make_predictions(600)
    random = torch.Generator().manual_seed(5)
    noise = Predictions(predictions.logits, torch.randint(7, (600,), generator=random), split="val")
    state = evaluate(noise, posthoc=["isotonic"], intervals=False).after["isotonic"]
    leaking = posthoc.Isotonic().fit(noise.logits, noise.labels).transform(noise)
    assert metrics.nll(leaking) < math.log(7) - 0.02
    assert state["nll"] > math.log(7) - 0.01
    assert [fit.n for fit in state.fits] == [480] * 5
    assert all("val" in fit.split != "val" for fit in state.fits)


def test_cross_fitting_finds_the_right_temperature():
    state = evaluate(make_predictions(4000), posthoc=["temperature"], intervals=False).after["temperature"]
    assert state.parameters["temperature"] == pytest.approx(3, rel=0.1)
    assert state["ece"] < 0.03


def test_several_calibrators_of_one_class_have_separate_results():
    options = [posthoc.Temperature(), posthoc.Temperature(objective="ece", search="grid"), "vector_scaling"]
    report = evaluate(
        make_predictions(), posthoc=options, calibration=make_predictions(seed=1, split="other"), intervals=False
    )
    assert list(report.after) == ["temperature", "temperature 2", "vector_scaling"]
    assert options[0].fitted is None  # the passed calibrator is not modified


def test_evaluating_on_the_fitting_samples_warns():
    predictions = make_predictions()
    for options in (
        {"posthoc": [posthoc.Temperature().fit(predictions)]},
        {"posthoc": ["temperature"], "calibration": predictions},
        {"posthoc": ["temperature"], "calibration": make_predictions(seed=1)},
    ):
        with pytest.warns(UserWarning, match=r"temperature.*fitted") as warned:
            evaluate(predictions, intervals=False, **options)
        assert "None" not in str(warned[0].message)


def evaluate_after(predictions, other):
    return evaluate(predictions, posthoc=["temperature"], calibration=other, intervals=False).after["temperature"]


def with_metadata(predictions, **metadata):
    return Predictions(predictions.logits, predictions.labels, **metadata)


@pytest.mark.parametrize("kind", ["copy", "other order", "part", "more"])
def test_calibrating_on_copies_of_evaluated_samples_warns(kind):
    """Regression: copies of the evaluated file were not detected."""
    predictions, additional = with_metadata(make_predictions(200)), make_predictions(100, seed=1)
    order = torch.randperm(200)
    other = {
        "copy": with_metadata(predictions),
        "other order": predictions[order],
        "part": predictions[order[:50]],
        "more": Predictions(
            torch.cat([additional.logits, predictions.logits[:30]]),
            torch.cat([additional.labels, predictions.labels[:30]]),
        ),
    }[kind]
    leaked = {"copy": 200, "other order": 200, "part": 50, "more": 30}[kind]
    with pytest.warns(UserWarning, match=f"temperature.*{'' if leaked == 200 else leaked}.*samples"):
        state = evaluate_after(predictions, other)
    assert state.leaked == leaked
    assert type(state).from_dict(state.to_dict()).leaked == leaked


def test_a_fitted_calibrator_knows_its_samples(tmp_path):
    """Regression: only an equal name of the split was detected."""

    def unnamed(seed: int) -> Predictions:
        return with_metadata(make_predictions(200, seed=seed), split=None)

    predictions, other = unnamed(0), unnamed(1)
    posthoc.Isotonic().fit(predictions).save(tmp_path / "fitted.safetensors")
    loaded = posthoc.load_calibrator(tmp_path / "fitted.safetensors")
    with pytest.warns(UserWarning, match="isotonic was fitted on the very samples"):
        report = evaluate(predictions[torch.randperm(200)], posthoc=[loaded], intervals=False)
    assert report.after["isotonic"].leaked == 200
    exchanged = Predictions(predictions.logits, predictions.labels.roll(1))
    for samples in (other, exchanged, predictions[:100]):
        assert evaluate(samples, posthoc=[loaded], intervals=False).after["isotonic"].leaked == 0


@pytest.mark.parametrize("field", ["ids", "index"])
def test_ids_detect_overlap_of_calibration_and_test_samples(field):
    predictions = make_predictions(200)
    names = [f"image {i}" for i in range(300)] if field == "ids" else torch.arange(300)
    rounded = Predictions.from_probs(predictions.probs.double().round(decimals=4), predictions.labels)
    evaluated = with_metadata(predictions, **{field: names[:200]})
    other = with_metadata(rounded[150:], **{field: names[150:200]})
    with pytest.warns(UserWarning, match=r"temperature.*50.*samples"):
        assert evaluate_after(evaluated, other).leaked == 50
    # Two splits whose samples are both counted from zero have no sample in common.
    assert evaluate_after(evaluated, with_metadata(make_predictions(200, seed=1), **{field: names[:200]})).leaked == 0
    assert evaluate_after(evaluated, with_metadata(make_predictions(100, seed=2), **{field: names[200:]})).leaked == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaked": "many"}, "leaked.*'many'"),
        ({"leaked": -3}, "leaked.*-3"),
        ({"leaked": None}, "leaked.*None"),
        ({"leaked": True}, "leaked.*True"),
        ({"name": 7}, "name.*7"),
        ({"doubt": 7}, "doubt.*7"),
        ({"split": ["test"]}, r"split.*\['test'\]"),
        ({"n": "many"}, r"\bn\b.*'many'"),
        ({"before": "low"}, "before.*'low'"),
        ({"class_names": "abc"}, "class_names.*'abc'"),
        ({"class_names": [1, 2, 3]}, "class_names.*1"),
    ],
)
def test_an_invalid_report_file_raises(tmp_path, change, message):
    """Regression: such a file was read and failed only when printed."""
    report = evaluate(make_predictions(), posthoc=["temperature"], intervals=False).to_dict()
    state = report["states"][1]
    (state if change.keys() <= {"leaked", "name"} else state["fits"][0]).update(change)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=rf"report\.json.*{message}"):
        Report.load(path)


@pytest.mark.parametrize(("name", "value"), [("n", "many"), ("classes", 2.5), ("split", 3)])
def test_invalid_report_metadata_raises(name, value):
    report = evaluate(make_predictions(), intervals=False).to_dict()
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{value}"):
        Report.from_dict(report | {name: value})


def test_chance_matches_of_rounded_rows_do_not_warn():
    generator = torch.Generator().manual_seed(0)
    probs = [(torch.rand(400, generator=generator) * 20).round() / 20 for _ in range(2)]
    labels = [(torch.rand(400, generator=generator) < 0.8 * prob + 0.1).long() for prob in probs]
    evaluated, other = (Predictions.from_probs(prob, label) for prob, label in zip(probs, labels, strict=True))
    assert evaluate_after(evaluated, other).leaked == 0


@pytest.mark.usefixtures("in_small_chunks")
def test_ood_detection_equals_detect():
    predictions, shifted = make_predictions(), make_predictions(400, seed=2, scale=1.0)
    unlabelled = Predictions(shifted.logits, features=shifted.features)
    report = evaluate(predictions, ood={"a": unlabelled}, posthoc=["temperature"], resamples=100)
    expected = ood.detect(predictions, {"a": unlabelled})
    assert report.before.detection.to_dict() == expected.to_dict()
    scores = report.after["temperature"].detection["a"]
    assert set(scores) == {"max_probability", "entropy", "generalised_entropy"}
    assert scores["entropy"].auroc.n == 1300


def test_ood_data_accepts_logits_arrays():
    predictions = make_predictions()
    report = evaluate(predictions, ood={"noise": torch.randn(50, 7), "other": np.zeros((20, 7))}, intervals=False)
    assert set(report.before.detection.sets) == {"noise", "other"}
    with pytest.raises(ValueError, match=r"noise.*5"):
        evaluate(predictions, ood={"noise": torch.randn(50, 5)})


def test_report_round_trips_through_its_file(tmp_path: Path):
    report = evaluate(make_predictions(), posthoc=["temperature"], ood={"a": torch.randn(60, 7)}, resamples=100)
    report.save(tmp_path / "report.json")
    loaded = Report.load(tmp_path / "report.json")
    assert loaded.to_dict() == report.to_dict()
    assert json.loads((tmp_path / "report.json").read_text())["split"] == "val"
    assert str(loaded) == str(report)
    assert torch.equal(loaded.before.bins["width"].counts, report.before.bins["width"].counts)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json.*format"):
        Report.load(tmp_path / "other.json")


def test_report_bins_equal_histogram_bins():
    predictions = make_predictions()
    bins = evaluate(predictions, intervals=False).before.bins
    assert torch.equal(bins["width"].counts, metrics.histogram(predictions).bins.counts)
    assert torch.equal(bins["mass"].counts, metrics.histogram(predictions, binning="mass").bins.counts)
    assert int(bins["mass"].counts.sum()) == 900


def test_report_prints_a_table():
    text = str(evaluate(make_predictions(), posthoc=["temperature"], resamples=100, ood={"far": torch.randn(40, 7)}))
    for entry in (
        "val",
        "n=900",
        "7 ",
        "accuracy %",
        "ECE %",
        "NLL",
        evaluation.UNCALIBRATED,
        "temperature",
        "far",
        "AUROC",
    ):
        assert entry in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_soft_labels_and_top_label_predictions_have_supported_metrics():
    predictions = make_predictions()
    soft = evaluate(Predictions(predictions.logits, predictions.logits.softmax(1)), resamples=100)
    assert float(soft["ece"]) == pytest.approx(0, abs=1e-6)
    assert "ks_test" not in soft.before.results
    top = evaluate(TopLabelPredictions(predictions.confidence, predictions.correct), resamples=100)
    assert "nll" not in top.before.results
    assert float(top["ece"]) == pytest.approx(float(metrics.ece(predictions)), abs=1e-6)


def test_accuracy_below_guessing_warns():
    """Labels that are numbered from 1, without the last class, are valid numbers."""
    logits = make_predictions(classes=4).logits
    labels = logits[:, :3].argmax(1) + 1
    with pytest.warns(UserWarning, match=r"below the 25\.0% .* numbered from 1"):
        evaluate(logits, labels, logits=True, intervals=False)


def test_probabilities_are_not_renormalised():
    predictions = make_predictions()
    probs = predictions.probs.round(decimals=2)
    probs = probs / probs.sum(1, keepdim=True)
    table = Predictions.from_probs(probs, predictions.labels)
    report = evaluate(table, intervals=False)
    assert float(report["nll"]) == pytest.approx(float(metrics.nll(table)), rel=1e-12)
    assert report["nll"].details["floored"] == metrics.nll(table).details["floored"] > 0


def test_invalid_input_raises():
    predictions = make_predictions()
    with pytest.raises(ValueError, match=r"level.*95"):
        evaluate(predictions, level=95)
    with pytest.raises(ValueError, match=r"calibrator.*'temp'"):
        evaluate(predictions, posthoc=["temp"])
    with pytest.raises(ValueError, match="labels"):
        evaluate(Predictions(predictions.logits))
    with pytest.raises(ValueError, match=r"9.*temperature.*calibration="):
        evaluate(predictions[:9], posthoc=["temperature"])


def test_evaluate_is_part_of_the_public_api():
    assert fedlas.evaluate is evaluate
    assert fedlas.Report is Report


def test_logits_are_read_once_per_chunk(monkeypatch: pytest.MonkeyPatch):
    """Every chunk is read once, independent of the number of calibrators."""
    predictions, val = make_predictions(), make_predictions(seed=1)
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)
    calibrators = [posthoc.build_calibrator(n).fit(val.logits, val.labels) for n in ("temperature", "vector_scaling")]
    slices: list[slice] = []
    original_getitem = Predictions.__getitem__

    def record_slice(self: Predictions, rows: slice) -> Predictions:
        slices.append(rows)
        return original_getitem(self, rows)

    def raise_for_all_samples(self: Predictions) -> torch.Tensor:
        assert len(self) <= 100, "probabilities of all samples were computed"
        return self.logits.softmax(1)

    monkeypatch.setattr(Predictions, "__getitem__", record_slice)
    monkeypatch.setattr(Predictions, "probs", property(raise_for_all_samples))
    evaluate(predictions, posthoc=calibrators, intervals=True, resamples=100)
    assert [(rows.start, rows.stop) for rows in slices] == [(100 * i, 100 * i + 100) for i in range(9)]


@pytest.mark.parametrize("seeds", [8, pytest.param(30, marks=pytest.mark.campaign)])
def test_cross_fitting_does_not_create_ood_separation(seeds):
    """ID and OOD samples from the same distribution: calibrators must not separate them."""
    contains_half = []
    for seed in range(seeds):
        samples = make_predictions(400, seed=seed)
        report = evaluate(samples[:200], ood={"same": samples[200:].logits}, posthoc=["isotonic"], intervals=False)
        contains_half.append(0.5 in report.after["isotonic"].detection["same"]["max_probability"].auroc.interval)
    assert sum(contains_half) >= 25 / 30 * seeds


def test_report_can_be_pickled_and_copied():
    report = evaluate(make_predictions(100), ood={"a": torch.randn(60, 7)}, resamples=100)
    for copied in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert copied.to_dict() == report.to_dict()
    assert report != pickle.loads(pickle.dumps(report))


def test_single_calibrator_needs_no_list_and_invalid_ones_raise():
    predictions = make_predictions(200)
    for calibrator in ("temperature", posthoc.Temperature()):
        assert list(evaluate(predictions, posthoc=calibrator, intervals=False).after) == ["temperature"]
    names = (name for name in ("temperature", "vector_scaling"))
    assert list(evaluate(predictions, posthoc=names, intervals=False).after) == ["temperature", "vector_scaling"]
    assert not evaluate(predictions, posthoc=None, intervals=False).after
    unchecked = inspect.unwrap(evaluate)
    with pytest.raises(TypeError, match=r"posthoc.*Temperature\(\)"):
        unchecked(predictions, posthoc=[posthoc.Temperature], intervals=False)
    with pytest.raises(TypeError, match=r"ood.*svhn"):
        unchecked(predictions, ood=[predictions.logits])
    with pytest.raises(ValueError, match=r"logits="):
        unchecked(predictions.logits, predictions.labels)
    with pytest.raises(KeyError, match=r"'acuracy'.*'accuracy'"):
        evaluate(predictions, intervals=False)["acuracy"]


def test_all_correct_predictions_give_a_report_and_json():
    """Regression: an infinite standard error made JSON file and page fail."""
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0]] * 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = evaluate(Predictions(logits, [0, 1] * 20), posthoc="temperature", folds=2, resamples=50)
    assert report.after["temperature"].parameters["temperature"] == pytest.approx(0.001)
    assert "standard_error" not in report.after["temperature"].parameters
    assert json.loads(report.to_json())["n"] == 40
    page = report_page(report)
    assert "Infinity" not in page.partition("<script")[0]
    assert ": Infinity" not in page


@pytest.mark.parametrize("options", [{"resamples": 1}, {"resamples": 0}, {"bins": 100_000}, {"bins": 0}, {"folds": 1}])
def test_invalid_arguments_raise(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}.*{options[name]}"):
        evaluate(Predictions(torch.randn(40, 2), [0, 1] * 20), posthoc="temperature", **options)


def test_calibrate_returns_the_predictions_that_evaluate_measures():
    predictions, val = make_predictions(), make_predictions(500, seed=1, split="other")
    for options in ({"calibration": val}, {}):
        report = evaluate(predictions, posthoc="temperature", intervals=False, **options)
        after = fedlas.calibrate(predictions, posthoc="temperature", **options)
        assert torch.equal(after.confidence, report.after["temperature"].pairs.confidence)
        assert torch.equal(after.labels, predictions.labels)
    fitted = posthoc.Temperature().fit(val)
    assert torch.equal(fedlas.calibrate(predictions, posthoc=fitted).logits, fitted.transform(predictions).logits)
    with pytest.raises(TypeError, match="posthoc"):
        fedlas.calibrate(predictions, posthoc=3)


def test_compare_accepts_arrays_files_and_predictions(tmp_path):
    first, second = make_predictions(), make_predictions(scale=1.0)
    expected = compare_models({"a": first, "b": second}, resamples=200)
    comparisons = fedlas.compare(first, second, resamples=200)
    assert comparisons == {row.metric: row.comparison for row in expected}
    fedlas.write_predictions(first, tmp_path / "a.npz")
    fedlas.write_predictions(second, tmp_path / "b.npz")
    files = fedlas.compare(tmp_path / "a.npz", tmp_path / "b.npz", metrics=["ece"], resamples=200)
    arrays = fedlas.compare(first.logits, second.logits, first.labels, logits=True, metrics=["ece"], resamples=200)
    assert files["ece"].difference == arrays["ece"].difference == comparisons["ece"].difference
    with pytest.raises(ValueError, match="nosuch"):
        fedlas.compare(first, second, metrics=["nosuch"])


def test_predictions_without_labels_are_calibrated_with_calibration_data():
    """Labels are needed only for cross-fitting."""
    fitted_on, unlabelled = make_predictions(500, seed=1, split="other"), Predictions(make_predictions().logits)
    calibrated = fedlas.calibrate(unlabelled, calibration=fitted_on)
    expected = posthoc.Temperature().fit(fitted_on).transform(unlabelled).logits
    assert torch.equal(calibrated.logits, expected)
    from_table = fedlas.calibrate({"logits": unlabelled.logits}, calibration=fitted_on)
    assert torch.equal(from_table.logits, expected)


def test_compare_metrics_must_be_a_list():
    with pytest.raises(TypeError, match=r"\['ece'\]"):
        fedlas.compare(make_predictions(), make_predictions(), metrics="ece")


def test_compare_with_a_negative_seed_raises():
    with pytest.raises(ValueError, match="seed is -1"):
        fedlas.compare(make_predictions(), make_predictions(), seed=-1)


def test_probabilities_of_two_decimals_get_every_interval():
    """Rows whose sum is 0.99 or 1.01 are accepted when they are read."""
    torch.manual_seed(0)
    probs = (2 * torch.randn(80, 4)).softmax(1).double().round(decimals=2)
    assert float(probs.sum(1).max()) > 1.005
    report = evaluate(Predictions.from_probs(probs, torch.randint(4, (80,))), resamples=50)
    assert report["classwise_ece"].interval is not None
