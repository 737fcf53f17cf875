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
SHORT = tuple(word for change in SMALL for word in ("--set", change))


def call(*words: str, **options: Any) -> Result:
    return CliRunner().invoke(app, list(words), **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "run"
    done = call("train", "--data", "digits", "--loss", "fedlas_ls", *SHORT, "--out", str(folder))
    assert done.exit_code == 0, done.output
    assert str(folder) in done.stdout
    assert "best" in done.stdout
    return folder


def test_train_command_produces_a_finished_run(run):
    assert Run(run).finished
    assert (Run(run).recipe.epochs, Run(run).recipe.model) == (2, "small_cnn")


def test_resuming_a_finished_run_prints_results_without_training(run, monkeypatch):
    monkeypatch.setattr("fedlas.training.loop.Session", lambda *_, **__: pytest.fail("it was trained again"))
    done = call("train", "--data", "digits", "--loss", "fedlas_ls", *SHORT, "--out", str(run), "--resume")
    assert done.exit_code == 0
    assert "test split" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
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
        (["train", "--data", "folder", "--loss", "ce"], "'folder'.*--model"),
        (["train", "--data", "folder", "--loss", "ce", "--model", "small_cnn"], "'folder'.*'path'"),
        (
            ["train", "--data", "digits", "--loss", "ce", "--set", "model_options.in_channels=3"],
            r"1 x 8 x 8.*\.in_channels",
        ),
        (["train", "--data", "digits", "--loss", "ce", "--set", "loss_options.reduction=none"], "reduction.*mean.*sum"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, words, message):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    done = call(*words)
    assert done.exit_code == 1
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.output


def test_quiet_hides_log_messages_and_verbose_adds_details(tmp_path):
    words = ["reproduce", "sota", "--dry-run", "--data", "digits", "--protocol", "small", "--ledger", str(tmp_path)]
    normal, quiet = call(*words), call("--quiet", *words)
    assert normal.stdout == quiet.stdout
    assert re.search(r"small protocol: \d+ runs", normal.stderr)
    assert quiet.stderr == ""
    assert call("--quiet", "--verbose", *words).exit_code == 2
    verbose = call("--verbose", "predict", str(tmp_path / "nowhere"), "--data", "digits")
    assert isinstance(verbose.exception, (ValueError, OSError)), "the traceback is shown"
    call("list", "losses")  # sets the level back


def test_every_help_text_ends_with_an_example():
    for command in ("", *get_command(app).commands, "calibrate fit", "calibrate apply"):
        words = command.split()
        shown = call(*words, "--help", env={"NO_COLOR": "1", "FORCE_COLOR": "1", "TERMINAL_WIDTH": "200"})
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown.stdout), "NO_COLOR turns colours off"
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout).split())
        assert f"Example: fedlas {command}".strip() in text[-120:]


def test_version_option_prints_the_version():
    done = call("--version")
    assert (done.exit_code, done.stdout) == (0, f"fedlas {fedlas.__version__}\n")


@pytest.mark.parametrize("words", [["evaluate", "a.csv"], ["ood", "a.csv", "far=b.csv"], ["compare", "a.csv", "b.csv"]])
def test_negative_seed_is_a_usage_error_that_names_the_option(words):
    done = call(*words, "--seed", "-1")
    assert done.exit_code == 2
    assert "'--seed'" in done.stderr


def test_training_into_the_folder_of_another_recipe_fails_in_one_line(run):
    done = call("train", "--data", "digits", "--loss", "ce", "--out", str(run))
    assert done.exit_code == 1
    assert re.search("recipe.*loss", done.stderr), done.stderr


def test_missing_data_error_names_the_expected_archive(tmp_path):
    words = ["--data", "cifar10", "--loss", "ce", "--protocol", "fast", "--data-root", str(tmp_path)]
    done = call("train", *words, "--set", "data_options.download=false", "--out", str(tmp_path / "run"))
    assert done.exit_code == 1
    assert "cifar-10-binary.tar.gz" in done.stderr


def test_predict_command_writes_predictions_of_any_split(run, tmp_path):
    done = call("predict", str(run), "--data", "digits", "--split", "train")
    assert done.exit_code == 0, done.output
    made = fedlas.read_predictions(done.stdout.strip())
    assert len(made) == 200
    again = call(
        "predict", str(run), "--data", "digits", "--split", "test", "--out", str(tmp_path / "test.safetensors")
    )
    assert again.exit_code == 0
    assert (tmp_path / "test.safetensors").read_bytes() == Run(run).predictions_file("best-test").read_bytes()


def test_evaluate_of_a_run_folder_uses_all_of_its_files(run, tmp_path):
    page, kept = tmp_path / "page.html", tmp_path / "answer.json"
    copy = tmp_path / "again-0.5"
    shutil.copytree(run, copy)
    held = Run(copy).predictions("best-test")
    ood = fedlas.Predictions(-held.logits[:50], features=held.features[:50])
    fedlas.write_predictions(ood, Run(copy).predictions_file("best-ood-far"))
    words = ["evaluate", str(copy), f"file={Run(run).predictions_file('best-test')}", "--resamples", "50"]
    done = call(*words, "--html", str(page), "--json", str(kept))
    assert done.exit_code == 0, done.output
    result = json.loads(kept.read_text())
    assert list(result["models"]) == ["again-0.5", "file"]
    assert result["models"]["again-0.5"]["file"] == str(copy)
    before, after = result["models"]["again-0.5"]["report"]["states"]
    assert list(before["detection"]["sets"]) == ["far"]
    assert [fit["n"] for fit in after["fits"]] == [len(Run(run).predictions("best-val"))]
    assert {item["difference"] for item in result["comparisons"]} == {0}
    data = json.loads(re.search(r'id="page-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])
    assert data["models"][0]["training"]["gate"]
    assert "fedlas_ls" in page.read_text()
    (tmp_path / "empty").mkdir()
    done = call("evaluate", str(tmp_path / "empty"))
    assert (done.exit_code, "recipe.json" in done.stderr) == (1, True)


def test_predict_command_reads_an_image_folder(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    split = fedlas.build_data("digits").split("test")
    for number in range(20):
        folder = tmp_path / "images" / str(int(split.labels[number]))
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(split.images[number, 0].numpy()).save(folder / f"{number}.png")
    out = tmp_path / "own.safetensors"
    words = ["--data", "folder", "--set", f"path={tmp_path / 'images'}", "--out", str(out)]
    done = call("predict", str(run), *words, "--set", 'class_names=["0","1","2","3","4","5","6","7","8","9"]')
    assert done.exit_code == 0, done.output
    made, known = fedlas.read_predictions(out), Run(run).predictions("best-test")
    assert len(made) == 20  # all of them, although nobody said so
    expected = sorted(known.logits[:20].amax(1).tolist())
    assert sorted(made.logits.amax(1).tolist()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("what", ["losses", "data", "models", "recipes", "calibrators"])
def test_list_command_shows_every_entry(what):
    done = call("list", what)
    assert done.exit_code == 0
    assert "…" not in done.stdout
    for record in getattr(fedlas, f"list_{what}")() if what != "recipes" else ():
        assert record.name in done.stdout
        assert record.summary in done.stdout
    if what == "recipes":
        assert fedlas.recipe_for("cifar10", loss="fedlas_ls").key in done.stdout


def test_list_data_shows_keywords():
    shown = {line.split()[0]: line for line in call("list", "data").stdout.splitlines() if line.strip()}
    assert "train_samples label_noise" in shown["digits"]
    assert "path class_names image_size" in shown["folder"]
    assert "progress" not in shown["digits"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_ctrl_c_during_import_exits_with_130_in_one_line(monkeypatch, wrapped):
    def interrupt(*_: object, **__: object) -> None:
        if wrapped:
            raise ImportError("initialization failed") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlas.training.recipe_for", interrupt, raising=False)
    done = call("train", "--data", "digits", "--loss", "ce")
    assert done.exit_code == 130
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.output


def test_missing_typer_error_is_one_line_with_the_install_command():
    """Test both entry points: `python -m fedlas` and the script of pyproject.toml."""
    command = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["fedlas"]
    module, name = command.split(":")
    for way in (
        f"from {module} import {name}; {name}()",
        "import runpy; runpy.run_module('fedlas', run_name='__main__')",
    ):
        code = f"import sys; sys.modules['typer'] = None; {way}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert re.fullmatch(r"fedlas: .*typer.* pip install 'fedlas\[train,report\]'\n", done.stderr)


def test_columns_variable_does_not_truncate_piped_output(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = call("list", "losses").stdout.splitlines()
    assert max(map(len, lines)) > 150


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Run]:
    """A process that begins with a warning and trains until a signal comes: its exit code, its words and its run."""
    run = Run(tmp_path_factory.mktemp("stopped") / "run")
    changes = (*SMALL[1:], "epochs=500", "schedule=multi_step", "milestones=600")
    words = ["--loss", "ce", "--out", str(run.folder), *(word for change in changes for word in ("--set", change))]
    command = [sys.executable, "-m", "fedlas", "train", "--data", "digits", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not run.checkpoint.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    return process.returncode, error, run


def test_warnings_are_one_line(stopped):
    warning, ending = stopped[1].splitlines()
    assert re.match("fedlas: milestones 600 .*500", warning)
    assert "milestones" not in ending


def test_sigterm_stops_training_with_a_hint_to_resume(stopped):
    code, error, run = stopped
    assert code == 128 + signal.SIGTERM
    assert "--resume" in error
    assert "Traceback" not in error
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
demo.evaluate = partial(demo.evaluate, intervals=False)  # which take most of the time
style.figure_bytes = lambda *_, **__: b"a picture"
app(["demo", "--out", {str(tmp_path)!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    rows = [line.split()[0] for line in lines if " as trained " in line]
    assert rows == ["ce", "ls", "fedlas_ls", "mbls", "fedlas_mbls"]
    assert "…" not in done.stdout
    assert sum(line.split()[:1] == ["temperature"] for line in lines) == 5
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert str(tmp_path / "report.html") in lines
    assert "fedlas_ls" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "figures" / "reliability.png").read_bytes() == b"a picture"
    assert json.loads((tmp_path / "figures" / "reliability.json").read_text())["data"]["temperature"]


@pytest.mark.campaign
def test_demo_cross_entropy_is_overconfident_and_temperature_scaling_helps(tmp_path):
    """Plain cross-entropy is over-confident there, and temperature scaling helps."""
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

    made = fedlas.Predictions(2 * torch.eye(4).repeat(9, 1), torch.arange(36) % 4 * (torch.arange(36) < 24))
    report = fedlas.evaluate(made, posthoc=["temperature"], resamples=50)
    as_trained, calibrated = _rows("ce", report)
    assert as_trained[:3] == ["ce", "as trained", "75"]
    assert calibrated[:3] == ["", "temperature", "75"]
    for cell, metric in zip(as_trained[3:], ("ece", "nll"), strict=True):
        assert cell == report.before[metric].cell()
        assert re.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]", cell)
