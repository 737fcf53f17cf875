"""Which existing files commands overwrite and which they leave alone, decided before anything is read or trained."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fedlas.cli import app
from fedlas.cli.errors import format_warning, one_line_errors
from fedlas.cli.output_paths import beginning
from fedlas.experiments.base import Choice
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.planning import experiment_named, list_experiments
from fedlas.io import read_predictions, write_predictions
from fedlas.posthoc import build_calibrator, load_calibrator
from fedlas.posthoc.base import DoubtfulFit
from fedlas.predictions import Predictions

SOTA = ("reproduce", "sota", "--data", "digits", "--protocol", "small", "--losses", "ls", "--seeds", "1", "--dry-run")
SEARCH = ("search", "--data", "digits", "--loss", "ls", "--over", "alpha=0.01:0.1", "--trials", "1")
TRAIN = ("train", "--data", "digits", "--loss", "ce")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(words, *facts):
    """Check that a command ends in an error of one line with these facts."""
    done = call(*words)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
    assert all(str(fact) in done.stderr for fact in facts), done.stderr


@pytest.fixture
def given(tmp_path):
    draw = torch.Generator().manual_seed(0)
    for name in ("test", "val"):
        true = torch.randn(80, 3, generator=draw)
        labels = torch.multinomial(true.softmax(1), 1, generator=draw)[:, 0]
        write_predictions(Predictions(3 * true, labels), tmp_path / f"{name}.csv")
    write_predictions(Predictions(torch.randn(20, 3, generator=draw)), tmp_path / "far.npz")
    return tmp_path


@pytest.mark.parametrize("name", ["class_map.json", "class_map-resnet.json", "reliability.png", "norm.svg", "roc.pdf"])
def test_figures_do_not_replace_files_of_that_name(tmp_path, name):
    (tmp_path / name).write_text('{"figure": "mine"}')
    refused(("evaluate", tmp_path / "nowhere.csv", "--figures", tmp_path), tmp_path / name, "folder")
    assert (tmp_path / name).read_text() == '{"figure": "mine"}'


def test_figures_are_drawn_again_and_beside_other_files(given, monkeypatch):
    monkeypatch.setattr("fedlas.report.figures.style.figure_bytes", lambda *_, **__: b"a picture")  # nobody looks at it
    monkeypatch.setattr("fedlas.report.figures.saving._of_all", lambda *_: ())  # the others are enough
    folder = given / "figures"
    folder.mkdir()
    mine = {"notes.md": "mine", "reliability.txt": "mine", "photo.png": "mine", "training-photo.png": "mine"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    words = ("evaluate", given / "test.csv", "--posthoc", "", "--figures", folder, "--resamples", 50)
    for _ in range(2):
        assert call(*words).exit_code == 0
    assert {name: (folder / name).read_text() for name in mine} == mine
    assert {path.suffix for path in folder.glob("class_map.*")} == {".pdf", ".png", ".svg", ".json"}
    assert json.loads((folder / "class_map.json").read_text())["format"] == "fedlas.figure/1"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (SOTA, "sota-small.md"),
        (SOTA, "sota-small.csv"),
        (SOTA, "sota-cifar10.png"),
        (("demo",), "figures/reliability.png"),
        (SEARCH, "search.json"),
        (TRAIN, "recipe.json"),
    ],
)
def test_folders_of_results_do_not_replace_files_of_that_name(tmp_path, monkeypatch, words, name):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "made" / name
    mine.parent.mkdir(parents=True)
    mine.write_text('{"flour": 500, "format": "fedlas.search/1"}')
    done = call(*words, "--out", "made")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
    assert f"{Path(name).name} " in done.stderr
    assert mine.read_text() == '{"flour": 500, "format": "fedlas.search/1"}'
    assert [path for path in (tmp_path / "made").rglob("*") if path.is_file() and path.name[0] != "."] == [mine]


def test_tables_are_overwritten_on_request_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*SOTA, "--out", "made").exit_code == 0
    table = tmp_path / "made" / "sota-small.csv"
    table.write_text("mine")
    refused((*SOTA, "--out", "made"), "sota-small", "--overwrite")
    assert table.read_text() == "mine"
    assert call(*SOTA, "--out", "made", "--overwrite").exit_code == 0
    assert table.read_text() != "mine"


@pytest.mark.parametrize("name", [name for name, _ in list_experiments()])
def test_every_table_has_a_name_of_its_experiment(name, tmp_path):
    experiment = experiment_named(name)
    for table in experiment.tables(Ledger(tmp_path), Choice()):
        assert re.fullmatch(experiment.file_names, table.name)


ANOTHER = [
    '{"format": "my config", "models": ["resnet"]}',
    '{"sets": 3, "mean": 2.5}',
    '[{"metric": "a", "pairs": []}]',
    '{"models": {}, "format": "of", "x": "fedlas.evaluation/1"}',
    '{"logits": [[1, 2]], "labels": [0]}',
    "[" * 200_000,
    '{"a":' * 200_000,
]


@pytest.mark.parametrize("text", ANOTHER, ids=range(len(ANOTHER)))
def test_json_that_only_looks_like_an_answer_is_left_alone(given, text):
    mine = given / "mine.json"
    mine.write_text(text)
    test = given / "test.csv"
    for words in (("evaluate", test), ("ood", test, f"far={given / 'far.npz'}")):
        refused((*words, "--json", mine), mine, f"`fedlas {words[0]}`")
    refused(("compare", test, given / "val.csv", "--json", mine), mine, "--overwrite")
    assert mine.read_text() == text


def test_every_answer_says_what_it_is_and_is_not_written_over_by_another(given):
    test = given / "test.csv"
    commands = {
        "fedlas.evaluation/1": ("evaluate", test, "--posthoc", "", "--resamples", 50),
        "fedlas.ood/1": ("ood", test, f"far={given / 'far.npz'}"),
        "fedlas.compare/1": ("compare", test, test, "--metrics", "accuracy", "--resamples", 50, "--overwrite"),
    }
    for number, (name, words) in enumerate(commands.items()):
        for _ in range(2):
            done = call(*words, "--json", given / f"{number}.json")
            assert done.exit_code == 0, done.output
        found = json.loads((given / f"{number}.json").read_text())
        assert (found[0] if isinstance(found, list) else found)["format"] == name
    for number, words in enumerate(list(commands.values())[:2]):
        other = given / f"{(number + 1) % 3}.json"
        refused((*words, "--json", other), other, f"`fedlas {words[0]}`")


def test_little_is_read_of_a_large_file(tmp_path):
    with (tmp_path / "large.html").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    assert len(beginning(tmp_path / "large.html")) == 4096
    refused(("evaluate", tmp_path / "nowhere.csv", "--html", tmp_path / "large.html"), "large.html", "page")


def test_a_deep_file_at_the_place_of_predictions_is_left_alone(given):
    kept = given / "c.safetensors"
    assert call("calibrate", "fit", given / "val.csv", "--out", kept).exit_code == 0
    (given / "deep.jsonl").write_text("[" * 200_000)
    refused(("calibrate", "apply", kept, given / "test.csv", "--out", given / "deep.jsonl"), "deep.jsonl")
    refused(("calibrate", "apply", kept, given / "nowhere.csv", "--out", given / "x.json"), ".safetensors")


@pytest.mark.parametrize("ending", ["safetensors", "npz", "csv", "parquet", "jsonl"])
def test_calibrate_apply_leaves_other_predictions_alone(given, ending):
    kept, out = given / "c.safetensors", given / f"out.{ending}"
    assert call("calibrate", "fit", given / "val.csv", "--out", kept).exit_code == 0
    words = ("calibrate", "apply", kept, given / "test.csv", "--out", out)
    for _ in range(2):  # the same may be written again
        done = call(*words)
        assert done.exit_code == 0, done.output
    write_predictions(read_predictions(given / "val.csv"), out)
    before = out.read_bytes()
    refused(words, out, "predictions")
    assert out.read_bytes() == before


def test_every_place_is_checked_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").write_text("x")
    here = "folder.safetensors"
    for words in (
        ("evaluate", "nowhere.csv", "--json", here),
        ("evaluate", "nowhere.csv", "--html", here),
        ("ood", "nowhere.csv", "far=nowhere.csv", "--json", here),
        ("compare", "nowhere.csv", "nowhere.csv", "--json", here),
        ("calibrate", "fit", "nowhere.csv", "--out", here),
        ("calibrate", "apply", "nowhere.safetensors", "nowhere.csv", "--out", here),
        ("predict", "nowhere", "--data", "digits", "--out", here),
    ):
        refused(words, f"{here} ", "folder")
        if words[0] == "evaluate":
            refused((*words[:-1], "file/deep/x"), tmp_path / "file/deep")
    for words in (("evaluate", "nowhere.csv", "--figures", "file"), *((*one, "--out", "file") for one in PLACES)):
        refused(words, "fedlas: file ", "folder")
        refused((*words[:-1], "file/deep"), tmp_path / "file/deep")


PLACES = (SOTA, SEARCH, TRAIN, ("demo",))


def test_a_doubtful_fit_is_reported_once_whatever_its_wording(tmp_path, monkeypatch):
    write_predictions(Predictions(5 * torch.eye(3).repeat(9, 1), torch.arange(3).repeat(9)), tmp_path / "easy.csv")
    monkeypatch.setattr("fedlas.posthoc.temperature.Temperature.doubt", lambda *_: "autre chose")
    with pytest.warns(DoubtfulFit, match="autre chose"):
        build_calibrator("temperature").fit(read_predictions(tmp_path / "easy.csv"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        done = call("calibrate", "fit", tmp_path / "easy.csv", "--out", tmp_path / "t.safetensors")
    assert done.exit_code == 0, done.output
    assert not [one for one in said if "autre chose" in str(one.message)]
    assert done.stderr.count("autre chose") == 1
    assert load_calibrator(tmp_path / "t.safetensors").fitted.doubt == "autre chose"
    assert format_warning("autre\nchose", DoubtfulFit, "file.py", 3) == "fedlas: autre chose\n"


def test_two_results_need_two_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(["evaluate", "a.csv", "--html", "same.out", "--json", "./same.out"], "same.out", "two")
    assert not Path("same.out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (MemoryError(""), "\n"),
        (MemoryError("Unable to allocate"), " (Unable to allocate)\n"),
        (RuntimeError("alloc.cpp:1 DefaultCPUAllocator: not enough memory:\n9 B"), " (not enough memory: 9 B)\n"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), " (CUDA out of memory)\n"),
    ],
)
def test_memory_that_runs_out_is_one_line(capsys, given, said):
    with pytest.raises(typer.Exit) as ended, one_line_errors():
        raise given
    assert ended.value.exit_code == 1
    shown = capsys.readouterr().err
    assert re.fullmatch(f"fedlas: [^(]*memory[^(]*{re.escape(said)}", shown)


def test_other_errors_of_torch_are_no_memory_that_ran_out():
    with pytest.raises(RuntimeError, match="a bug"), one_line_errors():
        raise RuntimeError("a bug")
