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
from fedlas.evaluation import Report, evaluate
from fedlas.metrics.result import Result
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.html import report_page


def predictions(n: int = 900, classes: int = 7, seed: int = 0, scale: float = 3.0, split: str = "val") -> Predictions:
    """Logits of an over-confident model, and labels drawn from the calibrated probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, classes, generator=random)
    labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
    features = torch.rand(n, 5, generator=random)
    return Predictions(scale * logits, labels, features=features, split=split)


ALONE = {
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
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts of 100 samples, so that every number is put together from many."""
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)


@cache
def in_type(dtype: torch.dtype) -> tuple[Predictions, Report]:
    given = predictions()
    given = Predictions(given.logits.to(dtype), given.labels, split="val")
    return given, evaluate(given, intervals=False)


@pytest.mark.usefixtures("in_small_parts")
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_report_metrics_equal_the_single_metrics(name: str, dtype: torch.dtype):
    given, report = in_type(dtype)
    found, wanted = report[name], ALONE[name](given, **({"bins": 15} if name == "brier" else {}))
    assert isinstance(found, Result)
    assert float(found) == pytest.approx(float(wanted), rel=1e-9, abs=1e-12)
    assert found.definition == wanted.definition
    assert set(found.details) == set(wanted.details)


def test_a_report_contains_every_metric():
    assert set(evaluate(predictions(), intervals=False).before.results) == set(ALONE)


@pytest.mark.usefixtures("in_small_parts")
@pytest.mark.parametrize("name", ["accuracy", "ece", "aece", "signed_ece", "classwise_ece", "nll", "brier"])
def test_report_intervals_equal_the_bootstrap(name: str):
    given = predictions()
    found = evaluate(given, resamples=500, level=0.9, seed=3)[name]
    wanted = metrics.bootstrap(ALONE[name], given, resamples=500, level=0.9, seed=3)
    assert found.interval == wanted.interval
    assert found.details.get("noise_floor") == wanted.details.get("noise_floor")


def test_class_wise_ece_of_too_many_probabilities_has_no_interval(monkeypatch: pytest.MonkeyPatch):
    given = predictions(300)
    assert evaluate(given, resamples=50)["classwise_ece"].interval is not None
    monkeypatch.setattr("fedlas.metrics.evaluation_accumulator.MAX_PROBS", given.logits.numel() - 1)
    assert evaluate(given, resamples=50)["classwise_ece"].interval is None


def test_over_and_under_ece_add_up_to_ece_and_have_intervals():
    report = evaluate(predictions(), resamples=200)
    assert report["over_ece"] + report["under_ece"] == pytest.approx(report["ece"])
    assert report["over_ece"].interval.high > report["over_ece"]


@pytest.mark.usefixtures("in_small_parts")
@pytest.mark.parametrize("name", ["temperature", "isotonic", "ensemble_temperature"])
def test_fitted_calibrator_is_not_refitted(name: str):
    given, val = predictions(), predictions(seed=1)
    calibrator = posthoc.build_calibrator(name).fit(val.logits, val.labels, split="other")
    state = evaluate(given, posthoc=[calibrator], intervals=False).after[name]
    after = calibrator.transform(given)
    for metric in ("ece", "nll", "brier", "classwise_ece", "accuracy"):
        assert float(state[metric]) == pytest.approx(float(ALONE[metric](after)), rel=1e-9)
    assert state.fits == (calibrator.fitted,)


def test_calibrator_of_other_classes_raises_also_after_saving(tmp_path: Path):
    def named(names: str, split: str) -> Predictions:
        given = predictions(300, split=split)
        return Predictions(given.logits, given.labels, class_names=list(names), split=split)

    calibrator = posthoc.build_calibrator("vector_scaling").fit(named("abcdefg", "other"))
    evaluate(named("abcdefg", "val"), posthoc=[calibrator], intervals=False).save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json").after["vector_scaling"].fits == (calibrator.fitted,)
    with pytest.raises(ValueError, match=r"order.*0.*'a'.*'g'"):
        evaluate(named("gfedcba", "val"), posthoc=[calibrator], intervals=False)


@pytest.mark.usefixtures("in_small_parts")
def test_saved_states_keep_their_confidence_correctness_pairs():
    given, val = predictions(), predictions(500, seed=1, split="other")
    report = evaluate(given, posthoc="temperature", calibration=val, intervals=False)
    after = posthoc.Temperature().fit(val).transform(given)
    for state, wanted in ((report.before, given), (report.after["temperature"], after)):
        assert torch.equal(state.pairs.confidence, wanted.confidence)
        assert torch.equal(state.pairs.correct, wanted.correct)
        assert state.pairs.about.n == len(given)
    again = Report.from_dict(json.loads(report.to_json()))
    for state, wanted in zip(again.states, report.states, strict=True):
        for name in ("confidence", "correct", "log_uncertainty"):
            assert torch.equal(getattr(state.pairs, name), getattr(wanted.pairs, name))
        assert state.pairs.about == wanted.pairs.about
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
    made = evaluate(predictions(), intervals=False).to_dict()
    made["states"][0]["pairs"] |= change
    with pytest.raises(ValueError, match=message):
        Report.from_dict(made)


def test_named_calibrators_are_fitted_on_calibration_data():
    given, val = predictions(), predictions(500, seed=1, split="other")
    state = evaluate(given, posthoc=["temperature"], calibration=val, intervals=False).after["temperature"]
    wanted = posthoc.Temperature().fit(val)
    assert state.parameters["temperature"] == wanted.temperature
    assert state.fits[0].n == 500
    assert float(state["nll"]) == pytest.approx(float(metrics.nll(wanted.transform(given))), rel=1e-9)


@pytest.mark.usefixtures("in_small_parts")
def test_without_calibration_data_calibrators_are_cross_fitted():
    """Random labels cannot be predicted, except by a calibrator that was fitted on them."""
    given = predictions(600)
    random = torch.Generator().manual_seed(5)
    noise = Predictions(given.logits, torch.randint(7, (600,), generator=random), split="val")
    state = evaluate(noise, posthoc=["isotonic"], intervals=False).after["isotonic"]
    leaking = posthoc.Isotonic().fit(noise.logits, noise.labels).transform(noise)
    assert metrics.nll(leaking) < math.log(7) - 0.02
    assert state["nll"] > math.log(7) - 0.01
    assert [fit.n for fit in state.fits] == [480] * 5
    assert all("val" in fit.split != "val" for fit in state.fits)


def test_cross_fitting_finds_the_right_temperature():
    state = evaluate(predictions(4000), posthoc=["temperature"], intervals=False).after["temperature"]
    assert state.parameters["temperature"] == pytest.approx(3, rel=0.1)
    assert state["ece"] < 0.03


def test_several_calibrators_of_one_class_have_separate_results():
    options = [posthoc.Temperature(), posthoc.Temperature(objective="ece", search="grid"), "vector_scaling"]
    report = evaluate(predictions(), posthoc=options, calibration=predictions(seed=1, split="other"), intervals=False)
    assert list(report.after) == ["temperature", "temperature 2", "vector_scaling"]
    assert options[0].fitted is None  # what is given is left alone


def test_evaluating_on_the_fitting_samples_warns():
    given = predictions()
    for options in (
        {"posthoc": [posthoc.Temperature().fit(given)]},
        {"posthoc": ["temperature"], "calibration": given},
        {"posthoc": ["temperature"], "calibration": predictions(seed=1)},
    ):
        with pytest.warns(UserWarning, match=r"temperature.*fitted") as warned:
            evaluate(given, intervals=False, **options)
        assert "None" not in str(warned[0].message)


def evaluate_after(given, other):
    return evaluate(given, posthoc=["temperature"], calibration=other, intervals=False).after["temperature"]


def unnamed(given, **rest):
    return Predictions(given.logits, given.labels, **rest)


@pytest.mark.parametrize("what", ["copy", "other order", "part", "more"])
def test_calibrating_on_copies_of_evaluated_samples_warns(what):
    """Regression: copies of the evaluated file were not detected."""
    given, more = unnamed(predictions(200)), predictions(100, seed=1)
    order = torch.randperm(200)
    other = {
        "copy": unnamed(given),
        "other order": given[order],
        "part": given[order[:50]],
        "more": Predictions(torch.cat([more.logits, given.logits[:30]]), torch.cat([more.labels, given.labels[:30]])),
    }[what]
    leaked = {"copy": 200, "other order": 200, "part": 50, "more": 30}[what]
    with pytest.warns(UserWarning, match=f"temperature.*{'' if leaked == 200 else leaked}.*samples"):
        state = evaluate_after(given, other)
    assert state.leaked == leaked
    assert type(state).from_dict(state.to_dict()).leaked == leaked


@pytest.mark.parametrize("word", ["ids", "index"])
def test_ids_detect_overlap_of_calibration_and_test_samples(word):
    given = predictions(200)
    names = [f"image {i}" for i in range(300)] if word == "ids" else torch.arange(300)
    rounded = Predictions.from_probs(given.probs.double().round(decimals=4), given.labels)
    evaluated = unnamed(given, **{word: names[:200]})
    other = unnamed(rounded[150:], **{word: names[150:200]})
    with pytest.warns(UserWarning, match=r"temperature.*50.*samples"):
        assert evaluate_after(evaluated, other).leaked == 50
    # Two splits whose samples are both counted from zero have no sample in common.
    assert evaluate_after(evaluated, unnamed(predictions(200, seed=1), **{word: names[:200]})).leaked == 0
    assert evaluate_after(evaluated, unnamed(predictions(100, seed=2), **{word: names[200:]})).leaked == 0


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
    made = evaluate(predictions(), posthoc=["temperature"], intervals=False).to_dict()
    state = made["states"][1]
    (state if change.keys() <= {"leaked", "name"} else state["fits"][0]).update(change)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made))
    with pytest.raises(ValueError, match=rf"report\.json.*{message}"):
        Report.load(path)


@pytest.mark.parametrize(("name", "value"), [("n", "many"), ("classes", 2.5), ("split", 3)])
def test_invalid_report_metadata_raises(name, value):
    made = evaluate(predictions(), intervals=False).to_dict()
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{value}"):
        Report.from_dict(made | {name: value})


def test_chance_matches_of_rounded_rows_do_not_warn():
    make = torch.Generator().manual_seed(0)
    shares = [(torch.rand(400, generator=make) * 20).round() / 20 for _ in range(2)]
    labels = [(torch.rand(400, generator=make) < 0.8 * share + 0.1).long() for share in shares]
    evaluated, other = (Predictions.from_probs(share, label) for share, label in zip(shares, labels, strict=True))
    assert evaluate_after(evaluated, other).leaked == 0


@pytest.mark.usefixtures("in_small_parts")
def test_ood_detection_equals_detect():
    given, shifted = predictions(), predictions(400, seed=2, scale=1.0)
    unlabelled = Predictions(shifted.logits, features=shifted.features)
    train = torch.rand(50, 5)
    report = evaluate(given, ood={"a": unlabelled}, train_features=train, posthoc=["temperature"], resamples=100)
    wanted = ood.detect(given, {"a": unlabelled}, train_features=train)
    assert report.before.detection.to_dict() == wanted.to_dict()
    scores = report.after["temperature"].detection["a"]
    assert set(scores) == {"max_probability", "entropy", "generalised_entropy"}
    assert scores["entropy"].auroc.n == 1300


def test_ood_data_accepts_logits_arrays():
    given = predictions()
    report = evaluate(given, ood={"noise": torch.randn(50, 7), "other": np.zeros((20, 7))}, intervals=False)
    assert set(report.before.detection.sets) == {"noise", "other"}
    with pytest.raises(ValueError, match=r"noise.*5"):
        evaluate(given, ood={"noise": torch.randn(50, 5)})


def test_report_round_trips_through_its_file(tmp_path: Path):
    report = evaluate(predictions(), posthoc=["temperature"], ood={"a": torch.randn(60, 7)}, resamples=100)
    report.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again.to_dict() == report.to_dict()
    assert json.loads((tmp_path / "report.json").read_text())["split"] == "val"
    assert str(again) == str(report)
    assert torch.equal(again.before.bins["width"].counts, report.before.bins["width"].counts)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json.*format"):
        Report.load(tmp_path / "other.json")


def test_report_bins_equal_histogram_bins():
    given = predictions()
    bins = evaluate(given, intervals=False).before.bins
    assert torch.equal(bins["width"].counts, metrics.histogram(given).bins.counts)
    assert torch.equal(bins["mass"].counts, metrics.histogram(given, binning="mass").bins.counts)
    assert int(bins["mass"].counts.sum()) == 900


def test_report_prints_a_table():
    text = str(evaluate(predictions(), posthoc=["temperature"], resamples=100, ood={"far": torch.randn(40, 7)}))
    for word in (
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
        assert word in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_soft_labels_and_top_label_predictions_have_supported_metrics():
    given = predictions()
    soft = evaluate(Predictions(given.logits, given.logits.softmax(1)), resamples=100)
    assert float(soft["ece"]) == pytest.approx(0, abs=1e-6)
    assert "ks_test" not in soft.before.results
    top = evaluate(TopLabelPredictions(given.confidence, given.correct), resamples=100)
    assert "nll" not in top.before.results
    assert float(top["ece"]) == pytest.approx(float(metrics.ece(given)), abs=1e-6)


def test_accuracy_below_guessing_warns():
    """Labels that are numbered from 1, without the last class, are valid numbers."""
    logits = predictions(classes=4).logits
    labels = logits[:, :3].argmax(1) + 1
    with pytest.warns(UserWarning, match=r"below the 25\.0% .* numbered from 1"):
        evaluate(logits, labels, logits=True, intervals=False)


def test_probabilities_are_not_renormalised():
    given = predictions()
    probs = given.probs.round(decimals=2)
    probs = probs / probs.sum(1, keepdim=True)
    table = Predictions.from_probs(probs, given.labels)
    report = evaluate(table, intervals=False)
    assert float(report["nll"]) == pytest.approx(float(metrics.nll(table)), rel=1e-12)
    assert report["nll"].details["floored"] == metrics.nll(table).details["floored"] > 0


def test_invalid_input_raises():
    given = predictions()
    with pytest.raises(ValueError, match=r"level.*95"):
        evaluate(given, level=95)
    with pytest.raises(ValueError, match=r"calibrator.*'temp'"):
        evaluate(given, posthoc=["temp"])
    with pytest.raises(ValueError, match="labels"):
        evaluate(Predictions(given.logits))
    with pytest.raises(ValueError, match=r"9.*temperature.*calibration="):
        evaluate(given[:9], posthoc=["temperature"])


def test_evaluate_is_part_of_the_public_api():
    assert fedlas.evaluate is evaluate
    assert fedlas.Report is Report


def test_logits_are_read_once_per_chunk(monkeypatch: pytest.MonkeyPatch):
    """Every part is taken from the table once, however many calibrators there are."""
    given, val = predictions(), predictions(seed=1)
    monkeypatch.setattr("fedlas.predictions.probabilities.AT_ONCE", 700)
    calibrators = [posthoc.build_calibrator(n).fit(val.logits, val.labels) for n in ("temperature", "vector_scaling")]
    taken: list[slice] = []
    plain = Predictions.__getitem__

    def watched(self: Predictions, rows: slice) -> Predictions:
        taken.append(rows)
        return plain(self, rows)

    def refuse_whole(self: Predictions) -> torch.Tensor:
        assert len(self) <= 100, "probabilities of the whole table were made"
        return self.logits.softmax(1)

    monkeypatch.setattr(Predictions, "__getitem__", watched)
    monkeypatch.setattr(Predictions, "probs", property(refuse_whole))
    evaluate(given, posthoc=calibrators, intervals=True, resamples=100)
    assert [(rows.start, rows.stop) for rows in taken] == [(100 * i, 100 * i + 100) for i in range(9)]


@pytest.mark.parametrize("seeds", [8, pytest.param(30, marks=pytest.mark.campaign)])
def test_cross_fitting_does_not_create_ood_separation(seeds):
    """ID and OOD samples from the same distribution: calibrators must not separate them."""
    held = []
    for seed in range(seeds):
        both = predictions(400, seed=seed)
        report = evaluate(both[:200], ood={"same": both[200:].logits}, posthoc=["isotonic"], intervals=False)
        held.append(0.5 in report.after["isotonic"].detection["same"]["max_probability"].auroc.interval)
    assert sum(held) >= 25 / 30 * seeds


def test_report_can_be_pickled_and_copied():
    report = evaluate(predictions(100), ood={"a": torch.randn(60, 7)}, resamples=100)
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again.to_dict() == report.to_dict()
    assert report != pickle.loads(pickle.dumps(report))


def test_single_calibrator_needs_no_list_and_invalid_ones_raise():
    given = predictions(200)
    for one in ("temperature", posthoc.Temperature()):
        assert list(evaluate(given, posthoc=one, intervals=False).after) == ["temperature"]
    names = (name for name in ("temperature", "vector_scaling"))
    assert list(evaluate(given, posthoc=names, intervals=False).after) == ["temperature", "vector_scaling"]
    assert not evaluate(given, posthoc=None, intervals=False).after
    unchecked = inspect.unwrap(evaluate)
    with pytest.raises(TypeError, match=r"posthoc.*Temperature\(\)"):
        unchecked(given, posthoc=[posthoc.Temperature], intervals=False)
    with pytest.raises(TypeError, match=r"ood.*svhn"):
        unchecked(given, ood=[given.logits])
    with pytest.raises(ValueError, match=r"logits="):
        unchecked(given.logits, given.labels)
    with pytest.raises(KeyError, match=r"'acuracy'.*'accuracy'"):
        evaluate(given, intervals=False)["acuracy"]


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
    given, val = predictions(), predictions(500, seed=1, split="other")
    for options in ({"calibration": val}, {}):
        report = evaluate(given, posthoc="temperature", intervals=False, **options)
        after = fedlas.calibrate(given, posthoc="temperature", **options)
        assert torch.equal(after.confidence, report.after["temperature"].pairs.confidence)
        assert torch.equal(after.labels, given.labels)
    fitted = posthoc.Temperature().fit(val)
    assert torch.equal(fedlas.calibrate(given, posthoc=fitted).logits, fitted.transform(given).logits)
    with pytest.raises(TypeError, match="posthoc"):
        fedlas.calibrate(given, posthoc=3)


def test_compare_accepts_arrays_files_and_predictions(tmp_path):
    first, second = predictions(), predictions(scale=1.0)
    expected = compare_models({"a": first, "b": second}, resamples=200)
    found = fedlas.compare(first, second, resamples=200)
    assert found == {one.metric: one.comparison for one in expected}
    fedlas.write_predictions(first, tmp_path / "a.npz")
    fedlas.write_predictions(second, tmp_path / "b.npz")
    files = fedlas.compare(tmp_path / "a.npz", tmp_path / "b.npz", metrics=["ece"], resamples=200)
    arrays = fedlas.compare(first.logits, second.logits, first.labels, logits=True, metrics=["ece"], resamples=200)
    assert files["ece"].difference == arrays["ece"].difference == found["ece"].difference
    with pytest.raises(ValueError, match="nosuch"):
        fedlas.compare(first, second, metrics=["nosuch"])


def test_predictions_without_labels_are_calibrated_with_calibration_data():
    """Labels are needed for cross-fitting alone."""
    fitted_on, unlabelled = predictions(500, seed=1, split="other"), Predictions(predictions().logits)
    calibrated = fedlas.calibrate(unlabelled, calibration=fitted_on)
    expected = posthoc.Temperature().fit(fitted_on).transform(unlabelled).logits
    assert torch.equal(calibrated.logits, expected)
    from_table = fedlas.calibrate({"logits": unlabelled.logits}, calibration=fitted_on)
    assert torch.equal(from_table.logits, expected)


def test_compare_metrics_must_be_a_list():
    with pytest.raises(TypeError, match=r"\['ece'\]"):
        fedlas.compare(predictions(), predictions(), metrics="ece")


def test_compare_with_a_negative_seed_raises():
    with pytest.raises(ValueError, match="seed is -1"):
        fedlas.compare(predictions(), predictions(), seed=-1)


def test_probabilities_of_two_decimals_get_every_interval():
    """Rows whose sum is 0.99 or 1.01 are accepted when they are read."""
    torch.manual_seed(0)
    probs = (2 * torch.randn(80, 4)).softmax(1).double().round(decimals=2)
    assert float(probs.sum(1).max()) > 1.005
    report = evaluate(Predictions.from_probs(probs, torch.randint(4, (80,))), resamples=50)
    assert report["classwise_ece"].interval is not None
