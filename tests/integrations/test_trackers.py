"""TensorBoard, Weights & Biases and MLflow log the values of a real run, read back with their own readers."""

import json
import re
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlas
from fedlas.integrations import trackers
from fedlas.integrations.trackers import AbstractTracker, MLflow, TensorBoard, WeightsAndBiases, numbers_of
from fedlas.records import Board, Histogram, histograms_in, numbers_in
from fedlas.report.figures import reliability_data, reliability_figure
from waiting import until


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = fedlas.Recipe(
        data="digits", model="small_cnn", loss="fedlas_ls", epochs=2, batch_size=256, lr=0.05, splits=("test",)
    )
    return fedlas.fit(recipe, out=tmp_path_factory.mktemp("runs") / "run", device="cpu", progress=False)


@pytest.fixture(scope="module")
def report(run):
    random = torch.Generator().manual_seed(0)
    ood = torch.randn(50, 10, generator=random)
    return fedlas.evaluate(run.predictions("best-test"), posthoc="temperature", ood={"noise": ood}, resamples=20)


def diagram(report):
    return reliability_figure({"run": [reliability_data(report.before.bins["width"], report["ece"], "uncalibrated")]})


def pixels(report) -> tuple[int, int]:
    """Width and height of the diagram as a picture."""
    figure = diagram(report)
    width, height = figure.get_size_inches() * figure.dpi
    return int(width), int(height)


def send(tracker: AbstractTracker, run, report) -> None:
    """Log everything that can be logged."""
    with tracker:
        tracker.settings(run.recipe.to_dict())
        tracker.log_all(run.log)
        tracker.report(report)
        tracker.figure("reliability", diagram(report), 2)


def test_logged_results_have_slash_separated_names(run, report):
    result = numbers_of(report)
    assert result["test/ece"] == report["ece"]
    assert result["test/ece_low"] == report["ece"].interval.low
    assert result["test/temperature/ece"] == report.after["temperature"]["ece"]
    assert result["test/temperature/temperature"] == report.after["temperature"].parameters["temperature"]
    assert result["test/ood/noise/entropy/auroc"] == report.before.detection["noise"]["entropy"].auroc
    assert set(numbers_of(report, "mine")) == {name.replace("test/", "mine/", 1) for name in result}
    line = numbers_in(run.log[0])
    assert line["val/ece"] == run.log[0]["val"]["ece"]
    assert line["epoch"] == 1
    assert [name for name, _ in histograms_in(run.log[0])] == ["gate/gamma"]


def test_non_numbers_are_not_logged():
    assert numbers_in({"a": None, "b": True, "c": {"d": [1], "e": 2, "f": "x"}}) == {"c/e": 2.0}


def test_tensorboard_shows_the_run(run, report, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(TensorBoard(tmp_path), run, report)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    for record in run.log:
        for name, value in numbers_in(record).items():
            logged = {event.step: event.value for event in events.Scalars(name)}
            assert logged[record["epoch"]] == pytest.approx(value, rel=1e-6)
    for name, value in numbers_of(report).items():
        assert [event.value for event in events.Scalars(name)] == [pytest.approx(value, rel=1e-6)]
    first, second = events.Histograms("gate/gamma")
    assert (first.step, second.step) == (1, 2)
    counts = run.log[0]["gate"]["gamma_histogram"]["counts"]
    assert first.histogram_value.num == sum(counts)
    (image,) = events.Images("reliability")
    assert (image.step, (image.width, image.height)) == (2, pixels(report))
    assert b"| loss | fedlas_ls |" in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


def test_a_trained_run_and_the_tracker_write_the_same_file(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fedlas.fit(run.recipe.replace(tensorboard=True), out=run.folder, device="cpu")
    with TensorBoard(tmp_path) as tracker:
        tracker.log_all(run.log)
    contents = []
    for folder in (run.folder / "tensorboard", tmp_path):
        events = EventAccumulator(str(folder), size_guidance={"histograms": 0})
        events.Reload()
        names = events.Tags()["scalars"]
        scalars = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
        contents.append((scalars, [event.histogram_value for event in events.Histograms("gate/gamma")]))
    assert contents[0] == contents[1]


def offline_records(folder):
    """Return the records that an offline wandb run wrote; empty until the run has ended."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    store, result = DataStore(), []
    store.open_for_scan(str(path))
    with closing(store._fp), suppress(AssertionError):  # raised for an incomplete record
        while (content := store.scan_data()) is not None:
            result.append(Record())
            result[-1].ParseFromString(content)
    return result if any(item.WhichOneof("record_type") == "exit" for item in result) else []


def items(entries):
    return {"/".join(entry.nested_key) or entry.key: json.loads(entry.value_json) for entry in entries}


def test_wandb_logs_the_run(run, report, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WeightsAndBiases(project="fedlas", dir=str(tmp_path), mode="offline")
    send(tracker, run, report)
    records = until(lambda: offline_records(tmp_path))  # a separate process of wandb writes, also after the end
    history = [items(item.history.item) for item in records if item.WhichOneof("record_type") == "history"]
    for epoch_record in run.log:
        (line,) = [item for item in history if item.get("epoch") == epoch_record["epoch"] and "val/ece" in item]
        assert {name: line[name] for name in numbers_in(epoch_record)} == pytest.approx(numbers_in(epoch_record))
    gamma = [item for item in history if "gate/gamma/values" in item]
    counts = [epoch_record["gate"]["gamma_histogram"]["counts"] for epoch_record in run.log]
    assert [item["gate/gamma/values"] for item in gamma] == counts
    assert len(gamma[0]["gate/gamma/bins"]) == len(counts[0]) + 1
    (image,) = [item for item in history if "reliability/_type" in item]
    assert ((image["reliability/width"], image["reliability/height"]), image["epoch"]) == (pixels(report), 2)
    summary: dict = {}
    for item in records:
        summary |= items(item.summary.update)
    assert {name: summary[name] for name in numbers_of(report)} == pytest.approx(numbers_of(report))
    config: dict = {}
    for item in records:
        config |= items(item.config.update)
    assert config["loss"] == "fedlas_ls"
    (exit_record,) = [item.exit for item in records if item.WhichOneof("record_type") == "exit"]
    assert exit_record.exit_code == 0


def test_docs_pass_a_folder_to_every_wandb_run():
    """wandb keeps the folder of its first run, so later examples would write into the checkout."""
    docs = Path(__file__).parents[2] / "docs"
    pages = [page.read_text(encoding="utf-8") for page in docs.rglob("*.md")]
    calls = [call for page in pages for call in re.findall(r"WeightsAndBiases\((\w+=.*)\)", page)]
    assert calls
    assert [call for call in calls if "dir=" not in call] == []


class FakeRun:
    """A wandb run that was started elsewhere."""

    def __init__(self) -> None:
        self.logged: list[dict] = []

    def log(self, values) -> None:
        self.logged.append(values)


def test_a_given_run_stays_open():
    fake_run = FakeRun()
    with WeightsAndBiases(fake_run) as tracker:
        tracker.log({"epoch": 3, "val": {"ece": 0.5}})
    assert fake_run.logged == [{"epoch": 3, "val/ece": 0.5}]
    with pytest.raises(TypeError, match="project"):
        WeightsAndBiases(fake_run, project="other")


@pytest.fixture
def store(tmp_path, monkeypatch) -> str:
    """A store of MLflow in a folder, which needs to be enabled explicitly; telemetry is disabled."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    return (tmp_path / "mlruns").as_uri()


def test_mlflow_logs_the_run(run, report, store):
    from mlflow import MlflowClient

    tracker = MLflow(store, experiment="digits", run_name="first")
    send(tracker, run, report)
    client = MlflowClient(tracking_uri=store)
    result = client.get_run(tracker.run_id)
    assert (result.info.run_name, result.info.status) == ("first", "FINISHED")
    assert result.data.params["loss"] == "fedlas_ls"
    assert result.data.params["splits"] == '["test"]'
    for name in numbers_in(run.log[0]):
        history = {item.step: item.value for item in client.get_metric_history(tracker.run_id, name)}
        assert history == {
            record["epoch"]: numbers_in(record)[name] for record in run.log if name in numbers_in(record)
        }
    metrics = result.data.metrics
    assert {name: metrics[name] for name in numbers_of(report)} == pytest.approx(numbers_of(report))
    assert [item.path for item in client.list_artifacts(tracker.run_id, "figures")] == ["figures/reliability-2.png"]
    with pytest.raises(ZeroDivisionError), MLflow(store, experiment="digits") as failing:
        failing.numbers({"a (b)": 1 / 0})
    assert client.get_run(failing.run_id).info.status == "FAILED"
    assert client.get_run(failing.run_id).info.experiment_id == result.info.experiment_id
    with MLflow(store, run_id=failing.run_id) as resumed:
        resumed.numbers({"a (b)": 1.0})
    assert client.get_run(failing.run_id).data.metrics == {"a _b_": 1.0}
    assert client.get_run(failing.run_id).info.status == "FAILED"


def test_unsupported_values_raise(tmp_path, monkeypatch):
    with TensorBoard(tmp_path) as tracker:
        with pytest.raises(ValueError, match=r"epoch.*\bval\b"):
            tracker.log({"val": {"ece": 0.1}})
        with pytest.raises(TypeError, match=r"matplotlib.*ndarray"):
            tracker.figure("pixels", np.zeros((2, 2)))
    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install wandb"):
        WeightsAndBiases(project="p")
    with pytest.raises(ImportError, match=r"pip install mlflow"):
        MLflow("sqlite:///mlflow.db")
    with pytest.raises(ImportError, match=r"tensorboard.*pip install 'fedlas\[integrations\]'"):
        Board(tmp_path)


def missing(name: str):
    raise ImportError(name)


def test_histogram_has_open_bins_on_both_sides():
    assert Histogram([0.0, 0.5, 1.0], [1, 2, 3, 4]).limits == [-0.5, 0.0, 0.5, 1.0, 1.5]
