"""Odd values, names and options end in one line that says what is wrong, before any work is done."""

import io
import os
import stat
import warnings
import zipfile

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedlas
from fedlas.cli import app
from fedlas.cli.errors import format_warning
from fedlas.cli.terminal import progress
from fedlas.io import read_predictions, write_predictions
from fedlas.io.atomic import write_atomic
from fedlas.posthoc import build_calibrator, load_calibrator

ESCAPE = "\x1b]0;title\x07"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def file(tmp_path):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3, generator=draw)
    write_predictions(
        fedlas.Predictions(logits, torch.multinomial(logits.softmax(1), 1, generator=draw)[:, 0]), tmp_path / "p.csv"
    )
    return tmp_path / "p.csv"


def refused(words, *facts):
    done = call(*words)
    assert done.exit_code in {1, 2}, done.output
    assert not isinstance(done.exception, OverflowError), done.exception
    assert all(str(fact) in done.stderr for fact in facts), done.stderr


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_outputs_respect_the_umask(tmp_path, umask):
    """They were 0644 whatever the umask."""
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "new", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask
    (tmp_path / "new").chmod(0o640)
    write_atomic(tmp_path / "new", b"other content")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_file_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    write_atomic(tmp_path / ("n" * 255), b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_a_name_that_is_too_long_is_refused_before_the_work(file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fedlas.report.evaluation_result.evaluate_files", lambda *_, **__: pytest.fail("files were read")
    )
    refused(("evaluate", file, "--json", tmp_path / ("n" * 300)), "n" * 300)


def test_file_names_do_not_reach_the_terminal_as_escapes(file, tmp_path, monkeypatch):
    odd = file.rename(tmp_path / f"{ESCAPE}.csv")
    done = call("evaluate", odd, "--fail-if", "ece>0", "--resamples", "50", "--posthoc", "")
    assert done.exit_code == 3
    assert "\x1b" not in done.output
    assert "\x1b" not in format_warning(f"{odd}: doubtful", UserWarning)
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    with progress() as report:
        report(f"reading {odd.name}", 0.5)
    assert "\x1b]0;" not in stream.getvalue()


@pytest.mark.parametrize("cell", ["1e999999999", "0e999999999", f"0e{'9' * 5000}", "1e-999999999"])
def test_a_cell_with_an_enormous_exponent_names_its_line(tmp_path, cell):
    (tmp_path / "p.csv").write_text(f"prob_a,prob_b,label\n0.5,0.5,a\n{cell},0.25,a\n")
    with pytest.raises(ValueError, match=r"p\.csv.*line 3"):
        read_predictions(tmp_path / "p.csv")


def test_float8_is_refused_with_the_remedy(tmp_path):
    table = torch.randn(4, 3).to(torch.float8_e4m3fn)
    torch.save({"logits": table, "labels": torch.zeros(4, dtype=torch.long)}, tmp_path / "p.pt")
    with pytest.raises(TypeError, match=r"p\.pt.*float8_e4m3fn.*half"):
        read_predictions(tmp_path / "p.pt")


def test_a_seed_that_no_generator_takes_is_refused(file):
    refused(("evaluate", file, "--seed", 10**23), "--seed")


@pytest.mark.parametrize("limit", ["1.2.3", ".", "1e", "0.1."])
def test_a_condition_without_a_number_is_refused(file, limit):
    refused(("evaluate", file, "--fail-if", f"ece>{limit}"), f"ece>{limit}", "ece>0.05")


def test_features_that_are_no_numbers_are_named_with_the_file(tmp_path):
    features = np.ones((3, 2))
    features[1, 0] = np.nan
    np.savez(tmp_path / "p.npz", logits=np.eye(3), labels=np.arange(3), features=features)
    with pytest.raises(ValueError, match=r"p\.npz.*features.*row 1"):
        read_predictions(tmp_path / "p.npz")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["temperature", "ensemble_temperature"])
def test_a_temperature_that_is_not_positive_is_not_applied(file, tmp_path, name, value):
    calibrator = build_calibrator(name).fit(read_predictions(file, "val"))
    calibrator.learned["temperature"].fill_(value)
    calibrator.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors.*temperature"):
        load_calibrator(tmp_path / "c.safetensors")


def test_a_calibrator_is_replaced_only_when_asked_to(file, tmp_path):
    out = tmp_path / "c.safetensors"
    assert call("calibrate", "fit", file, "--out", out).exit_code == 0
    before = out.read_bytes()
    other = write_predictions(read_predictions(file)[:30], tmp_path / "other.csv")
    refused(("calibrate", "fit", other, "--out", out), out, "--overwrite")
    again = ("calibrate", "fit", file, "--out", out, "--posthoc", "vector_scaling")
    refused(again, out, "--overwrite")
    assert out.read_bytes() == before
    assert call(*again, "--overwrite").exit_code == 0
    assert out.read_bytes() != before


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
def test_a_name_that_stands_twice_in_an_object_is_refused(tmp_path, ending):
    path = tmp_path / f"p{ending}"
    path.write_text('{"logits": [[1.0, 2.0]], "label": [0], "label": [1]}' if ending == ".json" else
                    '{"logits": [1.0, 2.0], "label": 0, "label": 1}\n')  # fmt: skip
    with pytest.raises(ValueError, match=rf"p\{ending}.*'label'"):
        read_predictions(path)


def test_an_array_that_stands_twice_in_a_file_is_refused(tmp_path):
    np.savez(tmp_path / "p.npz", logits=np.eye(2), labels=np.arange(2))
    content = (tmp_path / "p.npz").read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        labels = file.read("labels.npy")
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "p.npz", "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("labels.npy", labels)
    with pytest.raises(ValueError, match=r"p\.npz.*'labels'"):
        read_predictions(tmp_path / "p.npz")


def test_many_names_that_look_alike_make_few_warnings(tmp_path):
    names = [f"{word}{i}" for i in range(50) for word in ("a", "A")]
    np.savez(tmp_path / "p.npz", logits=3 * np.eye(100), labels=np.arange(100), class_names=names)
    with pytest.warns(UserWarning, match="alike") as found:
        read_predictions(tmp_path / "p.npz")
    assert len(found) == 6
    assert "45" in str(found[-1].message)
