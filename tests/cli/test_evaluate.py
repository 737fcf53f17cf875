"""`fedlas evaluate`, `calibrate`, `ood` and `compare`: output, files, exit codes and one-line errors."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from fedlas.cli import app, main
from fedlas.cli.errors import format_warning, one_line_errors
from fedlas.cli.terminal import progress
from fedlas.evaluation import evaluate
from fedlas.evaluation_report import Report
from fedlas.io import read_predictions, write_predictions
from fedlas.metrics import nll
from fedlas.metrics.registry import all_metrics
from fedlas.ood import detect
from fedlas.posthoc import build_calibrator, load_calibrator
from fedlas.posthoc.base import DoubtfulFit
from fedlas.predictions import Predictions


def call(*arguments):
    resamples = ("--resamples", "100") if arguments[0] == "evaluate" else ()
    return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *resamples)])


def sample_predictions(seed, n=400):
    generator = torch.Generator().manual_seed(seed)
    true_logits = 1.5 * torch.randn(n, 3, generator=generator)
    return Predictions(3 * true_logits, torch.multinomial(true_logits.softmax(1), 1, generator=generator)[:, 0])


@pytest.fixture
def files(tmp_path):
    for name, seed in {"val": 1, "test": 2}.items():
        write_predictions(sample_predictions(seed), tmp_path / f"{name}.csv")
    write_predictions(Predictions(torch.randn(40, 3)), tmp_path / "far.npz")
    return tmp_path


def test_evaluate_prints_a_summary_and_a_table(files):
    result = call(
        "evaluate", files / "test.csv", "--calibration", files / "val.csv", "--ood", f"far={files / 'far.npz'}"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("test: over-confident by ")
    for name in ("accuracy %", "ECE %", "U-ECE %", "temperature", "AUROC %", " fitted on 400 samples"):
        assert name in result.stdout, name
    assert not result.stderr


def test_columns_of_a_file_are_slices_of_the_page(files):
    header, *rows = (files / "test.csv").read_text().splitlines()
    lines = [f"{header},country,note", *(f"{row},{('no', 'de')[i % 2]},note {i}" for i, row in enumerate(rows))]
    (files / "test.csv").write_text("\n".join(lines))
    result = call("evaluate", files / "test.csv", "--html", files / "page.html")
    assert result.exit_code == 0, result.output
    assert "metadata from country; not read: note" in " ".join(result.stdout.split())
    slices = re.findall(r'\["country","(..)",200,', (files / "page.html").read_text())
    assert sorted(slices) == ["de", "no"]


def test_evaluate_skips_calibrators_with_a_note_for_three_samples(tmp_path):
    path = tmp_path / "mine.csv"
    for repeats, calibrated in {5: True, 1: False}.items():
        path.write_text("prob_cat,prob_dog,label\n" + "0.9,0.1,cat\n0.8,0.2,dog\n0.3,0.7,dog\n" * repeats)
        result = call("evaluate", path)
        assert result.exit_code == 0, result.output
        assert re.search(f"{3 * repeats} samples.* 2 classes", result.stdout)
        assert ("T = " in result.stdout) is calibrated
        assert bool(re.search("mine: .*calibrator.*3 samples", result.stdout)) is not calibrated


def test_missing_file_error_does_not_show_errno(tmp_path):
    path = tmp_path / "not there.csv"
    result = call("evaluate", path)
    assert (result.exit_code, result.stderr) == (1, f"fedlas: {path}: No such file or directory\n")


def test_evaluate_writes_json_and_html_with_the_printed_numbers(files, monkeypatch):
    monkeypatch.setattr("sys.argv", ["somewhere/fedlas", "evaluate", "my file.csv"])
    html_path, json_path = files / "page.html", files / "answer.json"
    arguments = ("evaluate", files / "test.csv", "--posthoc", "")
    result = call(*arguments, "--html", html_path, "--json", json_path)
    assert result.exit_code == 0, result.output
    record = json.loads(json_path.read_text())
    report = Report.from_dict(record["models"]["test"]["report"])
    assert report["ece"].cell() in result.stdout
    assert html_path.read_text().startswith("<!doctype html>")
    assert "fedlas evaluate &#39;my file.csv&#39;" in html_path.read_text()
    piped = call(*arguments, "--json", "-")
    assert json.loads(piped.stdout) == record
    assert piped.stderr.startswith("test: over-confident")


def test_fail_if_exits_with_3_when_a_condition_holds(files):
    arguments = ("evaluate", files / "test.csv", "--posthoc", "", "--fail-if", "ece>0.9")
    passed = call(*arguments, "--fail-if", "accuracy<1%")
    assert (passed.exit_code, passed.stderr) == (0, "")
    failed = call(*arguments, "--fail-if", "ece>1%")
    assert failed.exit_code == 3
    assert "ece>1%" in failed.stderr
    assert "0.9" not in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("ece", "'ece'"),
        ("eec>0.1", "'eec'.*accuracy, ece"),
        ("isotonic.ece>0.1", "'isotonic'.*temperature"),
        ("ece>5", r"5% .*0\.05"),  # a fraction is at most 1, so such a condition would hold always or never
        ("accuracy<90", "90%"),
        ("temperature.ece>=2", "2%"),
        *((f"ece>{limit}", rf"ece>{re.escape(limit)}'.*ece>0\.05") for limit in ("1.2.3", ".", "1e", "0.1.")),
    ],
)
def test_fail_if_conditions_are_validated_before_files_are_read(tmp_path, condition, message):
    result = call("evaluate", tmp_path / "nowhere.csv", "--fail-if", condition)
    assert result.exit_code == 1
    assert re.search(message, result.stderr)


@pytest.mark.parametrize("n", [50, 400])
def test_fail_if_knows_every_evaluated_metric(n):
    predictions = Predictions(torch.randn(n, 7), torch.arange(n) % 7)
    assert set(all_metrics()) == set(evaluate(predictions, intervals=False).before.results)


def run_with_closed_pipe(*arguments):
    """Run a command whose stdout is a closed pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedlas", *map(str, arguments)]
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)


def test_closed_pipe_does_not_change_output_files_or_exit_code(files):
    html_path, json_path = files / "page.html", files / "answer.json"
    arguments = ("evaluate", files / "test.csv", "--resamples", "50", "--html", html_path, "--json", json_path)
    process = run_with_closed_pipe(*arguments, "--fail-if", "ece>1%")
    assert process.returncode == 3
    assert "ece>1%" in process.stderr
    assert process.stderr.count("\n") == 1
    assert html_path.exists()
    assert json_path.exists()


@pytest.mark.parametrize(("reader_closed", "exit_code"), [(True, 141), (False, 1)])
def test_broken_pipe_is_silent_if_the_reader_of_stdout_closed_it(monkeypatch, capsys, reader_closed, exit_code):
    monkeypatch.setattr("fedlas.cli.errors.stdout_reader_is_gone", lambda: reader_closed)
    with pytest.raises(typer.Exit) as exit_info, one_line_errors():
        raise BrokenPipeError("a pipe broke")
    assert (exit_info.value.exit_code, capsys.readouterr().err.count("\n")) == (exit_code, int(not reader_closed))


@pytest.mark.campaign
def test_closed_pipe_gives_documented_exit_codes(files):
    process = run_with_closed_pipe(
        "evaluate", files / "test.csv", "--resamples", "50", "--json", "-", "--fail-if", "ece>1%"
    )
    assert (process.returncode, "ece>1%" in process.stderr) == (3, True)
    process = run_with_closed_pipe("list", "losses")
    assert (process.returncode, process.stderr) == (141, "")
    process = run_with_closed_pipe("calibrate", "apply", "nothing", "nothing", "--out", "nothing")
    assert (process.returncode, process.stderr.count("\n")) == (1, 1)


def test_fail_if_on_a_missing_value_still_writes_the_json(files):
    json_path = files / "answer.json"
    result = call("evaluate", files / "test.csv", "--posthoc", "", "--json", json_path, "--fail-if", "mce.high>0.1")
    assert (result.exit_code, "mce.high" in result.stderr) == (1, True)
    assert json_path.exists()
    assert "over-confident" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"p\.csv.*empty"),
        ("prob_a,prob_b,label\n0.50,0.30,a\n", r"line 2.*0\.8"),
        ("prob_a,prob_b\n0.5,0.5\n", r"p\.csv.*--label-column.*--labels"),
    ],
)
def test_invalid_csv_errors_are_one_line(tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text)
    result = call("evaluate", tmp_path / "p.csv")
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_page_shows_images_next_to_the_predictions_file(tmp_path):
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "one.png")
    rows = "".join(f"0.9,0.1,{'ab'[i % 4 == 0]},one.png,sample {i}\n" for i in range(40))
    (tmp_path / "p.csv").write_text("prob_a,prob_b,label,path,id\n" + rows)
    result = call("evaluate", tmp_path / "p.csv", "--posthoc", "", "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64" in page
    assert "sample 4" in page


def test_images_outside_the_predictions_folder_are_omitted_with_a_warning(tmp_path):
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "theirs" / "one.png")
    rows = "".join(f"0.9,0.1,{'ab'[i % 4 == 0]},../theirs/one.png\n" for i in range(40))
    (tmp_path / "mine" / "p.csv").write_text("prob_a,prob_b,label,path\n" + rows)
    arguments = ("evaluate", tmp_path / "mine" / "p.csv", "--posthoc", "", "--html", tmp_path / "page.html")
    with pytest.warns(UserWarning, match=r"^22 "):
        result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "data:image/png;base64" not in (tmp_path / "page.html").read_text()
    result = call(*arguments, "--images", tmp_path / "theirs", "--overwrite")
    assert result.exit_code == 0, result.output
    assert "data:image/png;base64" in (tmp_path / "page.html").read_text()


def test_progress_bar_shows_names_with_markup_literally(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", screen)
    with progress() as report:
        for fraction in (0.0, 1.0):
            report("evaluating x[/b]", fraction)
    assert "evaluating x[/b]" in screen.getvalue()


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_calibrator_fitted_on_one_file_is_applied_to_another(files, method):
    calibrator_path = files / "calibrator.safetensors"
    result = call("calibrate", "fit", files / "val.csv", "--posthoc", method, "--out", calibrator_path)
    assert result.exit_code == 0, result.output
    for suffix in (".csv", ".npz"):
        result = call(
            "calibrate", "apply", calibrator_path, files / "test.csv", "--out", files / f"fixed{suffix}", "--probs"
        )
        assert result.exit_code == 0, result.output
        calibrated = read_predictions(files / f"fixed{suffix}")
        expected = build_calibrator(method).fit(sample_predictions(1)).transform(sample_predictions(2))
        # Isotonic regression is a step function: rounding in the csv may move a sample across a step.
        differ = (calibrated.probs.double() - expected.probs.double()).abs().amax(1) > 1e-5
        assert int(differ.sum()) <= 2
        assert float(nll(calibrated)) < float(nll(sample_predictions(2)))


def test_calibrate_rejects_unknown_keywords_and_invalid_calibrator_files(files):
    arguments = (
        "calibrate",
        "fit",
        files / "val.csv",
        "--out",
        files / "c.safetensors",
        "--posthoc",
        "histogram_binning",
    )
    assert call(*arguments, "--set", "bins=4").exit_code == 0
    result = call(*arguments, "--set", "binz=4", "--overwrite")
    assert (result.exit_code, "binz" in result.stderr) == (1, True)
    result = call("calibrate", "apply", files / "far.npz", files / "test.csv", "--out", files / "x.csv")
    assert result.exit_code == 1
    assert "far.npz" in result.stderr
    assert not (files / "x.csv").exists()


def test_ood_command_reports_detection(files):
    result = call("ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", files / "ood.json")
    assert result.exit_code == 0, result.output
    inputs = read_predictions(files / "test.csv"), {"far": read_predictions(files / "far.npz")}
    expected = detect(*inputs)
    assert result.stdout.strip() == str(expected)
    expected_record = {"format": "fedlas.ood/1"} | expected.to_dict()
    assert json.loads((files / "ood.json").read_text()) == json.loads(json.dumps(expected_record))
    arguments = ("ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", "-")
    intervals = {}
    for options in (("--level", "0.5"), ("--seed", "0"), ("--seed", "1")):
        scores = json.loads(call(*arguments, *options).stdout)["sets"]["far"]["entropy"]
        intervals[options] = (scores["auroc"]["interval"]["level"], scores["fpr"]["interval"]["low"])
    assert [level for level, _ in intervals.values()] == [0.5, 0.95, 0.95]
    assert intervals["--seed", "0"] != intervals["--seed", "1"]
    rates = [
        json.loads(call(*arguments, "--positive", positive).stdout)["sets"]["far"]["entropy"]["fpr"]
        for positive in ("ood", "id")
    ]
    expected_id_positive = detect(*inputs, positive="id")["far"]["entropy"].fpr
    assert [rate["value"] for rate in rates] == [float(expected["far"]["entropy"].fpr), float(expected_id_positive)]
    assert ["OOD positive" in rate["estimator"] for rate in rates] == [True, False]
    assert call(*arguments, "--positive", "both").exit_code == 2
    result = call("ood", files / "test.csv", files / "far.npz")
    assert (result.exit_code, "NAME=FILE" in result.stderr) == (1, True)


def test_compare_writes_json(files):
    write_predictions(
        build_calibrator("temperature").fit(sample_predictions(1)).transform(sample_predictions(2)), files / "fixed.npz"
    )
    arguments = (
        "compare",
        files / "test.csv",
        files / "fixed.npz",
        "--metrics",
        "ece",
        "--json",
        "-",
        "--resamples",
        60,
    )
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads(result.stdout)
    assert comparison["metric"] == "ece"
    assert comparison["difference"] > 0
    assert comparison["pairs"][0]["better"] == "second"
    assert comparison["pairs"][0]["interval"]["level"] == 0.95
    intervals = {}
    for options in (("--level", "0.5"), ("--seed", "0"), ("--seed", "1")):
        (repeated,) = json.loads(call(*arguments, *options).stdout)
        intervals[options] = repeated["pairs"][0]["interval"]
    assert [item["level"] for item in intervals.values()] == [0.5, 0.95, 0.95]
    assert intervals["--seed", "0"] != intervals["--seed", "1"]


def test_every_ood_file_advances_the_progress_bar(files, monkeypatch):
    progress_calls = []

    @contextmanager
    def recorded_progress():
        yield lambda step, fraction: progress_calls.append((step, fraction))

    for commands in ("evaluation", "calibrate"):
        monkeypatch.setattr(f"fedlas.cli.{commands}.progress", recorded_progress)
    assert call("ood", files / "test.csv", f"far={files / 'far.npz'}").exit_code == 0
    calibrator_path = files / "c.safetensors"
    assert call("calibrate", "fit", files / "val.csv", "--out", calibrator_path).exit_code == 0
    stages = list(dict.fromkeys(step for step, _ in progress_calls))
    for stage, expected_text in zip(stages, ("test.csv", "far.npz", "", "val.csv", "temperature"), strict=True):
        assert expected_text in stage
        assert {0.0, 1.0} <= {fraction for step, fraction in progress_calls if step == stage}, stage


def test_outputs_never_overwrite_inputs(files):
    calibrator_path = files / "c.safetensors"
    assert call("calibrate", "fit", files / "val.csv", "--out", calibrator_path).exit_code == 0
    before = (files / "test.csv").read_bytes()
    for arguments in (
        ["evaluate", files / "test.csv", "--html", files / "test.csv"],
        ["evaluate", files / "test.csv", "--json", files / "." / "test.csv"],
        ["calibrate", "apply", calibrator_path, files / "test.csv", "--out", files / "test.csv"],
        ["calibrate", "fit", calibrator_path, "--out", calibrator_path],
        ["ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", files / "test.csv"],
    ):
        result = call(*arguments)
        assert (result.exit_code, str(arguments[-1]) in result.stderr) == (1, True), result.output
    assert (files / "test.csv").read_bytes() == before
    result = call("calibrate", "fit", files / "val.csv", "--out", files / "t.pt")
    assert (result.exit_code, ".safetensors" in result.stderr) == (1, True)


def test_calibrate_fit_reports_temperature_and_apply_keeps_probabilities(files):
    result = call("calibrate", "fit", files / "val.csv", "--out", files / "c.safetensors")
    calibrator = build_calibrator("temperature").fit(sample_predictions(1))
    assert f"temperature {calibrator.temperature:.4g}, " in result.stderr
    assert re.search(f"NLL {calibrator.fitted.before:.4g} .*{calibrator.fitted.after:.4g} .*400 samples", result.stderr)
    write_predictions(sample_predictions(2), files / "probs.csv", probs=True)
    call("calibrate", "apply", files / "c.safetensors", files / "probs.csv", "--out", files / "fixed.csv")
    assert (files / "fixed.csv").read_text().startswith("prob_0,")
    result = call("calibrate", "apply", files / "c.safetensors", files / "test.csv", "--out", files / "logits.csv")
    assert "fitted on" not in result.stderr
    assert (files / "logits.csv").read_text().startswith("logit_0,")
    result = call("calibrate", "apply", files / "c.safetensors", files / "val.csv", "--out", files / "fitted.csv")
    assert re.search(r"fitted on the samples of .*val\.csv", result.stderr)
    assert "not written" not in result.stderr
    table = (files / "probs.csv").read_text().splitlines()
    lines = [table[0] + ",age", *(f"{line},{number / 7}" for number, line in enumerate(table[1:]))]
    (files / "more.csv").write_text("\n".join(lines))
    result = call("calibrate", "apply", files / "c.safetensors", files / "more.csv", "--out", files / "less.csv")
    assert "not written: age" in result.stderr


def test_file_contents_cannot_emit_terminal_escapes(tmp_path):
    escape_sequence = "\x1b]0;owned\x07"
    np.savez(
        tmp_path / "p.npz",
        logits=sample_predictions(1).logits.numpy(),
        labels=sample_predictions(1).labels.numpy(),
        split=escape_sequence,
    )
    (tmp_path / "q.csv").write_text(f"{escape_sequence},label\n1,2\n")
    for name, exit_code in {"p.npz": 0, "q.csv": 1}.items():
        result = call("evaluate", tmp_path / name, "--posthoc", "")
        assert result.exit_code == exit_code
        assert "owned" in result.output
        assert not set("\x1b\x07") & set(result.output)


def test_main_exits_without_traceback_if_stdout_is_closed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedlas", "list", "calibrators"])
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr(
        "warnings.formatwarning", warnings.formatwarning
    )  # restored after the test, because `main` replaces it
    with pytest.raises(SystemExit) as exit_info:
        main()
    sys.stdout.close()
    assert exit_info.value.code == 0


@pytest.mark.campaign
def test_evaluate_process_exits_without_traceback_if_stdout_is_closed(files):
    command = [sys.executable, "-m", "fedlas", "evaluate", str(files / "test.csv"), "--resamples", "50"]
    process = subprocess.run(["sh", "-c", f"{shlex.join(command)} >&-"], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_saving_an_unsavable_calibrator_fails_in_one_line(files, monkeypatch):
    calibrator = build_calibrator("probmetrics", method="svs")
    monkeypatch.setattr(type(calibrator), "fit", lambda self, predictions: self)
    arguments = (
        "calibrate",
        "fit",
        files / "val.csv",
        "--posthoc",
        "probmetrics:svs",
        "--out",
        files / "c.safetensors",
    )
    result = call(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "pickle" in result.stderr


def test_docs_evaluate_example_prints_the_documented_output(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    rows = re.search(r"```text\n(prob_crow.*?)```", page, re.DOTALL)
    message = re.search(r"\$ fedlas evaluate birds.csv --html birds.html\n(.*?)\n\.\.\.", page, re.DOTALL)
    assert rows is not None
    assert message is not None
    (tmp_path / "birds.csv").write_text(rows[1])
    result = call("evaluate", tmp_path / "birds.csv", "--html", tmp_path / "birds.html")
    assert result.exit_code == 0
    numbers = [set(re.findall(r"\d+(?:\.\d+)? %", text)) for text in (message[1], result.stdout)]
    assert len(numbers[0]) > 3
    assert numbers[0] <= numbers[1]
    assert (tmp_path / "birds.html").stat().st_size > 50_000


ZEROS = "prob_a,prob_b,label\n" + "0.9,0.1,a\n0.2,0.8,b\n0.1,0.9,b\n0.6,0.4,a\n" * 400 + "1.0000,0.0000,b\n"


def test_calibrate_fit_warns_about_labels_of_probability_zero(tmp_path):
    (tmp_path / "zeros.csv").write_text(ZEROS)
    result = call("calibrate", "fit", tmp_path / "zeros.csv", "--out", tmp_path / "t.safetensors")
    assert result.exit_code == 0
    assert re.search("warning: 1 label.* zero.* logits.* digits", result.stderr)
    assert "standard error" in result.stderr


def test_zero_probabilities_do_not_bias_the_temperature(tmp_path):
    """Regression: four labels of probability zero made T large, although all other rows are calibrated."""
    rows = {"0.9,0.1,a": 1800, "0.9,0.1,b": 200, "1.00,0.00,a": 40, "1.00,0.00,b": 4}
    text = "prob_a,prob_b,label\n" + "".join(f"{row}\n" * count for row, count in rows.items())
    (tmp_path / "zeros.csv").write_text(text)
    result = call("evaluate", tmp_path / "zeros.csv")
    (line,) = [line for line in result.stdout.splitlines() if "  A temperature of T = " in line]
    assert "T = 1 " in line
    assert re.search("4 labels .*zero.*NLL.*logits.*digits", result.stdout)
    (tmp_path / "more.csv").write_text(text + "1.00,0.00,b\n" * 40)
    fitted = call("calibrate", "fit", tmp_path / "more.csv", "--out", tmp_path / "t.safetensors")
    assert re.search("warning: 44 labels .*zero.*logits", fitted.stderr)
    assert load_calibrator(tmp_path / "t.safetensors").temperature == pytest.approx(1, abs=0.01)


def test_negated_logits_are_explained_once(tmp_path):
    predictions = sample_predictions(1)
    write_predictions(Predictions(-predictions.logits, predictions.labels), tmp_path / "turned.csv")
    with pytest.warns(DoubtfulFit, match=r"logits.*labels.*\?$") as caught_warnings:
        result = call("evaluate", tmp_path / "turned.csv")
    (reason,) = {str(warning.message).partition(": ")[2] for warning in caught_warnings}
    assert " ".join(result.stdout.split()).count(reason) == 1


@pytest.mark.parametrize(("scale", "option"), [(1e-6, "--set low=NUMBER"), (1e9, "--set high=NUMBER")])
def test_fit_at_a_temperature_bound_names_the_option(tmp_path, scale, option):
    predictions = sample_predictions(1)
    write_predictions(Predictions(scale * predictions.logits, predictions.labels), tmp_path / "odd.csv")
    result = call("calibrate", "fit", tmp_path / "odd.csv", "--out", tmp_path / "t.safetensors")
    assert option in result.stderr


def test_warnings_about_files_do_not_mention_python_arguments(tmp_path):
    rows = [line.split(",") for line in ZEROS.splitlines()[1:40]]
    files = {
        "logits.csv": "prob_a,prob_b,label\n" + "2.5,-1.5,a\n" * 30,
        "probs.csv": "logit_a,logit_b,label\n" + "".join(f"{a},{b},{label}\n" for a, b, label in rows),
        "shares.csv": "logit_a,logit_b,label\n" + "70,30,a\n" * 30,
    }
    messages = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            result = call("evaluate", tmp_path / name, "--posthoc", "")
        messages[name] = result.stderr + " ".join(str(warning.message) for warning in caught_warnings)
    assert "--logits" in messages["logits.csv"]
    assert "prob_" in messages["probs.csv"]
    assert re.search("100.*prob_", messages["shares.csv"])
    for name, message in messages.items():
        assert "Predictions" not in message, name
        assert "from_probs" not in message, name


@pytest.mark.parametrize("kind", ["npz", "parquet", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_integer_percentages_are_rejected_as_percentages(tmp_path, kind, name):
    rows = np.array([[70, 20, 10], [33, 33, 33], [1, 98, 1], [97, 1, 1]] * 5)
    labels, prefix = np.array([0, 1, 1, 0] * 5), name.removesuffix("s")
    path = tmp_path / f"p.{kind}"
    columns = {f"{prefix}_{k}": rows[:, k] for k in range(3)} | {"label": labels}
    if kind == "npz":
        np.savez(path, **{name: rows}, labels=labels)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    elif kind == "jsonl":
        lines = [json.dumps({name: r, "label": y}) for r, y in zip(rows.tolist(), labels.tolist(), strict=True)]
        path.write_text("\n".join(lines))
    else:
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join([",".join(columns), *lines]))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        result = call("evaluate", path, "--posthoc", "")
    text = result.stderr + " ".join(str(warning.message) for warning in caught_warnings)
    assert re.search("percentages.* 100", text)
    assert result.exit_code == (1 if name == "probs" or kind == "npz" else 0)


def test_symlink_loop_fails_in_one_line(tmp_path):
    path = tmp_path / "loop.csv"
    path.symlink_to(path)
    result = call("evaluate", path)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "loop.csv" in result.stderr


def test_calibrating_on_a_copy_of_the_evaluated_file_warns(files):
    (files / "copy.csv").write_bytes((files / "test.csv").read_bytes())
    with pytest.warns(UserWarning, match=r"temperature.* fitted .*samples"):
        result = call("evaluate", files / "test.csv", "--calibration", files / "copy.csv", "--json", files / "a.json")
    assert result.exit_code == 0, result.output
    assert re.search("fitted .*400 samples.* 400 ", result.stdout)
    model = json.loads((files / "a.json").read_text())["models"]["test"]
    assert [state["leaked"] for state in model["report"]["states"]] == [0, 400]
    assert "None" not in result.output


def test_temperature_at_its_bound_is_reported_as_doubtful(tmp_path):
    predictions = sample_predictions(1)
    write_predictions(Predictions(predictions.logits, predictions.prediction), tmp_path / "right.csv")
    result = call("calibrate", "fit", tmp_path / "right.csv", "--out", tmp_path / "t.safetensors")
    assert result.exit_code == 0
    doubt = load_calibrator(tmp_path / "t.safetensors").fitted.doubt
    assert re.search(r"400 samples.*bound 0\.001", doubt)
    assert re.fullmatch(rf"warning: .*t\.safetensors.*: {re.escape(doubt)}", result.stderr.splitlines()[-1])
    assert result.stderr.count(doubt) == 1
    assert format_warning(doubt.replace(" ", "\n"), DoubtfulFit, "file.py", 3) == f"fedlas: {doubt}\n"
    arguments = (
        "calibrate",
        "apply",
        tmp_path / "t.safetensors",
        tmp_path / "right.csv",
        "--out",
        tmp_path / "fixed.csv",
    )
    assert re.search(rf"warning: .*t\.safetensors.*: {re.escape(doubt)}", call(*arguments).stderr)
    with pytest.warns(DoubtfulFit, match="bound"):
        result = call("evaluate", tmp_path / "right.csv", "--json", tmp_path / "a.json")
    assert re.search("temperature.* 5 of 5 .*bound", result.stdout)
    (before, after) = json.loads((tmp_path / "a.json").read_text())["models"]["right"]["report"]["states"]
    assert before["fits"] == []
    assert all("bound" in fit["doubt"] for fit in after["fits"])


def named_predictions(seed=2, **overrides):
    predictions = sample_predictions(seed)
    defaults = {
        "ids": [f"image {i}" for i in range(len(predictions))],
        "class_names": ("ant", "bee", "cow"),
        "split": "test",
    }
    return Predictions(predictions.logits, predictions.labels, **(defaults | overrides))


def test_compare_pairs_samples_by_id(files):
    write_predictions(named_predictions(), files / "a.npz")
    write_predictions(named_predictions()[torch.randperm(400)], files / "b.npz")
    result = call("compare", files / "a.npz", files / "b.npz", "--json", "-", "--resamples", 50)
    assert result.exit_code == 0, result.output
    pairs = [item["pairs"][0] for item in json.loads(result.stdout)]
    assert len(pairs) >= 3
    assert all(item["difference"] == pytest.approx(0, abs=1e-9) for item in pairs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"class_names": ("ant", "bee", "dog")}, "classes.*'cow'.*'dog'"),
        ({"split": "val", "ids": None}, "split 'test'.*'val'"),
        ({"ids": [f"image {i}" for i in range(1, 401)]}, r"ids\b.*\b1\b.*\b1\b"),
        ({}, r"labels.* row 3 \('image 3'\)"),
    ],
)
def test_compare_rejects_models_with_different_samples_or_classes(files, overrides, message):
    labels = sample_predictions(2).labels
    labels[3] = (labels[3] + 1) % 3
    other = (
        named_predictions(**overrides)
        if overrides
        else Predictions(sample_predictions(2).logits, labels, ids=named_predictions().ids)
    )
    write_predictions(named_predictions(), files / "a.npz")
    write_predictions(other, files / "b.npz")
    result = call("compare", files / "a.npz", files / "b.npz")
    assert result.exit_code == 1
    assert re.search(message, result.stderr), result.stderr


def test_numbered_columns_can_be_compared_with_named_classes(files):
    write_predictions(named_predictions(), files / "a.npz")
    result = call("compare", files / "test.csv", files / "a.npz", "--metrics", "accuracy")
    assert result.exit_code == 0
    assert "seed" not in result.stdout  # prediction files have no seed


@pytest.mark.parametrize("names", ["012", "01"])
def test_top_label_files_are_rejected_where_all_classes_are_needed(files, names):
    lines = "".join(f"0.9,{names[i % len(names)]},{names[0]}\n" for i in range(40))
    (files / "top.csv").write_text(f"confidence,prediction,label\n{lines}")
    test_csv, top_csv, calibrator_path = files / "test.csv", files / "top.csv", files / "t.safetensors"
    assert call("calibrate", "fit", test_csv, "--out", calibrator_path).exit_code == 0
    cases = {
        ("calibrate", "apply", calibrator_path, top_csv, "--out", files / "x.safetensors"): "",
        ("evaluate", test_csv, "--calibration", top_csv): f"{top_csv}: ",
        ("evaluate", test_csv, "--ood", f"x={top_csv}"): f"{top_csv}: ",
        ("evaluate", top_csv, "--calibration", test_csv): "predictions: ",
    }
    for arguments, prefix in (cases | ({("ood", test_csv, f"x={top_csv}"): "x: "} if len(names) == 3 else {})).items():
        result = call(*arguments)
        assert result.exit_code != 0
        assert re.search(f"{prefix}.*top.* logits .*probabilities", " ".join(result.stderr.split())), arguments
        assert "classes" not in result.stderr


def test_nll_interval_with_an_explanation_has_a_footnote(tmp_path):
    """The upper end of the NLL interval of 100 certain predictions allows for losses that did not occur."""
    probs, labels = torch.tensor([[0.9, 0.1]]).repeat(100, 1), torch.zeros(100, dtype=torch.long)
    write_predictions(Predictions.from_probs(probs, labels), tmp_path / "given.safetensors")
    stdout = call("evaluate", tmp_path / "given.safetensors", "--posthoc", "").stdout
    assert re.search(r"^NLL \(uncalibrated\): .*3\.6 %", stdout, re.MULTILINE)
