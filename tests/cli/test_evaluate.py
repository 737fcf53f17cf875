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
from fedlas.cli.errors import one_line_errors
from fedlas.cli.terminal import progress
from fedlas.evaluation import Report, evaluate
from fedlas.io import read_predictions, write_predictions
from fedlas.metrics import nll
from fedlas.metrics.registry import all_metrics
from fedlas.ood import detect
from fedlas.posthoc import build_calibrator, load_calibrator
from fedlas.posthoc.base import DoubtfulFit
from fedlas.predictions import Predictions


def call(*words):
    fewer = ("--resamples", "100") if words[0] == "evaluate" else ()
    return CliRunner().invoke(app, [str(name) for name in (*words, *fewer)])


def sample_predictions(seed, n=400):
    make = torch.Generator().manual_seed(seed)
    true = 1.5 * torch.randn(n, 3, generator=make)
    return Predictions(3 * true, torch.multinomial(true.softmax(1), 1, generator=make)[:, 0])


@pytest.fixture
def files(tmp_path):
    for name, seed in {"val": 1, "test": 2}.items():
        write_predictions(sample_predictions(seed), tmp_path / f"{name}.csv")
    write_predictions(Predictions(torch.randn(40, 3)), tmp_path / "far.npz")
    return tmp_path


def test_evaluate_prints_a_summary_and_a_table(files):
    done = call("evaluate", files / "test.csv", "--calibration", files / "val.csv", "--ood", f"far={files / 'far.npz'}")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("test: over-confident by ")
    for name in ("accuracy %", "ECE %", "U-ECE %", "temperature", "AUROC %", " fitted on 400 samples"):
        assert name in done.stdout, name
    assert not done.stderr


def test_columns_of_a_file_are_slices_of_the_page(files):
    header, *rows = (files / "test.csv").read_text().splitlines()
    lines = [f"{header},country,note", *(f"{row},{('no', 'de')[i % 2]},note {i}" for i, row in enumerate(rows))]
    (files / "test.csv").write_text("\n".join(lines))
    done = call("evaluate", files / "test.csv", "--html", files / "page.html")
    assert done.exit_code == 0, done.output
    assert "metadata from country; not read: note" in " ".join(done.stdout.split())
    slices = re.findall(r'\["country","(..)",200,', (files / "page.html").read_text())
    assert sorted(slices) == ["de", "no"]


def test_evaluate_skips_calibrators_with_a_note_for_three_samples(tmp_path):
    path = tmp_path / "mine.csv"
    for times, tried in {5: True, 1: False}.items():
        path.write_text("prob_cat,prob_dog,label\n" + "0.9,0.1,cat\n0.8,0.2,dog\n0.3,0.7,dog\n" * times)
        done = call("evaluate", path)
        assert done.exit_code == 0, done.output
        assert re.search(f"{3 * times} samples.* 2 classes", done.stdout)
        assert ("T = " in done.stdout) is tried
        assert bool(re.search("mine: .*calibrator.*3 samples", done.stdout)) is not tried


def test_missing_file_error_does_not_show_errno(tmp_path):
    path = tmp_path / "not there.csv"
    done = call("evaluate", path)
    assert (done.exit_code, done.stderr) == (1, f"fedlas: {path}: No such file or directory\n")


def test_evaluate_writes_json_and_html_with_the_printed_numbers(files, monkeypatch):
    monkeypatch.setattr("sys.argv", ["somewhere/fedlas", "evaluate", "my file.csv"])
    page, kept = files / "page.html", files / "answer.json"
    words = ("evaluate", files / "test.csv", "--posthoc", "")
    done = call(*words, "--html", page, "--json", kept)
    assert done.exit_code == 0, done.output
    result = json.loads(kept.read_text())
    report = Report.from_dict(result["models"]["test"]["report"])
    assert report["ece"].cell() in done.stdout
    assert page.read_text().startswith("<!doctype html>")
    assert "fedlas evaluate &#39;my file.csv&#39;" in page.read_text()
    piped = call(*words, "--json", "-")
    assert json.loads(piped.stdout) == result
    assert piped.stderr.startswith("test: over-confident")


def test_fail_if_exits_with_3_when_a_condition_holds(files):
    words = ("evaluate", files / "test.csv", "--posthoc", "", "--fail-if", "ece>0.9")
    fine = call(*words, "--fail-if", "accuracy<1%")
    assert (fine.exit_code, fine.stderr) == (0, "")
    bad = call(*words, "--fail-if", "ece>1%")
    assert bad.exit_code == 3
    assert "ece>1%" in bad.stderr
    assert "0.9" not in bad.stderr
    assert bad.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("ece", "'ece'"),
        ("eec>0.1", "'eec'.*accuracy, ece"),
        ("isotonic.ece>0.1", "'isotonic'.*temperature"),
        ("ece>5", r"5% .*0\.05"),  # a fraction is at most 1, so such a condition would hold always or never
        ("accuracy<90", "90%"),
        ("temperature.ece>=2", "2%"),
    ],
)
def test_fail_if_conditions_are_validated_before_files_are_read(tmp_path, condition, message):
    done = call("evaluate", tmp_path / "nowhere.csv", "--fail-if", condition)
    assert done.exit_code == 1
    assert re.search(message, done.stderr)


@pytest.mark.parametrize("n", [50, 400])
def test_fail_if_knows_every_evaluated_metric(n):
    made = Predictions(torch.randn(n, 7), torch.arange(n) % 7)
    assert set(all_metrics()) == set(evaluate(made, intervals=False).before.results)


def run_with_closed_pipe(*words):
    """Run a command whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fedlas", *map(str, words)]
    try:
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)


def test_closed_pipe_does_not_change_output_files_or_exit_code(files):
    page, kept = files / "page.html", files / "answer.json"
    words = ("evaluate", files / "test.csv", "--resamples", "50", "--html", page, "--json", kept)
    done = run_with_closed_pipe(*words, "--fail-if", "ece>1%")
    assert done.returncode == 3
    assert "ece>1%" in done.stderr
    assert done.stderr.count("\n") == 1
    assert page.exists()
    assert kept.exists()


@pytest.mark.parametrize(("left", "code"), [(True, 141), (False, 1)])
def test_broken_pipe_is_silent_if_the_reader_of_stdout_closed_it(monkeypatch, capsys, left, code):
    monkeypatch.setattr("fedlas.cli.errors.stdout_reader_is_gone", lambda: left)
    with pytest.raises(typer.Exit) as ended, one_line_errors():
        raise BrokenPipeError("a pipe broke")
    assert (ended.value.exit_code, capsys.readouterr().err.count("\n")) == (code, int(not left))


@pytest.mark.campaign
def test_closed_pipe_gives_documented_exit_codes(files):
    done = run_with_closed_pipe(
        "evaluate", files / "test.csv", "--resamples", "50", "--json", "-", "--fail-if", "ece>1%"
    )
    assert (done.returncode, "ece>1%" in done.stderr) == (3, True)
    done = run_with_closed_pipe("list", "losses")
    assert (done.returncode, done.stderr) == (141, "")
    done = run_with_closed_pipe("calibrate", "apply", "nothing", "nothing", "--out", "nothing")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_fail_if_on_a_missing_value_still_writes_the_json(files):
    kept = files / "answer.json"
    done = call("evaluate", files / "test.csv", "--posthoc", "", "--json", kept, "--fail-if", "mce.high>0.1")
    assert (done.exit_code, "mce.high" in done.stderr) == (1, True)
    assert kept.exists()
    assert "over-confident" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"p\.csv.*empty"),
        ("x_cat,x_dog,label\n0.5,0.5,cat\n", "x_cat, x_dog, label"),
        ("prob_a,prob_b,label\n0.50,0.30,a\n", r"line 2.*0\.8"),
        ("prob_a,prob_b,label\n0.5,0.5,a\n0.5,0.5,c\n", "line 3.*'c'.*a, b"),
        ("prob_a,prob_b\n0.5,0.5\n", r"p\.csv.*--label-column.*--labels"),
        ("prob_a,prob_b,label\n", r"p\.csv.*no (rows|records)"),
        ("prob_a,logit_a,prob_b,label\n0.5,1,0.5,a\n", "logit_a; prob_a, prob_b.*--prob-columns"),
    ],
)
def test_invalid_csv_errors_are_one_line(tmp_path, text, message):
    (tmp_path / "p.csv").write_text(text)
    done = call("evaluate", tmp_path / "p.csv")
    assert done.exit_code == 1
    assert re.search(message, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.output


def test_page_shows_images_next_to_the_predictions_file(tmp_path):
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "one.png")
    rows = "".join(f"0.9,0.1,{'ab'[i % 4 == 0]},one.png,sample {i}\n" for i in range(40))
    (tmp_path / "p.csv").write_text("prob_a,prob_b,label,path,id\n" + rows)
    done = call("evaluate", tmp_path / "p.csv", "--posthoc", "", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert "data:image/png;base64" in page
    assert "sample 4" in page


def test_images_outside_the_predictions_folder_are_omitted_with_a_warning(tmp_path):
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(tmp_path / "theirs" / "one.png")
    rows = "".join(f"0.9,0.1,{'ab'[i % 4 == 0]},../theirs/one.png\n" for i in range(40))
    (tmp_path / "mine" / "p.csv").write_text("prob_a,prob_b,label,path\n" + rows)
    words = ("evaluate", tmp_path / "mine" / "p.csv", "--posthoc", "", "--html", tmp_path / "page.html")
    with pytest.warns(UserWarning, match=r"^22 "):
        done = call(*words)
    assert done.exit_code == 0, done.output
    assert "data:image/png;base64" not in (tmp_path / "page.html").read_text()
    done = call(*words, "--images", tmp_path / "theirs", "--overwrite")
    assert done.exit_code == 0, done.output
    assert "data:image/png;base64" in (tmp_path / "page.html").read_text()


def test_progress_bar_shows_names_with_markup_literally(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", screen)
    with progress() as report:
        for share in (0.0, 1.0):
            report("evaluating x[/b]", share)
    assert "evaluating x[/b]" in screen.getvalue()


@pytest.mark.parametrize("method", ["temperature", "isotonic"])
def test_calibrator_fitted_on_one_file_is_applied_to_another(files, method):
    kept = files / "calibrator.safetensors"
    done = call("calibrate", "fit", files / "val.csv", "--posthoc", method, "--out", kept)
    assert done.exit_code == 0, done.output
    for ending in (".csv", ".npz"):
        done = call("calibrate", "apply", kept, files / "test.csv", "--out", files / f"fixed{ending}", "--probs")
        assert done.exit_code == 0, done.output
        result = read_predictions(files / f"fixed{ending}")
        expected = build_calibrator(method).fit(sample_predictions(1)).transform(sample_predictions(2))
        # Calibrators of steps jump, so a sample at a step may differ where the csv has it in other digits.
        differ = (result.probs.double() - expected.probs.double()).abs().amax(1) > 1e-5
        assert int(differ.sum()) <= 2
        assert float(nll(result)) < float(nll(sample_predictions(2)))


def test_calibrate_rejects_unknown_keywords_and_invalid_calibrator_files(files):
    words = ("calibrate", "fit", files / "val.csv", "--out", files / "c.safetensors", "--posthoc", "histogram_binning")
    assert call(*words, "--set", "bins=4").exit_code == 0
    done = call(*words, "--set", "binz=4", "--overwrite")
    assert (done.exit_code, "binz" in done.stderr) == (1, True)
    done = call("calibrate", "apply", files / "far.npz", files / "test.csv", "--out", files / "x.csv")
    assert done.exit_code == 1
    assert "far.npz" in done.stderr
    assert not (files / "x.csv").exists()


def test_ood_command_reports_detection(files):
    done = call("ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", files / "ood.json")
    assert done.exit_code == 0, done.output
    read = read_predictions(files / "test.csv"), {"far": read_predictions(files / "far.npz")}
    expected = detect(*read)
    assert done.stdout.strip() == str(expected)
    kept = {"format": "fedlas.ood/1"} | expected.to_dict()
    assert json.loads((files / "ood.json").read_text()) == json.loads(json.dumps(kept))
    words = ("ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", "-")
    result = {}
    for more in (("--level", "0.5"), ("--seed", "0"), ("--seed", "1")):
        scores = json.loads(call(*words, *more).stdout)["sets"]["far"]["entropy"]
        result[more] = (scores["auroc"]["interval"]["level"], scores["fpr"]["interval"]["low"])
    assert [level for level, _ in result.values()] == [0.5, 0.95, 0.95]
    assert result["--seed", "0"] != result["--seed", "1"]
    rates = [
        json.loads(call(*words, "--positive", side).stdout)["sets"]["far"]["entropy"]["fpr"] for side in ("ood", "id")
    ]
    turned = detect(*read, positive="id")["far"]["entropy"].fpr
    assert [rate["value"] for rate in rates] == [float(expected["far"]["entropy"].fpr), float(turned)]
    assert ["OOD positive" in rate["estimator"] for rate in rates] == [True, False]
    assert call(*words, "--positive", "both").exit_code == 2
    done = call("ood", files / "test.csv", files / "far.npz")
    assert (done.exit_code, "NAME=FILE" in done.stderr) == (1, True)


def test_compare_writes_json(files):
    write_predictions(
        build_calibrator("temperature").fit(sample_predictions(1)).transform(sample_predictions(2)), files / "fixed.npz"
    )
    words = ("compare", files / "test.csv", files / "fixed.npz", "--metrics", "ece", "--json", "-", "--resamples", 60)
    done = call(*words)
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)
    assert result["metric"] == "ece"
    assert result["difference"] > 0
    assert result["pairs"][0]["better"] == "second"
    assert result["pairs"][0]["interval"]["level"] == 0.95
    drawn_by = {}
    for more in (("--level", "0.5"), ("--seed", "0"), ("--seed", "1")):
        (again,) = json.loads(call(*words, *more).stdout)
        drawn_by[more] = again["pairs"][0]["interval"]
    assert [item["level"] for item in drawn_by.values()] == [0.5, 0.95, 0.95]
    assert drawn_by["--seed", "0"] != drawn_by["--seed", "1"]


def test_every_ood_file_advances_the_progress_bar(files, monkeypatch):
    seen = []

    @contextmanager
    def told():
        yield lambda word, share: seen.append((word, share))

    for commands in ("evaluation", "calibrate"):
        monkeypatch.setattr(f"fedlas.cli.{commands}.progress", told)
    assert call("ood", files / "test.csv", f"far={files / 'far.npz'}").exit_code == 0
    kept = files / "c.safetensors"
    assert call("calibrate", "fit", files / "val.csv", "--out", kept).exit_code == 0
    stages = list(dict.fromkeys(name for name, _ in seen))
    for stage, word in zip(stages, ("test.csv", "far.npz", "", "val.csv", "temperature"), strict=True):
        assert word in stage
        assert {0.0, 1.0} <= {share for name, share in seen if name == stage}, stage


def test_outputs_never_overwrite_inputs(files):
    kept = files / "c.safetensors"
    assert call("calibrate", "fit", files / "val.csv", "--out", kept).exit_code == 0
    before = (files / "test.csv").read_bytes()
    for words in (
        ["evaluate", files / "test.csv", "--html", files / "test.csv"],
        ["evaluate", files / "test.csv", "--json", files / "." / "test.csv"],
        ["calibrate", "apply", kept, files / "test.csv", "--out", files / "test.csv"],
        ["calibrate", "fit", kept, "--out", kept],
        ["ood", files / "test.csv", f"far={files / 'far.npz'}", "--json", files / "test.csv"],
    ):
        done = call(*words)
        assert (done.exit_code, str(words[-1]) in done.stderr) == (1, True), done.output
    assert (files / "test.csv").read_bytes() == before
    done = call("calibrate", "fit", files / "val.csv", "--out", files / "t.pt")
    assert (done.exit_code, ".safetensors" in done.stderr) == (1, True)


def test_outputs_never_overwrite_files_of_another_kind(files):
    kept = files / "c.safetensors"
    assert call("calibrate", "fit", files / "val.csv", "--out", kept).exit_code == 0
    write_predictions(sample_predictions(3), files / "run.safetensors")
    (files / "notes.csv").write_text("these are,no predictions\n1,2\n")
    test = files / "test.csv"
    for words in (
        ["calibrate", "fit", files / "val.csv", "--out", files / "run.safetensors"],
        ["calibrate", "apply", kept, test, "--out", files / "notes.csv"],
        ["evaluate", test, "--html", files / "val.csv"],
        ["ood", test, f"far={files / 'far.npz'}", "--json", files / "val.csv"],
    ):
        before = Path(words[-1]).read_bytes()
        done = call(*words)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
        assert str(words[-1]) in done.stderr
        assert Path(words[-1]).read_bytes() == before


def test_calibrate_fit_reports_temperature_and_apply_keeps_probabilities(files):
    done = call("calibrate", "fit", files / "val.csv", "--out", files / "c.safetensors")
    result = build_calibrator("temperature").fit(sample_predictions(1))
    assert f"temperature {result.temperature:.4g}, " in done.stderr
    assert re.search(f"NLL {result.fitted.before:.4g} .*{result.fitted.after:.4g} .*400 samples", done.stderr)
    write_predictions(sample_predictions(2), files / "probs.csv", probs=True)
    call("calibrate", "apply", files / "c.safetensors", files / "probs.csv", "--out", files / "fixed.csv")
    assert (files / "fixed.csv").read_text().startswith("prob_0,")
    call("calibrate", "apply", files / "c.safetensors", files / "test.csv", "--out", files / "logits.csv")
    assert (files / "logits.csv").read_text().startswith("logit_0,")


def test_file_contents_cannot_emit_terminal_escapes(tmp_path):
    evil = "\x1b]0;owned\x07"
    np.savez(
        tmp_path / "p.npz",
        logits=sample_predictions(1).logits.numpy(),
        labels=sample_predictions(1).labels.numpy(),
        split=evil,
    )
    (tmp_path / "q.csv").write_text(f"{evil},label\n1,2\n")
    for name, code in {"p.npz": 0, "q.csv": 1}.items():
        done = call("evaluate", tmp_path / name, "--posthoc", "")
        assert done.exit_code == code
        assert "owned" in done.output
        assert not set("\x1b\x07") & set(done.output)


def test_main_exits_without_traceback_if_stdout_is_closed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedlas", "list", "calibrators"])
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr(
        "warnings.formatwarning", warnings.formatwarning
    )  # restored after the test, because `main` replaces it
    with pytest.raises(SystemExit) as ended:
        main()
    sys.stdout.close()
    assert ended.value.code == 0


@pytest.mark.campaign
def test_evaluate_process_exits_without_traceback_if_stdout_is_closed(files):
    words = [sys.executable, "-m", "fedlas", "evaluate", str(files / "test.csv"), "--resamples", "50"]
    done = subprocess.run(["sh", "-c", f"{shlex.join(words)} >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_saving_an_unsavable_calibrator_fails_in_one_line(files, monkeypatch):
    calibrator = build_calibrator("probmetrics", method="svs")
    monkeypatch.setattr(type(calibrator), "fit", lambda self, given: self)
    words = ("calibrate", "fit", files / "val.csv", "--posthoc", "probmetrics:svs", "--out", files / "c.safetensors")
    done = call(*words)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "pickle" in done.stderr


def test_docs_evaluate_example_prints_the_documented_output(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")
    rows = re.search(r"```text\n(prob_crow.*?)```", page, re.DOTALL)
    message = re.search(r"\$ fedlas evaluate birds.csv --html birds.html\n(.*?)\n\.\.\.", page, re.DOTALL)
    assert rows is not None
    assert message is not None
    (tmp_path / "birds.csv").write_text(rows[1])
    done = call("evaluate", tmp_path / "birds.csv", "--html", tmp_path / "birds.html")
    assert done.exit_code == 0
    numbers = [set(re.findall(r"\d+(?:\.\d+)? %", text)) for text in (message[1], done.stdout)]
    assert len(numbers[0]) > 3
    assert numbers[0] <= numbers[1]
    assert (tmp_path / "birds.html").stat().st_size > 50_000


ZEROS = "prob_a,prob_b,label\n" + "0.9,0.1,a\n0.2,0.8,b\n0.1,0.9,b\n0.6,0.4,a\n" * 400 + "1.0000,0.0000,b\n"


def test_calibrate_fit_warns_about_labels_of_probability_zero(tmp_path):
    (tmp_path / "zeros.csv").write_text(ZEROS)
    done = call("calibrate", "fit", tmp_path / "zeros.csv", "--out", tmp_path / "t.safetensors")
    assert done.exit_code == 0
    assert re.search("warning: 1 label.* zero.* logits.* digits", done.stderr)
    assert "standard error" in done.stderr


def test_zero_probabilities_do_not_bias_the_temperature(tmp_path):
    """The rows without zeros are calibrated; four labels of probability zero used to make T large."""
    rows = {"0.9,0.1,a": 1800, "0.9,0.1,b": 200, "1.00,0.00,a": 40, "1.00,0.00,b": 4}
    text = "prob_a,prob_b,label\n" + "".join(f"{row}\n" * count for row, count in rows.items())
    (tmp_path / "zeros.csv").write_text(text)
    done = call("evaluate", tmp_path / "zeros.csv")
    (line,) = [line for line in done.stdout.splitlines() if "  A temperature of T = " in line]
    assert "T = 1 " in line
    assert re.search("4 labels .*zero.*NLL.*logits.*digits", done.stdout)
    (tmp_path / "more.csv").write_text(text + "1.00,0.00,b\n" * 40)
    fitted = call("calibrate", "fit", tmp_path / "more.csv", "--out", tmp_path / "t.safetensors")
    assert re.search("warning: 44 labels .*zero.*logits", fitted.stderr)
    assert load_calibrator(tmp_path / "t.safetensors").temperature == pytest.approx(1, abs=0.01)


def test_negated_logits_are_explained_once(tmp_path):
    made = sample_predictions(1)
    write_predictions(Predictions(-made.logits, made.labels), tmp_path / "turned.csv")
    with pytest.warns(DoubtfulFit, match=r"logits.*labels.*\?$") as seen:
        done = call("evaluate", tmp_path / "turned.csv")
    (why,) = {str(warning.message).partition(": ")[2] for warning in seen}
    assert " ".join(done.stdout.split()).count(why) == 1


@pytest.mark.parametrize(("scale", "option"), [(1e-6, "--set low=NUMBER"), (1e9, "--set high=NUMBER")])
def test_fit_at_a_temperature_bound_names_the_option(tmp_path, scale, option):
    made = sample_predictions(1)
    write_predictions(Predictions(scale * made.logits, made.labels), tmp_path / "odd.csv")
    done = call("calibrate", "fit", tmp_path / "odd.csv", "--out", tmp_path / "t.safetensors")
    assert option in done.stderr


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
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            done = call("evaluate", tmp_path / name, "--posthoc", "")
        messages[name] = done.stderr + " ".join(str(warning.message) for warning in seen)
    assert "--logits" in messages["logits.csv"]
    assert "prob_" in messages["probs.csv"]
    assert re.search("100.*prob_", messages["shares.csv"])
    for name, words in messages.items():
        assert "Predictions" not in words, name
        assert "from_probs" not in words, name


@pytest.mark.parametrize("kind", ["npz", "parquet", "jsonl", "csv"])
@pytest.mark.parametrize("name", ["probs", "logits"])
def test_integer_percentages_are_rejected_as_percentages(tmp_path, kind, name):
    rows = np.array([[70, 20, 10], [33, 33, 33], [1, 98, 1], [97, 1, 1]] * 5)
    labels, single = np.array([0, 1, 1, 0] * 5), name.removesuffix("s")
    path = tmp_path / f"p.{kind}"
    flat = {f"{single}_{k}": rows[:, k] for k in range(3)} | {"label": labels}
    if kind == "npz":
        np.savez(path, **{name: rows}, labels=labels)
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table(flat), path)
    elif kind == "jsonl":
        lines = [json.dumps({name: r, "label": y}) for r, y in zip(rows.tolist(), labels.tolist(), strict=True)]
        path.write_text("\n".join(lines))
    else:
        lines = [",".join(map(str, row)) for row in zip(*flat.values(), strict=True)]
        path.write_text("\n".join([",".join(flat), *lines]))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        done = call("evaluate", path, "--posthoc", "")
    text = done.stderr + " ".join(str(warning.message) for warning in seen)
    assert re.search("percentages.* 100", text)
    assert done.exit_code == (1 if name == "probs" or kind == "npz" else 0)


def test_compare_error_says_that_the_class_order_differs(tmp_path):
    (tmp_path / "one.csv").write_text(ZEROS)
    swapped = [line.split(",") for line in ZEROS.splitlines()]
    (tmp_path / "two.csv").write_text("".join(f"{b},{a},{label}\n" for a, b, label in swapped))
    done = call("compare", tmp_path / "one.csv", tmp_path / "two.csv")
    assert done.exit_code == 1
    assert re.search("classes.* order", done.stderr)


def test_symlink_loop_fails_in_one_line(tmp_path):
    path = tmp_path / "loop.csv"
    path.symlink_to(path)
    done = call("evaluate", path)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "loop.csv" in done.stderr


def test_calibrating_on_a_copy_of_the_evaluated_file_warns(files):
    (files / "copy.csv").write_bytes((files / "test.csv").read_bytes())
    with pytest.warns(UserWarning, match=r"temperature.* fitted .*samples"):
        done = call("evaluate", files / "test.csv", "--calibration", files / "copy.csv", "--json", files / "a.json")
    assert done.exit_code == 0, done.output
    assert re.search("fitted .*400 samples.* 400 ", done.stdout)
    model = json.loads((files / "a.json").read_text())["models"]["test"]
    assert [state["leaked"] for state in model["report"]["states"]] == [0, 400]
    assert "None" not in done.output


def test_temperature_at_its_bound_is_reported_as_doubtful(tmp_path):
    made = sample_predictions(1)
    write_predictions(Predictions(made.logits, made.prediction), tmp_path / "right.csv")
    done = call("calibrate", "fit", tmp_path / "right.csv", "--out", tmp_path / "t.safetensors")
    assert done.exit_code == 0
    doubt = load_calibrator(tmp_path / "t.safetensors").fitted.doubt
    assert re.search(r"400 samples.*bound 0\.001", doubt)
    assert re.fullmatch(rf"warning: .*t\.safetensors.*: {re.escape(doubt)}", done.stderr.splitlines()[-1])
    assert done.stderr.count(doubt) == 1
    words = ("calibrate", "apply", tmp_path / "t.safetensors", tmp_path / "right.csv", "--out", tmp_path / "fixed.csv")
    assert re.search(rf"warning: .*t\.safetensors.*: {re.escape(doubt)}", call(*words).stderr)
    with pytest.warns(DoubtfulFit, match="bound"):
        done = call("evaluate", tmp_path / "right.csv", "--json", tmp_path / "a.json")
    assert re.search("temperature.* 5 of 5 .*bound", done.stdout)
    (before, after) = json.loads((tmp_path / "a.json").read_text())["models"]["right"]["report"]["states"]
    assert before["fits"] == []
    assert all("bound" in fit["doubt"] for fit in after["fits"])


def named(seed=2, **rest):
    made = sample_predictions(seed)
    given = {"ids": [f"image {i}" for i in range(len(made))], "class_names": ("ant", "bee", "cow"), "split": "test"}
    return Predictions(made.logits, made.labels, **(given | rest))


def test_compare_pairs_samples_by_id(files):
    write_predictions(named(), files / "a.npz")
    write_predictions(named()[torch.randperm(400)], files / "b.npz")
    done = call("compare", files / "a.npz", files / "b.npz", "--json", "-", "--resamples", 50)
    assert done.exit_code == 0, done.output
    pairs = [item["pairs"][0] for item in json.loads(done.stdout)]
    assert len(pairs) >= 3
    assert all(item["difference"] == pytest.approx(0, abs=1e-9) for item in pairs)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"class_names": ("ant", "bee", "dog")}, "classes.*'cow'.*'dog'"),
        ({"split": "val", "ids": None}, "split 'test'.*'val'"),
        ({"ids": [f"image {i}" for i in range(1, 401)]}, r"ids\b.*\b1\b.*\b1\b"),
        ({}, r"labels.* row 3 \('image 3'\)"),
    ],
)
def test_compare_rejects_models_with_different_samples_or_classes(files, rest, message):
    labels = sample_predictions(2).labels
    labels[3] = (labels[3] + 1) % 3
    other = named(**rest) if rest else Predictions(sample_predictions(2).logits, labels, ids=named().ids)
    write_predictions(named(), files / "a.npz")
    write_predictions(other, files / "b.npz")
    done = call("compare", files / "a.npz", files / "b.npz")
    assert done.exit_code == 1
    assert re.search(message, done.stderr), done.stderr


def test_numbered_columns_can_be_compared_with_named_classes(files):
    write_predictions(named(), files / "a.npz")
    done = call("compare", files / "test.csv", files / "a.npz", "--metrics", "accuracy")
    assert done.exit_code == 0
    assert "seed" not in done.stdout  # files have none


@pytest.mark.parametrize("names", ["012", "01"])
def test_top_label_files_are_rejected_where_all_classes_are_needed(files, names):
    lines = "".join(f"0.9,{names[i % len(names)]},{names[0]}\n" for i in range(40))
    (files / "top.csv").write_text(f"confidence,prediction,label\n{lines}")
    good, top, kept = files / "test.csv", files / "top.csv", files / "t.safetensors"
    assert call("calibrate", "fit", good, "--out", kept).exit_code == 0
    cases = {
        ("calibrate", "apply", kept, top, "--out", files / "x.safetensors"): "",
        ("evaluate", good, "--calibration", top): f"{top}: ",
        ("evaluate", good, "--ood", f"x={top}"): f"{top}: ",
        ("evaluate", top, "--calibration", good): "predictions: ",
    }
    for words, which in (cases | ({("ood", good, f"x={top}"): "x: "} if len(names) == 3 else {})).items():
        done = call(*words)
        assert done.exit_code != 0
        assert re.search(f"{which}.*top.* logits .*probabilities", " ".join(done.stderr.split())), words
        assert "classes" not in done.stderr


def test_nll_interval_with_an_explanation_has_a_footnote(tmp_path):
    """The upper end of the NLL interval of 100 certain predictions allows for losses that did not occur."""
    probs, labels = torch.tensor([[0.9, 0.1]]).repeat(100, 1), torch.zeros(100, dtype=torch.long)
    write_predictions(Predictions.from_probs(probs, labels), tmp_path / "given.safetensors")
    shown = call("evaluate", tmp_path / "given.safetensors", "--posthoc", "").stdout
    assert re.search(r"^NLL \(uncalibrated\): .*3\.6 %", shown, re.MULTILINE)
