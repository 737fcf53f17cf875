"""Predictions in the layouts of other tools: names of columns, options that name them, formats, types of labels."""

import gzip
import json
import tracemalloc
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedlas.cli.commands import app
from fedlas.errors import UserError
from fedlas.io import as_predictions, read_predictions, require_labels
from fedlas.io.columns import LABEL_NAMES, UNDECLARED
from fedlas.predictions import Predictions, TopLabelPredictions

NAMES = ("cat", "dog", "eel")
rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(12, 3)).round(3)
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(1, keepdims=True)
LABELS = np.array([0, 1, 2, 2] * 3)
NAMED_LABELS = [NAMES[label] for label in LABELS]
ONE_HOT = {"one-hot": np.int64, "bool one-hot": np.bool_, "f4 one-hot": np.float32, "f8 one-hot": np.float64}


def write_table(path: Path, columns: dict, delimiter: str = ",") -> Path:
    """Write a text table, compressed if the suffix is .gz."""
    rows = zip(*(map(str, column) for column in columns.values()), strict=True)
    text = "\n".join(delimiter.join(row) for row in [tuple(columns), *rows]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_columns(path: Path, columns: dict) -> Path:
    """Write columns to a text, JSON or parquet file, as its suffix says."""
    lists = {name: list(column) for name, column in columns.items()}
    if path.suffix == ".json":
        path.write_text(json.dumps(lists))
    elif path.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table(lists), path)
    else:
        write_table(path, columns)
    return path


def class_columns(prefix: str, values: np.ndarray = PROBS, names: tuple = NAMES) -> dict:
    return {f"{prefix}{name}": values[:, position] for position, name in enumerate(names)}


def assert_predictions(predictions: Predictions, *, logits: bool = False) -> None:
    assert torch.allclose(
        predictions.logits if logits else predictions.probs, torch.from_numpy(LOGITS if logits else PROBS)
    )
    assert (predictions.given_logits is not None) is logits
    assert predictions.labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize("name", [*sorted(LABEL_NAMES), "Label", "Y", "Y_True"])
def test_label_columns_of_other_tools_are_recognised(tmp_path, name):
    predictions = read_predictions(write_table(tmp_path / "p.csv", class_columns("prob_") | {name: NAMED_LABELS}))
    assert_predictions(predictions)
    assert f"labels from {name}" in str(predictions.columns)


def test_columns_of_soft_labels_are_among_those_that_were_read(tmp_path):
    """Regression: the summary named the probabilities alone, as if the file had no labels."""
    soft = {
        f"label_{name}": np.eye(3)[LABELS][:, i] * 0.8 + 0.1 * (1 - np.eye(3)[LABELS][:, i])
        for i, name in enumerate(NAMES)
    }
    read = read_predictions(
        write_table(tmp_path / "p.csv", class_columns("prob_") | soft | {"label_source": ["web"] * len(LABELS)})
    )
    assert f"labels from {', '.join(soft)}" in str(read.columns)
    assert str(read.columns).endswith("; not read: label_source")
    with_label = class_columns("prob_") | {"label": NAMED_LABELS, "label_source": ["web", "shop"] * 6}
    assert set(read_predictions(write_table(tmp_path / "m.csv", with_label)).metadata) == {"label_source"}


def test_a_misspelt_soft_label_column_is_named(tmp_path):
    soft = {f"label_{name}": [1 / len(NAMES)] * len(LABELS) for name in NAMES[1:]} | {
        "label_mispelt": [0.5] * len(LABELS)
    }
    with pytest.raises(UserError, match="label_mispelt"):
        read_predictions(write_table(tmp_path / "p.csv", class_columns("prob_") | soft))


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
@pytest.mark.parametrize(
    "prefix", ["prob_", "Prob_", "probs_", "proba_", "P_", "probability_", ".pred_", "", "logits_"]
)
def test_class_columns_of_other_tools_are_recognised(tmp_path, prefix, kind):
    logits = prefix == "logits_"
    columns = (
        {"unknown": range(12)}
        | class_columns(prefix, LOGITS if logits else PROBS)
        | {"y_true": NAMED_LABELS, "note": NAMED_LABELS[::-1]}
    )
    path = write_columns(tmp_path / f"p.{kind}", columns)
    predictions = read_predictions(path)
    assert_predictions(predictions, logits=logits)
    assert predictions.class_names == NAMES
    assert predictions.columns.unread == ["unknown"]
    assert dict(predictions.metadata) == {"note": tuple(NAMED_LABELS[::-1])}


def test_numeric_class_columns_are_recognised(tmp_path):
    path = write_table(
        tmp_path / "p.csv", {"": range(12)} | class_columns("", names=("0", "1", "2")) | {"target": LABELS}
    )
    assert_predictions(read_predictions(path))
    path = write_table(
        tmp_path / "q.csv", {"p_value": LABELS[::-1]} | class_columns("p_", names=("1", "2", "3")) | {"y": LABELS + 1}
    )
    predictions = read_predictions(path)
    assert_predictions(predictions)
    assert predictions.columns.metadata == ("p_value",)
    path = write_table(tmp_path / "r.csv", {"p_value": LABELS, "p_adjusted": LABELS, "y": NAMED_LABELS})
    with pytest.raises(ValueError, match=r"r\.csv.*--prob-columns.*p_value"):
        read_predictions(path)


def test_class_without_samples_is_read(tmp_path):
    columns = class_columns("") | {"truth": ["cat", "eel"] * 6}
    predictions = read_predictions(write_table(tmp_path / "p.csv", columns))
    assert predictions.class_names == NAMES
    assert predictions.labels.tolist() == [0, 2] * 6


@pytest.mark.parametrize("key", ["predictions", "Probs", "softmax", "outputs", "probabilities", "y_score", "y_pred"])
def test_arrays_of_other_tools_are_recognised(tmp_path, key):
    np.savez(tmp_path / "p.npz", **{key: PROBS, "ground_truth": LABELS})
    assert_predictions(read_predictions(tmp_path / "p.npz"))
    torch.save({key: torch.from_numpy(PROBS), "targets": torch.from_numpy(LABELS)}, tmp_path / "p.pt")
    assert_predictions(read_predictions(tmp_path / "p.pt"))
    np.savez(tmp_path / "q.npz", **{key: LOGITS, "ground_truth": LABELS})
    with pytest.raises(ValueError, match=r"q\.npz.*--logits"):  # never guessed from values
        read_predictions(tmp_path / "q.npz")
    if key.casefold() not in UNDECLARED:
        with pytest.raises(ValueError, match=rf"q\.npz.*--logits.*{key}.*--prob-columns"):
            read_predictions(tmp_path / "q.npz", logits=True)
    options = {} if key.casefold() in UNDECLARED else {"prob_columns": key}
    assert_predictions(read_predictions(tmp_path / "q.npz", logits=True, **options), logits=True)


def test_class_columns_of_probabilities_are_not_read_as_logits(tmp_path):
    path = write_table(tmp_path / "p.csv", class_columns("prob_") | {"label": NAMED_LABELS})
    with pytest.raises(ValueError, match=r"p\.csv.*--logits.*prob_cat.*--prob-columns"):
        read_predictions(path, logits=True)


def test_arrays_of_hugging_face_are_logits(tmp_path):
    np.savez(tmp_path / "p.npz", predictions=LOGITS, label_ids=LABELS, metrics={"accuracy": 0.5})
    assert_predictions(read_predictions(tmp_path / "p.npz"), logits=True)


def test_scalars_and_settings_next_to_arrays_are_ignored(tmp_path):
    torch.save(
        {"epoch": 3, "config": {}, "logits": torch.from_numpy(LOGITS), "y": torch.from_numpy(LABELS)}, tmp_path / "p.pt"
    )
    assert_predictions(read_predictions(tmp_path / "p.pt"), logits=True)


@pytest.mark.parametrize("confidence", ["confidence", "Conf", "max_prob", "prob"])
@pytest.mark.parametrize(
    "predicted", ["pred", "Prediction", "predicted", "y_pred", "pred_label", "correct", "hit", "is_correct"]
)
def test_top_label_columns_of_other_tools_are_recognised(tmp_path, confidence, predicted):
    predicted_classes = PROBS.argmax(1)
    is_correctness = predicted in {"correct", "hit", "is_correct"}
    columns = {
        confidence: PROBS.max(1),
        predicted: (predicted_classes == LABELS) if is_correctness else predicted_classes,
    }
    predictions = read_predictions(
        write_table(tmp_path / "p.csv", columns | ({} if is_correctness else {"target": LABELS}))
    )
    assert isinstance(predictions, TopLabelPredictions)
    assert torch.allclose(predictions.confidence, torch.from_numpy(PROBS.max(1)))
    assert predictions.correct.tolist() == (predicted_classes == LABELS).tolist()


def test_ambiguous_columns_raise_an_error_with_candidates_and_option(tmp_path):
    two_labels = write_table(tmp_path / "a.csv", class_columns("prob_") | {"target": NAMED_LABELS, "gt": NAMED_LABELS})
    with pytest.raises(ValueError, match=r"a\.csv.*target, gt.*--label-column"):
        read_predictions(two_labels)
    assert_predictions(read_predictions(two_labels, label_column="gt"))
    two_tables = write_table(
        tmp_path / "b.csv", class_columns("probs_") | class_columns("logits_", LOGITS) | {"y": NAMED_LABELS}
    )
    with pytest.raises(ValueError, match=r"b\.csv.*logits_cat.*probs_cat.*--prob-columns"):
        read_predictions(two_tables)
    assert_predictions(read_predictions(two_tables, prob_columns="probs_*"))
    assert_predictions(read_predictions(two_tables, prob_columns="logits_*", logits=True), logits=True)
    columns = {"conf": PROBS.max(1), "max_prob": PROBS.max(1), "pred": LABELS, "y": LABELS}
    with pytest.raises(ValueError, match=r"c\.csv.*conf, max_prob.*--confidence-column"):
        read_predictions(write_table(tmp_path / "c.csv", columns))


def test_options_select_columns_of_any_name(tmp_path):
    columns = class_columns("s.", names=("1", "2", "3")) | {
        "species": LABELS + 1,
        "sure": PROBS.max(1),
        "said": LABELS,
        "ok": [1] * 12,
    }
    path = write_table(tmp_path / "p.csv", columns)
    assert_predictions(read_predictions(path, prob_columns="s.*", label_column="species"))
    predictions = read_predictions(path, confidence_column="sure", prediction_column="said", label_column="species")
    assert isinstance(predictions, TopLabelPredictions)
    assert not predictions.correct.any()
    assert read_predictions(path, confidence_column="sure", correct_column="ok").correct.all()
    with pytest.raises(ValueError, match=r"--label-column.*'truth'.*species"):
        read_predictions(path, label_column="truth", prob_columns="s.*")


def test_error_about_a_last_class_without_samples_names_the_option(tmp_path):
    path = write_table(tmp_path / "p.csv", {"note": NAMED_LABELS} | class_columns("") | {"label": ["cat", "dog"] * 6})
    with pytest.raises(ValueError, match=r"p\.csv.*line 2.*eel.*--prob-columns") as error:
        read_predictions(path)
    assert "note" not in str(error.value)
    assert read_predictions(path, prob_columns="cat, dog,eel").class_names == NAMES


def test_a_column_that_is_no_class_is_named_if_the_sums_are_too_large(tmp_path):
    """Regression: the error advised to normalise, which made a class of it."""
    path = tmp_path / "p.csv"
    path.write_text("prob_cat,prob_dog,prob_max,label\n0.7,0.3,0.7,cat\n0.4,0.6,0.6,dog\n")
    with pytest.raises(ValueError, match=r"p\.csv.*line 2.*read from prob_cat, prob_dog, prob_max;.*--prob-columns"):
        read_predictions(path)
    assert read_predictions(path, prob_columns="prob_cat,prob_dog").class_names == ("cat", "dog")


def test_error_about_an_unknown_label_column_names_the_option(tmp_path):
    with pytest.raises(ValueError, match=r"p\.csv.*--label-column.*art"):
        read_predictions(write_table(tmp_path / "p.csv", class_columns("") | {"art": NAMED_LABELS}))
    columns = {"confidence": PROBS.max(1), "prediction": NAMED_LABELS, "wahrheit": NAMED_LABELS}
    with pytest.raises(ValueError, match=r"q\.csv.*wahrheit.*--label-column"):
        read_predictions(write_table(tmp_path / "q.csv", columns))


def test_missing_columns_raise_an_error_that_lists_the_columns(tmp_path):
    path = write_table(tmp_path / "p.csv", class_columns("prob_") | {"species": NAMED_LABELS})
    predictions = read_predictions(path)
    with pytest.raises(ValueError, match=r"p\.csv.*species.*--label-column"):
        require_labels(predictions, path)
    unrelated = write_table(tmp_path / "q.csv", {"age": LABELS, "weight": LABELS, "label": NAMED_LABELS})
    with pytest.raises(ValueError, match=r"q\.csv.*--prob-columns.*age, weight"):
        read_predictions(unrelated)


@pytest.mark.parametrize("suffix", [".tsv", ".txt", ".csv.gz", ".tsv.gz"])
def test_tables_with_other_suffixes_are_read(tmp_path, suffix):
    delimiter = {".tsv": "\t", ".txt": " ", ".tsv.gz": "\t"}.get(suffix, ",")
    path = write_table(tmp_path / f"p{suffix}", class_columns("prob_") | {"label": NAMED_LABELS}, delimiter)
    assert_predictions(read_predictions(path, progress=lambda *_: None))


def test_a_compressed_file_with_an_extreme_ratio_raises(tmp_path):
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(b"prob_a,prob_b,label\n" + b"0" * 300_000_000, 9))
    with pytest.raises(ValueError, match=r"p\.csv\.gz"):
        read_predictions(tmp_path / "p.csv.gz")
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(b'{"probs": [0.5, 0.5], "label": 0}\n' * 9)[:-9])
    with pytest.raises(ValueError, match=r"q\.jsonl\.gz"):
        read_predictions(tmp_path / "q.jsonl.gz")


def test_compressed_jsonl_is_read(tmp_path):
    lines = [
        json.dumps({"probabilities": dict(zip(NAMES, row, strict=True)), "y_true": label})
        for row, label in zip(PROBS.tolist(), NAMED_LABELS, strict=True)
    ]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert_predictions(read_predictions(tmp_path / "p.jsonl.gz"))


def test_arrays_and_labels_in_separate_files_are_read(tmp_path):
    np.save(tmp_path / "probs.npy", PROBS)
    np.save(tmp_path / "logits.npy", LOGITS)
    np.savetxt(tmp_path / "probs.txt", PROBS)
    np.savetxt(tmp_path / "labels.txt", LABELS)
    np.save(tmp_path / "labels.npy", LABELS)
    (tmp_path / "labels.csv").write_text("\n".join(["name,target", *(f"x,{label}" for label in LABELS)]))
    (tmp_path / "named.csv").write_text("\n".join(["species,size", *(f"{label},9" for label in LABELS)]))
    assert_predictions(read_predictions(tmp_path / "probs.npy", labels=tmp_path / "named.csv", label_column="species"))
    for labels in (LABELS, *(tmp_path / f"labels.{kind}" for kind in ("npy", "txt", "csv"))):
        assert_predictions(read_predictions(tmp_path / "probs.npy", labels=labels))
    assert_predictions(read_predictions(tmp_path / "logits.npy", labels=LABELS, logits=True), logits=True)
    assert_predictions(read_predictions(tmp_path / "probs.txt", labels=tmp_path / "labels.txt", header=False))
    with pytest.raises(ValueError, match=r"probs\.npy.*--labels"):
        require_labels(read_predictions(tmp_path / "probs.npy"), tmp_path / "probs.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"objects\.npy.*Python objects"):
        read_predictions(tmp_path / "objects.npy")


def test_class_names_alone_are_found_by_labels_from_another_file(tmp_path):
    path = write_table(tmp_path / "p.csv", {"size": range(12)} | class_columns(""))
    (tmp_path / "y.txt").write_text("\n".join(NAMED_LABELS))
    for labels in (tmp_path / "y.txt", np.array(NAMED_LABELS)):
        predictions = read_predictions(path, labels=labels)
        assert_predictions(predictions)
        assert predictions.columns.unread == ["size"]
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(class_columns("")), tmp_path / "p.parquet")
    assert_predictions(read_predictions(tmp_path / "p.parquet", labels=tmp_path / "y.txt"))


@pytest.mark.parametrize("labels", [LABELS, NAMED_LABELS, [f"{label:.3e}" for label in LABELS]])
@pytest.mark.parametrize("header", ["", "0\n", "species\n", ",0\n"])
def test_header_of_a_label_file_is_detected_by_its_line_count(tmp_path, labels, header):
    path = write_table(tmp_path / "p.csv", class_columns("prob_"))
    rows = [f"{row},{label}" if "," in header else str(label) for row, label in enumerate(labels)]
    (tmp_path / "y.csv").write_text(header + "\n".join(rows))
    assert_predictions(read_predictions(path, labels=tmp_path / "y.csv"))
    (tmp_path / "y.csv").write_text(header + "\n".join(rows[:-2]))
    with pytest.raises(ValueError, match=r"y\.csv.*1[01] labels.*12 samples"):
        read_predictions(path, labels=tmp_path / "y.csv")


def test_errors_about_labels_from_another_file_name_that_file(tmp_path):
    path = write_table(tmp_path / "p.csv", class_columns("prob_"))
    for label, message in (("9", "9"), ("cow", "cow")):
        (tmp_path / "y.txt").write_text("\n".join([*(NAMES[0:1] if label == "cow" else "0") * 11, label]))
        with pytest.raises(ValueError, match=rf"y\.txt.*row 11.*{message}") as error:
            read_predictions(path, labels=tmp_path / "y.txt")
        assert str(error.value).index("y.txt") < str(error.value).index("p.csv")
    np.save(tmp_path / "probs.npy", PROBS)
    (tmp_path / "y.txt").write_text("\n".join(NAMED_LABELS))
    with pytest.raises(ValueError, match=r"^\S*y\.txt.*class_names"):
        read_predictions(tmp_path / "probs.npy", labels=tmp_path / "y.txt")
    (tmp_path / "x.csv").write_text("1,1\n0,0\n")
    with pytest.raises(ValueError, match=r"^\S*x\.csv.*2 columns.*'1'"):
        read_predictions(tmp_path / "probs.npy", labels=tmp_path / "x.csv")
    (tmp_path / "z.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"^\S*z\.csv.*--label-column.*a, b"):
        read_predictions(tmp_path / "probs.npy", labels=tmp_path / "z.csv")


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
@pytest.mark.parametrize("names", [("0", "1"), ("1",), ("cat", "dog"), ("True", "False")])
def test_boolean_labels_are_read(tmp_path, kind, names):
    columns = class_columns("prob_", np.array([[0.7, 0.3], [0.2, 0.8]]), names) | {"label": [False, True]}
    path = write_columns(tmp_path / f"p.{kind}", columns)
    assert read_predictions(path).labels.tolist() == ([1, 0] if names[0] == "True" else [0, 1])


def test_labels_in_scientific_notation_are_read(tmp_path):
    labels = [f"{label + 1:.3e}" if row % 2 else f"{label + 1}e+00" for row, label in enumerate(LABELS)]
    assert_predictions(
        read_predictions(write_table(tmp_path / "p.csv", class_columns("prob_", names=("1", "2", "3")) | {"y": labels}))
    )
    columns = {"conf": PROBS.max(1), "pred": LABELS, "y": [f"{label:.18e}" for label in LABELS]}
    assert read_predictions(write_table(tmp_path / "q.csv", columns)).correct.all()


def test_top_k_columns_of_timm_are_not_read_as_class_columns(tmp_path):
    """The layout of timm: prob_0 is the largest probability, and its class is in index_0."""
    order = (-PROBS).argsort(1)
    columns = {f"index_{k}": order[:, k] for k in range(3)} | {f"prob_{k}": -np.sort(-PROBS)[:, k] for k in range(3)}
    path = write_table(tmp_path / "timm.csv", columns | {"label": LABELS})
    with pytest.raises(ValueError, match=r"index_0.*--confidence-column.*prob_0.*--prediction-column.*index_0"):
        read_predictions(path)
    predictions = read_predictions(path, confidence_column="prob_0", prediction_column="index_0")
    assert predictions.correct.tolist() == (PROBS.argmax(1) == LABELS).tolist()


def test_a_confidence_without_a_prediction_raises(tmp_path):
    path = write_table(tmp_path / "p.csv", {"number": LABELS, "prob": PROBS.max(1), "label": LABELS})
    with pytest.raises(ValueError, match=r"prob.*--prediction-column.*--correct-column.*--prob-columns"):
        read_predictions(path)


def test_class_numbers_are_sorted_numerically(tmp_path):
    """Classes are in the order of numbers, also those of ImageNet-21k."""
    columns = {"conf": [0.5, 0.6, 0.7], "pred": [21_840, 5_000, 3], "y": [21_840, 12, 3]}
    predictions = read_predictions(write_table(tmp_path / "p.csv", columns))
    assert predictions.correct.tolist() == [True, False, True]
    assert predictions.class_names == ("3", "12", "5000", "21840")


def test_an_array_that_claims_more_than_its_file_holds_raises_without_allocation(tmp_path):
    np.save(tmp_path / "p.npy", np.zeros((10, 10)))
    content = (tmp_path / "p.npy").read_bytes()
    (tmp_path / "p.npy").write_bytes(content.replace(b"(10, 10), }      ", b"(10, 99999999), }"))
    with pytest.raises(ValueError, match=r"p\.npy.*damaged"):
        read_predictions(tmp_path / "p.npy")


@pytest.mark.parametrize("position", [0, 3])
def test_csv_without_a_header_is_read(tmp_path, position):
    columns = list(PROBS.T)
    columns.insert(position, LABELS)
    rows = zip(*(map(str, column) for column in columns), strict=True)
    (tmp_path / "p.csv").write_text("\n".join(map(",".join, rows)))
    assert_predictions(read_predictions(tmp_path / "p.csv", header=False, label_column=str(position)))


def test_row_names_written_by_r_are_read(tmp_path):
    rows = [
        f'"{i}" ' + " ".join(map(str, row)) + f' "{label}"'
        for i, (row, label) in enumerate(zip(PROBS, NAMED_LABELS, strict=True))
    ]
    (tmp_path / "p.txt").write_text("\n".join(['"cat" "dog" "eel" "obs"', *rows]))
    assert_predictions(read_predictions(tmp_path / "p.txt"))
    (tmp_path / "q.csv").write_text("logit_a,logit_b,label\n1,2,1,\n")  # an extra comma is not a row name
    with pytest.raises(ValueError, match=r"q\.csv.*line 2.*4.*3"):
        read_predictions(tmp_path / "q.csv")


def test_a_long_label_among_many_does_not_fill_the_memory(tmp_path):
    comments = ["a", "b" * 50_000] + ["a"] * 2_000
    columns = {"conf": [0.9] * 2_002, "hit": [1] * 2_002, "comment": comments}
    path = write_table(tmp_path / "p.csv", columns)
    tracemalloc.start()
    read_predictions(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # a fixed-width string array would take 400 MB


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8", "f4", "?", "column", *ONE_HOT])
def test_labels_of_every_dtype_are_accepted(kind):
    labels = LABELS if kind != "?" else LABELS % 2
    two_dimensional = {"column": labels[:, None]} | {
        name: np.eye(3, dtype=dtype)[labels] for name, dtype in ONE_HOT.items()
    }
    predictions = Predictions.from_probs(
        PROBS, two_dimensional[kind] if kind in two_dimensional else labels.astype(kind)
    )
    assert predictions.labels.dtype == torch.int64
    assert predictions.labels.tolist() == labels.tolist()


def test_a_row_that_is_not_one_hot_raises_an_error_that_names_it():
    labels = np.eye(3, dtype=np.int64)[LABELS]
    labels[4, :] = 1
    with pytest.raises(ValueError, match=r"labels.*row 4.*one-hot"):
        Predictions.from_probs(PROBS, labels)


def test_soft_labels_stay_soft_and_one_hot_labels_have_a_column_for_each_class():
    soft = np.eye(3)[LABELS]
    soft[4] = [0.5, 0.5, 0]
    assert torch.equal(Predictions.from_probs(PROBS, soft).labels, torch.from_numpy(soft))
    for dtype in ONE_HOT.values():
        with pytest.raises(ValueError, match=r"labels.*\(12, 4\)"):
            Predictions.from_probs(PROBS, np.eye(4, dtype=dtype)[LABELS])


def test_models_with_one_hot_and_integer_labels_can_be_compared(tmp_path):
    write_table(tmp_path / "a.csv", class_columns("prob_") | class_columns("label_", np.eye(3)[LABELS]))
    write_table(tmp_path / "b.csv", class_columns("prob_") | {"label": NAMED_LABELS})
    command = ["compare", f"{tmp_path}/a.csv", f"{tmp_path}/b.csv", "--metrics", "accuracy", "--resamples", "50"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output


def test_evaluate_has_column_options_and_prints_what_was_read(tmp_path):
    np.save(tmp_path / "scores.npy", LOGITS)
    np.save(tmp_path / "y.npy", LABELS)
    command = ["evaluate", f"{tmp_path}/scores.npy", "--labels", f"{tmp_path}/y.npy", "--logits", "--resamples", "20"]
    result = CliRunner().invoke(app, [*command, "--posthoc", ""])
    assert result.exit_code == 0, result.output
    assert "labels from y.npy" in result.output
    path = write_table(tmp_path / "p.csv", class_columns("s", 2 * PROBS) | {"species": NAMED_LABELS})
    columns = ["--label-column", "species", "--prob-columns", "s*"]
    refused = CliRunner().invoke(app, ["evaluate", str(path), *columns])
    assert refused.exit_code == 1
    assert "--normalize" in refused.output
    out = tmp_path / "t.safetensors"
    method = ["--posthoc", "histogram_binning", "--normalize", "--out", str(out)]
    fitted = CliRunner().invoke(app, ["calibrate", "fit", str(path), *columns, *method])
    assert fitted.exit_code == 0, fitted.output
    assert out.exists()


def test_compare_has_column_options(tmp_path):
    paths = [write_table(tmp_path / f"{name}.csv", class_columns("s") | {"species": NAMED_LABELS}) for name in "ab"]
    command = ["compare", *map(str, paths), "--metrics", "accuracy", "--resamples", "50", "--prob-columns", "s*"]
    result = CliRunner().invoke(app, [*command, "--label-column", "species"])
    assert result.exit_code == 0, result.output


def test_error_about_a_label_column_missing_in_one_file_names_the_option(tmp_path):
    paths = [
        write_table(tmp_path / f"{name}.csv", class_columns("prob_") | {name: NAMED_LABELS})
        for name in ("species", "kind")
    ]
    command = ["compare", *map(str, paths), "--metrics", "accuracy", "--resamples", "50"]
    refused = CliRunner().invoke(app, [*command, "--label-column", "species"])
    assert refused.exit_code == 1
    assert "kind.csv" in refused.output
    assert "--labels" in refused.output
    result = CliRunner().invoke(
        app, [*command, "--labels", str(write_table(tmp_path / "y.csv", {"label": NAMED_LABELS}))]
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("0.7,0.2,0.1,0", {}),
        ("0.7,0.2,0.1,0", {"label_column": "3"}),
        ("0.25,0.25,0.5,2", {}),  # two columns with the same name
        ("0,7;0,2;0,1;0", {}),
    ],
)
def test_error_about_a_missing_header_names_the_option(tmp_path, row, options):
    (tmp_path / "p.csv").write_text(f"{row}\n{row}\n")
    with pytest.raises(ValueError, match=r"p\.csv.*--no-header"):
        read_predictions(tmp_path / "p.csv", **options)
    assert len(read_predictions(tmp_path / "p.csv", header=False, label_column="3")) == 2
    with pytest.raises(ValueError, match=r"p\.csv.*label_column.*9") as error:
        read_predictions(tmp_path / "p.csv", header=False, label_column="9")
    assert "--no-header" not in str(error.value)


def test_labels_of_a_calibration_file_may_be_in_another_file(tmp_path):
    for name in ("test", "val"):
        np.save(tmp_path / f"{name}.npy", LOGITS + (name == "val") * rng.normal(size=LOGITS.shape))
        np.save(tmp_path / f"{name}_y.npy", LABELS)
    files = [f"{tmp_path}/test.npy", "--labels", f"{tmp_path}/test_y.npy", "--calibration", f"{tmp_path}/val.npy"]
    command = ["evaluate", *files, "--logits", "--resamples", "50", "--posthoc", "histogram_binning"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert "val.npy" in refused.output
    assert "--calibration-labels" in refused.output
    result = CliRunner().invoke(app, [*command, "--calibration-labels", f"{tmp_path}/val_y.npy"])
    assert result.exit_code == 0, result.output


def test_listed_columns_are_classes_in_the_order_of_the_list(tmp_path):
    path = write_table(tmp_path / "p.csv", {"score_1": [0.9, 0.2], "score_0": [0.1, 0.8], "label": [1, 0]})
    assert read_predictions(path, prob_columns=["score_0", "score_1"]).correct.tolist() == [True, True]
    assert read_predictions(path, prob_columns=["score_1", "score_0"]).correct.tolist() == [False, False]


@pytest.mark.parametrize("listed", [["Prob_cat", "Prob_dog", "Prob_eel"], "Prob_cat, Prob_dog,Prob_eel"])
def test_listed_columns_lose_the_prefix_of_class_columns(tmp_path, listed):
    path = write_table(tmp_path / "p.csv", class_columns("Prob_") | {"Prob_mean": LABELS, "label": NAMED_LABELS})
    predictions = read_predictions(path, prob_columns=listed)
    assert_predictions(predictions)
    assert predictions.class_names == NAMES


def test_confidence_column_option_also_finds_the_prediction_column(tmp_path):
    path = write_table(tmp_path / "p.csv", {"sc": [0.9, 0.6], "pred": [1, 0], "y": [1, 1]})
    assert read_predictions(path, confidence_column="sc").correct.tolist() == [True, False]


def test_correct_column_replaces_the_label_or_must_agree_with_it(tmp_path):
    columns = {"confidence": [0.9, 0.6], "prediction": ["cat", "dog"], "correct": [1, 0]}
    assert read_predictions(write_table(tmp_path / "p.csv", columns)).correct.tolist() == [True, False]
    path = write_table(tmp_path / "q.csv", columns | {"label": ["cat", "dog"]})
    with pytest.raises(ValueError, match="contradicts"):
        read_predictions(path)
    lines = [json.dumps({"confidence": 0.9, "is_correct": True}), json.dumps({"confidence": 0.6, "is_correct": False})]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    assert read_predictions(tmp_path / "p.jsonl").correct.tolist() == [True, False]


@pytest.mark.parametrize("kind", ["csv", "parquet", "json"])
def test_columns_without_a_role_that_group_the_samples_are_metadata(tmp_path, kind):
    """Regression: they were dropped, so a page had no slices by country; Parquet files lost floats and dates."""
    columns = class_columns("prob_") | {
        "label": NAMED_LABELS,
        "country": ["no", "de", "no"] * 4,
        "year": [2019, 2020] * 6,
    }
    days = [date(2020, 1, 1 + row % 3) for row in range(12)]
    if kind == "json":
        days = list(map(str, days))
    columns |= {"dose": [0.5, 0.5, 1.5] * 4, "day": days}
    columns |= {"note": [f"text {row}" for row in range(12)], "unit": ["kg"] * 12, "weight": np.arange(12) / 10}
    predictions = read_predictions(write_columns(tmp_path / f"p.{kind}", columns))
    expected = {"country": ("no", "de", "no") * 4, "year": ("2019", "2020") * 6, "dose": ("0.5", "0.5", "1.5") * 4}
    assert dict(predictions.metadata) == expected | {"day": ("2020-01-01", "2020-01-02", "2020-01-03") * 4}
    assert predictions.columns.metadata == ("country", "year", "dose", "day")
    assert predictions.columns.unread == ["note", "unit", "weight"]
    assert "metadata from country, year, dose, day; not read: note, unit, weight" in str(predictions.columns)


def test_columns_that_repeat_label_or_prediction_are_no_metadata(tmp_path):
    """Regression: they became slices whose accuracy is 0 or 1."""
    correct = PROBS.argmax(1) == LABELS
    extra_columns = {"correct": correct, "pred": PROBS.argmax(1), "confidence": [0.5, 0.7] * 6, "species": NAMED_LABELS}
    extra_columns |= {"number": LABELS, "passed": np.where(correct, "yes", "no"), "country": ["no", "de", "nan"] * 4}
    columns = class_columns("prob_") | {"label": NAMED_LABELS} | extra_columns
    predictions = read_predictions(write_table(tmp_path / "p.csv", columns))
    assert dict(predictions.metadata) == {"country": ("no", "de", "nan") * 4}
    assert predictions.columns.unread == list(extra_columns)[:-1]
    frame = as_predictions({**columns, "size": np.array([1.5, np.nan] * 6)})
    assert dict(frame.metadata) == {"country": ("no", "de", "nan") * 4, "size": ("1.5", "") * 6}


@pytest.mark.parametrize("as_names", [True, False])
def test_predictions_that_contradict_the_scores_warn(tmp_path, as_names):
    """The columns of the classes may be in another order than the class numbers."""
    predicted_numbers = (PROBS.argmax(1) + (np.arange(12) < 2)) % 3
    columns = class_columns("prob_") | {
        "label": NAMED_LABELS,
        "pred": [NAMES[k] for k in predicted_numbers] if as_names else predicted_numbers,
    }
    path = write_table(tmp_path / "p.csv", columns)
    with pytest.warns(UserWarning, match="pred is not the most probable class in 2 of 12 rows"):
        assert_predictions(read_predictions(path))
    for values in ([0.5] * 12, [99] * 12, ["?"] * 12):  # values that are not classes
        assert_predictions(read_predictions(write_table(path, {**columns, "pred": values})))


def test_metadata_of_a_million_rows_is_small(tmp_path):
    site = np.array(["north", "south"], dtype=object)[np.arange(200_000) % 2]
    table = {"confidence": np.full(200_000, 0.5), "correct": np.ones(200_000, dtype=bool), "site": site}
    tracemalloc.start()
    predictions = as_predictions(table)
    stored_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert predictions.metadata["site"][:2] == ("north", "south")
    assert stored_bytes < 200_000 * 20
