"""Ledger of runs: completeness, reproduction from stored predictions, and detection of changes."""

import dataclasses
import hashlib
import json
import re
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedlas.cli import app
from fedlas.evaluation import evaluate
from fedlas.experiments.ledger import Ledger, Line, epoch_ledger, line_id
from fedlas.experiments.planning import experiment_named, make_plan
from fedlas.experiments.stored_predictions import StoredPredictions, load_stored_predictions, problems, record
from fedlas.io import write_predictions
from fedlas.metrics import accuracy, ece, nll
from fedlas.metrics.evaluation_accumulator import EvaluationAccumulator
from fedlas.posthoc import build_calibrator
from fedlas.posthoc.base import DoubtfulFit
from fedlas.predictions import Predictions
from fedlas.training import Recipe, Run, fit

pytestmark = pytest.mark.usefixtures("few_resamples")


def random_predictions(classes: int, n: int = 400, seed: int = 0) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator)
    labels = torch.where(
        torch.rand(n, generator=generator) < 0.7, logits.argmax(1), torch.randint(classes, (n,), generator=generator)
    )
    return Predictions(logits, labels, split="test")


@pytest.fixture
def copy(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    return tmp_path / "copy"


def change_lines(folder, change):
    """Apply a function to the parsed lines of a ledger, and write them again."""
    path = folder / "results" / "digits-small.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Ledger(folder / "results")


def test_every_run_has_an_uncalibrated_and_a_temperature_scaled_line(ledger):
    methods = sorted((line.method, line.seed) for line in ledger.lines.values())
    assert methods == [(m, s) for m in ("ce", "ce+temperature", "ls", "ls+temperature") for s in (1, 2)]
    for line in ledger.lines.values():
        assert line.predictions == ledger.find(line.recipe).predictions, "both are computed from one file"


def test_the_other_epoch_is_in_a_ledger_of_its_own(ledger, trained, choice):
    last = epoch_ledger(ledger, "last")
    assert last.lines.keys() == ledger.lines.keys()
    assert not list(problems(last))
    table = experiment_named("sota").tables(ledger, choice)[-1]
    cells = {row.name: row.cells for row in table.rows}
    assert list(cells) == [
        f"{method}/{epoch}" for method in ("ce", "ls", "ce+temperature") for epoch in ("best", "last")
    ]
    assert [len(cell.values) for cell in cells["ls/last"]] == [2, 2, 2]
    nll_of = {line.seed: line.metrics["nll"][0] for line in last.lines.values() if line.method == "ls"}
    assert cells["ls/last"][2].values == (nll_of[1], nll_of[2])


def test_other_weights_than_those_of_the_recipe_can_be_recorded(copy, ledger):
    line = next(line for line in ledger.lines.values() if line.method == "ce")
    run, other = Run(copy / "runs" / line.recipe.name), Ledger(copy / "results" / "new_epoch")
    predictions = run.predictions("last-test")
    opposite = Predictions(-predictions.logits, predictions.labels, split="test")
    write_predictions(opposite, run.predictions_file("last-test"))
    record(run, line.protocol, other, state="last")
    assert other.find(line.recipe).metrics["accuracy"][0] == float(accuracy(opposite)) != line.metrics["accuracy"][0]


def test_line_records_recipe_protocol_environment_and_data(ledger, trained):
    line = next(line for line in ledger.lines.values() if line.method == "ce")
    run = Run(trained / "runs" / line.recipe.name)
    assert line.recipe.key == run.recipe.key
    assert line.protocol == "small"
    assert line.environment["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert line.environment["device"] == "cpu"
    assert set(line.data) == {"train", "val", "test"}
    assert line.seconds > 0
    assert line.images_per_second > 0
    assert len(line.curve) == line.best_epoch == 1
    assert line.curve[0]["val"]["accuracy"] == pytest.approx(run.log[0]["val"]["accuracy"], abs=1e-4)
    assert len(line.date) == 10
    value, low, high = line.metrics["ece"]
    assert low <= value <= high


def test_line_metrics_equal_those_of_the_run(ledger, trained):
    for line in ledger.lines.values():
        run = Run(trained / "runs" / line.recipe.name)
        predictions, validation = run.predictions("best-test"), run.predictions("best-val")
        report = evaluate(predictions, posthoc=["temperature"], calibration=validation, intervals=False)
        state = report.before if line.posthoc is None else report.after["temperature"]
        for name, (value, _, _) in line.metrics.items():
            if not name.endswith(("_official", "_test")):
                # Runs are evaluated in float32, where confidences tie and are ranked differently.
                tolerance = 1e-4 if "aurc" in name else 1e-5
                assert value == pytest.approx(float(state.results[name]), abs=tolerance), name
        assert line.metrics["accuracy"][0] == float(state.results["accuracy"])


def test_temperature_scaling_is_fitted_on_validation_logits_and_keeps_the_accuracy(ledger, trained):
    for before in [line for line in ledger.lines.values() if line.posthoc is None]:
        after = ledger.find(before.recipe, "temperature")
        assert before.metrics["accuracy"] == after.metrics["accuracy"]
        assert after.metrics["nll"][0] < before.metrics["nll"][0]
        fitted = build_calibrator("temperature").fit(Run(trained / "runs" / before.recipe.name).predictions("best-val"))
        assert after.posthoc["temperature"] == pytest.approx(fitted.temperature, rel=1e-5)
        assert after.posthoc["fitted_on"] == "val"


def test_changed_metric_is_reported(copy):
    def change(lines):
        lines[0]["metrics"]["ece"][0] += 1e-4
        lines[1]["metrics"]["aece"][2] += 0.01
        lines[2]["metrics"]["nll"][1:] = None, None  # as in lines written before the metric had an interval

    ledger = change_lines(copy, change)
    (problem,) = problems(ledger)
    assert "ece" in problem
    assert len(list(problems(ledger, intervals=True))) == 2


def test_changed_temperature_is_reported(copy):
    position, line = next(item for item in enumerate(Ledger(copy / "results").lines.values()) if item[1].posthoc)
    temperature = 1.001 * line.posthoc["temperature"]
    (problem,) = problems(change_lines(copy, lambda lines: lines[position]["posthoc"].update(temperature=temperature)))
    assert f"{line.id}: the temperature is" in problem


def test_missing_changed_and_unused_prediction_files_are_reported(copy):
    files = sorted((copy / "results" / "predictions").iterdir())
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    (copy / "results" / "predictions" / "stray.npz").write_bytes(b"")
    result = list(problems(Ledger(copy / "results")))
    assert len(result) == 5
    for name, lines in {files[0].name: 2, files[1].name: 2, "stray.npz": 1}.items():
        assert sum(name in problem for problem in result) == lines
    assert any(files[1].name in problem and "checksum" in problem for problem in result)


def test_ood_metrics_without_predictions_are_reported(copy):
    ood = {"mnist": {"entropy": [0.999, 0.998, 0.9995]}}
    (problem,) = problems(change_lines(copy, lambda lines: lines[0]["ood"].update(ood)))
    assert re.search("mnist.*'entropy'", problem)


def test_prediction_path_outside_the_ledger_is_reported(copy):
    path = copy / "results" / "digits-small.jsonl"
    path.write_text(path.read_text().replace('"predictions/', '"../predictions/'))
    result = list(problems(Ledger(copy / "results")))
    outside = [item for item in result if "../predictions/" in item]
    assert len(outside) == len(Ledger(copy / "results").lines)
    assert "digits-small.jsonl:1:" in outside[0]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "fedlas.ledger/1", "id": "x", "speed": 3}', "not json"])
def test_damaged_line_raises_with_file_and_line_number(tmp_path, text):
    (tmp_path / "a-b.jsonl").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=r"a-b\.jsonl:1"):
        _ = Ledger(tmp_path).lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("metrics"), "metrics"),
        (lambda line: line.update(metrics={}), "metrics.*accuracy, ece, aece"),
        (lambda line: line["metrics"].pop("ece"), "metrics.*ece"),
        (lambda line: line["metrics"].update(ece=[float("nan"), None, None]), r"ece.*\[nan, None, None\]"),
        (lambda line: line["metrics"].update(ece=["0.5", None, None]), r"ece.*\['0\.5', None, None\]"),
        (lambda line: line["metrics"].update(ece=[None, None, None]), r"ece.*\[None, None, None\]"),
        (lambda line: line["metrics"].update(ece=[0.5, 0.4, float("inf")]), r"ece.*\[0\.5, 0\.4, "),
        (lambda line: line["metrics"].update(ece=[0.5]), r"ece.*\[0\.5\]"),
        (lambda line: line["metrics"].update(ece=0.5), r"ece.*\b0\.5"),
        (lambda line: line["metrics"].update(ece=[10**400, None, None]), "ece.*000"),
        (lambda line: line["metrics"].update(ece=[5.2, 5, 6]), r"ece.*0.*1.*5\.2"),
        (lambda line: line.update(ood={"svhn": {"entropy": [91, 90, 92]}}), "entropy.*svhn.*0.*1.*91"),
        (lambda line: line.update(ood={"svhn": {}}), "svhn"),
        (lambda line: line.update(ood={"svhn": {"entropy": 0.5}}), "entropy.*svhn"),
        (lambda line: line.update(predictions={}), "file.*predictions"),
        (lambda line: line.update(posthoc={"temperature": 1.5}), "name.*posthoc"),
        (lambda line: line.update(seconds="1 h"), "seconds.*0.*'1 h'"),
        (lambda line: line.update(curve=[1]), "curve.*1"),
        (lambda line: line["curve"][0].update(lr=float("nan")), "finite.*NaN"),
        (lambda line: line.update(curve=[{}]), "epoch.*curve.*None"),
        (lambda line: line["curve"][0].update(epoch="x"), "epoch.*curve.*'x'"),
        (lambda line: line["curve"][0].update(gate={"positive": "x"}), "positive.*gate.*'x'"),
        (lambda line: line.update(id=3), "id.*3"),
        (lambda line: line.update(id="xyz"), "id.*digits-small_cnn-.*'xyz'"),
        (lambda line: line["recipe"].update(loss="mbls"), "id.*digits-small_cnn-mbls"),
    ],
)
def test_invalid_line_raises_with_its_field(copy, change, message):
    ledger = change_lines(copy, lambda lines: change(lines[1]))
    with pytest.raises(ValueError, match=rf"digits-small\.jsonl:2\b.*{message}"):
        _ = ledger.lines


def test_commands_report_an_invalid_ledger_line_in_one_line(copy):
    path = copy / "results" / "digits-small.jsonl"
    path.write_text(path.read_text().replace('"ece": [', '"ece": ["x", ', 1))
    options = ["--data", "digits", "--protocol", "small", "--dry-run", "--ledger"]
    for arguments in (["reproduce", "sota", *options], ["compare", "digits/ce", "digits/ls", "--ledger"]):
        result = CliRunner().invoke(app, [*arguments, str(copy / "results")])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
        assert "digits-small.jsonl:1" in result.stderr


@pytest.mark.parametrize("damage", ["cut off", "other numbers", "away"])
def test_damaged_prediction_file_error_names_its_line(copy, ledger, choice, damage):
    line = next(iter(ledger.lines.values()))
    path = Ledger(copy / "results").file_of(line)
    content = {
        "cut off": path.read_bytes()[:-100],
        "other numbers": StoredPredictions.of(random_predictions(10)).pack(),
    }.get(damage)
    path.unlink() if content is None else path.write_bytes(content)
    result = CliRunner().invoke(app, ["compare", line.id, line.id, "--ledger", str(copy / "results")])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    message = rf"digits-small\.jsonl:1: .*{path.name}" + ("" if content is None else ".*checksum")
    assert re.search(message, result.stderr)
    damaged_ledger = Ledger(copy / "results")
    with pytest.raises(ValueError, match=message):
        make_plan(experiment_named("sota"), choice, damaged_ledger)


def test_duplicate_run_raises(copy):
    path = copy / "results" / "digits-small.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"digits-small\.jsonl:9.*twice"):
        _ = Ledger(copy / "results").lines


def test_recording_a_run_again_changes_nothing(copy, ledger):
    before = (copy / "results" / "digits-small.jsonl").read_bytes()
    for line in ledger.lines.values():
        record(Run(copy / "runs" / line.recipe.name), "small", Ledger(copy / "results"))
    assert (copy / "results" / "digits-small.jsonl").read_bytes() == before


def test_concurrent_writers_record_each_run_once(copy):
    """Use two threads, whose file locks exclude each other like those of processes."""

    def add_all() -> None:
        for run in sorted((copy / "runs").iterdir()):
            record(Run(run), "small", Ledger(copy / "new"))

    with ThreadPoolExecutor(2) as pool:
        for writer in [pool.submit(add_all) for _ in range(2)]:
            writer.result()
    assert len(Ledger(copy / "new").lines) == 8
    assert list(problems(Ledger(copy / "new"))) == []


def test_ood_metrics_added_later_complete_both_lines(copy):
    before = Ledger(copy / "results")
    recipe = next(line.recipe for line in before.lines.values() if line.method == "ls")
    folder = copy / "runs" / recipe.name
    recipe_with_ood = recipe.replace(ood=("digits",))
    assert recipe_with_ood.name == recipe.name
    epochs = len(Run(folder).log)
    fit(recipe_with_ood, out=folder, resume=True)
    assert len(Run(folder).log) == epochs
    record(Run(folder), "small", Ledger(copy / "results"))
    ledger = Ledger(copy / "results")
    for posthoc in (None, "temperature"):
        added = ledger.find(recipe, posthoc)
        assert added.ood["digits"]["entropy"][0] == pytest.approx(0.5, abs=0.02)
        assert added.metrics == before.find(recipe, posthoc).metrics
    assert len(ledger.lines) == 8
    assert list(problems(ledger)) == []


def test_run_without_validation_logits_has_no_temperature_scaled_line(copy, choice):
    ledger = Ledger(copy / "new")
    for run in sorted((copy / "runs").iterdir()):
        (run / "predictions" / "best-val.safetensors").unlink()
        record(Run(run), "small", ledger)
    assert sorted(line.method for line in ledger.lines.values()) == ["ce", "ce", "ls", "ls"]
    assert list(problems(ledger)) == []
    sota = experiment_named("sota")
    plan = make_plan(sota, dataclasses.replace(choice, losses=("ce", "ls")), ledger)
    assert "4 runs, 4 in the ledger (4 without temperature scaling), 0 to train" in str(plan)
    assert [planned.recipe.loss for planned in make_plan(sota, choice, ledger).missing] == ["ce", "ce"], (
        "its row is in the table"
    )


def test_older_lines_with_separate_prediction_files_stay_valid(copy):
    """Older runs were stored without validation logits and with a separate file of scaled predictions."""
    old_ledger = Ledger(copy / "old")
    recipe = next(line.recipe for line in Ledger(copy / "results").lines.values() if line.method == "ce")
    run = Run(copy / "runs" / recipe.name)
    predictions, accumulator = run.predictions("best-test"), EvaluationAccumulator()
    accumulator.update(predictions)
    columns = {name: column.numpy() for name, column in accumulator.state_dict().items()}
    float16_logits = predictions.logits.numpy().astype(np.float16)
    stored = {None: {"logits": float16_logits}, "temperature": columns | {"prediction": float16_logits.argmax(1)}}
    for posthoc, arrays in stored.items():
        stored_predictions = StoredPredictions({"labels": predictions.labels.numpy(), **arrays})
        line = Ledger(copy / "results").find(recipe, posthoc)
        content = stored_predictions.pack()
        file_record = {"file": f"predictions/{line.id}.npz", "sha256": hashlib.sha256(content).hexdigest()}
        old_ledger.add(
            [dataclasses.replace(line, metrics=stored_predictions.metrics(), predictions=file_record)], content
        )
    assert list(problems(old_ledger)) == []
    loaded = [load_stored_predictions(line, old_ledger).predictions for line in old_ledger.lines.values()]
    assert [item is None for item in loaded] == [False, True]
    fit(recipe.replace(ood=("digits",)), out=run.folder, resume=True)
    record(run, "small", old_ledger)
    assert len({line.predictions["file"] for line in old_ledger.lines.values()}) == 1
    assert list(problems(old_ledger)) == [], "and no file is left over"


@pytest.mark.parametrize("name", ["digits-small.jsonl", ".lock", "predictions"])
def test_symlink_in_a_ledger_raises(ledger, tmp_path, name):
    line, target = next(iter(ledger.lines.values())), tmp_path / "mine"
    folder = tmp_path / "results"
    folder.mkdir()
    if name == "predictions":
        target.mkdir()
    else:
        target.write_text("")
    (folder / name.replace("small", line.protocol)).symlink_to(target)
    target.touch()
    modified = target.stat().st_mtime_ns
    with pytest.raises(ValueError, match="link"):
        Ledger(folder).add([line], b"content")
    assert target.stat().st_mtime_ns == modified


def test_data_name_cannot_escape_the_ledger_folder(ledger, tmp_path):
    line = next(iter(ledger.lines.values()))
    escaping_line = dataclasses.replace(line, recipe=line.recipe.replace(data="../mine"))
    with pytest.raises(ValueError, match="mine"):
        Ledger(tmp_path / "results").add([escaping_line], b"content")
    assert not list(tmp_path.glob("mine*"))


def test_line_id_is_recipe_name_and_calibrator():
    recipe = Recipe(data="digits", model="small_cnn", loss="ce")
    assert line_id(recipe, None) == recipe.name
    assert line_id(recipe, "temperature") == f"{recipe.name}+temperature"


def test_line_round_trips_through_json(ledger):
    for line in ledger.lines.values():
        assert Line.from_json(line.to_json(), "here") == line


@pytest.mark.parametrize("classes", [2, 10, 11, 100])
@pytest.mark.parametrize("factor", [1, 12], ids=["usual", "saturated"])
def test_stored_predictions_reproduce_the_metrics_of_both_lines(classes, factor):
    """Regression: saturated confidences are 1 in float32, so the AURC ranked only ties."""
    predictions, validation, ood = (random_predictions(classes, n, seed) for seed, n in ((0, 400), (2, 300), (1, 50)))
    predictions, validation, ood = (
        Predictions(factor * item.logits, item.labels) for item in (predictions, validation, ood)
    )
    stored = StoredPredictions.unpack(StoredPredictions.of(predictions, {"far": ood}, validation).pack())
    exact = [Predictions(item.logits.double(), item.labels) for item in (predictions, validation)]
    report = evaluate(exact[0], posthoc=["temperature"], calibration=exact[1], ood={"far": ood}, intervals=False)
    for stored_state, exact_state in ((stored, report.before), (stored.scaled(), report.after["temperature"])):
        results = stored_state.metrics()
        for name, result in exact_state.results.items():
            # Validation logits of many classes are stored as float16, so the temperature differs in the fifth digit.
            tolerance = 1e-4 if stored_state is not stored and classes > 10 else 1e-5
            assert results[name][0] == pytest.approx(float(result), abs=tolerance, rel=tolerance), name
        assert results["accuracy"][0] == float(accuracy(predictions))
        for score in ("entropy", "max_probability"):
            value = float(exact_state.detection["far"][score].auroc)
            assert stored_state.detection()["far"][score][0] == pytest.approx(value, abs=5e-4)  # 10 of 20,000 pairs
        assert (stored_state.predictions is None) == (classes > 10)
    assert stored.metrics()["ece_official"][0] == pytest.approx(float(ece(predictions, compat="official")), abs=1e-5)


def test_run_without_an_optimal_temperature_has_no_temperature_scaled_line(copy):
    """If all validation samples are correct, the optimal temperature is 0 and metrics become infinite."""
    run = Run(min((copy / "runs").iterdir()))
    validation = run.predictions("best-val")
    correct = Predictions(validation.logits, validation.logits.argmax(1), split="val")
    write_predictions(correct, run.predictions_file("best-val"))
    ledger = Ledger(copy / "new")
    with pytest.warns(DoubtfulFit, match="every one is classified correctly"):
        record(run, "small", ledger)
    assert [line.posthoc for line in ledger.lines.values()] == [None]
    assert list(problems(ledger)) == []


@pytest.mark.parametrize(("classes", "largest"), [(10, 900_000), (100, 4_000_000)])
def test_stored_predictions_are_small(classes, largest):
    ood = {"svhn": random_predictions(classes, 26_032, 2), "cifar": random_predictions(classes, 10_000, 3)}
    test, validation = random_predictions(classes, 10_000), random_predictions(classes, 5_000, 1)
    assert len(StoredPredictions.of(test, ood, validation).pack()) < largest


def test_storing_keeps_the_predicted_class_and_large_logits():
    largest = torch.finfo(torch.float32).max
    logits = torch.tensor([[1.0, 1.0 + 1e-6], [1.0 + 1e-6, 1.0], [1e6, -1e6], [-largest, largest]])
    predictions = Predictions(logits, torch.tensor([1, 0, 0, 1]))
    loaded = StoredPredictions.of(predictions).predictions
    assert loaded.prediction.tolist() == [1, 0, 0, 1]
    assert float(accuracy(loaded)) == 1.0
    assert np.isfinite(float(nll(loaded)))


def test_equal_predictions_give_equal_bytes():
    assert StoredPredictions.of(random_predictions(5)).pack() == StoredPredictions.of(random_predictions(5)).pack()


def test_invalid_stored_prediction_files_raise(tmp_path):
    with pytest.raises(ValueError, match=r"x\.npz.*damaged"):
        StoredPredictions.unpack(b"PK nothing", "x.npz")
    unknown_array = tmp_path / "e.npz"
    np.savez(unknown_array, a=np.ones(3))
    with pytest.raises(ValueError, match=r"x\.npz.*\ba\b"):
        StoredPredictions.unpack(unknown_array.read_bytes(), "x.npz")
    pickled = tmp_path / "h.npz"
    np.savez(pickled, labels=np.array([{"a": 1}], dtype=object), logits=np.ones((1, 2)))
    with pytest.raises(ValueError, match=r"x\.npz.*Python objects"):
        StoredPredictions.unpack(pickled.read_bytes(), "x.npz")
    zip_bomb = tmp_path / "b.npz"
    with zipfile.ZipFile(zip_bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("logits.npy", b"0" * (65 * 2**20))
    with pytest.raises(ValueError, match=r"x\.npz.*68,157,\d+ bytes"):
        StoredPredictions.unpack(zip_bomb.read_bytes(), "x.npz")
