"""What `fedlas.evaluate` takes (arrays, files, DataFrames, outputs of Hugging Face), and how a report is used."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fedlas import metrics, posthoc
from fedlas.comparison import compare
from fedlas.evaluation import calibrate, evaluate
from fedlas.io import as_predictions, read_predictions
from fedlas.predictions import Predictions

PROBS = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.9, 0.1], [0.2, 0.8]] * 10)
TRUTH = torch.tensor([0, 1, 1, 1] * 10)
QUICK: dict = {"intervals": False}


class PredictionOutput(NamedTuple):
    """The type of Hugging Face, whose import takes long."""

    predictions: Any
    label_ids: Any
    metrics: Any


def input_forms(tmp_path) -> dict[str, Any]:
    """Return arguments of `evaluate` that all describe the same predictions."""
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    np.save(tmp_path / "p.npy", PROBS.numpy())
    np.save(tmp_path / "y.npy", TRUTH.numpy())
    frame = pd.DataFrame(PROBS.numpy()).assign(y_true=TRUTH.numpy())
    lists = pd.DataFrame({"probs": list(PROBS.numpy()), "label": TRUTH.numpy()})
    logits = PROBS.log()
    array_output, tuple_output = (
        PredictionOutput(output, TRUTH.numpy(), {}) for output in (logits.numpy(), (logits.numpy(), 0))
    )
    return {
        "arrays": ((PROBS.numpy(), TRUTH.numpy()), {}),
        "lists": ((PROBS.tolist(), TRUTH.tolist()), {}),
        "array of logits": ((logits, TRUTH), {"logits": True}),
        "file": ((str(tmp_path / "p.npy"), tmp_path / "y.npy"), {}),
        "mapping": (({"softmax": PROBS, "targets": TRUTH},), {}),
        "frame": ((frame,), {}),
        "frame of lists": ((lists,), {}),
        "frame with labels beside": ((frame.drop(columns="y_true"), frame["y_true"]), {}),
        "frame with an option": ((frame.rename(columns={"y_true": "species"}),), {"label_column": "species"}),
        "PredictionOutput": ((array_output,), {}),
        "tuple of outputs": ((tuple_output,), {}),
        "names of labels": ((PROBS.tolist(), np.array(["cat", "dog"])[TRUTH]), {"class_names": ["cat", "dog"]}),
        "normalized": ((2 * PROBS, TRUTH), {"normalize": True}),
        "Arrow": (
            (pa.table({"prob_0": PROBS[:, 0].numpy(), "prob_1": PROBS[:, 1].numpy(), "y": TRUTH.numpy()}).to_pandas(),),
            {},
        ),
    }


def test_evaluate_accepts_every_form_of_predictions(tmp_path):
    expected = evaluate(Predictions.from_probs(PROBS, TRUTH), **QUICK)
    for name, (arguments, options) in input_forms(tmp_path).items():
        report = evaluate(*arguments, **options, **QUICK)
        assert report["ece"] == pytest.approx(float(expected["ece"]), abs=1e-6), name
        assert (report.n, report.classes) == (40, 2), name


class Frame:
    """A DataFrame like that of polars: `columns` is a list of names, and a column converts to an array."""

    def __init__(self, columns: dict) -> None:
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(to_numpy=lambda: self._columns[name])


def test_evaluate_accepts_other_data_frames():
    columns = {
        "cat": PROBS[:, 0].numpy(),
        "dog": PROBS[:, 1].numpy(),
        "target": np.array(["cat", "dog"])[TRUTH.numpy()],
    }
    assert evaluate(Frame(columns), **QUICK)["accuracy"] == pytest.approx(0.75)


def test_columns_of_a_frame_are_class_names():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(PROBS.numpy(), columns=["cat", "dog"])
    for predictions in (Predictions.from_probs(frame, TRUTH), Predictions(np.log(frame), TRUTH)):
        assert predictions.class_names == ("cat", "dog")
    assert Predictions.from_probs(frame, class_names=["a", "b"]).class_names == ("a", "b")
    assert Predictions.from_probs(pd.DataFrame(PROBS.numpy())).class_names is None
    polars = Frame({name: frame[name].to_numpy() for name in frame})
    for table in (frame, polars):
        for labels in (TRUTH.numpy(), np.array(["cat", "dog"])[TRUTH]):
            parsed = as_predictions(table, labels)
            assert (parsed.class_names, parsed.labels.tolist()) == (("cat", "dog"), TRUTH.tolist())


def test_labels_with_another_index_than_the_frame_raise():
    """Regression: they were paired by position."""
    pd = pytest.importorskip("pandas")
    frame, labels = pd.DataFrame(PROBS.numpy(), columns=["cat", "dog"]), pd.Series(TRUTH.numpy())
    for misaligned in (labels.sample(frac=1, random_state=0), labels.set_axis(range(1, 41))):
        with pytest.raises(ValueError, match=r"labels\.loc\[predictions\.index\]"):
            evaluate(frame, misaligned, **QUICK)
    expected = evaluate(frame, labels, **QUICK).to_dict()
    shuffled = labels.sample(frac=1, random_state=0)
    for pair in (Predictions.from_probs, Predictions, metrics.ece, posthoc.Temperature().fit):
        with pytest.raises(ValueError, match=r"labels\.loc\[predictions\.index\]"):
            pair(frame, shuffled)
    with pytest.raises(ValueError, match=r"second\.loc\[first\.index\]"):
        compare(frame, frame.loc[shuffled.index], labels.to_numpy())
    assert evaluate(frame, shuffled.loc[frame.index], **QUICK).to_dict() == expected
    assert evaluate(PROBS, shuffled.loc[frame.index], **QUICK).classes == 2  # an array has no index


@pytest.mark.parametrize("options", [{"logits": True}, {"normalize": True}])
@pytest.mark.parametrize("column", [{"age": [31, 45] * 20}, {"id": np.arange(40.0)}, {"target": np.zeros(40)}])
def test_columns_of_a_frame_that_may_be_no_class_raise(column, options):
    """Regression: they were evaluated as further classes, where labels are given beside the frame."""
    pd = pytest.importorskip("pandas")
    scores = pd.DataFrame(np.random.default_rng(0).random((40, 3)), columns=["cat", "dog", "eel"])
    frame = scores.assign(**column)
    with pytest.raises(ValueError, match=rf"{next(iter(column))} may be no class.*prob_columns"):
        evaluate(frame, TRUTH, **options, **QUICK)
    assert evaluate(frame, TRUTH, prob_columns=["cat", "dog", "eel"], **options, **QUICK).classes == 3
    assert evaluate(scores, TRUTH, **options, **QUICK).classes == 3


def test_invalid_inputs_raise_with_the_argument_to_use():
    logits = 5 * torch.randn(40, 2)
    with pytest.raises(ValueError, match=r"row 0.*logits="):
        evaluate(logits, TRUTH)
    with pytest.raises(TypeError, match="logits"):
        evaluate(PROBS, TRUTH, logits=logits)
    with pytest.raises(TypeError, match="labels"):
        evaluate(Predictions(logits, TRUTH), TRUTH)
    with pytest.raises(ValueError, match="labels"):
        evaluate(PROBS)
    with pytest.raises(TypeError, match="label_column"):
        evaluate(PROBS, TRUTH, label_column="y")
    with pytest.raises(ValueError, match="posthoc="):
        evaluate(PROBS, TRUTH, calibration=(PROBS, TRUTH))
    for calibration in ((PROBS, TRUTH), PROBS):
        with pytest.raises(TypeError, match=r"Predictions\.from_probs\(probs, labels\)"):
            evaluate(PROBS, TRUTH, calibration=calibration, posthoc="temperature")
    with pytest.raises(TypeError, match="predictions are None; give an array"):
        evaluate(None, TRUTH)
    with pytest.raises(ValueError, match="sums to") as error:
        evaluate({"probs": logits, "labels": TRUTH})
    assert "logits=True" in str(error.value)
    assert "--" not in str(error.value)


def test_a_report_is_a_mapping_of_its_metrics():
    report = evaluate(PROBS, TRUTH, **QUICK)
    assert "ece" in report
    assert "nothing" not in report
    assert list(report) == list(report.before.results) == list(dict(report))
    assert dict(report)["ece"] == report["ece"]
    assert len(report) == len(list(report))
    assert "n=40" in repr(report)
    assert len(repr(report)) < 200


def test_report_converts_to_data_frame_latex_and_figure():
    pytest.importorskip("pandas")
    plt = pytest.importorskip("matplotlib.pyplot")
    report = evaluate(Predictions(4 * PROBS, TRUTH, split="a_b"), posthoc="histogram_binning", resamples=20)
    frame = report.to_frame()
    row = frame[(frame.state == "uncalibrated") & (frame.metric == "ece")].iloc[0]
    assert row.value == float(report["ece"])
    assert (row.low, row.high) == (report["ece"].interval.low, report["ece"].interval.high)
    assert len(frame) == sum(len(state.results) for state in report.states)
    text = report.to_latex()
    assert text.count(r"\\") == 3
    assert r"histogram\_binning" in text
    assert report["ece"].to_latex() in text
    figure = report.plot()
    assert [panel.get_title().partition(":")[0] for panel in figure.axes] == ["uncalibrated", "histogram_binning"]
    bins = report.before.bins["width"]
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx(bins.accuracy[bins.counts > 0].tolist())
    plt.close(figure)


def test_labels_of_an_array_may_be_a_file(tmp_path):
    probs, labels = np.array([[0.9, 0.1], [0.3, 0.7]] * 20), np.array([0, 1] * 20)
    np.save(tmp_path / "labels.npy", labels)
    assert float(evaluate(probs, tmp_path / "labels.npy", intervals=False).before["accuracy"]) == 1


def test_unknown_keyword_raises(tmp_path):
    (tmp_path / "p.csv").write_text("prob_a,prob_b,label\n" + "0.9,0.1,a\n" * 5)
    for keyword in ("bin", "label_colum", "calibrate_on"):
        with pytest.raises(TypeError, match=repr(keyword)):
            evaluate(tmp_path / "p.csv", **{keyword: "label"})
    for function in (evaluate, compare):
        with pytest.raises(TypeError, match="unknown keyword 'resample'; did you mean 'resamples'"):
            function(PROBS, TRUTH, resample=10)


def test_calibration_data_may_be_a_file_with_its_own_label_column(tmp_path):
    (tmp_path / "p.csv").write_text("prob_a,prob_b,label\n" + "0.9,0.1,a\n0.8,0.2,b\n" * 20)
    (tmp_path / "q.csv").write_text("prob_a,prob_b,my_truth\n" + "0.9,0.1,a\n" * 5)
    (tmp_path / "val.csv").write_text("prob_a,prob_b,label\n" + "0.7,0.3,a\n0.6,0.4,b\n" * 20)
    report = evaluate(tmp_path / "p.csv", posthoc="temperature", calibration=tmp_path / "val.csv", intervals=False)
    assert "temperature" in report.after
    with pytest.raises(ValueError, match=r"q\.csv.*my_truth.*label_column"):
        evaluate(tmp_path / "q.csv")


def test_folds_without_a_temperature_do_not_fail_cross_fitting():
    """With 3 decimals of 1,000 classes, some folds determine no temperature."""
    random = np.random.default_rng(1)
    labels, logits = random.integers(1000, size=600), random.normal(size=(600, 1000))
    logits[np.arange(600), labels] += 3.2
    probs = np.exp(2 * logits - 2 * logits.max(1, keepdims=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = evaluate(
            (probs / probs.sum(1, keepdims=True)).round(3), labels, posthoc="temperature", intervals=False
        )
    assert "temperature" in report.after


@pytest.mark.parametrize("seed", [10**23, -1])
def test_invalid_seed_raises(seed):
    with pytest.raises(ValueError, match=f"seed is {seed}"):
        evaluate(PROBS, TRUTH, seed=seed)


def test_inapplicable_options_raise():
    output = PredictionOutput(PROBS.log().numpy(), TRUTH.numpy(), {})
    for options in ({"normalize": True}, {"label_column": "species"}):
        with pytest.raises(TypeError, match=rf"{next(iter(options))}.*PredictionOutput"):
            evaluate(output, **options, **QUICK)
    with pytest.raises(TypeError, match=r"normalize.*logits"):
        evaluate(PROBS.log(), TRUTH, logits=True, normalize=True, **QUICK)


def test_string_labels_without_class_names_raise():
    names = np.array(["cat", "dog"])[TRUTH]
    with pytest.raises(TypeError, match=r"labels.*class_names"):
        evaluate(PROBS, names, **QUICK)
    evaluate({"probs": PROBS, "labels": names, "class_names": ["cat", "dog"]}, **QUICK)


def test_calibration_file_is_read_with_the_same_column_options(tmp_path):
    rows = "\n".join(f"{a},{b},{label}" for (a, b), label in zip(PROBS.tolist(), TRUTH.tolist(), strict=True))
    for name in ("test", "val"):
        (tmp_path / f"{name}.csv").write_text(f"prob_0,prob_1,species\n{rows}")
    with pytest.warns(UserWarning, match="same|very"):
        report = evaluate(
            tmp_path / "test.csv",
            calibration=tmp_path / "val.csv",
            posthoc="temperature",
            label_column="species",
            **QUICK,
        )
    assert "temperature" in report.after


def test_data_frames_may_have_any_index():
    pd = pytest.importorskip("pandas")
    rows = range(7, 7 + len(TRUTH))
    texts = pd.Series([f"{number:.1f}" for number in PROBS[:, 1].tolist()], index=rows, dtype=object)
    scores = {name: PROBS[:, column].double() for column, name in enumerate(("cat", "dog"))}
    report = evaluate({"note": texts, **scores, "y": np.array(["cat", "dog"])[TRUTH]}, **QUICK)
    assert report.classes == 2


def test_calibration_data_accepts_every_form_of_predictions():
    mapping = {"probs": PROBS.roll(1, 0).numpy(), "labels": TRUTH.roll(1).numpy()}
    predictions = Predictions.from_probs(torch.from_numpy(mapping["probs"]), torch.from_numpy(mapping["labels"]))
    reports = [
        evaluate(PROBS, TRUTH, posthoc="temperature", calibration=calibration, **QUICK)
        for calibration in (mapping, predictions)
    ]
    assert float(reports[0].after["temperature"]["nll"]) == float(reports[1].after["temperature"]["nll"])


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_an_ood_array_holds_what_the_predictions_were_built_from(kind):
    """An array of probabilities beside predictions of probabilities was read as logits."""
    build = Predictions if kind == "logits" else Predictions.from_probs
    logits = 2 * torch.randn(80, 3)
    scores, svhn = (logits if kind == "logits" else logits.softmax(1)).split(40)
    test = build(scores, torch.arange(40) % 3)
    report = evaluate(test, ood={"svhn": svhn}, **QUICK)
    assert report.to_dict() == evaluate(test, ood={"svhn": build(svhn)}, **QUICK).to_dict()


def test_ood_arrays_are_normalized_with_the_predictions():
    svhn = PROBS.roll(1, 1)
    report = evaluate(2 * PROBS, TRUTH, ood={"svhn": 4 * svhn}, normalize=True, **QUICK)
    expected = evaluate(PROBS, TRUTH, ood={"svhn": svhn}, **QUICK)
    for name, separation in report.before.detection["svhn"].items():
        assert float(separation.auroc) == pytest.approx(float(expected.before.detection["svhn"][name].auroc))


def test_ood_predictions_with_other_classes_raise():
    """Regression: their order was not checked."""
    test = Predictions.from_probs(PROBS, TRUTH, class_names=["cat", "dog"])
    for names, difference in (
        (["dog", "cat"], "same classes in another order: class 0"),
        (["cat", "eel"], "other.* 1"),
    ):
        with pytest.raises(ValueError, match=f"{difference} is .* in svhn"):
            evaluate(test, ood={"svhn": Predictions.from_probs(PROBS, class_names=names)}, **QUICK)


def test_ood_tables_are_read_like_the_evaluated_table(tmp_path):
    """Regression: the columns of a frame were other classes than those of the evaluated frame, and a file an array."""
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame({"prob_cat": PROBS[:, 0].double(), "prob_dog": PROBS[:, 1].double()})
    svhn = table.iloc[::-1]
    svhn.assign(name="x").to_csv(tmp_path / "svhn.csv", index=False)
    evaluated = table.assign(species=np.array(["cat", "dog"])[TRUTH])
    expected = evaluate(evaluated, ood={"svhn": svhn.to_numpy()}, label_column="species", **QUICK).to_dict()
    for data in (svhn, svhn.assign(name="x"), dict(svhn), tmp_path / "svhn.csv", Predictions.from_probs(svhn)):
        report = evaluate(evaluated, ood={"svhn": data}, label_column="species", **QUICK)
        assert report.to_dict() == expected
    bare = svhn.rename(columns=lambda name: name.removeprefix("prob_"))
    report = evaluate(bare.iloc[::-1], np.array(["cat", "dog"])[TRUTH], ood={"svhn": bare}, **QUICK)
    assert report.to_dict() == expected


def test_an_ood_array_of_probabilities_beside_calibrated_predictions_raises():
    """Regression: it was read as logits, because calibrated predictions hold logits."""
    test = calibrate(Predictions.from_probs(PROBS, TRUTH))
    with pytest.raises(ValueError, match=r"svhn.*sum to one.*Predictions\.from_probs"):
        evaluate(test, ood={"svhn": PROBS}, **QUICK)
    assert evaluate(test, ood={"svhn": Predictions.from_probs(PROBS)}, **QUICK).before.detection is not None
    with pytest.warns(UserWarning, match="sums to 1"):  # because of logits=True
        evaluate(PROBS.log(), TRUTH, logits=True, ood={"svhn": PROBS}, **QUICK)


def test_repeated_ids_warn():
    ids = [f"s{number // 2}" for number in range(len(TRUTH))]
    predictions = Predictions.from_probs(PROBS, TRUTH, ids=ids)
    with pytest.warns(UserWarning, match=r"ids occur before.*remove repeated rows"):
        evaluate(predictions, intervals=False)


def test_labels_that_count_from_one_raise_with_a_remedy():
    with pytest.raises(ValueError, match="subtract 1"):
        Predictions.from_probs(PROBS, torch.as_tensor(TRUTH) + 1)


def test_read_predictions_of_a_table_names_evaluate():
    with pytest.raises(TypeError, match=r"fedlas\.evaluate"):
        inspect.unwrap(read_predictions)({"probs": PROBS})
