"""Tables of predictions (csv, parquet, npz): columns, rounded probabilities, and errors that name the row."""

import builtins
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlas.extras import optional_module
from fedlas.io import read_predictions, write_predictions
from fedlas.metrics import ece
from fedlas.predictions import Predictions, TopLabelPredictions

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def test_npz_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS, class_names=["x", "y", "z"], split="test")
    loaded = read_predictions(tmp_path / "a.npz")
    assert (loaded.class_names, loaded.split) == (("x", "y", "z"), "test")
    np.savez(tmp_path / "b.npz", probs=LOGITS.softmax(1), labels=LABELS, features=np.ones((2, 5)), index=[4, 2])
    loaded = read_predictions(tmp_path / "b.npz", split="val")
    assert (loaded.split, loaded.features.shape, loaded.index.tolist()) == ("val", (2, 5), [4, 2])
    assert loaded.given_probs is not None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": LABELS}, r"a\.npz.*logits, probs.*labels$"),
        ({"logits": LOGITS, "probs": LOGITS.softmax(1), "labels": LABELS}, r"a\.npz.*logits; probs.*--prob-columns"),
        ({"logits": LOGITS, "label": LABELS, "labels": LABELS}, r"a\.npz.*label, labels.*--label-column"),
    ],
)
def test_missing_or_ambiguous_columns_raise_an_error_that_lists_columns(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_predictions(tmp_path / "a.npz")


def write_csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_with_probabilities_and_class_names_is_read(tmp_path):
    text = "\ufeffprob_cat,prob_dog,label,index\n0.7,0.3,dog,10\n0.25,0.75,dog,11\n"
    loaded = read_predictions(write_csv(tmp_path, text), split="test")
    assert loaded.class_names == ("cat", "dog")
    assert loaded.labels.tolist() == [1, 1]
    assert loaded.index.tolist() == [10, 11]
    assert loaded.probs.tolist() == [[0.7, 0.3], [0.25, 0.75]]
    assert loaded.split == "test"


def test_csv_with_logits_class_numbers_and_features_is_read(tmp_path):
    text = "label,logit_a,logit_b,feature_0,feature_1\n0,1.5,-2,1,2\n1,0,3e1,3,4\n"
    loaded = read_predictions(write_csv(tmp_path, text))
    assert loaded.labels.tolist() == [0, 1]
    assert loaded.logits.tolist() == [[1.5, -2.0], [0.0, 30.0]]
    assert loaded.features.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_csv_with_soft_labels_is_read(tmp_path):
    text = "prob_a,prob_b,label_b,label_a\n0.5,0.5,0.25,0.75\n"
    assert read_predictions(write_csv(tmp_path, text)).labels.tolist() == [[0.75, 0.25]]


def test_numeric_class_names_are_treated_as_names(tmp_path):
    text = "prob_1,prob_2\u002clabel\n0.9,0.1,1\n0.2,0.8,2\n"
    assert read_predictions(write_csv(tmp_path, text)).labels.tolist() == [0, 1]


def test_columns_are_recognised_by_name_never_by_value(tmp_path):
    """Logits that look like probabilities stay logits."""
    text = "logit_a,logit_b,label\n0.9,0.1,0\n"
    assert read_predictions(write_csv(tmp_path, text)).given_probs is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,label\n1,2,0\n", r"t\.csv.*prob_NAME.*a, b, label$"),
        ("prob_a,logit_a,label\n1,2,0\n", r"t\.csv.*logit_a; prob_a.*--prob-columns"),
        ("prob_a,prob_b,label_a\n0.5,0.5,1\n", r"t\.csv.*`label`.*prob_a, prob_b, label_a$"),
        ("prob_a,prob_b,label\n0.5,0.5,a\n0.5,0.5,7\n", "line 3.*label.*'7'.*a, b"),
        ("prob_a,prob_b,label\n0.5,0.5,2\n", "labels.*line 2.*2"),
        ("prob_a,prob_b,label\n0.5,0.6,a\n0.50,0.57,a\n", "line 3.*distribution"),
        ("prob_a,prob_b,label\n", "rows"),
        ("", r"t\.csv.*empty"),
    ],
)
def test_invalid_csv_raises(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_predictions(write_csv(tmp_path, text))


def test_more_than_a_million_classes_raise(tmp_path):
    logits = np.zeros((1, 2**20 + 1), np.float16)
    np.savez_compressed(tmp_path / "wide.npz", logits=logits, labels=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=r"wide\.npz.*1,048,577.*1,048,576"):
        read_predictions(tmp_path / "wide.npz")


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_rounded_probabilities_are_accepted_in_binary_files_as_in_csv(tmp_path, kind):
    rounded = np.array([[0.33, 0.33, 0.33], [0.5, 0.25, 0.25]], dtype=kind)
    beyond_rounding = np.array([[0.331, 0.331, 0.331], [0.5, 0.25, 0.25]], dtype=kind)
    for name, probs in {"rounded": rounded, "finer": beyond_rounding, "no number": rounded * np.nan}.items():
        np.savez(tmp_path / f"{name}.npz", probs=probs, labels=[0, 1])
    assert read_predictions(tmp_path / "rounded.npz").probs.tolist() == rounded.tolist()
    for name, message in {"finer": "distribution", "no number": "row 0 holds NaN"}.items():
        with pytest.raises(ValueError, match=message):
            read_predictions(tmp_path / f"{name}.npz")
    assert Predictions.from_probs(rounded, [0, 1]).probs.tolist() == rounded.tolist()


def rounded_softmax(classes: int, decimals: int, n: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    exact = np.exp(2 * rng.standard_normal((n, classes)))
    return np.round(exact / exact.sum(1, keepdims=True), decimals)


def write_probs(folder: Path, kind: str, probs: np.ndarray) -> Path:
    labels = np.zeros(len(probs), dtype=np.int64)
    path = folder / f"p.{kind}"
    if kind == "npz":
        np.savez(path, probs=probs, labels=labels)
    else:
        header = ",".join(f"prob_{k}" for k in range(probs.shape[1]))
        rows = (",".join(map(str, [*row, 0])) for row in probs)
        path.write_text("\n".join([f"{header},label", *rows]))
    return path


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize(
    ("row", "message"),
    [([1.5, *[0.0] * 9], r"sums to 1\.5"), ([0.2] * 10, r"sums to 2"), ([0.251, 0.149, *[0.0] * 8], r"sums to 0\.4")],
)
def test_rounding_tolerance_of_many_classes_is_bounded(tmp_path, kind, row, message):
    """Regression: the tolerance of half a unit per class had no limit; an entry of 1.5 gave a confidence of 150 %."""
    zeros = np.zeros((3, 990))
    probs = np.hstack([np.array([[*[0.1] * 10], row, [0.5, 0.5, *[0.0] * 8]]), zeros])
    with pytest.raises(ValueError, match=rf"(row 1|line 3).*{message}.*--normalize"):
        read_predictions(write_probs(tmp_path, kind, probs))


@pytest.mark.parametrize("kind", ["npz", "csv", "array"])
def test_many_classes_with_few_decimals_are_completed_with_a_warning(tmp_path, kind):
    """A softmax of 1,000 classes with 3 decimals sums to about 0.93: its small probabilities are zeros."""
    probs = rounded_softmax(1000, 3)
    assert probs.sum(1).max() < 0.98
    path = None if kind == "array" else write_probs(tmp_path, kind, probs)
    with pytest.warns(UserWarning, match=r"40 of 40 .*0\.9"):
        loaded = Predictions.from_probs(probs, [0] * 40) if path is None else read_predictions(path)
    assert torch.allclose(loaded.probs.sum(1), torch.ones(40, dtype=torch.float64))
    # The missing probability is spread over zeros: no confidence changes by more than rounding explains.
    assert torch.allclose(loaded.confidence, torch.from_numpy(probs.max(1)), rtol=1e-2, atol=1e-3)
    assert loaded.zeros is None


def test_row_sums_beyond_rounding_raise_with_a_remedy():
    """Regression: row sums of 1.2 and more were accepted for 1,000 classes with 3 decimals."""
    probs = rounded_softmax(1000, 3)
    probs[1] = np.round(1.3 * probs[1], 3)
    with pytest.raises(ValueError, match=r"row 1.*sums of all rows.*1\.1.*normalize"):
        Predictions.from_probs(probs, [0] * 40)
    loaded = Predictions.from_probs(probs, [0] * 40, normalize=True)
    assert torch.allclose(loaded.probs[1], torch.from_numpy(probs[1] / probs[1].sum()))
    with pytest.raises(ValueError, match="row 0"):
        Predictions.from_probs([[1.5, -0.5]], [0], normalize=True)


def test_rounded_parquet_columns_are_accepted(tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns = {"prob_a": [0.3333, 0.5], "prob_b": [0.3333, 0.25], "prob_c": [0.3333, 0.25], "label": ["a", "b"]}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), tmp_path / "p.parquet")
    assert read_predictions(tmp_path / "p.parquet").probs[0].tolist() == [0.3333] * 3


@pytest.mark.parametrize(("cell", "message"), {"x": "'x'", " ": "empty", "50%": r"'50%'.*0\.7"}.items())
def test_a_cell_that_is_not_a_number_raises_an_error_that_names_the_line(tmp_path, cell, message):
    with pytest.raises(ValueError, match=f"line 4.*prob_b.*{message}"):
        read_predictions(write_csv(tmp_path, f"prob_a,prob_b,label\n0.5,0.5,a\n\n0.5,{cell},a\n"))


@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ("0.33,0.33,0.33", True),
        ("0.330,0.330,0.33", False),
        ("0.330,0.330,0.330", False),
        ("1,0.,0.015", False),
        ("1,.0,0.015", False),
        (" 0.33 ,0.33,0.33", True),
        ("3.3e-1,0.33,0.33", True),
        ("3.30e-1,0.330,0.330", False),
        ("33e-2,0.330,0.330", False),
    ],
)
def test_row_sum_tolerance_is_half_a_unit_of_the_last_digit_per_class(tmp_path, row, allowed):
    path = write_csv(
        tmp_path,
        f"label,prob_a,feature_0,prob_b,prob_c\na,{','.join([row.split(',')[0], '7.5', *row.split(',')[1:]])}\n",
    )
    if allowed:
        assert len(read_predictions(path)) == 1
    else:
        with pytest.raises(ValueError, match=r"line 2.*distribution"):
            read_predictions(path)


def test_reading_a_large_csv_takes_little_more_memory_than_its_numbers(tmp_path):
    """Regression: cells kept as text took 300 bytes each; a number takes 8, with one or two copies while reading."""
    rows = "\n".join(["0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,3"] * 5_000)
    path = write_csv(tmp_path, ",".join(f"prob_{i}" for i in range(8)) + f",label\n{rows}\n")
    tracemalloc.start()
    loaded = read_predictions(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loaded.probs.shape == (5_000, 8)
    assert peak < 60 * 8 * 5_000


def test_csv_of_top_label_predictions_is_read(tmp_path):
    text = "confidence,prediction,label\n0.5,dog,dog\n0.9,cat,dog\n0.12,7,cat\n"
    loaded = read_predictions(write_csv(tmp_path, text))
    assert isinstance(loaded, TopLabelPredictions)
    assert loaded.confidence.tolist() == pytest.approx([0.5, 0.9, 0.12])
    assert [loaded.class_names[i] for i in loaded.prediction] == ["dog", "cat", "7"]
    assert loaded.correct.tolist() == [True, False, False]
    write_predictions(loaded, tmp_path / "p.safetensors")
    reloaded = read_predictions(tmp_path / "p.safetensors")
    assert isinstance(reloaded, TopLabelPredictions)
    for name in ("confidence", "correct", "prediction", "labels"):
        assert torch.equal(getattr(reloaded, name), getattr(loaded, name)), name
    with pytest.raises(ValueError, match=r"confidence.*line 2.*0"):
        read_predictions(write_csv(tmp_path, "confidence,prediction,label\n0,a,b\n"))


def test_a_binary_confidence_of_one_half_keeps_its_prediction(tmp_path):
    """With two classes both halves tie, and the first class would win."""
    loaded = read_predictions(write_csv(tmp_path, "confidence,prediction,label\n0.5,1,1\n0.5,0,1\n"))
    assert loaded.correct.tolist() == [True, False]


def test_parquet_is_read(tmp_path):
    lists = pa.table({"probs": LOGITS.softmax(1).double().tolist(), "label": [0, 1], "index": [3, 4]})
    pq.write_table(lists, tmp_path / "a.parquet")
    loaded = read_predictions(tmp_path / "a.parquet")
    assert torch.allclose(loaded.probs, LOGITS.softmax(1).double())
    assert loaded.index.tolist() == [3, 4]
    columns = pa.table({"logit_x": [1.0, 2.0], "logit_y": [0.0, 5.0], "label": ["y", "x"]})
    pq.write_table(columns, tmp_path / "b.parquet")
    loaded = read_predictions(tmp_path / "b.parquet", split="s")
    assert (loaded.class_names, loaded.labels.tolist(), loaded.split) == (("x", "y"), [1, 0], "s")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 3)])
def test_parquet_lists_keep_their_dtype(tmp_path, kind):
    """Regression: values became float64, whose tolerance is below the rounding of a float32 softmax."""
    rows = LOGITS.softmax(1)
    table = pa.table({"probs": pa.array(rows.tolist(), kind), "label": ["1", "2"]})
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "a.parquet", row_group_size=1)
    loaded = read_predictions(tmp_path / "a.parquet")
    assert torch.equal(loaded.probs, rows.repeat(2, 1))
    assert loaded.labels.tolist() == [1, 2, 1, 2]
    columns = pa.table({"prob_a": rows[:, 0].numpy(), "prob_b": (1 - rows[:, 0]).numpy(), "label": ["a", "b"]})
    pq.write_table(columns, tmp_path / "b.parquet")
    assert read_predictions(tmp_path / "b.parquet").probs.dtype == torch.float32


def test_parquet_lists_of_different_lengths_raise(tmp_path):
    pq.write_table(pa.table({"logits": [[1.0, 2.0], [1.0]], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1.*logits.*1.*row 0.*2"):
        read_predictions(tmp_path / "a.parquet")
    pq.write_table(pa.table({"logits": [[1.0, 2.0], [1.0, None]], "label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"logits.*row 1"):
        read_predictions(tmp_path / "b.parquet")


def test_missing_package_error_names_its_extra(tmp_path, monkeypatch):
    original = builtins.__import__

    def import_without_safetensors(name: str, *args: object) -> object:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr("importlib.import_module", import_without_safetensors)
    with pytest.raises(ImportError, match=r"safetensors.*pip install 'fedlas\[report\]'"):
        write_predictions(Predictions(LOGITS, LABELS), tmp_path / "p.safetensors")
    with pytest.raises(ImportError, match="fedlas"):
        optional_module("safetensors.torch")


def test_predictions_without_labels_are_read_and_written(tmp_path):
    """OOD data has none of the classes; accessing its labels raises."""
    unlabelled = Predictions(logits=LOGITS, split="svhn")
    write_predictions(unlabelled, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", logits=LOGITS.numpy())
    all_unlabelled = [
        unlabelled,
        read_predictions(tmp_path / "a.safetensors"),
        read_predictions(tmp_path / "a.npz"),
        read_predictions(write_csv(tmp_path, "logit_a,logit_b\n1,2\n")),
        Predictions.from_probs(LOGITS.softmax(1)),
    ]
    for predictions in all_unlabelled:
        assert predictions.given_labels is None
        assert len(predictions.confidence) == len(predictions)
        for access in (lambda p: p.labels, lambda p: p.correct, ece):
            with pytest.raises(ValueError, match="label"):
                access(predictions)


def test_duplicate_column_names_raise(tmp_path):
    with pytest.raises(ValueError, match=r"2.*'logit_a'"):
        read_predictions(write_csv(tmp_path, "logit_a,logit_b,logit_a,label\n1,2,3,0\n"))


def test_one_probability_column_is_a_binary_classifier(tmp_path):
    loaded = read_predictions(write_csv(tmp_path, "prob_cat,label\n0.25,cat\n0.75,not cat\n"))
    assert loaded.class_names == ("not cat", "cat")
    with pytest.raises(ValueError, match=r"'dog'.*add a column for 'dog', or write 'not cat'"):
        read_predictions(write_csv(tmp_path, "prob_cat,label\n0.25,cat\n0.75,dog\n"))
    assert loaded.labels.tolist() == [1, 0]
    assert loaded.probs.tolist() == [[0.75, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.parquet"])
def test_damaged_files_raise_an_error_that_names_them(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"this is not what it seems to be")
    with pytest.raises(ValueError, match=name):
        read_predictions(path)
    with pytest.raises(FileNotFoundError):
        read_predictions(tmp_path / "nowhere" / name)
