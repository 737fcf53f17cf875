"""Training, prediction, lists and the demo on the command line: results, one-line errors, tables without truncation."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

import fedlas
from fedlas.cli import app
from fedlas.training import Run

SMALL = ("epochs=2", "batch_size=50", "data_options.train_samples=200", "model_options.width=8")
SHORT = tuple(argument for change in SMALL for argument in ("--set", change))


def call(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    result = call("train", "--data", "digits", "--loss", "fedlas_ls", *SHORT, "--out", str(folder))
    assert result.exit_code == 0, result.output
    assert str(folder) in result.stdout
    assert "best" in result.stdout
    return folder


def test_train_command_produces_a_finished_run(run):
    assert Run(run).finished
    assert (Run(run).recipe.epochs, Run(run).recipe.model) == (2, "small_cnn")


def test_resuming_a_finished_run_prints_results_without_training(run, monkeypatch):
    monkeypatch.setattr("fedlas.training.loop.Session", lambda *_, **__: pytest.fail("it was trained again"))
    result = call("train", "--data", "digits", "--loss", "fedlas_ls", *SHORT, "--out", str(run), "--resume")
    assert result.exit_code == 0
    assert "test split" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "digits", "--loss", "ce", "--set", "epohs=3"], "epohs.*'epochs'"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "epochs"], "FIELD=VALUE"),
        (["train", "--data", "digits", "--loss", "ls", "--set", "alpha=0.1"], r"'ls'.*loss_options\.alpha"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "alpha=0.1"], r"'alpha'(?!.*loss_options\.alpha)"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "width=8"], r"'small_cnn'.*model_options\.width"),
        (
            ["search", "--data", "digits", "--loss", "ls", "--over", "alpha=0:1", "--set", "train_samples=50"],
            r"'digits'.*data_options\.train_samples",
        ),
        (["train", "--data", "digitz", "--loss", "ce"], "digitz.*'digits'"),
        (["train", "--data", "digits", "--loss", "fedlas"], "'fedlas'"),
        (["train", "--data", "digits", "--loss", "ce", "--model", "small_cnm"], "small_cnm.*'small_cnn'"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "loss_options.alpha=1"], "'ce'.*'alpha'"),
        (["train", "--data", "digits", "--loss", "ce", "--device", "cuda"], "cuda.*GPU"),
        (["train", "--data", "digits", "--loss", "ce", "--device", "gpu"], "'gpu'.*cpu.*cuda"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "ood=folder"], "ood=folder.*path="),
        (["train", "--data", "digits", "--loss", "ce", "--set", "ood=svnh"], "svnh.*'svhn'"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "loss=ls"], "--loss ls.*--set loss"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "lr=1", "--set", "lr=2"], "--set lr.*'1'.*'2'"),
        (["train", "--data", "digits", "--loss", "ce", "--set", "warmup=3"], "warmup.*schedule"),
        (
            ["train", "--data", "digits", "--loss", "ce", "--protocol", "paper", "--model", "small_cnn"],
            "'paper'.*'digits'",
        ),
        (["predict", "nowhere", "--data", "digits"], r"nowhere.*recipe\.json"),
        (
            ["train", "--data", "folder", "--loss", "ce"],
            r"default.*'small'.*'folder'.*--model.* epochs, lr .*model_options\.pretrained=true",
        ),
        (["train", "--data", "folder", "--loss", "ce", "--model", "small_cnn"], "'folder'.*'path'"),
        (
            ["train", "--data", "digits", "--loss", "ce", "--set", "model_options.in_channels=3"],
            r"1 x 8 x 8.*\.in_channels",
        ),
        (["train", "--data", "digits", "--loss", "ce", "--set", "loss_options.reduction=none"], "reduction.*mean.*sum"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_quiet_hides_log_messages_and_verbose_adds_details(tmp_path):
    arguments = ["reproduce", "sota", "--dry-run", "--data", "digits", "--protocol", "small", "--ledger", str(tmp_path)]
    normal, quiet = call(*arguments), call("--quiet", *arguments)
    assert normal.stdout == quiet.stdout
    assert re.search(r"small protocol: \d+ runs", normal.stderr)
    assert quiet.stderr == ""
    assert call("--quiet", "--verbose", *arguments).exit_code == 2
    verbose = call("--verbose", "predict", str(tmp_path / "nowhere"), "--data", "digits")
    assert isinstance(verbose.exception, (ValueError, OSError)), "the traceback is shown"
    call("list", "losses")  # resets the log level


def test_every_help_text_ends_with_an_example():
    for command in ("", *get_command(app).commands, "calibrate fit", "calibrate apply"):
        arguments = command.split()
        help_result = call(*arguments, "--help", env={"NO_COLOR": "1", "FORCE_COLOR": "1", "TERMINAL_WIDTH": "200"})
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", help_result.stdout), "NO_COLOR turns colours off"
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", help_result.stdout).split())
        assert f"Example: fedlas {command}".strip() in text[-120:]


def test_version_option_prints_the_version():
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"fedlas {fedlas.__version__}\n")


@pytest.mark.parametrize(
    "arguments", [["evaluate", "a.csv"], ["ood", "a.csv", "far=b.csv"], ["compare", "a.csv", "b.csv"]]
)
def test_negative_seed_is_a_usage_error_that_names_the_option(arguments):
    result = call(*arguments, "--seed", "-1")
    assert result.exit_code == 2
    assert "'--seed'" in result.stderr


def test_training_into_the_folder_of_another_recipe_fails_in_one_line(run):
    result = call("train", "--data", "digits", "--loss", "ce", "--out", str(run))
    assert result.exit_code == 1
    assert re.search("recipe.*loss", result.stderr), result.stderr


def test_missing_data_error_names_the_expected_archive(tmp_path):
    arguments = ["--data", "cifar10", "--loss", "ce", "--protocol", "fast", "--data-root", str(tmp_path)]
    result = call("train", *arguments, "--set", "data_options.download=false", "--out", str(tmp_path / "run"))
    assert result.exit_code == 1
    assert "cifar-10-binary.tar.gz" in result.stderr


def test_predict_command_writes_predictions_of_any_split(run, tmp_path):
    result = call("predict", str(run), "--data", "digits", "--split", "train")
    assert result.exit_code == 0, result.output
    predictions = fedlas.read_predictions(result.stdout.strip())
    assert len(predictions) == 200
    test_result = call(
        "predict", str(run), "--data", "digits", "--split", "test", "--out", str(tmp_path / "test.safetensors")
    )
    assert test_result.exit_code == 0
    assert (tmp_path / "test.safetensors").read_bytes() == Run(run).predictions_file("best-test").read_bytes()


def test_evaluate_of_a_run_folder_uses_all_of_its_files(run, tmp_path):
    html_path, json_path = tmp_path / "page.html", tmp_path / "answer.json"
    copy = tmp_path / "again-0.5"
    shutil.copytree(run, copy)
    predictions = Run(copy).predictions("best-test")
    ood = fedlas.Predictions(-predictions.logits[:50], features=predictions.features[:50])
    fedlas.write_predictions(ood, Run(copy).predictions_file("best-ood-far"))
    arguments = ["evaluate", str(copy), f"file={Run(run).predictions_file('best-test')}", "--resamples", "50"]
    result = call(*arguments, "--html", str(html_path), "--json", str(json_path))
    assert result.exit_code == 0, result.output
    record = json.loads(json_path.read_text())
    assert list(record["models"]) == ["again-0.5", "file"]
    assert record["models"]["again-0.5"]["file"] == str(copy)
    before, after = record["models"]["again-0.5"]["report"]["states"]
    assert list(before["detection"]["sets"]) == ["far"]
    assert [fit["n"] for fit in after["fits"]] == [len(Run(run).predictions("best-val"))]
    assert {item["difference"] for item in record["comparisons"]} == {0}
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', html_path.read_text(), re.DOTALL)[1])
    assert data["models"][0]["training"]["gate"]
    assert "fedlas_ls" in html_path.read_text()
    (tmp_path / "empty").mkdir()
    result = call("evaluate", str(tmp_path / "empty"))
    assert (result.exit_code, "recipe.json" in result.stderr) == (1, True)


def test_predict_command_reads_an_image_folder(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    split = fedlas.build_data("digits").split("test")
    for number in range(20):
        folder = tmp_path / "images" / str(int(split.labels[number]))
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(split.images[number, 0].numpy()).save(folder / f"{number}.png")
    out = tmp_path / "own.safetensors"
    arguments = ["--data", "folder", "--set", f"path={tmp_path / 'images'}", "--out", str(out)]
    result = call("predict", str(run), *arguments, "--set", 'class_names=["0","1","2","3","4","5","6","7","8","9"]')
    assert result.exit_code == 0, result.output
    predictions, reference = fedlas.read_predictions(out), Run(run).predictions("best-test")
    assert len(predictions) == 20  # all images, although no number was given
    expected = sorted(reference.logits[:20].amax(1).tolist())
    assert sorted(predictions.logits.amax(1).tolist()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["losses", "data", "models", "recipes", "calibrators"])
def test_list_command_shows_every_entry(kind):
    result = call("list", kind)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for record in getattr(fedlas, f"list_{kind}")() if kind != "recipes" else ():
        assert record.name in result.stdout
        assert record.summary in result.stdout
    if kind == "recipes":
        assert fedlas.recipe_for("cifar10", loss="fedlas_ls").key in result.stdout


def test_list_data_shows_keywords():
    rows_by_name = {line.split()[0]: line for line in call("list", "data").stdout.splitlines() if line.strip()}
    assert "train_samples label_noise" in rows_by_name["digits"]
    assert "path class_names image_size" in rows_by_name["folder"]
    assert "progress" not in rows_by_name["digits"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_ctrl_c_during_import_exits_with_130_in_one_line(monkeypatch, wrapped):
    def interrupt(*_: object, **__: object) -> None:
        if wrapped:
            raise ImportError("initialization failed") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlas.training.recipe_for", interrupt, raising=False)
    result = call("train", "--data", "digits", "--loss", "ce")
    assert result.exit_code == 130
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_missing_typer_error_is_one_line_with_the_install_command():
    """Test both entry points: `python -m fedlas` and the script of pyproject.toml."""
    command = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["fedlas"]
    module, name = command.split(":")
    for entry_point in (
        f"from {module} import {name}; {name}()",
        "import runpy; runpy.run_module('fedlas', run_name='__main__')",
    ):
        code = f"import sys; sys.modules['typer'] = None; {entry_point}"
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert process.returncode == 1
        assert re.fullmatch(r"fedlas: .*typer.* pip install 'fedlas\[train,report\]'\n", process.stderr)


def test_columns_variable_does_not_truncate_piped_output(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("list", "losses").stdout.splitlines()
    assert max(map(len, lines)) > 150


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Run]:
    """Train in a process until SIGTERM; return its exit code, its stderr, which starts with a warning, and its run."""
    run = Run(tmp_path_factory.mktemp("stopped") / "run")
    changes = (*SMALL[1:], "epochs=500", "schedule=multi_step", "milestones=600")
    arguments = [
        "--loss",
        "ce",
        "--out",
        str(run.folder),
        *(argument for change in changes for argument in ("--set", change)),
    ]
    command = [sys.executable, "-m", "fedlas", "train", "--data", "digits", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not run.checkpoint.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, run


def test_warnings_are_one_line(stopped):
    warning, stop_message = stopped[1].splitlines()
    assert re.match("fedlas: milestones 600 .*500", warning)
    assert "milestones" not in stop_message


def test_sigterm_stops_training_with_a_hint_to_resume(stopped):
    exit_code, stderr, run = stopped
    assert exit_code == 128 + signal.SIGTERM
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert 0 < len(run.log) < 500


def test_the_demo_shows_five_losses_with_its_own_extra_only(tmp_path):
    """The extra `demo` installs neither torchvision nor timm nor PyArrow."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys(("torchvision", "timm", "pyarrow", "probmetrics", "pandas")))
from functools import partial
from fedlas.cli import app
from fedlas.experiments import demo
from fedlas.report.figures import style
demo.EPOCHS = 1
demo.evaluate = partial(demo.evaluate, intervals=False)  # intervals take most of the time
style.figure_bytes = lambda *_, **__: b"a picture"
app(["demo", "--out", {str(tmp_path)!r}])
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    rows = [line.split()[0] for line in lines if " as trained " in line]
    assert rows == ["ce", "ls", "fedlas_ls", "mbls", "fedlas_mbls"]
    assert "…" not in process.stdout
    assert sum(line.split()[:1] == ["temperature"] for line in lines) == 5
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert str(tmp_path / "report.html") in lines
    assert "fedlas_ls" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "figures" / "reliability.png").read_bytes() == b"a picture"
    assert json.loads((tmp_path / "figures" / "reliability.json").read_text())["data"]["temperature"]


@pytest.mark.campaign
def test_demo_cross_entropy_is_overconfident_and_temperature_scaling_helps(tmp_path):
    """The demo shows an over-confident network whose ECE temperature scaling reduces."""
    from fedlas.experiments.demo import recipes
    from fedlas.training import fit_many

    (run,) = fit_many([recipe for recipe in recipes() if recipe.loss == "ce"], folder=tmp_path)
    test, val = run.predictions("best-test"), run.predictions("best-val")
    report = fedlas.evaluate(test, posthoc=["temperature"], calibration=val, intervals=False)
    before, after = float(report.before["ece"]), float(report.after["temperature"]["ece"])
    assert before > 0.07
    assert float(report.before["over_ece"]) > 0.9 * before
    assert after < 0.6 * before


def test_demo_table_cells_have_intervals():
    from fedlas.experiments.demo import _rows

    predictions = fedlas.Predictions(2 * torch.eye(4).repeat(9, 1), torch.arange(36) % 4 * (torch.arange(36) < 24))
    report = fedlas.evaluate(predictions, posthoc=["temperature"], resamples=50)
    as_trained, calibrated = _rows("ce", report)
    assert as_trained[:3] == ["ce", "as trained", "75"]
    assert calibrated[:3] == ["", "temperature", "75"]
    for cell, metric in zip(as_trained[3:], ("ece", "nll"), strict=True):
        assert cell == report.before[metric].cell()
        assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", cell)
