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
from fedlas.report.evaluation_result import evaluate_files
from fedlas.report.html import report_page


@pytest.fixture(scope="module")
def given() -> Predictions:
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 4, generator=draw)
    return Predictions(logits, torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0], split="test")


def test_top_label_metrics_equal_those_of_full_predictions(given):
    top = TopLabelPredictions(given.confidence, given.correct, split="test")
    ours, full = (fedlas.evaluate(one, intervals=False) for one in (top, given))
    assert {"nll", "brier", "classwise_ece"}.isdisjoint(ours.before.results)
    for name in ("accuracy", "ece", "aece", "smooth_ece", "aurc"):
        assert float(ours[name]) == pytest.approx(float(full[name]), abs=1e-6), name
    assert torch.allclose(score_of(top, "max_probability"), score_of(given, "max_probability"), atol=1e-6)
    with pytest.raises(ValueError, match="every class"):
        metrics.nll(top)
    with pytest.raises(ValueError, match="every class"):
        fedlas.evaluate(top, posthoc="temperature")


@pytest.mark.parametrize("words", [("1", "0"), ("true", "false"), ("True", "False"), ("1.0", "0.0")])
def test_correctness_column_replaces_labels_and_predictions(tmp_path, given, words):
    rows = "".join(
        f"{c},{words[0] if right else words[1]}\n"
        for c, right in zip(given.confidence.tolist(), given.correct.tolist(), strict=True)
    )
    (tmp_path / "p.csv").write_text(f"confidence,correct\n{rows}")
    found = read_predictions(tmp_path / "p.csv")
    assert torch.equal(found.correct, given.correct)
    assert (found.num_classes, found.given_labels, found.prediction) == (0, None, None)
    answer = evaluate_files([tmp_path / "p.csv"], resamples=50)
    assert "classes" not in " ".join(answer.lines())
    assert '<section id="classes"' not in report_page(answer.models, resamples=50)
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
    back = read_predictions(tmp_path / "p.safetensors")
    assert same_predictions(top, back)
    some = back[[2, 0]]
    assert (some.ids, some.correct.tolist(), some.prediction.tolist()) == (("z", "x"), [True, True], [1, 0])
    assert back[::-1].ids == ("z", "y", "x")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("quoted", [False, True])
def test_csv_blank_lines_quotes_and_line_ends_are_ignored(tmp_path, ending, quoted):
    mark = '"' if quoted else ""
    lines = ["confidence,prediction,label", f"0.9,{mark}a{mark},a", "", "0.8,b,a", f"0.7,{mark}b{mark},b"]
    (tmp_path / "p.csv").write_bytes(ending.join(lines).encode())
    found = read_predictions(tmp_path / "p.csv")
    assert found.confidence.tolist() == [0.9, 0.8, 0.7]
    assert (found.class_names, found.correct.tolist()) == (("a", "b"), [True, False, True])
    (tmp_path / "p.csv").write_bytes(ending.join([*lines, "0.5,a"]).encode())
    with pytest.raises(ValueError, match=r"p\.csv.*line 6.*\b2\b.*\b3\b"):
        read_predictions(tmp_path / "p.csv")


def test_top_label_memory_is_independent_of_the_number_of_classes(tmp_path):
    """A table of all classes took 8 bytes for each row and class: 800 MB for this many classes and 100,000 rows."""
    n, classes = 20_000, 1_000
    draw = np.random.default_rng(0)
    stream = io.StringIO()
    np.savetxt(stream, np.c_[draw.uniform(0.2, 1, n), draw.integers(0, classes, (n, 2))], "%.4f,%d,%d")
    (tmp_path / "p.csv").write_text("confidence,prediction,label\n" + stream.getvalue())
    tracemalloc.start()
    try:
        found = read_predictions(tmp_path / "p.csv")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(found), found.num_classes, found.scores.shape) == (n, classes, (n,))
    assert peak < 200 * n + 2**22


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64, np.float64])
def test_class_numbers_of_every_dtype_are_accepted(kind):
    found = TopLabelPredictions([0.5, 0.6], labels=np.array([300, 2], kind), prediction=np.array([300, 3], kind))
    assert found.correct.tolist() == [True, False]


def test_predictions_with_correctness_alone_are_saved_and_loaded(tmp_path):
    given = TopLabelPredictions([0.5, 0.6], [True, False], prediction=[1, 0])
    write_predictions(given, tmp_path / "p.safetensors")
    found = read_predictions(tmp_path / "p.safetensors")
    assert (found.correct.tolist(), found.prediction.tolist()) == ([True, False], [1, 0])
