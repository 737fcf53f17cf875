"""Hyperparameter search uses only the validation split, records all trials, and resumes."""

import json
import re

import pytest
from typer.testing import CliRunner

from fedlas.cli import app
from fedlas.experiments.search import Range, search
from fedlas.metrics import nll
from fedlas.training import Run, recipe_for

SMALL = {"epochs": 1, "batch_size": 100, "data_options": {"train_samples": 200}, "model_options": {"width": 8}}
RECIPE = recipe_for("digits", "small_cnn", "ls", **SMALL)


@pytest.fixture(scope="module")
def finished_search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    ranges = [Range.parse("alpha=0.01:0.4:log")]
    return folder, search(RECIPE, ranges, trials=3, folder=folder, seeds=(1, 2))


def test_search_never_reads_the_test_split(finished_search):
    folder, _ = finished_search
    files = {path.name for path in folder.rglob("*.safetensors")}
    assert files == {"best-val.safetensors", "last-val.safetensors"}
    runs = [Run(path) for path in (folder / "runs").iterdir()]
    assert len(runs) == 6
    assert all("test" not in run.environment["data"] for run in runs)
    assert all(run.finished for run in runs)


def test_recipes_that_validate_on_the_test_split_raise(tmp_path):
    """The validation split of these recipes is the test split."""
    official = recipe_for("cub200", loss="ls", protocol="official")
    with pytest.raises(ValueError, match=r"data_options\.selection=held_out"):
        search(official, [Range.parse("alpha=0.01:0.4")], trials=1, folder=tmp_path)


def test_search_json_records_all_trials(finished_search):
    folder, result = finished_search
    record = json.loads((folder / "search.json").read_text())
    assert record["split"] == "val"
    assert record["metric"] == "nll"
    assert [trial["options"] for trial in record["trials"]] == [trial.options for trial in result.trials]
    assert record["best"]["mean"] == min(trial["mean"] for trial in record["trials"])
    for trial in result.trials:
        values = [float(nll(Run(folder / "runs" / name).predictions("best-val"))) for name in trial.runs]
        assert list(trial.values) == values
        assert trial.mean == pytest.approx(sum(values) / 2)
        assert 0.01 <= trial.options["alpha"] <= 0.4
    best = RECIPE.replace(loss_options={**RECIPE.loss_options, **result.best.options}, seed=1)
    assert best.name == result.best.runs[0]


def test_repeated_search_reuses_finished_runs(finished_search):
    folder, result = finished_search
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    repeated = search(RECIPE, result.ranges, trials=4, folder=folder, seeds=(1, 2))
    assert repeated.trials[:3] == result.trials
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 4


def test_diverged_trial_is_never_the_best(tmp_path):
    recipe = RECIPE.replace(lr=1e30)
    result = search(recipe, [Range.parse("alpha=0.1,0.2")], trials=1, folder=tmp_path)
    assert result.trials[0].values == (None,)
    assert json.loads((tmp_path / "search.json").read_text())["best"] is None
    with pytest.raises(ValueError, match="diverged"):
        _ = result.best


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beta=0.5:8", Range("beta", 0.5, 8.0)),
        ("beta=0.5:8:log", Range("beta", 0.5, 8.0, log=True)),
        ('gate="soft","learned"', Range("gate", values=("soft", "learned"))),
        ("theta=0.1,0.95", Range("theta", values=(0.1, 0.95))),
    ],
)
def test_range_strings_are_parsed(text, expected):
    assert Range.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    ["beta", "beta=", "=1:2", "beta=1:2:lin", "beta=a:b", "b=1:inf", "b=soft", "b=1:2:3:4"],
)
def test_invalid_range_strings_raise(text):
    with pytest.raises(ValueError, match=rf"NAME=LOW:HIGH.*{re.escape(text)}"):
        Range.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta=8:0.5:log", r"\b8\b.*\b0\.5\b"),
        ("beta=2:1", r"\b2\b.*\b1\b"),
        ("beta=1:1", r"--set loss_options\.beta=1"),
        ("beta=0:1:log", r":log.*\b0\b"),
    ],
)
def test_invalid_range_bounds_raise(text, message):
    with pytest.raises(ValueError, match=f"{text}: .*{message}"):
        Range.parse(text)


def test_duplicate_search_keyword_fails(tmp_path):
    arguments = ["search", "--data", "digits", "--loss", "fedlas_ls", "--over", "beta=1,2", "--over", "beta=3,4"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "made")])
    assert result.exit_code == 1
    assert re.search("--over.*beta", result.output)
    assert not (tmp_path / "made").exists()


def test_search_command_prints_the_best_settings(tmp_path):
    command = (
        "search --data digits --loss ls --over alpha=0.05,0.1 --trials 1 --set epochs=1 --set model_options.width=8"
    )
    arguments = [*command.split(), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "--set loss_options.alpha=0." in result.output
    longer = CliRunner().invoke(app, [*arguments, "--trials", "2"])
    assert longer.exit_code == 0, longer.output
    other = CliRunner().invoke(app, [*arguments, "--metric", "ece"])
    assert (other.exit_code, "--overwrite" in other.output) == (1, True)
    invalid = CliRunner().invoke(app, [*arguments, "--overwrite", "--metric", "speed"])
    assert invalid.exit_code == 1
    assert "'speed'" in invalid.output
