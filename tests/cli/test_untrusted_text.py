"""Unusual values, names and options give a one-line error before any work is done."""

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


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 3, generator=generator)
    write_predictions(
        fedlas.Predictions(logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]),
        tmp_path / "p.csv",
    )
    return tmp_path / "p.csv"


def assert_error_names(arguments, *expected_texts):
    result = call(*arguments)
    assert result.exit_code in {1, 2}, result.output
    assert not isinstance(result.exception, OverflowError), result.exception
    assert all(str(text) in result.stderr for text in expected_texts), result.stderr


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_outputs_respect_the_umask(tmp_path, umask):
    """Regression: files were written with mode 0644 for every umask."""
    previous_umask = os.umask(umask)
    try:
        write_atomic(tmp_path / "new", b"content")
    finally:
        os.umask(previous_umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~umask


def test_atomic_write_accepts_file_names_of_255_bytes(tmp_path):
    write_atomic(tmp_path / ("n" * 255), b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["n" * 255]


def test_too_long_output_name_fails_before_files_are_read(file, tmp_path, monkeypatch):
    monkeypatch.setattr("fedlas.report.evaluate_files.evaluate_files", lambda *_, **__: pytest.fail("files were read"))
    assert_error_names(("evaluate", file, "--json", tmp_path / ("n" * 300)), "n" * 300)


def test_escape_sequences_in_file_names_are_not_printed(file, tmp_path, monkeypatch):
    path = file.rename(tmp_path / f"{ESCAPE}.csv")
    result = call("evaluate", path, "--fail-if", "ece>0", "--resamples", "50", "--posthoc", "")
    assert result.exit_code == 3
    assert "\x1b" not in result.output
    assert "\x1b" not in format_warning(f"{path}: doubtful", UserWarning)
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    with progress() as report:
        report(f"reading {path.name}", 0.5)
    assert "\x1b]0;" not in stream.getvalue()


@pytest.mark.parametrize("cell", ["1e999999999", "0e999999999", f"0e{'9' * 5000}", "1e-999999999"])
def test_enormous_exponent_error_names_the_line(tmp_path, cell):
    (tmp_path / "p.csv").write_text(f"prob_a,prob_b,label\n0.5,0.5,a\n{cell},0.25,a\n")
    with pytest.raises(ValueError, match=r"p\.csv.*line 3"):
        read_predictions(tmp_path / "p.csv")


def test_float8_error_suggests_half_precision(tmp_path):
    table = torch.randn(4, 3).to(torch.float8_e4m3fn)
    torch.save({"logits": table, "labels": torch.zeros(4, dtype=torch.long)}, tmp_path / "p.pt")
    with pytest.raises(TypeError, match=r"p\.pt.*float8_e4m3fn.*half"):
        read_predictions(tmp_path / "p.pt")


def test_seed_beyond_64_bits_is_rejected(file):
    assert_error_names(("evaluate", file, "--seed", 10**23), "--seed")


def test_nan_features_error_names_file_and_row(tmp_path):
    features = np.ones((3, 2))
    features[1, 0] = np.nan
    np.savez(tmp_path / "p.npz", logits=np.eye(3), labels=np.arange(3), features=features)
    with pytest.raises(ValueError, match=r"p\.npz.*features.*row 1"):
        read_predictions(tmp_path / "p.npz")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["temperature", "ensemble_temperature"])
def test_loading_a_temperature_that_is_not_positive_raises(file, tmp_path, name, value):
    calibrator = build_calibrator(name).fit(read_predictions(file, "val"))
    calibrator.learned["temperature"].fill_(value)
    calibrator.save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=r"c\.safetensors.*temperature"):
        load_calibrator(tmp_path / "c.safetensors")


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_duplicate_json_keys_raise(tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    path.write_text('{"logits": [[1.0, 2.0]], "label": [0], "label": [1]}' if suffix == ".json" else
                    '{"logits": [1.0, 2.0], "label": 0, "label": 1}\n')  # fmt: skip
    with pytest.raises(ValueError, match=rf"p\{suffix}.*'label'"):
        read_predictions(path)


def test_duplicate_npz_members_raise(tmp_path):
    np.savez(tmp_path / "p.npz", logits=np.eye(2), labels=np.arange(2))
    content = (tmp_path / "p.npz").read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        labels = file.read("labels.npy")
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "p.npz", "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("labels.npy", labels)
    with pytest.raises(ValueError, match=r"p\.npz.*'labels'"):
        read_predictions(tmp_path / "p.npz")


def test_warnings_about_similar_class_names_are_capped(tmp_path):
    names = [f"{name}{i}" for i in range(50) for name in ("a", "A")]
    np.savez(tmp_path / "p.npz", logits=3 * np.eye(100), labels=np.arange(100), class_names=names)
    with pytest.warns(UserWarning, match="alike") as caught_warnings:
        read_predictions(tmp_path / "p.npz")
    assert len(caught_warnings) == 6
    assert "45" in str(caught_warnings[-1].message)
