"""Top-label predictions: confidence and correctness of the predicted class, without a table of all classes."""

import io
import tracemalloc

import numpy as np
import pytest
import torch

import fedlas
from fedlas import metrics
from fedlas.io import read_predictions, same_predictions, write_predictions
from fedlas.ood.scores import score_of
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.evaluate_files import evaluate_files
from fedlas.report.html import report_page


@pytest.fixture(scope="module")
def predictions() -> Predictions:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 4, generator=generator)
    return Predictions(logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0], split="test")


def test_top_label_metrics_equal_those_of_full_predictions(predictions):
    top = TopLabelPredictions(predictions.confidence, predictions.correct, split="test")
    top_report, full_report = (fedlas.evaluate(samples, intervals=False) for samples in (top, predictions))
    assert {"nll", "brier", "classwise_ece"}.isdisjoint(top_report.before.results)
    for name in ("accuracy", "ece", "aece", "smooth_ece", "aurc"):
        assert float(top_report[name]) == pytest.approx(float(full_report[name]), abs=1e-6), name
    assert torch.allclose(score_of(top, "max_probability"), score_of(predictions, "max_probability"), atol=1e-6)
    with pytest.raises(ValueError, match="every class"):
        metrics.nll(top)
    with pytest.raises(ValueError, match="every class"):
        fedlas.evaluate(top, posthoc="temperature")


@pytest.mark.parametrize("spellings", [("1", "0"), ("true", "false"), ("True", "False"), ("1.0", "0.0")])
def test_correctness_column_replaces_labels_and_predictions(tmp_path, predictions, spellings):
    rows = "".join(
        f"{c},{spellings[0] if correct else spellings[1]}\n"
        for c, correct in zip(predictions.confidence.tolist(), predictions.correct.tolist(), strict=True)
    )
    (tmp_path / "p.csv").write_text(f"confidence,correct\n{rows}")
    loaded = read_predictions(tmp_path / "p.csv")
    assert torch.equal(loaded.correct, predictions.correct)
    assert (loaded.num_classes, loaded.given_labels, loaded.prediction) == (0, None, None)
    result = evaluate_files([tmp_path / "p.csv"], resamples=50)
    assert "classes" not in " ".join(result.lines())
    assert '<section id="classes"' not in report_page(result.models, resamples=50)
    (tmp_path / "p.csv").write_text(f"confidence,correct\n{rows}0.5,perhaps\n")
    with pytest.raises(ValueError, match=r"p\.csv.*line 302.*'perhaps'"):
        read_predictions(tmp_path / "p.csv")


def test_contradictory_top_label_arguments_raise():
    with pytest.raises(ValueError, match=r"correct.*row 1"):
        TopLabelPredictions([0.5, 0.6], [True, True], labels=[0, 1], prediction=[0, 0])
    with pytest.raises(ValueError, match="correct"):
        TopLabelPredictions([0.5, 0.6], labels=[0, 1])
    with pytest.raises(ValueError, match=r"confidence.*row 1"):
        TopLabelPredictions([0.5, 1.2], [True, True])


def test_top_label_predictions_are_saved_loaded_and_indexed(tmp_path):
    top = TopLabelPredictions(
        [0.5, 0.6, 0.7],
        labels=[0, 1, 1],
        prediction=[0, 0, 1],
        class_names=["a", "b"],
        split="val",
        ids=["x", "y", "z"],
    )
    write_predictions(top, tmp_path / "p.safetensors")
    loaded = read_predictions(tmp_path / "p.safetensors")
    assert same_predictions(top, loaded)
    subset = loaded[[2, 0]]
    assert (subset.ids, subset.correct.tolist(), subset.prediction.tolist()) == (("z", "x"), [True, True], [1, 0])
    assert loaded[::-1].ids == ("z", "y", "x")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("quoted", [False, True])
def test_csv_blank_lines_quotes_and_line_ends_are_ignored(tmp_path, line_end, quoted):
    mark = '"' if quoted else ""
    lines = ["confidence,prediction,label", f"0.9,{mark}a{mark},a", "", "0.8,b,a", f"0.7,{mark}b{mark},b"]
    (tmp_path / "p.csv").write_bytes(line_end.join(lines).encode())
    loaded = read_predictions(tmp_path / "p.csv")
    assert loaded.confidence.tolist() == [0.9, 0.8, 0.7]
    assert (loaded.class_names, loaded.correct.tolist()) == (("a", "b"), [True, False, True])
    (tmp_path / "p.csv").write_bytes(line_end.join([*lines, "0.5,a"]).encode())
    with pytest.raises(ValueError, match=r"p\.csv.*line 6.*\b2\b.*\b3\b"):
        read_predictions(tmp_path / "p.csv")


def test_top_label_memory_is_independent_of_the_number_of_classes(tmp_path):
    """A table of all classes took 8 bytes for each row and class: 800 MB for this many classes and 100,000 rows."""
    n, classes = 20_000, 1_000
    random = np.random.default_rng(0)
    stream = io.StringIO()
    np.savetxt(stream, np.c_[random.uniform(0.2, 1, n), random.integers(0, classes, (n, 2))], "%.4f,%d,%d")
    (tmp_path / "p.csv").write_text("confidence,prediction,label\n" + stream.getvalue())
    tracemalloc.start()
    try:
        loaded = read_predictions(tmp_path / "p.csv")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(loaded), loaded.num_classes, loaded.scores.shape) == (n, classes, (n,))
    assert peak < 200 * n + 2**22


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.float64])
def test_class_numbers_of_every_dtype_are_accepted(kind):
    top = TopLabelPredictions([0.5, 0.6], labels=np.array([300, 2], kind), prediction=np.array([300, 3], kind))
    assert top.correct.tolist() == [True, False]


def test_predictions_with_correctness_alone_are_saved_and_loaded(tmp_path):
    predictions = TopLabelPredictions([0.5, 0.6], [True, False], prediction=[1, 0])
    write_predictions(predictions, tmp_path / "p.safetensors")
    loaded = read_predictions(tmp_path / "p.safetensors")
    assert (loaded.correct.tolist(), loaded.prediction.tolist()) == ([True, False], [1, 0])
