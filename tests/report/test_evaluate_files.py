"""`evaluate_files`: summary text, comparison of models, conditions, and input that is refused."""

import base64
import contextlib
import inspect
import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import fedlas
from fedlas.cli.evaluation import evaluate_command
from fedlas.evaluation import FOLDS, evaluate
from fedlas.evaluation_report import Report
from fedlas.integrations.base import ValidationMetrics
from fedlas.integrations.sklearn import CalibratedClassifier
from fedlas.integrations.torchmetrics import calibration_metrics
from fedlas.io import write_predictions
from fedlas.metrics import ece
from fedlas.metrics.paired import paired_bootstrap
from fedlas.predictions import Predictions
from fedlas.report.conditions import Condition
from fedlas.report.evaluate_files import evaluate_files
from fedlas.report.figures import reliability_data, reliability_figure, save_figures
from fedlas.report.html import save_page
from fedlas.report.model import Model

N, CLASSES = 600, 4


def sample_predictions(seed: int, sharpness: float = 3.0, n: int = N) -> Predictions:
    """Predictions whose logits are `sharpness` times those that the labels were drawn from."""
    generator = torch.Generator().manual_seed(seed)
    true_logits = 1.5 * torch.randn(n, CLASSES, generator=generator)
    labels = torch.multinomial(true_logits.softmax(1), 1, generator=generator)[:, 0]
    return Predictions(sharpness * true_logits, labels, class_names=["ant", "bee", "cow", "dog"])


@pytest.fixture
def sure_file(tmp_path):
    return write_predictions(sample_predictions(0), tmp_path / "sure.npz")


@pytest.fixture(autouse=True)
def without_intervals(monkeypatch):
    """Leave out the intervals of reports, which take most of the time; `result` has them."""
    monkeypatch.setattr("fedlas.report.model.evaluate", partial(evaluate, intervals=False))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = write_predictions(sample_predictions(0), tmp_path_factory.mktemp("result") / "sure.npz")
    return evaluate_files([path], resamples=200)


def test_evaluate_files_equals_evaluate(result):
    expected = evaluate(sample_predictions(0), posthoc="temperature", resamples=200)
    assert result.reports["sure"].to_json() == expected.to_json()
    assert float(result.reports["sure"]["ece"]) == float(ece(sample_predictions(0)))
    assert len(result.reports["sure"].after["temperature"].fits) == FOLDS


def test_summary_has_direction_temperature_and_metrics(result):
    lines = result.lines()
    assert lines[0].startswith("sure: over-confident by ")
    assert "T = " in lines[0]
    text, report = " ".join(lines[1:]), result.reports["sure"]
    for name in ("accuracy", "ece"):
        assert f"{100 * float(report[name]):.1f} % (" in text
    assert f"{report['ece'].details['noise_floor']:.1%}".replace("%", " %") in text
    assert re.search(f"cross-fitted in {FOLDS} ", text)


def test_calibration_file_is_used_for_fitting(sure_file, tmp_path):
    val_file = write_predictions(sample_predictions(1), tmp_path / "val.csv")
    result = evaluate_files([sure_file], calibration=[val_file], resamples=100)
    (fit,) = result.reports["sure"].after["temperature"].fits
    assert fit.n == N
    assert result.reports["sure"].after["temperature"].parameters["temperature"] == pytest.approx(3, rel=0.2)
    with pytest.raises(ValueError, match=r"sure\.npz"):
        evaluate_files([sure_file], calibration=[sure_file])
    three_class_file = write_predictions(Predictions(torch.randn(9, 3), [0] * 9), tmp_path / "three.npz")
    with pytest.raises(ValueError, match=r"three\.npz.* 3 classes.* 4"):
        evaluate_files([sure_file], calibration=[three_class_file])
    names = ["bee", "ant", "cow", "dog"]
    reordered_file = write_predictions(
        Predictions(sample_predictions(1).logits, sample_predictions(1).labels, class_names=names), tmp_path / "s.npz"
    )
    with pytest.raises(ValueError, match=r"s\.npz.* classes.* order"):
        evaluate_files([sure_file], calibration=[reordered_file])


def test_several_models_are_compared_on_the_same_samples(sure_file, tmp_path):
    calibrated_file = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.parquet")
    result = evaluate_files([sure_file, f"second={calibrated_file}"], resamples=100)
    assert list(result.reports) == ["sure", "second"]
    ece_test = next(test for test in result.comparisons if test.metric == "ece")
    assert ece_test.comparison.better == "second"
    expected = paired_bootstrap(ece, sample_predictions(0), sample_predictions(0, 1.0))
    assert ece_test.comparison.difference == expected.difference
    assert any(re.match(r"sure and second: ECE .*\+", line) for line in result.lines())
    header, rows = result.table()
    assert header[:2] == ["model", "state"]
    assert [row[:2] for row in rows] == [
        ["sure", "uncalibrated"], ["sure", "temperature"], ["second", "uncalibrated"], ["second", "temperature"],
    ]  # fmt: skip


def test_different_samples_are_not_compared_with_a_note(sure_file, tmp_path):
    other_file = write_predictions(sample_predictions(5), tmp_path / "other.npz")
    result = evaluate_files([sure_file, other_file], resamples=100)
    (test,) = result.comparisons
    assert (test.comparison, bool(test.reason)) == (None, True)
    assert any(re.fullmatch(f"sure and other .*{re.escape(test.reason)}", line) for line in result.lines())
    assert json.loads(result.to_json())["comparisons"][0]["reason"] == test.reason


def test_table_and_paired_test_use_the_same_bins(sure_file, tmp_path):
    calibrated_file = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.npz")
    result = evaluate_files([sure_file, calibrated_file], bins=3, resamples=60)
    ece_comparison = next(test.comparison for test in result.comparisons if test.metric == "ece")
    assert float(ece_comparison.first) == float(result.reports["sure"]["ece"])
    expected = paired_bootstrap(ece, sample_predictions(0), sample_predictions(0, 1.0), bins=3, resamples=60)
    assert ece_comparison.interval == expected.interval


@pytest.mark.parametrize("id_field", ["ids", "index"])
def test_samples_are_paired_by_id_or_index(tmp_path, id_field):
    """Equal labels cannot reveal a different order."""
    predictions, order = sample_predictions(0, n=200), torch.randperm(200)
    sample_ids = torch.arange(200) + 7
    labels = torch.zeros(200, dtype=torch.long)
    first = Predictions(predictions.logits, labels, **{id_field: sample_ids})
    second = Predictions(predictions.logits[order], labels, **{id_field: sample_ids[order]})
    files = [write_predictions(model, tmp_path / f"{k}.npz") for k, model in enumerate((first, second))]
    result = evaluate_files(files, posthoc=(), resamples=50)
    assert [test.comparison.difference for test in result.comparisons if test.metric == "nll"] == [0]
    for new_id, message in {9: f"9'? occurs 2 times in {id_field}", 999: f"{id_field}.* 1 .* 1 "}.items():
        changed_ids = torch.where(sample_ids[order] == 8, new_id, sample_ids[order])
        write_predictions(Predictions(second.logits, labels, **{id_field: changed_ids}), files[1])
        repeated = id_field == "ids" and new_id == 9
        with pytest.warns(UserWarning, match="occur before") if repeated else contextlib.nullcontext():
            (test,) = evaluate_files(files, posthoc=(), resamples=50).comparisons
        assert test.comparison is None
        assert re.search(message, test.reason)


def test_ood_files_give_detection_metrics(sure_file, tmp_path):
    ood_file = write_predictions(Predictions(0.1 * torch.randn(50, CLASSES)), tmp_path / "far.npz")
    result = evaluate_files([sure_file], ood=[f"noise={ood_file}"], resamples=100)
    assert float(result.reports["sure"].before.detection.sets["noise"]["entropy"].auroc) > 0.9
    assert set(result.detections()) == {"sure, uncalibrated", "sure, temperature"}
    two_model_result = evaluate_files([sure_file, f"two={sure_file}"], ood=[f"two/noise={ood_file}"], resamples=100)
    assert two_model_result.reports["sure"].before.detection is None
    assert two_model_result.reports["two"].before.detection is not None


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ((), {}, "no file"),
        (("a=P", "a=P"), {}, "'a'.* NAME=FILE"),
        (("a=P", "b=P"), {"calibration": ["P"]}, "MODEL=FILE.* a, b"),
        (("P",), {"calibration": ["x=P"]}, "MODEL=FILE.* sure"),
        (("P",), {"ood": ["P"]}, "NAME=FILE"),
        (("a=P", "b=P"), {"ood": ["far=P"]}, "far=.* MODEL/NAME=FILE.* a, b"),
        (("P",), {"ood": ["far=P", "far=P"]}, "two .* far$"),
        (("P",), {"folds": 1}, "folds is 1"),
        (("P",), {"posthoc": ["temprature"]}, "temprature.*'temperature'"),
    ],
)
def test_invalid_files_and_options_raise(sure_file, files, options, message):
    def with_path(arguments):
        return [
            str(sure_file) if argument == "P" else argument.replace("=P", f"={sure_file}") for argument in arguments
        ]

    options = {name: with_path(value) if isinstance(value, list) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        evaluate_files(with_path(files), **options)


def test_arrays_raise_with_the_form_to_use():
    probs, labels = torch.full((4, 2), 0.5), torch.zeros(4).long()
    unchecked_save_page, unchecked_evaluate_files = inspect.unwrap(save_page), inspect.unwrap(evaluate_files)
    with pytest.raises(TypeError, match=r"Predictions\.from_probs\(probs, labels\)"):
        unchecked_save_page(probs, labels)
    for argument in ({"a": probs}, probs):
        with pytest.raises(TypeError, match=r"Tensor; fedlas\.evaluate"):
            unchecked_evaluate_files(argument)
    with pytest.raises(TypeError, match="predictions"):  # the shape checks of the tests raise first
        Model(predictions=probs)


def test_single_values_are_accepted_instead_of_lists(sure_file, tmp_path):
    val_file = write_predictions(sample_predictions(1), tmp_path / "val.npz")
    ood_file = write_predictions(Predictions(torch.randn(50, CLASSES)), tmp_path / "far.npz")
    options = {"posthoc": "temperature", "calibration": str(val_file), "ood": {"far": ood_file}, "resamples": 50}
    result = evaluate_files(str(sure_file), **options)
    expected = evaluate_files(
        [sure_file], posthoc=["temperature"], calibration=[val_file], ood=[f"far={ood_file}"], resamples=50
    )
    assert result.to_json() == expected.to_json()
    assert list(result.reports["sure"].before.detection.sets) == ["far"]
    two_model_result = evaluate_files(
        {"a": sure_file, "b": str(sure_file)}, calibration={"b": val_file}, ood={"a/far": ood_file}, resamples=50
    )
    assert [len(report.after["temperature"].fits) for report in two_model_result.reports.values()] == [FOLDS, 1]
    assert [report.before.detection is None for report in two_model_result.reports.values()] == [False, True]


def test_model_attributes_are_used_in_its_report(sure_file):
    """A run folder is evaluated this way."""
    ood = Predictions(torch.randn(50, CLASSES))
    log = [{"epoch": 1}]
    model = Model(
        predictions=sample_predictions(0),
        calibration=sample_predictions(1),
        ood={"far": ood},
        log=log,
        recipe={"lr": 1},
    )
    result = evaluate_files({"run": model, "file": sure_file}, resamples=50)
    report = result.reports["run"]
    assert len(report.after["temperature"].fits) == 1
    assert report.before.detection is not None
    assert (result.models["run"].log, result.models["run"].recipe) == (log, {"lr": 1})
    saved_models = json.loads(result.to_json())["models"]
    assert (saved_models["run"]["file"], saved_models["file"]["file"]) == (None, str(sure_file))
    second_result = evaluate_files({"run": result.models["run"]})
    assert second_result.reports["run"] is report
    with pytest.raises(ValueError, match=r"run .*report"):
        evaluate_files({"run": result.models["run"]}, calibration=sure_file)
    with pytest.raises(ValueError, match=r"run .*predictions"):
        evaluate_files({"run": Model()})


def test_the_public_api_exports_models_and_figures():
    assert (fedlas.Model, fedlas.save_figures) == (Model, save_figures)
    assert {"Model", "save_figures"} <= set(fedlas.__all__)


def test_model_and_evaluate_files_cross_fit_equally(result, monkeypatch):
    monkeypatch.undo()  # with intervals
    report = Model(predictions=sample_predictions(0)).evaluate(resamples=200)
    assert report.to_json() == result.reports["sure"].to_json()


def test_images_are_searched_next_to_the_file_and_in_the_images_folder(tmp_path):
    predictions = Predictions(sample_predictions(0).logits, sample_predictions(0).labels, paths=["one.png"] * N)
    path = write_predictions(predictions, tmp_path / "with.npz")
    for images, folders in {None: (tmp_path,), "elsewhere": (tmp_path, Path("elsewhere"))}.items():
        (model,) = evaluate_files(path, posthoc=(), resamples=50, images=images).models.values()
        assert model.image_folders == folders


def test_models_are_named_after_their_files(tmp_path):
    files = [
        write_predictions(sample_predictions(0), tmp_path / name) for name in ("a/test.npz", "b/test.npz", "lr=0.1.npz")
    ]
    names = list(evaluate_files(files, resamples=50).reports)
    assert [name.split("/")[-2:] for name in names] == [["a", "test"], ["b", "test"], ["lr=0.1"]]


def test_top_confidence_is_evaluated_without_a_calibrator(tmp_path):
    rows = "\n".join(f"0.9{i % 10},{'ab'[i % 3 == 0]},a" for i in range(60))
    (tmp_path / "top.csv").write_text(f"confidence,prediction,label\n{rows}\n")
    result = evaluate_files([tmp_path / "top.csv"], resamples=100)
    assert not result.reports["top"].after
    (note,) = result.notes
    assert re.match("top: .*calibrator", note)
    assert result.lines()[0].startswith("top: ")


def test_failed_returns_the_conditions_that_hold(result):
    error = float(result.reports["sure"]["ece"])
    true_conditions = [
        f"ece>{error - 0.001}",
        f"ece>={100 * error - 0.1}%",
        "accuracy<1",
        "temperature.ece<0.5",
        "ece.high>0",
    ]
    false_conditions = [f"ece>{error + 0.001}", "ece.low>0.9", "temperature.accuracy < 1e-3", "nll<=-1"]
    assert len(result.failed(true_conditions)) == len(true_conditions)
    assert result.failed(false_conditions) == []
    (message,) = result.failed([true_conditions[0]])
    assert re.match(f"sure: ece .*{error:.6g}.* ece>", message)


@pytest.mark.parametrize("text", ["ece", "ece>", ">0.1", "ece=0.1", "ece>a", "a.b.c>1", "ece>0.1 or so", ""])
def test_invalid_conditions_raise(text):
    with pytest.raises(ValueError, match=r"condition|before >"):
        Condition.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eec>0.1", "'eec'.* ece"),
        ("isotonic.ece>0.1", "'isotonic'.* uncalibrated, temperature"),
        ("mce.high>0.1", r"mce\.high"),
    ],
)
def test_condition_on_a_missing_value_raises(result, text, message):
    with pytest.raises(ValueError, match=message):
        result.failed([text])


def test_result_is_written_to_json(sure_file, tmp_path):
    calibrated_file = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.npz")
    result = evaluate_files([sure_file, calibrated_file], resamples=100)
    data = json.loads(result.to_json())
    assert data["models"]["sure"]["headline"] in result.lines()[0]
    assert Report.from_dict(data["models"]["calm"]["report"]).to_dict() == result.reports["calm"].to_dict(samples=False)
    assert {tuple(comparison["models"]) for comparison in data["comparisons"]} == {("sure", "calm")}


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.undo()  # intervals have steps, too
    path, calls = write_predictions(sample_predictions(0), tmp_path / "sure.csv"), []
    evaluate_files(
        [path, f"again={path}"], resamples=50, progress=lambda step, fraction: calls.append((step, fraction))
    )
    steps = list(dict.fromkeys(step for step, _ in calls))
    assert [step.split()[-1] for step in steps] == ["sure.csv", "sure", "again", "models"]
    for step in steps:
        fractions = [fraction for name, fraction in calls if name == step]
        assert fractions[-1] == 1.0, step
    fractions = [fraction for name, fraction in calls if name == steps[1]]
    assert fractions == sorted(fractions)
    # The fraction grows with each of five fitted folds and with the intervals of two states.
    assert len({round(fraction, 3) for fraction in fractions}) >= 5


def test_results_have_an_html_repr(sure_file, tmp_path):
    """Untrusted names must be escaped."""
    hostile_name = "<script>alert(1)</script>"
    ood_file = write_predictions(Predictions(torch.randn(50, CLASSES)), tmp_path / "far.npz")
    result = evaluate_files(
        [f"{hostile_name}={sure_file}", f"b={sure_file}"], ood=[f"b/{hostile_name}={ood_file}"], resamples=100
    )
    report = result.reports["b"]
    for item in (result, report, report["ece"], report.before.detection, result.comparisons[0].comparison):
        text = item._repr_html_()
        assert text.count("<") == text.count(">") > 0
        assert "<script" not in text
    assert "&lt;script&gt;" in result._repr_html_()
    assert report["ece"].cell() in report._repr_html_()
    assert "AUROC" in report._repr_html_()


def test_figure_has_an_html_repr(result):
    report = result.reports["sure"]
    figure = reliability_figure(
        {"": [reliability_data(report.before.bins["width"], float(report["ece"]), "uncalibrated")]}
    )
    start, _, encoded = figure._repr_html_().partition("base64,")
    assert start.startswith('<img alt="figure" width="')
    picture = Image.open(io.BytesIO(base64.b64decode(encoded.removesuffix('">'))))
    assert picture.format == "PNG"
    assert picture.size == tuple(int(200 * inches) for inches in figure.get_size_inches())


def test_all_functions_share_the_default_number_of_folds():
    functions = {"folds": (evaluate, evaluate_files, evaluate_command, Model), "cv": (CalibratedClassifier,)}
    defaults = [
        inspect.signature(function).parameters[name].default for name in functions for function in functions[name]
    ]
    assert defaults == [FOLDS] * 5


def test_adapters_use_the_metric_names_of_evaluate():
    predictions = sample_predictions(0, n=40)
    validation_metrics = ValidationMetrics()
    validation_metrics.add(predictions.logits, predictions.labels)
    report = evaluate(predictions, intervals=False)
    assert set(validation_metrics.read()) | set(calibration_metrics("logits")) <= set(report.before.results)
