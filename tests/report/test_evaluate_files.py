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
from fedlas.evaluation import FOLDS, Report, evaluate
from fedlas.integrations.base import ValidationMetrics
from fedlas.integrations.sklearn import CalibratedClassifier
from fedlas.integrations.torchmetrics import calibration_metrics
from fedlas.io import write_predictions
from fedlas.metrics import ece
from fedlas.metrics.paired import paired_bootstrap
from fedlas.predictions import Predictions
from fedlas.report.evaluation_result import Condition, evaluate_files
from fedlas.report.figures import reliability_data, reliability_figure, save_figures
from fedlas.report.html import report_of, save_page
from fedlas.report.model import Model

N, CLASSES = 600, 4


def sample_predictions(seed: int, sharpness: float = 3.0, n: int = N) -> Predictions:
    """Draw labels from a softmax; the logits given are `sharpness` times those of that softmax."""
    make = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(n, CLASSES, generator=make)
    labels = torch.multinomial(true.softmax(1), 1, generator=make)[:, 0]
    return Predictions(sharpness * true, labels, class_names=["ant", "bee", "cow", "dog"])


@pytest.fixture
def sure(tmp_path):
    return write_predictions(sample_predictions(0), tmp_path / "sure.npz")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Leave out the intervals of reports, which take most of the time; `result` has them."""
    monkeypatch.setattr("fedlas.report.evaluation_result.evaluate", partial(evaluate, intervals=False))


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
    said, report = " ".join(lines[1:]), result.reports["sure"]
    for name in ("accuracy", "ece"):
        assert f"{100 * float(report[name]):.1f} % (" in said
    assert f"{report['ece'].details['noise_floor']:.1%}".replace("%", " %") in said
    assert re.search(f"cross-fitted in {FOLDS} ", said)


def test_calibration_file_is_used_for_fitting(sure, tmp_path):
    val = write_predictions(sample_predictions(1), tmp_path / "val.csv")
    result = evaluate_files([sure], calibration=[val], resamples=100)
    (fit,) = result.reports["sure"].after["temperature"].fits
    assert fit.n == N
    assert result.reports["sure"].after["temperature"].parameters["temperature"] == pytest.approx(3, rel=0.2)
    with pytest.raises(ValueError, match=r"sure\.npz"):
        evaluate_files([sure], calibration=[sure])
    other = write_predictions(Predictions(torch.randn(9, 3), [0] * 9), tmp_path / "three.npz")
    with pytest.raises(ValueError, match=r"three\.npz.* 3 classes.* 4"):
        evaluate_files([sure], calibration=[other])
    names = ["bee", "ant", "cow", "dog"]
    swapped = write_predictions(
        Predictions(sample_predictions(1).logits, sample_predictions(1).labels, class_names=names), tmp_path / "s.npz"
    )
    with pytest.raises(ValueError, match=r"s\.npz.* classes.* order"):
        evaluate_files([sure], calibration=[swapped])


def test_several_models_are_compared_on_the_same_samples(sure, tmp_path):
    calm = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.parquet")
    result = evaluate_files([sure, f"second={calm}"], resamples=100)
    assert list(result.reports) == ["sure", "second"]
    found = next(one for one in result.comparisons if one.metric == "ece")
    assert found.comparison.better == "second"
    expected = paired_bootstrap(ece, sample_predictions(0), sample_predictions(0, 1.0))
    assert found.comparison.difference == expected.difference
    assert any(re.match(r"sure and second: ECE .*\+", line) for line in result.lines())
    head, rows = result.table()
    assert head[:2] == ["model", "state"]
    assert [row[:2] for row in rows] == [
        ["sure", "uncalibrated"], ["sure", "temperature"], ["second", "uncalibrated"], ["second", "temperature"],
    ]  # fmt: skip


def test_different_samples_are_not_compared_with_a_note(sure, tmp_path):
    other = write_predictions(sample_predictions(5), tmp_path / "other.npz")
    result = evaluate_files([sure, other], resamples=100)
    (test,) = result.comparisons
    assert (test.comparison, bool(test.reason)) == (None, True)
    assert any(re.fullmatch(f"sure and other .*{re.escape(test.reason)}", line) for line in result.lines())
    assert json.loads(result.to_json())["comparisons"][0]["reason"] == test.reason


def test_table_and_paired_test_use_the_same_bins(sure, tmp_path):
    calm = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.npz")
    result = evaluate_files([sure, calm], bins=3, resamples=60)
    found = next(one.comparison for one in result.comparisons if one.metric == "ece")
    assert float(found.first) == float(result.reports["sure"]["ece"])
    expected = paired_bootstrap(ece, sample_predictions(0), sample_predictions(0, 1.0), bins=3, resamples=60)
    assert found.interval == expected.interval


@pytest.mark.parametrize("word", ["ids", "index"])
def test_samples_are_paired_by_id_or_index(tmp_path, word):
    """Equal labels cannot reveal a different order."""
    given, order = sample_predictions(0, n=200), torch.randperm(200)
    names = torch.arange(200) + 7
    labels = torch.zeros(200, dtype=torch.long)
    first = Predictions(given.logits, labels, **{word: names})
    second = Predictions(given.logits[order], labels, **{word: names[order]})
    files = [write_predictions(one, tmp_path / f"{k}.npz") for k, one in enumerate((first, second))]
    result = evaluate_files(files, posthoc=(), resamples=50)
    assert [one.comparison.difference for one in result.comparisons if one.metric == "nll"] == [0]
    for name, why in {9: f"{word}.* 2 times", 999: f"{word}.* 1 .* 1 "}.items():
        others = torch.where(names[order] == 8, name, names[order])
        write_predictions(Predictions(second.logits, labels, **{word: others}), files[1])
        repeated = word == "ids" and name == 9
        with pytest.warns(UserWarning, match="occur before") if repeated else contextlib.nullcontext():
            (test,) = evaluate_files(files, posthoc=(), resamples=50).comparisons
        assert test.comparison is None
        assert re.search(why, test.reason)


def test_ood_files_give_detection_metrics(sure, tmp_path):
    far = write_predictions(Predictions(0.1 * torch.randn(50, CLASSES)), tmp_path / "far.npz")
    result = evaluate_files([sure], ood=[f"noise={far}"], resamples=100)
    assert float(result.reports["sure"].before.detection.sets["noise"]["entropy"].auroc) > 0.9
    assert set(result.detections()) == {"sure, uncalibrated", "sure, temperature"}
    both = evaluate_files([sure, f"two={sure}"], ood=[f"two/noise={far}"], resamples=100)
    assert both.reports["sure"].before.detection is None
    assert both.reports["two"].before.detection is not None


@pytest.mark.parametrize(
    ("given", "options", "message"),
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
def test_invalid_files_and_options_raise(sure, given, options, message):
    def placed(words):
        return [str(sure) if word == "P" else word.replace("=P", f"={sure}") for word in words]

    options = {name: placed(value) if isinstance(value, list) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        evaluate_files(placed(given), **options)


def test_arrays_raise_with_the_form_to_use():
    probs, labels = torch.full((4, 2), 0.5), torch.zeros(4).long()
    save, files = inspect.unwrap(save_page), inspect.unwrap(evaluate_files)
    with pytest.raises(TypeError, match=r"Predictions\.from_probs\(probs, labels\)"):
        save(probs, labels)
    for given in ({"a": probs}, probs):
        with pytest.raises(TypeError, match=r"Tensor; fedlas\.evaluate"):
            files(given)
    with pytest.raises(TypeError, match="predictions"):  # the shape checks of the tests come first
        Model(predictions=probs)


def test_single_values_are_accepted_instead_of_lists(sure, tmp_path):
    val = write_predictions(sample_predictions(1), tmp_path / "val.npz")
    far = write_predictions(Predictions(torch.randn(50, CLASSES)), tmp_path / "far.npz")
    options = {"posthoc": "temperature", "calibration": str(val), "ood": {"far": far}, "resamples": 50}
    result = evaluate_files(str(sure), **options)
    expected = evaluate_files([sure], posthoc=["temperature"], calibration=[val], ood=[f"far={far}"], resamples=50)
    assert result.to_json() == expected.to_json()
    assert list(result.reports["sure"].before.detection.sets) == ["far"]
    several = evaluate_files({"a": sure, "b": str(sure)}, calibration={"b": val}, ood={"a/far": far}, resamples=50)
    assert [len(one.after["temperature"].fits) for one in several.reports.values()] == [FOLDS, 1]
    assert [one.before.detection is None for one in several.reports.values()] == [False, True]


def test_model_attributes_are_used_in_its_report(sure):
    """A run folder is evaluated this way."""
    far = Predictions(torch.randn(50, CLASSES))
    log = [{"epoch": 1}]
    known = Model(
        predictions=sample_predictions(0),
        calibration=sample_predictions(1),
        ood={"far": far},
        log=log,
        recipe={"lr": 1},
    )
    result = evaluate_files({"run": known, "file": sure}, resamples=50)
    report = result.reports["run"]
    assert len(report.after["temperature"].fits) == 1
    assert report.before.detection is not None
    assert (result.models["run"].log, result.models["run"].recipe) == (log, {"lr": 1})
    found = json.loads(result.to_json())["models"]
    assert (found["run"]["file"], found["file"]["file"]) == (None, str(sure))
    again = evaluate_files({"run": result.models["run"]})
    assert again.reports["run"] is report
    with pytest.raises(ValueError, match=r"run .*report"):
        evaluate_files({"run": result.models["run"]}, calibration=sure)
    with pytest.raises(ValueError, match=r"run .*predictions"):
        evaluate_files({"run": Model()})


def test_the_public_api_exports_models_and_figures():
    assert (fedlas.Model, fedlas.save_figures) == (Model, save_figures)
    assert {"Model", "save_figures"} <= set(fedlas.__all__)


def test_page_and_evaluate_files_cross_fit_equally(result):
    report = report_of(Model(predictions=sample_predictions(0)), resamples=200)
    assert report.to_json() == result.reports["sure"].to_json()


def test_images_are_searched_next_to_the_file_and_in_the_images_folder(tmp_path):
    given = Predictions(sample_predictions(0).logits, sample_predictions(0).labels, paths=["one.png"] * N)
    path = write_predictions(given, tmp_path / "with.npz")
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
    held = [f"ece>{error - 0.001}", f"ece>={100 * error - 0.1}%", "accuracy<1", "temperature.ece<0.5", "ece.high>0"]
    failing = [f"ece>{error + 0.001}", "ece.low>0.9", "temperature.accuracy < 1e-3", "nll<=-1"]
    assert len(result.failed(held)) == len(held)
    assert result.failed(failing) == []
    (said,) = result.failed([held[0]])
    assert re.match(f"sure: ece .*{error:.6g}.* ece>", said)


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


def test_result_is_written_to_json(sure, tmp_path):
    calm = write_predictions(sample_predictions(0, 1.0), tmp_path / "calm.npz")
    result = evaluate_files([sure, calm], resamples=100)
    found = json.loads(result.to_json())
    assert found["models"]["sure"]["headline"] in result.lines()[0]
    assert Report.from_dict(found["models"]["calm"]["report"]).to_dict() == result.reports["calm"].to_dict(
        samples=False
    )
    assert {tuple(one["models"]) for one in found["comparisons"]} == {("sure", "calm")}


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.undo()  # intervals have steps, too
    path, seen = write_predictions(sample_predictions(0), tmp_path / "sure.csv"), []
    evaluate_files([path, f"again={path}"], resamples=50, progress=lambda word, share: seen.append((word, share)))
    words = list(dict.fromkeys(word for word, _ in seen))
    assert [word.split()[-1] for word in words] == ["sure.csv", "sure", "again", "models"]
    for word in words:
        shares = [share for name, share in seen if name == word]
        assert shares[-1] == 1.0, word
    shares = [share for name, share in seen if name == words[1]]
    assert shares == sorted(shares)
    # Five folds are fitted, the file is read, and two states get intervals; the reading is one part of that.
    assert len({round(share, 3) for share in shares}) >= 5


def test_results_have_an_html_repr(sure, tmp_path):
    """Untrusted names must be escaped."""
    evil = "<script>alert(1)</script>"
    far = write_predictions(Predictions(torch.randn(50, CLASSES)), tmp_path / "far.npz")
    result = evaluate_files([f"{evil}={sure}", f"b={sure}"], ood=[f"b/{evil}={far}"], resamples=100)
    report = result.reports["b"]
    for shown in (result, report, report["ece"], report.before.detection, result.comparisons[0].comparison):
        text = shown._repr_html_()
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
    start, _, rest = figure._repr_html_().partition("base64,")
    assert start.startswith('<img alt="figure" width="')
    picture = Image.open(io.BytesIO(base64.b64decode(rest.removesuffix('">'))))
    assert picture.format == "PNG"
    assert picture.size == tuple(int(200 * inches) for inches in figure.get_size_inches())


def test_all_functions_share_the_default_number_of_folds():
    owners = {"folds": (evaluate, evaluate_files, evaluate_command, Model), "cv": (CalibratedClassifier,)}
    defaults = [inspect.signature(owner).parameters[name].default for name in owners for owner in owners[name]]
    assert defaults == [FOLDS] * 5


def test_adapters_use_the_metric_names_of_evaluate():
    given = sample_predictions(0, n=40)
    running = ValidationMetrics()
    running.add(given.logits, given.labels)
    found = evaluate(given, intervals=False)
    assert set(running.read()) | set(calibration_metrics("logits")) <= set(found.before.results)
