"""Predictions: what they accept, what they refuse, and that files come back as they went."""

import builtins
import copy
import inspect
import json
import math
import os
import pickle
import threading
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlas.errors import RowError
from fedlas.extras import optional_module
from fedlas.io import read_predictions, write_predictions
from fedlas.io.atomic import write_atomic
from fedlas.metrics import ece, nll
from fedlas.predictions import ENOUGH, Predictions, TopLabelPredictions, as_tensor, least_prob

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def test_properties():
    known = Predictions(LOGITS, LABELS, split="test", class_names=["cat", "dog", "emu"])
    assert (len(known), known.num_classes, known.split) == (2, 3, "test")
    assert torch.equal(known.probs, LOGITS.softmax(1))
    assert known.prediction.tolist() == [0, 2]
    assert known.correct.tolist() == [True, False]
    assert torch.equal(known.confidence, LOGITS.softmax(1).amax(1))
    assert repr(known) == "Predictions(split='test', n=2, classes=3, float32)"
    with pytest.raises(AttributeError):
        known.logits = LOGITS


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.numpy(), lambda x: x.tolist()])
def test_torch_numpy_and_lists(make):
    known = Predictions(logits=make(LOGITS), labels=make(LABELS), index=make(torch.tensor([5, 3])))
    assert known.logits.tolist() == LOGITS.tolist()
    assert known.labels.dtype == torch.int64
    assert known.index.tolist() == [5, 3]


def test_read_only_arrays_and_gradients():
    array = LOGITS.numpy().copy()
    array.flags.writeable = False
    assert Predictions(array, LABELS).logits.tolist() == LOGITS.tolist()
    assert not Predictions(LOGITS.clone().requires_grad_(), LABELS).logits.requires_grad


def test_half_precision_is_softened_in_float32():
    known = Predictions(LOGITS.bfloat16(), LABELS)
    assert known.logits.dtype == torch.bfloat16
    assert known.probs.dtype == torch.float32


def test_a_one_logit_head_is_binary():
    for logits in (torch.tensor([-1.0, 2.0]), torch.tensor([[-1.0], [2.0]])):
        known = Predictions(logits, torch.tensor([0, 1]))
        assert known.num_classes == 2
        assert torch.allclose(known.probs[:, 1], torch.tensor([-1.0, 2.0]).sigmoid())


def test_soft_labels():
    soft = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]])
    known = Predictions(LOGITS, soft)
    assert known.correct.tolist() == [0.5, 1.0]


def test_equal_probabilities_predict_the_first_class():
    assert Predictions(torch.zeros(1, 4), torch.tensor([0])).prediction.tolist() == [0]


def test_probabilities_are_kept_as_given():
    """softmax(log p) is not p; a confidence on the edge of a bin has to stay there."""
    probs = torch.tensor([[0.2, 0.8], [1.0, 0.0], [2 / 3, 1 / 3]])
    known = Predictions.from_probs(probs, torch.tensor([0, 0, 1]))
    assert torch.equal(known.probs, probs)
    assert torch.isfinite(known.logits).all()
    assert torch.allclose(known.logits.softmax(1), probs, atol=1e-6)
    vector = Predictions.from_probs([0.25, 0.5], [0, 1])
    assert vector.probs.tolist() == [[0.75, 0.25], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        ([[0.0, 1.0], [math.nan, 0.0]], [0, 1], {}, "logits.*row 1"),
        ([[0.0, math.inf]], [0], {}, "logits.*row 0"),
        ([[0.0, 1.0], [1.0, 0.0]], [0, 2], {}, "labels.*row 1.*2"),
        ([[0.0, 1.0]], [-1], {}, "labels.*row 0"),
        ([[0.0, 1.0]], [0, 1], {}, "labels.*2.*1"),
        ([[0.0, 1.0]], [0.5], {}, "labels.*1 integers"),
        ([[0.0, 1.0]], [[0.5, 0.6]], {}, "labels.*row 0.*distribution"),
        ([[0.0, 1.0]], [0], {"class_names": ["a"]}, "class_names.*1.*2"),
        ([[0.0, 1.0]], [0], {"features": [[1.0], [2.0]]}, "features.*2.*1"),
        ([[0.0, 1.0]], [0], {"index": [1, 2]}, "index.*2.*1"),
    ],
)
def test_what_is_wrong_is_said_with_its_row(logits, labels, options, message):
    with pytest.raises(ValueError, match=message):
        Predictions(
            np.array(logits),
            np.array(labels),
            **{k: np.array(v) if k != "class_names" else v for k, v in options.items()},
        )


@pytest.mark.parametrize("rows", [2, ENOUGH + 5])
def test_no_classes(rows):
    """The fuzzer found torch's own error, about the smallest of no numbers."""
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=rf"\({rows}, 0\)"):
            make(torch.zeros(rows, 0), torch.zeros(rows, dtype=torch.long))


def test_no_rows_wrong_types_and_wrong_shapes():
    with pytest.raises(ValueError, match=r"logits.*rows"):
        Predictions(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    with pytest.raises(TypeError, match="floating-point"):
        Predictions(torch.zeros(2, 3, dtype=torch.long), LABELS)
    with pytest.raises(TypeError, match=r"logits.*<U1"):
        Predictions(np.array([["a", "b"]]), [0])
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=r"\(2, 3, 4\)"):
            make(torch.zeros(2, 3, 4), LABELS)


def test_rows_have_to_sum_to_one():
    with pytest.raises(ValueError, match=r"probs.*row 1.*distribution.*\[0\.9, 0\.9\]"):
        Predictions.from_probs([[0.5, 0.5], [0.9, 0.9]], [0, 1])
    with pytest.raises(ValueError, match="row 0"):
        Predictions.from_probs([[1.2, -0.2]], [0])
    assert len(Predictions.from_probs([[0.9, 0.09]], [0])) == 1  # two decimals


def everything(probs: bool) -> Predictions:
    options = {
        "features": torch.randn(2, 4),
        "index": torch.tensor([7, 1]),
        "class_names": ["<b>", "ünï", ""],
        "split": "val",
    }
    if probs:
        return Predictions.from_probs(LOGITS.softmax(1), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), **options)
    return Predictions(LOGITS, LABELS, **options)


@pytest.mark.parametrize("probs", [False, True])
def test_save_and_load(tmp_path, probs):
    known = everything(probs)
    write_predictions(known, tmp_path / "deep" / "p.safetensors")
    back = read_predictions(tmp_path / "deep" / "p.safetensors")
    for name in ("logits", "labels", "features", "index", "probs"):
        assert torch.equal(getattr(back, name), getattr(known, name)), name
    assert (back.class_names, back.split) == (known.class_names, known.split)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["p.safetensors"]


def test_load_keeps_half_precision(tmp_path):
    write_predictions(Predictions(LOGITS.bfloat16(), LABELS), tmp_path / "p.safetensors")
    assert read_predictions(tmp_path / "p.safetensors").logits.dtype == torch.bfloat16


def test_files_of_other_programs(tmp_path):
    from safetensors.torch import save_file

    save_file({"logits": LOGITS, "labels": LABELS}, tmp_path / "p.safetensors", metadata={"format": "pt"})
    assert read_predictions(tmp_path / "p.safetensors").logits.tolist() == LOGITS.tolist()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    write_predictions(everything(False), path)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_predictions(everything(True), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]


def test_files_are_on_disk_before_they_have_their_name(tmp_path, monkeypatch):
    steps = []
    original_fsync, original_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("fsync"), original_fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (steps.append("rename"), original_replace(a, b))[1])
    write_atomic(tmp_path / "x", b"abc")
    assert steps == ["fsync", "rename"]
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_a_file_that_has_both_names_already_leaves_no_third_one(tmp_path):
    """As a kill between two renames leaves it; then the spare name stayed for ever beside a finished run."""
    path, before = tmp_path / "x", tmp_path / "before"
    path.write_bytes(b"old")
    before.hardlink_to(path)
    write_atomic(path, b"new", backup=before)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"x": b"new", "before": b"old"}


def test_npz(tmp_path):
    np.savez(tmp_path / "a.npz", logits=LOGITS, labels=LABELS, class_names=["x", "y", "z"], split="test")
    known = read_predictions(tmp_path / "a.npz")
    assert (known.class_names, known.split) == (("x", "y", "z"), "test")
    np.savez(tmp_path / "b.npz", probs=LOGITS.softmax(1), labels=LABELS, features=np.ones((2, 5)), index=[4, 2])
    known = read_predictions(tmp_path / "b.npz", split="val")
    assert (known.split, known.features.shape, known.index.tolist()) == ("val", (2, 5), [4, 2])
    assert known.given_probs is not None


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"labels": LABELS}, r"a\.npz.*logits, probs.*labels$"),
        ({"logits": LOGITS, "probs": LOGITS.softmax(1), "labels": LABELS}, r"a\.npz.*logits; probs.*--prob-columns"),
        ({"logits": LOGITS, "label": LABELS, "labels": LABELS}, r"a\.npz.*label, labels.*--label-column"),
    ],
)
def test_what_is_missing_or_ambiguous_is_asked_for_with_the_columns(tmp_path, arrays, named):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=named):
        read_predictions(tmp_path / "a.npz")


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_with_probabilities_and_names(tmp_path):
    text = "\ufeffprob_cat,prob_dog,label,index\n0.7,0.3,dog,10\n0.25,0.75,dog,11\n"
    known = read_predictions(table(tmp_path, text), split="test")
    assert known.class_names == ("cat", "dog")
    assert known.labels.tolist() == [1, 1]
    assert known.index.tolist() == [10, 11]
    assert known.probs.tolist() == [[0.7, 0.3], [0.25, 0.75]]
    assert known.split == "test"


def test_csv_with_logits_numbers_and_features(tmp_path):
    text = "label,logit_a,logit_b,feature_0,feature_1\n0,1.5,-2,1,2\n1,0,3e1,3,4\n"
    known = read_predictions(table(tmp_path, text))
    assert known.labels.tolist() == [0, 1]
    assert known.logits.tolist() == [[1.5, -2.0], [0.0, 30.0]]
    assert known.features.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_csv_with_soft_labels(tmp_path):
    text = "prob_a,prob_b,label_b,label_a\n0.5,0.5,0.25,0.75\n"
    assert read_predictions(table(tmp_path, text)).labels.tolist() == [[0.75, 0.25]]


def test_class_names_that_are_numbers_are_names(tmp_path):
    text = "prob_1,prob_2\u002clabel\n0.9,0.1,1\n0.2,0.8,2\n"
    assert read_predictions(table(tmp_path, text)).labels.tolist() == [0, 1]


def test_columns_are_recognised_by_name_never_by_value(tmp_path):
    """Logits that look like probabilities stay logits."""
    text = "logit_a,logit_b,label\n0.9,0.1,0\n"
    assert read_predictions(table(tmp_path, text)).given_probs is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b,label\n1,2,0\n", r"t\.csv.*prob_NAME.*a, b, label$"),
        ("prob_a,logit_a,label\n1,2,0\n", r"t\.csv.*logit_a; prob_a.*--prob-columns"),
        ("prob_a,prob_b,label_a\n0.5,0.5,1\n", r"t\.csv.*`label`.*prob_a, prob_b, label_a$"),
        ("prob_a,prob_b,label\n0.5,0.5\n", "line 2.*2.*3"),
        ("prob_a,prob_b,label\n0.5,x,a\n", "line 2.*prob_b.*'x'"),
        ("prob_a,prob_b,label\n0.5,0.5,a\n0.5,0.5,7\n", "line 3.*label.*'7'.*a, b"),
        ("prob_a,prob_b,label\n0.5,0.5,emu\n", "line 2.*label.*'emu'.*a, b"),
        ("prob_a,prob_b,label\n0.5,0.5,2\n", "labels.*line 2.*2"),
        ("prob_a,prob_b,label\n0.5,0.6,a\n0.50,0.57,a\n", "line 3.*distribution"),
        ("prob_a,prob_b,label\n", "rows"),
        ("", r"t\.csv.*empty"),
    ],
)
def test_csv_errors(tmp_path, text, named):
    with pytest.raises(ValueError, match=named):
        read_predictions(table(tmp_path, text))


def test_a_small_file_cannot_claim_any_number_of_classes(tmp_path):
    wide = np.zeros((1, 2**20 + 1), np.float16)
    np.savez_compressed(tmp_path / "wide.npz", logits=wide, labels=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=r"wide\.npz.*1,048,577.*1,048,576"):
        read_predictions(tmp_path / "wide.npz")


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_rounded_numbers_of_other_files_may_miss_one_as_those_of_text_may(tmp_path, kind):
    rounded = np.array([[0.33, 0.33, 0.33], [0.5, 0.25, 0.25]], dtype=kind)
    finer = np.array([[0.331, 0.331, 0.331], [0.5, 0.25, 0.25]], dtype=kind)
    for name, probs in {"rounded": rounded, "finer": finer, "no number": rounded * np.nan}.items():
        np.savez(tmp_path / f"{name}.npz", probs=probs, labels=[0, 1])
    assert read_predictions(tmp_path / "rounded.npz").probs.tolist() == rounded.tolist()
    for name in ("finer", "no number"):
        with pytest.raises(ValueError, match="distribution"):
            read_predictions(tmp_path / f"{name}.npz")
    assert Predictions.from_probs(rounded, [0, 1]).probs.tolist() == rounded.tolist()


def rounded_softmax(classes: int, decimals: int, n: int = 40) -> np.ndarray:
    make = np.random.default_rng(0)
    exact = np.exp(2 * make.standard_normal((n, classes)))
    return np.round(exact / exact.sum(1, keepdims=True), decimals)


def write_kind(folder: Path, kind: str, probs: np.ndarray) -> Path:
    labels = np.zeros(len(probs), dtype=np.int64)
    path = folder / f"p.{kind}"
    if kind == "npz":
        np.savez(path, probs=probs, labels=labels)
    else:
        head = ",".join(f"prob_{k}" for k in range(probs.shape[1]))
        rows = (",".join(map(str, [*row, 0])) for row in probs)
        path.write_text("\n".join([f"{head},label", *rows]))
    return path


@pytest.mark.parametrize("kind", ["npz", "csv"])
@pytest.mark.parametrize(
    ("row", "shown"),
    [([1.5, *[0.0] * 9], r"sums to 1\.5"), ([0.2] * 10, r"sums to 2"), ([0.251, 0.149, *[0.0] * 8], r"sums to 0\.4")],
)
def test_a_row_is_no_distribution_however_many_classes_there_are(tmp_path, kind, row, shown):
    """The allowance was half a unit for each class without a limit, and an entry of 1.5 was a confidence of 150 %."""
    filler = np.zeros((3, 990))
    probs = np.hstack([np.array([[*[0.1] * 10], row, [0.5, 0.5, *[0.0] * 8]]), filler])
    with pytest.raises(ValueError, match=rf"(row 1|line 3).*{shown}.*--normalize"):
        read_predictions(write_kind(tmp_path, kind, probs))


@pytest.mark.parametrize("kind", ["npz", "csv", "array"])
def test_many_classes_with_few_decimals_are_completed_with_a_warning(tmp_path, kind):
    """A softmax of 1,000 classes with 3 decimals sums to about 0.93: its small probabilities are zeros."""
    probs = rounded_softmax(1000, 3)
    assert probs.sum(1).max() < 0.98
    path = None if kind == "array" else write_kind(tmp_path, kind, probs)
    with pytest.warns(UserWarning, match=r"40 of 40 .*0\.9"):
        found = Predictions.from_probs(probs, [0] * 40) if path is None else read_predictions(path)
    assert torch.allclose(found.probs.sum(1), torch.ones(40, dtype=torch.float64))
    # The missing probability is spread over zeros: no confidence changes by more than rounding explains.
    assert torch.allclose(found.confidence, torch.from_numpy(probs.max(1)), rtol=1e-2, atol=1e-3)
    assert found.zeros is None


def test_sums_beyond_rounding_are_an_error_that_names_the_remedy():
    """Sums of 1.2 and more of 1,000 classes with 3 decimals passed."""
    probs = rounded_softmax(1000, 3)
    probs[1] = np.round(1.3 * probs[1], 3)
    with pytest.raises(ValueError, match=r"row 1.*sums of all rows.*1\.1.*normalize"):
        Predictions.from_probs(probs, [0] * 40)
    found = Predictions.from_probs(probs, [0] * 40, normalize=True)
    assert torch.allclose(found.probs[1], torch.from_numpy(probs[1] / probs[1].sum()))
    with pytest.raises(ValueError, match="row 0"):
        Predictions.from_probs([[1.5, -0.5]], [0], normalize=True)


def test_rounded_columns_of_a_parquet_file_are_taken(tmp_path):
    pa = pytest.importorskip("pyarrow")
    columns = {"prob_a": [0.3333, 0.5], "prob_b": [0.3333, 0.25], "prob_c": [0.3333, 0.25], "label": ["a", "b"]}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), tmp_path / "p.parquet")
    assert read_predictions(tmp_path / "p.parquet").probs[0].tolist() == [0.3333] * 3


@pytest.mark.parametrize(("cell", "named"), {"x": "'x'", " ": "empty", "50%": r"'50%'.*0\.7"}.items())
def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path, cell, named):
    with pytest.raises(ValueError, match=f"line 4.*prob_b.*{named}"):
        read_predictions(table(tmp_path, f"prob_a,prob_b,label\n0.5,0.5,a\n\n0.5,{cell},a\n"))


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
def test_each_number_of_a_row_adds_half_of_its_last_digit(tmp_path, row, allowed):
    path = table(
        tmp_path,
        f"label,prob_a,feature_0,prob_b,prob_c\na,{','.join([row.split(',')[0], '7.5', *row.split(',')[1:]])}\n",
    )
    if allowed:
        assert len(read_predictions(path)) == 1
    else:
        with pytest.raises(ValueError, match=r"line 2.*distribution"):
            read_predictions(path)


def test_a_large_csv_takes_little_more_than_its_numbers(tmp_path):
    """Cells kept as text took 300 bytes each; a number takes 8, and a copy or two of it on the way."""
    rows = "\n".join(["0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,0.1250,3"] * 5_000)
    path = table(tmp_path, ",".join(f"prob_{i}" for i in range(8)) + f",label\n{rows}\n")
    tracemalloc.start()
    known = read_predictions(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert known.probs.shape == (5_000, 8)
    assert most < 60 * 8 * 5_000


def test_csv_with_the_top_class_alone(tmp_path):
    text = "confidence,prediction,label\n0.5,dog,dog\n0.9,cat,dog\n0.12,7,cat\n"
    known = read_predictions(table(tmp_path, text))
    assert isinstance(known, TopLabelPredictions)
    assert known.confidence.tolist() == pytest.approx([0.5, 0.9, 0.12])
    assert [known.class_names[i] for i in known.prediction] == ["dog", "cat", "7"]
    assert known.correct.tolist() == [True, False, False]
    write_predictions(known, tmp_path / "p.safetensors")
    back = read_predictions(tmp_path / "p.safetensors")
    assert isinstance(back, TopLabelPredictions)
    for name in ("confidence", "correct", "prediction", "labels"):
        assert torch.equal(getattr(back, name), getattr(known, name)), name
    with pytest.raises(ValueError, match=r"confidence.*line 2.*0"):
        read_predictions(table(tmp_path, "confidence,prediction,label\n0,a,b\n"))


def test_a_binary_confidence_of_one_half_keeps_its_prediction(tmp_path):
    """With two classes both halves tie, and the first class would win."""
    known = read_predictions(table(tmp_path, "confidence,prediction,label\n0.5,1,1\n0.5,0,1\n"))
    assert known.correct.tolist() == [True, False]


def test_parquet(tmp_path):
    lists = pa.table({"probs": LOGITS.softmax(1).double().tolist(), "label": [0, 1], "index": [3, 4]})
    pq.write_table(lists, tmp_path / "a.parquet")
    known = read_predictions(tmp_path / "a.parquet")
    assert torch.allclose(known.probs, LOGITS.softmax(1).double())
    assert known.index.tolist() == [3, 4]
    columns = pa.table({"logit_x": [1.0, 2.0], "logit_y": [0.0, 5.0], "label": ["y", "x"]})
    pq.write_table(columns, tmp_path / "b.parquet")
    known = read_predictions(tmp_path / "b.parquet", split="s")
    assert (known.class_names, known.labels.tolist(), known.split) == (("x", "y"), [1, 0], "s")


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 3)])
def test_lists_of_parquet_keep_their_type(tmp_path, kind):
    """As Python numbers float32 became float64, which allows less rounding than a softmax in float32 has."""
    rows = LOGITS.softmax(1)
    table = pa.table({"probs": pa.array(rows.tolist(), kind), "label": ["1", "2"]})
    pq.write_table(pa.concat_tables([table, table]), tmp_path / "a.parquet", row_group_size=1)
    known = read_predictions(tmp_path / "a.parquet")
    assert torch.equal(known.probs, rows.repeat(2, 1))
    assert known.labels.tolist() == [1, 2, 1, 2]
    columns = pa.table({"prob_a": rows[:, 0].numpy(), "prob_b": (1 - rows[:, 0]).numpy(), "label": ["a", "b"]})
    pq.write_table(columns, tmp_path / "b.parquet")
    assert read_predictions(tmp_path / "b.parquet").probs.dtype == torch.float32


def test_lists_of_parquet_that_are_not_rows(tmp_path):
    pq.write_table(pa.table({"logits": [[1.0, 2.0], [1.0]], "label": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 1.*logits.*1.*row 0.*2"):
        read_predictions(tmp_path / "a.parquet")
    pq.write_table(pa.table({"logits": [[1.0, 2.0], [1.0, None]], "label": [0, 1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"logits.*row 1"):
        read_predictions(tmp_path / "b.parquet")


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    original = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(ImportError, match=r"safetensors.*pip install 'fedlas\[report\]'"):
        write_predictions(Predictions(LOGITS, LABELS), tmp_path / "p.safetensors")
    with pytest.raises(ImportError, match="fedlas"):
        optional_module("safetensors.torch")


def test_as_tensor_does_not_copy():
    array = np.zeros(3)
    as_tensor(array, "x")[0] = 1
    assert array[0] == 1


def test_an_unknown_keyword_does_not_vanish() -> None:
    with pytest.raises(TypeError, match=r"'spilt'.*split"):
        Predictions(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), spilt="test")


def test_labels_may_be_unknown(tmp_path):
    """Foreign data has none of the classes; asking for its labels is an error that says so."""
    plain = Predictions(logits=LOGITS, split="svhn")
    write_predictions(plain, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", logits=LOGITS.numpy())
    given = [
        plain,
        read_predictions(tmp_path / "a.safetensors"),
        read_predictions(tmp_path / "a.npz"),
        read_predictions(table(tmp_path, "logit_a,logit_b\n1,2\n")),
        Predictions.from_probs(LOGITS.softmax(1)),
    ]
    for predictions in given:
        assert predictions.given_labels is None
        assert len(predictions.confidence) == len(predictions)
        for ask in (lambda p: p.labels, lambda p: p.correct, ece):
            with pytest.raises(ValueError, match="label"):
                ask(predictions)


@pytest.mark.parametrize("rows", [slice(1, 2), torch.tensor([1]), torch.tensor([False, True])])
def test_some_of_the_samples(rows):
    every = Predictions(LOGITS, LABELS, features=LOGITS, index=[7, 8], class_names=list("abc"), split="val")
    one = every[rows]
    assert len(one) == 1
    assert torch.equal(one.logits, LOGITS[1:])
    assert torch.equal(one.labels, LABELS[1:])
    assert torch.equal(one.features, LOGITS[1:])
    assert one.index.tolist() == [8]
    assert (one.split, one.class_names) == ("val", ("a", "b", "c"))
    assert torch.equal(one.confidence, every.confidence[1:])
    probs = Predictions.from_probs(LOGITS.softmax(1))[rows]
    assert torch.equal(probs.given_probs, LOGITS.softmax(1)[1:])


def test_a_number_is_not_some_of_the_samples():
    with pytest.raises(TypeError, match=r"slice.*mask.*str"):
        inspect.unwrap(Predictions.__getitem__)(Predictions(LOGITS, LABELS), "a")


@pytest.mark.parametrize("rows", [np.array([False, True]), np.array([1]), [1], slice(None, 0, -1)])
def test_some_of_the_samples_by_numpy_and_lists(rows):
    assert torch.equal(Predictions(LOGITS, LABELS)[rows].logits, LOGITS[1:])


def test_no_samples_are_an_error():
    with pytest.raises(ValueError, match="sample"):
        Predictions(LOGITS, LABELS)[:0]


def test_arrays_that_torch_cannot_share_are_copied():
    plain = LOGITS.numpy()
    for given in (plain[::-1][::-1], plain[::-1], plain.astype(">f4"), plain.astype(np.longdouble)):
        assert np.allclose(as_tensor(given, "a").numpy(), np.asarray(given, dtype=np.float64))


def test_hidden_and_ragged_values_are_refused():
    with pytest.raises(TypeError, match=r"logits.*masked"):
        Predictions(np.ma.masked_array(LOGITS.numpy(), mask=LOGITS.numpy() > 2.5), LABELS)
    with pytest.raises(ValueError, match="logits"):
        Predictions([[1.0, 2.0], [1.0]], [0, 1])


def test_two_columns_of_one_name_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"2.*'logit_a'"):
        read_predictions(table(tmp_path, "logit_a,logit_b,logit_a,label\n1,2,3,0\n"))


def test_one_column_is_a_binary_classifier(tmp_path):
    found = read_predictions(table(tmp_path, "prob_cat,label\n0.25,cat\n0.75,not cat\n"))
    assert found.class_names == ("not cat", "cat")
    assert found.labels.tolist() == [1, 0]
    assert found.probs.tolist() == [[0.75, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("name", ["a.safetensors", "a.npz", "a.parquet"])
def test_damaged_files_are_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"this is not what it seems to be")
    with pytest.raises(ValueError, match=name):
        read_predictions(path)
    with pytest.raises(FileNotFoundError):
        read_predictions(tmp_path / "nowhere" / name)


def test_a_row_that_is_no_distribution_says_what_it_sums_to():
    with pytest.raises(ValueError, match=r"1\.5.*logits=.*normalize="):
        Predictions.from_probs([[0.5, 0.5], [0.75, 0.75]], [0, 1])


def test_percentages_whose_rounding_adds_up_are_called_so():
    """Of a row that sums to 94 it was said that logits enter elsewhere."""
    rows = [[90.0, 1.0, 1.0, 1.0, 1.0], [95.0, 1.0, 1.0, 1.0, 0.0], [50.0, 48.0, 0.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"94.*percentages.*100"):
        Predictions.from_probs(rows, [0, 1, 2])
    with pytest.raises(ValueError, match=r"94.*logits="):
        Predictions.from_probs([[94.0, 0.0], [0.5, 0.5], [0.5, 0.5]], [0, 1, 1])


def test_a_transposed_table_is_asked_about():
    """Of probabilities it was said that they look like percentages: 300 of them sum to about 100."""
    probs = torch.full((300, 3), 1 / 3)
    labels = torch.arange(300) % 3
    for given in (labels, labels.numpy(), labels.tolist(), torch.eye(3)[labels]):
        with pytest.raises(ValueError, match=r"^probs.*3.*300.*transposed"):
            Predictions.from_probs(probs.T, given, class_names=["a", "b", "c"])
        with pytest.raises(ValueError, match=r"^labels.*300.*3.*transposed"):
            Predictions(probs.log().T, given, class_names=["a", "b", "c"], index=torch.arange(300))
    with pytest.raises(ValueError, match=r"^probs.*1.*300.*transposed"):
        Predictions.from_probs(probs[:, :1].T, labels)
    with pytest.raises(ValueError, match=r"^labels((?!transposed).)*299((?!transposed).)*300((?!transposed).)*$"):
        Predictions(probs.log(), labels[1:])
    assert len(Predictions.from_probs(probs[:3], labels[:3])) == 3  # as many rows as columns


def test_numbers_up_to_one_are_no_percentages():
    probs = torch.full((3, 300), 1 / 3)
    with pytest.raises(ValueError, match=r"100.*logits="):
        Predictions.from_probs(probs)
    with pytest.raises(ValueError, match=r"95.*logits="):
        Predictions.from_probs(probs * 0.95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Predictions(probs * torch.tensor([0.9999, 1.0, 1.0])[:, None])
    with pytest.raises(ValueError, match=r"100.*percentages"):
        Predictions.from_probs([[99.0, 0.5, 0.5], [0.2, 0.3, 0.5]])


def test_soft_labels_that_are_no_distribution_are_not_taken_for_logits():
    with pytest.raises(ValueError, match=r"labels.*row 0((?!logits).)*1\.5((?!logits).)*$"):
        Predictions(torch.zeros(1, 2), [[0.75, 0.75]])


def test_equal_predictions_are_equal_bytes(tmp_path):
    given = Predictions(torch.eye(3), [0, 1, 2], class_names=("a", "b", "ä"), split="test", index=[5, 6, 7])
    written = set()
    for number in range(8):  # the order of words in the file is drawn anew each time that one is made
        write_predictions(given, tmp_path / f"{number}.safetensors")
        written.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(written) == 1
    assert read_predictions(tmp_path / "0.safetensors").class_names == ("a", "b", "ä")


def head_of(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("probs", [False, True])
def test_no_flipped_bit_goes_unnoticed(tmp_path, probs):
    """Logits with a flipped bit were read without a word; so were the names of classes."""
    given, path = everything(probs), tmp_path / "p.safetensors"
    write_predictions(given, path)
    whole = path.read_bytes()
    words = [whole.index(word) for word in (b"val", b"fedlas.predictions", b"class_names")]
    for place in [*words, *range(head_of(whole), len(whole))]:
        for bit in (0, 7) if place not in words else (0,):
            content = bytearray(whole)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"p\.safetensors"):
                read_predictions(path)


def test_files_without_a_checksum_are_read(tmp_path):
    write_predictions(everything(False), tmp_path / "p.safetensors")
    whole = (tmp_path / "p.safetensors").read_bytes()
    head = json.loads(whole[8 : head_of(whole)])
    del head["__metadata__"]["fedlas.crc32"]  # as they were written before there was one
    text = json.dumps(head).encode()
    content = len(text).to_bytes(8, "little") + text + whole[head_of(whole) :]
    (tmp_path / "p.safetensors").write_bytes(content)
    back = read_predictions(tmp_path / "p.safetensors")
    assert (back.logits.tolist(), back.split) == (LOGITS.tolist(), "val")


def test_links_pipes_and_rights_stay_what_they_are(tmp_path):
    """Writing to /dev/null as root made a plain file of it."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomic(tmp_path / "pipe", b"through")
    reader.join(10)
    assert got == [b"through"]
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link", "pipe"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_probabilities_given_as_logits_are_doubted(dtype):
    probs = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).softmax(1).to(dtype)
    with pytest.warns(UserWarning, match="from_probs"):
        Predictions(probs, torch.zeros(50, dtype=torch.int64))


def test_logits_that_are_distributions_here_and_there_are_not_doubted():
    probs = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).softmax(1)
    last = probs.clone()
    last[-1] += 0.1
    few = probs[: ENOUGH - 1]  # so few may be somebody's example
    for logits in (last, few, 2 * probs, -probs, probs.log(), torch.zeros(50, 7)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Predictions(logits, torch.zeros(len(logits), dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_probability_of_zero_has_a_logit_where_small_numbers_are_flushed(dtype):
    """The floor was such a small number itself, and its logarithm minus infinity."""
    probs, soft = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[0.5, 0.5]], dtype=dtype)
    plain = Predictions.from_probs(probs, [1])
    expected = [float(nll(probs, labels)) for labels in ([1], soft)]
    torch.set_flush_denormal(True)  # on a processor that cannot, what follows holds all the same
    try:
        flushed = Predictions.from_probs(probs, [1])
        found = [nll(probs, labels) for labels in ([1], soft)]
    finally:
        torch.set_flush_denormal(False)
    assert torch.isfinite(flushed.logits).all()
    assert torch.equal(flushed.logits, plain.logits)
    assert plain.logits[0, 1] == pytest.approx(math.log(least_prob(dtype)))
    assert [float(one) for one in found] == pytest.approx(expected)
    assert [one.details["floored"] for one in found] == [1, 1]


def test_two_classes_of_one_name_are_refused_at_once():
    """They were taken, and refused when the work was done and should be saved."""
    for make in (Predictions, Predictions.from_probs):
        with pytest.raises(ValueError, match=r"name.*'a'"):
            make(LOGITS.softmax(1), LABELS, class_names=["a", "b", "a"])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_about_a_row_can_be_copied_and_pickled(again):
    """A process that reads files for another one could not tell it."""
    error = RowError("p.csv: ", 3, " has label 'x'")
    found = again(error)
    assert (type(found), str(found)) == (RowError, str(error))
    assert str(found.at_line([2, 3, 4, 9])) == "p.csv: line 9 has label 'x'"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decimals", [1, 2, 4, 6])
@pytest.mark.filterwarnings("ignore:.*normalized")
def test_rounding_to_decimals_is_detected(dtype, decimals):
    make = torch.Generator().manual_seed(0)
    probs = (4 * torch.randn(300, 5, generator=make, dtype=torch.float64)).softmax(1)
    labels = probs.argmin(1)
    rounded = Predictions.from_probs(probs.round(decimals=decimals).to(dtype), labels)
    assert rounded.decimals == rounded[5:9].decimals == decimals
    floor = math.log(0.5 * 10**-decimals)
    assert rounded.logits[rounded.zeros].unique().tolist() == pytest.approx([floor])
    loss = nll(rounded)
    assert loss.details["floored"] > 0
    assert loss.details["floor"] == pytest.approx(math.exp(floor))
    assert float(loss) == pytest.approx(-float(rounded.logits.double().gather(1, labels[:, None]).mean()), rel=1e-5)


def test_other_tables_are_not_taken_for_rounded_ones():
    make = torch.Generator().manual_seed(0)
    scores = torch.randn(300, 5, generator=make)
    votes = torch.multinomial(torch.ones(300, 5), 7, replacement=True, generator=make)
    tables = {
        "softmax": scores.softmax(1),
        "saturated": (60 * scores).softmax(1),
        "seventh": torch.stack([(votes == k).sum(1) for k in range(5)], 1) / 7,
        "certain": torch.eye(5).repeat(60, 1),
        "few": torch.tensor([[0.5, 0.5], [0.25, 0.75]]),
    }
    found = {name: Predictions.from_probs(table, torch.zeros(len(table)).long()) for name, table in tables.items()}
    assert {name: given.decimals for name, given in found.items()} == dict.fromkeys(tables)
