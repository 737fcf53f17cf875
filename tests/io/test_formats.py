"""Prediction files of every format: round trips, and errors about ambiguous or damaged files."""

import io
import json
import pickle
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from fedlas.evaluation import evaluate
from fedlas.io import READERS, WRITERS, read_predictions, write_predictions
from fedlas.predictions import Predictions, TopLabelPredictions
from fedlas.report.evaluate_files import evaluate_files

NAMES = ("cat", 'd"o,g', "ω\nemu")


def make_predictions(n: int = 7, **overrides) -> Predictions:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(n, 3, generator=generator), torch.randint(3, (n,), generator=generator)
    defaults = {"class_names": NAMES, "ids": [f"s{i}" for i in range(n)], "paths": [f"img/{i}.png" for i in range(n)]}
    return Predictions(logits, labels, index=torch.arange(n) + 5, features=torch.rand(n, 2), **(defaults | overrides))


def assert_same(first: Predictions, second: Predictions) -> None:
    assert torch.equal(first.logits.double(), second.logits.double())
    assert first.labels.tolist() == second.labels.tolist()
    assert first.index.tolist() == second.index.tolist()
    assert torch.equal(first.features.double(), second.features.double())
    assert (first.ids, first.paths) == (second.ids, second.paths)


@pytest.mark.parametrize("suffix", WRITERS)
def test_written_predictions_round_trip(tmp_path, suffix):
    predictions = make_predictions()
    path = write_predictions(predictions, tmp_path / f"p{suffix}")
    loaded = read_predictions(path)
    assert_same(predictions, loaded)
    assert loaded.class_names == NAMES
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", WRITERS)
def test_metadata_round_trips(tmp_path, suffix):
    """Regression: only .safetensors kept it. Metadata whose name would be read as labels is not written to tables."""
    metadata = {"site": ("north, 1", "south") * 6, "year": ("2019", "2020", "") * 4}
    logits = torch.randn(12, 3)
    for labels in ([0, 1, 2] * 4, None):
        predictions = Predictions(logits, labels, class_names=NAMES, metadata=metadata | {"y": ("a", "b") * 6})
        loaded = read_predictions(write_predictions(predictions, tmp_path / f"p{suffix}"))
        assert {name: loaded.metadata[name] for name in metadata} == metadata
        assert loaded.given_labels is None if labels is None else loaded.labels.tolist() == labels


@pytest.mark.parametrize("suffix", WRITERS)
def test_probs_option_writes_probabilities(tmp_path, suffix):
    probs = make_predictions().probs
    loaded = read_predictions(write_predictions(Predictions(probs.log(), [0] * 7), tmp_path / f"p{suffix}", probs=True))
    assert loaded.given_probs is not None
    assert torch.allclose(loaded.probs.double(), probs.double(), atol=1e-7)
    assert loaded.class_names in (None, ("0", "1", "2"))


@pytest.mark.parametrize("suffix", [suffix for suffix in WRITERS if suffix != ".jsonl"])
def test_soft_labels_and_missing_labels_round_trip(tmp_path, suffix):
    soft = make_predictions().probs
    loaded = read_predictions(
        write_predictions(Predictions(make_predictions().logits, soft, class_names=NAMES), tmp_path / f"p{suffix}")
    )
    assert torch.allclose(loaded.labels.double(), soft.double())
    loaded = read_predictions(write_predictions(Predictions(make_predictions().logits), tmp_path / f"q{suffix}"))
    assert loaded.given_labels is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("suffix", WRITERS)
def test_every_dtype_round_trips(tmp_path, dtype, suffix):
    predictions = Predictions(make_predictions().logits.to(dtype), [0] * 7)
    loaded = read_predictions(write_predictions(predictions, tmp_path / f"p{suffix}"))
    assert torch.equal(predictions.logits.double(), loaded.logits.double())
    assert suffix != ".safetensors" or loaded.logits.dtype == dtype


def test_json_columns_and_records_are_read(tmp_path):
    predictions = make_predictions()
    columns = {"logits": predictions.logits.tolist(), "labels": predictions.labels.tolist(), "class_names": list(NAMES)}
    (tmp_path / "c.json").write_text(json.dumps(columns | {"split": "test"}))
    loaded = read_predictions(tmp_path / "c.json")
    assert torch.equal(loaded.logits, predictions.logits.double())
    assert (loaded.class_names, loaded.split) == (NAMES, "test")
    records = [
        {"probs": dict(zip("ab", row, strict=True)), "label": "b", "id": i}
        for i, row in enumerate([[0.25, 0.75], [1, 0]])
    ]
    (tmp_path / "r.json").write_text(json.dumps(records))
    loaded = read_predictions(tmp_path / "r.json")
    assert loaded.probs.tolist() == [[0.25, 0.75], [1, 0]]
    assert (loaded.labels.tolist(), loaded.class_names, loaded.ids) == ([1, 1], ("a", "b"), ("0", "1"))


def test_jsonl_is_read(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"logits": [1, 2.5], "label": 1}\n\n{"logits": [0, 0], "label": 0}\r\n', encoding="utf-8")
    loaded = read_predictions(path, "val")
    assert (loaded.logits.tolist(), loaded.labels.tolist(), loaded.split) == ([[1, 2.5], [0, 0]], [1, 0], "val")
    path.write_text('{"confidence": 0.9, "prediction": "a", "label": "b"}\n')
    assert isinstance(read_predictions(path), TopLabelPredictions)


def test_torch_files_are_read(tmp_path):
    predictions = make_predictions()
    torch.save(
        {"logits": predictions.logits, "labels": predictions.labels, "class_names": list(NAMES)}, tmp_path / "p.pt"
    )
    loaded = read_predictions(tmp_path / "p.pt")
    assert torch.equal(loaded.logits, predictions.logits)
    assert loaded.class_names == NAMES


class Payload:
    def __reduce__(self):
        return (exec, ("raise SystemExit('this ran')",))


@pytest.mark.parametrize("content", ["text", "a pickle"])
def test_errors_never_advise_to_unpickle(tmp_path, content):
    """numpy reports all of these as pickles and suggests `allow_pickle=True`."""
    path = tmp_path / "given.npz"
    path.write_bytes(b"hello" if content == "text" else pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match=r"given\.npz") as error:
        read_predictions(path)
    assert "pickle" not in str(error.value)


@pytest.mark.parametrize("n", [3, 300])
@pytest.mark.parametrize(("name", "remedy"), [("labels", r"astype\(str\)"), ("class_names", "astype")])
def test_an_array_of_python_objects_raises_a_specific_error(tmp_path, name, remedy, n):
    """Regression: repeated strings take fewer bytes pickled than as pointers, so the file was reported as damaged."""
    arrays = {
        "probs": np.tile([[0.5, 0.3, 0.2]], (n, 1)),
        "labels": np.array(["cat", "dog", "eel"] * (n // 3)),
        "class_names": np.array(["cat", "dog", "eel"]),
    }
    np.savez(tmp_path / "good.npz", **arrays)
    assert read_predictions(tmp_path / "good.npz").labels[:3].tolist() == [0, 1, 2]
    np.savez(tmp_path / "p.npz", **(arrays | {name: arrays[name].astype(object)}))
    with pytest.raises(ValueError, match=rf"p\.npz.*{name}.*Python objects.*{remedy}") as error:
        read_predictions(tmp_path / "p.npz")
    assert "pickle" not in str(error.value)


def test_reading_never_unpickles(tmp_path):
    (tmp_path / "p.pt").write_bytes(pickle.dumps({"logits": Payload()}, protocol=2))
    torch.save({"logits": Payload()}, tmp_path / "q.pt")
    np.savez(tmp_path / "r.npz", logits=np.array([Payload()], dtype=object), labels=[0])
    for name in ("p.pt", "q.pt"):
        with pytest.raises(ValueError, match=rf"{name}.*tensors.*torch\.save") as error:
            read_predictions(tmp_path / name)
        assert "weights_only" not in str(error.value)
    with pytest.raises(ValueError, match=r"r\.npz.*logits.*Python objects"):
        read_predictions(tmp_path / "r.npz")


def test_numpy_arrays_in_a_torch_file_raise(tmp_path):
    torch.save({"logits": np.zeros((2, 3)), "labels": [0, 1]}, tmp_path / "p.pt")
    with pytest.raises(ValueError, match=r"p\.pt: .*NumPy.*torch\.from_numpy.*\.npz") as error:
        read_predictions(tmp_path / "p.pt")
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.json", "[1, 2]", "record 0.*int"),
        ("p.json", "3", "columns.*records.*int"),
        ("p.json", "[]", r"p\.json.*records"),
        ("p.json", '{"logits": 3}', "logits.*int.*list"),
        ("p.json", '{"prob_a": {"0": 1}}', "prob_a.*dict.*list.*records"),  # DataFrame.to_json(path)
        ("p.json", '{"logits": [[1, 2], [1]], "labels": [0, 1]}', "row 1.*logits.*2 numbers"),
        ("p.json", '{"logits": [[1, null]], "labels": [0]}', "row 0.*logits.*NoneType"),
        ("p.json", '[{"prob_a": 1, "prob_b": [0], "label": 0}]', r"p\.json.*prob_.*number"),
        ("p.json", '{"logits": [[1, true]], "labels": [0]}', "row 0.*logits.*bool"),
        ("p.json", '{"logits": [[1, 2]], "labels": [null]}', "labels.*NoneType"),
        ("p.csv", 'prob_a,prob_b,label\n"0.5,0.5,a\n' + "x" * 140_000, "line 3"),
        ("p.csv", "prob_a,prob_b,label\n0.5,0.5,7\n", "labels.*line 2.*7"),
        ("p.csv", "confidence,prediction,label\n0.9,1,cat\n0.9,2,dog\n", "label.*prediction.*cat.*1"),
        ("p.csv", "confidence,prediction,label\n0.9,a,a\n-0.1,a,b\n", r"confidence.*line 3.*-0\.1"),
        ("p.json", '{"logits": [[1, NaN]], "labels": [0]}', "NaN.*number"),
        ("p.json", '{"scores": [[1, 2]], "labels": [0]}', "logits, probs.*scores, labels$"),
        ("p.jsonl", '{"logits": [1, 2], "label": 0}\n{"logits": [1, 2]}', "line 2.*label"),
        ("p.jsonl", '{"logits": [1, 2], "label": 0}\n{"logits', "line 2.*JSON"),
        ("p.jsonl", "", r"p\.jsonl.*records"),
        ("p.jsonl", '{"logits": [1, 2], "probs": [0.5, 0.5], "label": 0}', "logits; probs.*--prob-columns"),
        ("p.jsonl", '{"logits": [1, 2], "label": 0, "id": 1, "ids": 2}', "id and ids"),
        ("p.xls", "", r"\.safetensors.*\.csv.*\.xls$"),
    ],
)
def test_unreadable_files_raise_an_error_that_names_them(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_predictions(tmp_path / name)
    assert name in str(error.value)
    assert error.value.__cause__ is not error.value  # the chain of causes is finite


def test_folders_missing_files_and_other_encodings_raise(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"\.safetensors.*\.csv"):
        read_predictions(tmp_path)
    for suffix in READERS:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            read_predictions(tmp_path / f"nowhere{suffix}")
    (tmp_path / "p.csv").write_bytes("prob_été,prob_b,label\n0.5,0.5,été\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"p\.csv.*UTF-8"):
        read_predictions(tmp_path / "p.csv")


def test_a_run_folder_is_read_by_split(tmp_path):
    (tmp_path / "predictions").mkdir()
    write_predictions(make_predictions(), tmp_path / "predictions" / "best-val.safetensors")
    for split in (None, "test"):
        with pytest.raises(IsADirectoryError, match=r"predictions/best-val\.safetensors"):
            read_predictions(tmp_path, split)
    assert torch.equal(read_predictions(tmp_path, "val").logits, make_predictions().logits)
    with pytest.raises(ValueError, match="outside"):
        read_predictions(tmp_path, "x/../../best-val")


def test_unwritable_formats_raise(tmp_path):
    with pytest.raises(ValueError, match=r"\.safetensors.*\.csv.*\.xlsx$"):
        write_predictions(make_predictions(), tmp_path / "p.xlsx")
    with pytest.raises(ValueError, match="name"):
        write_predictions(make_predictions(class_names=["a ", "a", "b"]), tmp_path / "p.csv")
    (tmp_path / "top.csv").write_text("confidence,prediction,label\n0.9,a,b\n")
    with pytest.raises(ValueError, match=r"p\.npz.*\btop\b.*\.safetensors"):
        write_predictions(read_predictions(tmp_path / "top.csv"), tmp_path / "p.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["top.csv"]
    loaded = read_predictions(write_predictions(read_predictions(tmp_path / "top.csv"), tmp_path / "p.safetensors"))
    assert isinstance(loaded, TopLabelPredictions)
    assert (loaded.class_names, loaded.prediction.tolist(), loaded.labels.tolist()) == (("a", "b"), [0], [1])


def test_ids_and_paths_are_indexed_with_their_samples():
    predictions = make_predictions()
    for rows, remaining in [(slice(2, 4), (2, 3)), (slice(None, None, -3), (6, 3, 0))]:
        assert predictions[rows].ids == tuple(f"s{i}" for i in remaining)
    mask = torch.tensor([i in {1, 5} for i in range(7)])
    assert predictions[mask].paths == ("img/1.png", "img/5.png")
    assert predictions[[6, 0]].ids == ("s6", "s0")
    with pytest.raises(ValueError, match=r"ids.*2.*7"):
        make_predictions(ids=["a", "b"])


def test_split_option_is_used_if_the_file_has_none(tmp_path):
    write_predictions(make_predictions(split="val"), tmp_path / "p.safetensors")
    write_predictions(make_predictions(), tmp_path / "q.safetensors")
    assert read_predictions(tmp_path / "p.safetensors", "test").split == "val"
    assert read_predictions(tmp_path / "q.safetensors", "test").split == "test"


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_reading_reports_progress(tmp_path, suffix):
    path, calls = write_predictions(Predictions(torch.randn(9_000, 2), [0] * 9_000), tmp_path / f"p{suffix}"), []
    read_predictions(path, progress=lambda *call: calls.append(call))
    assert {step for step, _ in calls} == {f"reading p{suffix}"}
    fractions = [fraction for _, fraction in calls]
    assert len(fractions) >= 5
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert 0 < fractions[1] < fractions[-1] == 1.0


def test_columns_of_a_csv_are_not_copied(tmp_path):
    """Class columns are a view of one table, whatever columns stand between them in the file."""
    (tmp_path / "p.csv").write_text("logit_a,label,feature_x,logit_b\n1,a,7,2\n3,b,8,4\n")
    loaded = read_predictions(tmp_path / "p.csv")
    assert loaded.logits.tolist() == [[1, 2], [3, 4]]
    assert loaded.features.tolist() == [[7], [8]]
    assert loaded.logits.stride() == (3, 1)  # rows of three numbers, of which the feature is the third


def test_a_truncated_archive_raises(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.zeros((2, 3)))
    with zipfile.ZipFile(tmp_path / "p.npz", "w") as file:
        file.writestr("logits.npy", stream.getvalue()[:-8])
        file.writestr("labels.npy", b"")
    with pytest.raises(ValueError, match=r"p\.npz"):
        read_predictions(tmp_path / "p.npz")


def test_parquet_column_names_may_contain_dots(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"prob_a": [0.5, 0.25], "label": ["a", "a.b"], "prob_a.b": [0.25, 0.5], "prob_a.b.c": [0.25, 0.25]}
    parquet.write_table(arrow.table(rows), tmp_path / "p.parquet")
    loaded = read_predictions(tmp_path / "p.parquet")
    assert loaded.probs.tolist() == [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]
    assert (loaded.labels.tolist(), loaded.class_names) == ([0, 1], ("a", "a.b", "a.b.c"))
    parquet.write_table(arrow.table({name: rows[name] for name in rows if name != "label"}), tmp_path / "q.parquet")
    assert read_predictions(tmp_path / "q.parquet").given_labels is None


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".json", ".jsonl"])
def test_labels_of_any_type_are_matched_to_class_names(tmp_path, suffix):
    """Regression: unsorted class columns gave an accuracy of 0.52 in parquet and 1.00 in csv."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"prob_1": [0.9, 0.1, 0.0], "prob_0": [0.1, 0.7, 0.3], "prob_10": [0.0, 0.2, 0.7], "label": [1, 0, 10]}
    path = tmp_path / f"p{suffix}"
    records = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    if suffix == ".parquet":
        parquet.write_table(arrow.table(rows), path)
    elif suffix == ".csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in [rows, *zip(*rows.values(), strict=True)]))
    else:
        lines = "\n".join(map(json.dumps, records))
        path.write_text(lines if suffix == ".jsonl" else json.dumps(rows))
    loaded = read_predictions(path)
    assert loaded.labels.tolist() == [0, 1, 2]
    assert loaded.correct.all()


def test_an_ambiguous_class_number_raises(tmp_path):
    (tmp_path / "p.csv").write_text("prob_1,prob_2,label\n0.5,0.5,1\n0.5,0.5,0\n")
    with pytest.raises(ValueError, match=r"line 3.*label.*'0'.*1, 2"):
        read_predictions(tmp_path / "p.csv")
    (tmp_path / "q.csv").write_text("prob_a,prob_b,label\n0.5,0.5,1\n0.5,0.5,0\n")
    assert read_predictions(tmp_path / "q.csv").labels.tolist() == [1, 0]


def test_class_names_that_are_positions_of_others_round_trip(tmp_path):
    predictions = Predictions(make_predictions().logits, make_predictions().labels, class_names=("2", "0", "1"))
    for suffix in WRITERS:
        assert (
            read_predictions(write_predictions(predictions, tmp_path / f"p{suffix}")).labels.tolist()
            == predictions.labels.tolist()
        )


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_class_names_that_collide_in_a_table_raise(tmp_path, suffix):
    with pytest.raises(ValueError, match="name"):
        write_predictions(make_predictions(class_names=[" a", "a", "b"]), tmp_path / f"p{suffix}")
    predictions = make_predictions(class_names=[" a", "c", "b "])
    assert (
        read_predictions(write_predictions(predictions, tmp_path / f"p{suffix}")).labels.tolist()
        == predictions.labels.tolist()
    )


def test_integers_of_another_dtype_are_the_same_class(tmp_path):
    """Regression: an empty cell turns 1 into 1.0, which matched no class, giving an accuracy of 0."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"confidence": [0.9, 0.8], "prediction": [1, 2], "label": [1.0, 3.0]}
    parquet.write_table(arrow.table(rows), tmp_path / "p.parquet")
    assert read_predictions(tmp_path / "p.parquet").correct.tolist() == [True, False]
    (tmp_path / "p.csv").write_text("confidence,prediction,label\n0.9,1,1.0\n0.8,2,3.00\n")
    assert read_predictions(tmp_path / "p.csv").correct.tolist() == [True, False]


def test_unnamed_classes_of_top_label_files_are_not_counted(tmp_path):
    (tmp_path / "p.csv").write_text("confidence,prediction,label\n0.9,a,b\n0.02,b,b\n")
    loaded = read_predictions(tmp_path / "p.csv")
    assert loaded.num_classes == 2
    assert evaluate(loaded, intervals=False).classes == 2


@pytest.mark.parametrize("comma", [",", "."])
def test_semicolons_and_decimal_commas_are_read(tmp_path, comma):
    text = "prob_a;prob_b;label;id\n0.25;0.75;b;x,y\n1;0;a;z\n".replace(".", comma)
    (tmp_path / "p.csv").write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")
    loaded = read_predictions(tmp_path / "p.csv")
    assert (loaded.probs.tolist(), loaded.labels.tolist()) == ([[0.25, 0.75], [1, 0]], [1, 0])
    assert loaded.ids == ("x,y", "z")


def test_errors_about_many_columns_list_only_some(tmp_path):
    (tmp_path / "p.csv").write_text(",".join(f"c{i}" for i in range(1_000)) + "\n")
    with pytest.raises(ValueError, match=r"c0, c1, .*, c18, .*c999.*1,000"):
        read_predictions(tmp_path / "p.csv")


def test_reading_jsonl_takes_little_more_memory_than_its_numbers(tmp_path):
    path = write_predictions(Predictions(torch.randn(3_000, 100), [0] * 3_000), tmp_path / "p.jsonl")
    tracemalloc.start()
    read_predictions(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * 8 * 3_000 * 100


LINES = {
    "cells": ("0.5,0.5", "line 6.*2.*4"),
    "no number": ("0.5,x,a,0", "line 6.*prob_b.*'x'"),
    "no distribution": ("0.5,0.9,a,0", "probs.*line 6.*distribution"),
    "label": ("0.5,0.5,c,0", "line 6.*label.*'c'"),
    "index": ("0.5,0.5,a,none", "line 6.*index.*'none'"),
}


@pytest.mark.parametrize("damage", LINES)
def test_errors_about_a_csv_name_the_line_as_an_editor_counts(tmp_path, damage):
    """Regression: some errors counted rows, some lines; blank lines and multi-line cells shifted the numbers."""
    row, message = LINES[damage]
    (tmp_path / "p.csv").write_text(f'prob_a,prob_b,"label",index\n0.5,0.5,"a\n",0\n\n0.5,0.5,b,1\n{row}\n')
    with pytest.raises(ValueError, match=message):
        read_predictions(tmp_path / "p.csv")


def test_errors_about_records_name_the_line_too(tmp_path):
    valid_line = '{"probs": [0.5, 0.5], "label": 0}\n\n'
    for invalid_line, message in {
        '{"probs": [0.5, 0.9], "label": 0}': "probs.*line 3.*distribution",
        '{"probs": [0.5, 0.5], "label": 7}': "labels.*line 3.*7",
        '{"probs": [0.5], "label": 0}': "line 3.*probs.*2 numbers",
        "7": "line 3.*int",
    }.items():
        (tmp_path / "p.jsonl").write_text(valid_line + invalid_line)
        with pytest.raises(ValueError, match=message):
            read_predictions(tmp_path / "p.jsonl")


def test_a_number_that_matches_no_class_name_raises(tmp_path):
    """Regression: label 1 was taken as the second column, although the first class is called 01."""
    for names in (("01", "02"), ("1.0", "2.0")):
        (tmp_path / "p.csv").write_text(f"prob_{names[0]},prob_{names[1]},label\n0.9,0.1,1\n0.2,0.8,0\n")
        with pytest.raises(ValueError, match=f"label.*'1'.*'{names[0]}'"):
            read_predictions(tmp_path / "p.csv")


@pytest.mark.parametrize(
    "text",
    [
        "prob_Cat,prob_cat,label\n0.9,0.1,Cat\n",
        "confidence,prediction,label\n0.9,Cat,cat\n",
        '{"probs": {"Cat": 0.9, "cat": 0.1}, "label": "Cat"}',
    ],
)
def test_class_names_that_differ_only_in_case_warn(tmp_path, text):
    path = tmp_path / ("p.jsonl" if text[0] == "{" else "p.csv")
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"'Cat'.*'cat'"):
        assert set(read_predictions(path).class_names) >= {"Cat", "cat"}
    (tmp_path / "q.csv").write_text("confidence,prediction,label\n0.9,01,1\n0.9,2,2\n")
    with pytest.warns(UserWarning, match=r"'01'.*'1'"):
        read_predictions(tmp_path / "q.csv")


@pytest.mark.parametrize("labels", [["a", "a", "b"], [0, 1, 2]])
def test_duplicate_class_names_raise(tmp_path, labels):
    np.savez(tmp_path / "p.npz", logits=torch.eye(3).numpy(), labels=labels, class_names=["a", "a", "b"])
    with pytest.raises(ValueError, match=r"p\.npz.*name.*'a'"):
        read_predictions(tmp_path / "p.npz")


@pytest.mark.parametrize(("cell", "row"), [("+-3", 3), ("9" * 25, 3), ("9" * 5000, 3)])
@pytest.mark.parametrize("column", ["index", "label"])
def test_label_that_is_not_an_integer_raises_with_its_line(tmp_path, column, cell, row):
    """Regression: the error came from int() and did not name the line."""
    other = "label" if column == "index" else "index"
    (tmp_path / "p.csv").write_text(f"prob_a,prob_b,{column},{other}\n0.5,0.5,1,0\n0.5,0.5,{cell},1\n")
    with pytest.raises(ValueError, match=rf"p\.csv.*line {row}.*{column}"):
        read_predictions(tmp_path / "p.csv")


def test_class_numbers_of_top_label_predictions_are_read(tmp_path):
    """Without ids, reordered rows could not be paired."""
    (tmp_path / "p.csv").write_text("confidence,prediction,label,index\n0.9,a,b,7\n0.9,b,b,3\n")
    assert read_predictions(tmp_path / "p.csv").index.tolist() == [7, 3]


def test_percentages_are_detected(tmp_path):
    rows = [(70, 20, 10), (33.3, 33.3, 33.3), (5, 90, 5), (1.5, 98, 0.5)]
    for kind in ("prob", "logit"):
        lines = [f"{a},{b},{c},x\n" for a, b, c in rows]
        (tmp_path / f"{kind}.csv").write_text(f"{kind}_x,{kind}_y,{kind}_z,label\n{''.join(lines)}")
    with pytest.raises(ValueError, match=r"percentages.*100"):
        read_predictions(tmp_path / "prob.csv")
    with pytest.warns(UserWarning, match=r"about 100.*percentages.*100.*prob_"):
        read_predictions(tmp_path / "logit.csv")
    (tmp_path / "one.csv").write_text("prob_1,label\n90,1\n20,0\n")
    with pytest.raises(ValueError, match=r"percentages.*100"):
        read_predictions(tmp_path / "one.csv")
    (tmp_path / "top.csv").write_text("confidence,prediction,label\n90,a,a\n20,b,a\n")
    with pytest.raises(ValueError, match=r"percentages.*100"):
        read_predictions(tmp_path / "top.csv")
    Predictions(100 * torch.eye(30), torch.arange(30))  # confident logits are not percentages


def test_labels_and_soft_labels_together_raise(tmp_path):
    """Regression: one of the two was ignored, even if they contradicted each other."""
    (tmp_path / "p.csv").write_text("prob_a,prob_b,label,label_a,label_b\n0.9,0.1,b,1,0\n0.2,0.8,a,0,1\n")
    with pytest.raises(ValueError, match=r"p\.csv.*label_NAME"):
        read_predictions(tmp_path / "p.csv")


def test_confidences_below_one_over_classes_warn(tmp_path):
    """The probability of class 1 is not the confidence; read as one, it turns over- into under-confidence."""
    rows = [f"{0.03 + 0.04 * i:.2f},{int(i > 12)},{i % 2}\n" for i in range(24)]
    (tmp_path / "p.csv").write_text(f"confidence,prediction,label\n{''.join(rows)}")
    with pytest.warns(UserWarning, match=r"0\.5.*prob_1"):
        read_predictions(tmp_path / "p.csv")


def test_a_file_without_labels_raises_an_error_that_names_it(tmp_path):
    for name in ("a", "b"):
        label_column = "species" if name == "b" else "label"
        (tmp_path / f"{name}.csv").write_text(f"prob_x,prob_y,{label_column}\n0.9,0.1,x\n0.2,0.8,y\n")
    with pytest.raises(ValueError, match=r"b\.csv.*species.*--label-column"):
        evaluate_files([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_class_numbers_that_count_from_one_are_named(tmp_path):
    (tmp_path / "one.csv").write_text("prob_0,prob_1,prob_2,label\n0.5,0.3,0.2,1\n0.5,0.3,0.2,3\n0.5,0.3,0.2,2\n")
    with pytest.raises(ValueError, match=r"line 3 has label '3'.*count from 1: subtract 1$"):
        read_predictions(tmp_path / "one.csv")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("cat", "EEL", "DOG", "eel"), "line 3.*'EEL'.*cat, dog, eel.*'eel'"),
        (("EEL", "DOG"), "line 2.*'EEL'.*cat, dog, eel.*'eel'"),
        (("cat", "zebu", "ape"), "line 3.*'zebu'.*cat, dog, eel$"),
        (("zebu", "ape"), "line 2.*'zebu'.*cat, dog, eel$"),
    ],
)
def test_unknown_label_raises_with_a_suggestion(tmp_path, labels, message):
    """Regression: the error named the line of the alphabetically first label and did not list the classes."""
    lines = "".join(f"0.5,0.3,0.2,{label}\n" for label in labels)
    (tmp_path / "upper.csv").write_text(f"prob_cat,prob_dog,prob_eel,label\n{lines}")
    with pytest.raises(ValueError, match=rf"upper\.csv.*{message}"):
        read_predictions(tmp_path / "upper.csv")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cat", "dog"], "class_names"),
        (["1", "dog"], "row 1.*label.*'dog'"),
        ([0.5, 1.0], r"row 0.*label.*'0\.5'"),
        ([0.5, 0.25], r"row 0.*label.*'0\.5'"),
    ],
)
def test_named_labels_without_class_names_raise(tmp_path, labels, message):
    """Without class names, labels must be class numbers."""
    np.savez(tmp_path / "p.npz", probs=np.full((2, 2), 0.5), labels=np.array(labels))
    with pytest.raises(ValueError, match=rf"p\.npz.*{message}"):
        read_predictions(tmp_path / "p.npz")
    np.savez(tmp_path / "q.npz", probs=np.full((2, 2), 0.5), labels=np.array(["1", "0"]))
    assert read_predictions(tmp_path / "q.npz").labels.tolist() == [1, 0]
