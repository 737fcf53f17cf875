"""Commands check output paths before any work, and replace existing files with `--overwrite` only."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fedlas.cli import app
from fedlas.cli.errors import one_line_errors
from fedlas.cli.training import is_same_search
from fedlas.experiments.base import Choice
from fedlas.experiments.demo import DemoResult
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.planning import experiment_named, list_experiments
from fedlas.experiments.search import Range, Search
from fedlas.io import read_predictions, write_predictions
from fedlas.posthoc import load_calibrator
from fedlas.predictions import Predictions
from fedlas.training import recipe_for

SOTA = ("reproduce", "sota", "--data", "digits", "--protocol", "small", "--losses", "ls", "--seeds", "1", "--dry-run")
SEARCH = ("search", "--data", "digits", "--loss", "ls", "--over", "alpha=0.01:0.1", "--trials", "1")
TRAIN = ("train", "--data", "digits", "--loss", "ce")


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_one_line_error(arguments, *expected_texts):
    """Check that a command fails with a one-line error that contains the expected texts."""
    result = call(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert all(str(text) in result.stderr for text in expected_texts), result.stderr


@pytest.fixture
def files(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name in ("test", "val"):
        true_logits = torch.randn(80, 3, generator=generator)
        labels = torch.multinomial(true_logits.softmax(1), 1, generator=generator)[:, 0]
        write_predictions(Predictions(3 * true_logits, labels), tmp_path / f"{name}.csv")
    write_predictions(Predictions(torch.randn(20, 3, generator=generator)), tmp_path / "far.npz")
    return tmp_path


OUTPUTS = (  # commands, and the name of an existing file that they would replace
    (("evaluate", "test.csv", "--html", "page.html"), "page.html"),
    (("evaluate", "test.csv", "--json", "evaluation.json"), "evaluation.json"),
    (("evaluate", "test.csv", "--figures", "figures"), "figures/reliability.png"),
    (("evaluate", "test.csv", "--figures", "figures"), "figures/class_map-resnet.json"),
    (("ood", "test.csv", "far=far.npz", "--json", "ood.json"), "ood.json"),
    (("compare", "test.csv", "test.csv", "--json", "comparison.json"), "comparison.json"),
    (("calibrate", "fit", "val.csv", "--out", "calibrator.safetensors"), "calibrator.safetensors"),
    (("calibrate", "apply", "fitted.safetensors", "test.csv", "--out", "out.csv"), "out.csv"),
)


@pytest.mark.parametrize(("arguments", "name"), OUTPUTS, ids=lambda value: "-".join(value[:2]) if value[1:2] else value)
def test_existing_files_need_overwrite(tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    existing = tmp_path / name
    existing.parent.mkdir(exist_ok=True)
    existing.write_text("mine")
    assert_one_line_error(arguments, f"{name} exists", "--overwrite")
    assert existing.read_text() == "mine"
    with_flag = call(*arguments, "--overwrite")  # the inputs do not exist
    assert (with_flag.exit_code, "--overwrite" in with_flag.stderr) == (1, False), with_flag.output


def test_overwrite_replaces_files_of_any_content(files, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setattr("fedlas.report.figures.style.figure_bytes", lambda *_, **__: b"an image")
    monkeypatch.setattr("fedlas.report.figures.saving._shared_figures", lambda *_: ())
    assert call("calibrate", "fit", "val.csv", "--out", "fitted.safetensors").exit_code == 0
    (files / "figures").mkdir()
    for name in ("page.html", "evaluation.json", "ood.json", "comparison.json", "calibrator.safetensors", "out.csv"):
        (files / name).write_text("mine")
    user_files = {"notes.md": "mine", "reliability.txt": "mine", "photo.png": "mine", "training-photo.png": "mine"}
    for name, text in user_files.items():
        (files / "figures" / name).write_text(text)
    evaluate = ("evaluate", "test.csv", "--posthoc", "", "--resamples", 50)
    for arguments in (
        (*evaluate, "--html", "page.html", "--json", "evaluation.json", "--figures", "figures"),
        *(arguments for arguments, _ in OUTPUTS if arguments[0] != "evaluate"),
    ):
        result = call(*arguments, "--overwrite")
        assert result.exit_code == 0, result.output
        assert_one_line_error(arguments, "exists", "--overwrite")
    assert {name: (files / "figures" / name).read_text() for name in user_files} == user_files
    for name in ("evaluation", "ood", "comparison", "figures/class_map"):
        record = json.loads((files / f"{name}.json").read_text())
        assert (record[0] if isinstance(record, list) else record)["format"].startswith("fedlas.")
    assert (files / "page.html").read_text().startswith("<!doctype html>")
    assert load_calibrator(files / "calibrator.safetensors").name == "temperature"
    assert len(read_predictions(files / "out.csv")) == 80


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (SOTA, "sota-small.md"),
        (SOTA, "sota-small.csv"),
        (SOTA, "sota-cifar10.png"),
        (("demo",), "figures/reliability.png"),
        (("demo",), "report.html"),
        (SEARCH, "search.json"),
        (TRAIN, "recipe.json"),
    ],
)
def test_result_folders_do_not_replace_user_files_of_the_same_name(tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    user_file = tmp_path / "made" / name
    user_file.parent.mkdir(parents=True)
    user_file.write_text('{"flour": 500, "format": "fedlas.search/1"}')
    result = call(*arguments, "--out", "made")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert f"{Path(name).name} " in result.stderr
    assert user_file.read_text() == '{"flour": 500, "format": "fedlas.search/1"}'
    assert [path for path in (tmp_path / "made").rglob("*") if path.is_file() and path.name[0] != "."] == [user_file]


def test_reproduce_replaces_only_its_own_results_without_overwrite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "made" / "sota-small.csv"
    table.parent.mkdir()
    table.write_text("mine")
    assert_one_line_error((*SOTA, "--out", "made"), "sota-small.csv exists", "--overwrite")
    assert table.read_text() == "mine"
    for overwrite in (("--overwrite",), ()):
        result = call(*SOTA, "--out", "made", *overwrite)
        assert result.exit_code == 0, result.output
    assert table.read_text() != "mine"
    (tmp_path / "made" / "indicator-small.csv").write_text("mine")  # of another experiment
    assert_one_line_error(("reproduce", "indicator", "--data", "digits", "--dry-run", "--out", "made"), "--overwrite")


def test_demo_replaces_its_own_results_without_overwrite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_demo(folder, **_):
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / "reliability.png").write_bytes(b"an image")
        (folder / "report.html").write_text("a page")
        return DemoResult([], "", "", folder / "report.html", [])

    monkeypatch.setattr("fedlas.experiments.demo.run_demo", run_demo)
    for _ in range(2):
        result = call("demo", "--out", "made")
        assert result.exit_code == 0, result.output


def test_search_json_is_replaced_only_by_the_same_search(tmp_path):
    recipe, ranges = recipe_for("digits", None, "ls"), [Range.parse("alpha=0.01:0.1:log"), Range.parse("n=1,2")]
    record = Search(recipe, tuple(ranges), "nll", (1, 2), 0, (), {})
    path = tmp_path / "search.json"
    assert not is_same_search(path, recipe, ranges, metric="nll", seeds=(1, 2))
    path.write_text(json.dumps(record.to_dict()))
    assert is_same_search(path, recipe, ranges, metric="nll", seeds=(1, 2))
    assert not is_same_search(path, recipe, ranges, metric="ece", seeds=(1, 2))
    assert not is_same_search(path, recipe, ranges, metric="nll", seeds=(1,))
    assert not is_same_search(path, recipe, ranges[:1], metric="nll", seeds=(1, 2))
    assert not is_same_search(path, recipe.replace(epochs=3), ranges, metric="nll", seeds=(1, 2))
    for text in ("[]", "[" * 200_000, "{"):
        path.write_text(text)
        assert not is_same_search(path, recipe, ranges, metric="nll", seeds=(1, 2))


@pytest.mark.parametrize("name", [name for name, _ in list_experiments()])
def test_table_names_match_the_file_pattern_of_their_experiment(name, tmp_path):
    experiment = experiment_named(name)
    for table in experiment.tables(Ledger(tmp_path), Choice()):
        assert re.fullmatch(experiment.file_names, table.name)


def test_output_paths_are_checked_before_inputs_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").write_text("x")
    folder_name = "folder.safetensors"
    for arguments in (
        ("evaluate", "nowhere.csv", "--json", folder_name),
        ("evaluate", "nowhere.csv", "--html", folder_name),
        ("ood", "nowhere.csv", "far=nowhere.csv", "--json", folder_name),
        ("compare", "nowhere.csv", "nowhere.csv", "--json", folder_name),
        ("calibrate", "fit", "nowhere.csv", "--out", folder_name),
        ("calibrate", "apply", "nowhere.safetensors", "nowhere.csv", "--out", folder_name),
        ("predict", "nowhere", "--data", "digits", "--out", folder_name),
    ):
        assert_one_line_error(arguments, f"{folder_name} ", "folder")
        if arguments[0] == "evaluate":
            assert_one_line_error((*arguments[:-1], "file/deep/x"), tmp_path / "file/deep")
    for arguments in (
        ("evaluate", "nowhere.csv", "--figures", "file"),
        *((*item, "--out", "file") for item in OUTPUT_FOLDERS),
    ):
        assert_one_line_error(arguments, "fedlas: file ", "folder")
        assert_one_line_error((*arguments[:-1], "file/deep"), tmp_path / "file/deep")


OUTPUT_FOLDERS = (SOTA, SEARCH, TRAIN, ("demo",))


def test_two_outputs_to_the_same_path_are_rejected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(["evaluate", "a.csv", "--html", "same.out", "--json", "./same.out"], "same.out", "two")
    assert not Path("same.out").exists()


@pytest.mark.parametrize(
    ("error", "message_end"),
    [
        (MemoryError(""), "\n"),
        (MemoryError("Unable to allocate"), " (Unable to allocate)\n"),
        (RuntimeError("alloc.cpp:1 DefaultCPUAllocator: not enough memory:\n9 B"), " (not enough memory: 9 B)\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), " (CUDA out of memory)\n"),
    ],
)
def test_out_of_memory_is_one_line(capsys, error, message_end):
    with pytest.raises(typer.Exit) as exit_info, one_line_errors():
        raise error
    assert exit_info.value.exit_code == 1
    stderr = capsys.readouterr().err
    assert re.fullmatch(f"fedlas: [^(]*memory[^(]*{re.escape(message_end)}", stderr)


def test_other_runtime_errors_are_not_reported_as_out_of_memory():
    with pytest.raises(RuntimeError, match="a bug"), one_line_errors():
        raise RuntimeError("a bug")
