"""The paper's first figure, and its theorem on a trained network."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_ledgers import minimal_ledger, minimal_line
from typer.testing import CliRunner

from fedlas.cli import app
from fedlas.experiments import indicator
from fedlas.experiments.base import Choice, Drawing
from fedlas.experiments.indicator import Indicator
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.reproduce import save_results
from fedlas.io import write_predictions
from fedlas.predictions import Predictions
from fedlas.training import Run, RunError, fit, recipe_for
from fedlas.training.checkpoint import load

CHANGES = {"epochs": "3", "data_options.train_samples": "200"}
CHOICE = Choice(data=("digits",), seeds=(4, 5), changes=CHANGES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run of a small network on digits."""
    (planned_run,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    return fit(planned_run.recipe, out=tmp_path_factory.mktemp("runs") / "run", device="cpu", progress=False)


@pytest.fixture
def run(trained, tmp_path):
    """Return a copy of the run that a test may modify."""
    import shutil

    return Run(shutil.copytree(trained.folder, tmp_path / "run"))


@pytest.fixture(scope="module")
def figures(trained, tmp_path_factory):
    """Return the figures of the run and their folder."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("figures")
    return folder, Indicator().draw(drawing(trained, folder))


@pytest.fixture
def figure_data(monkeypatch):
    """Return the figure data that would be written, without drawing."""
    pytest.importorskip("matplotlib")
    data_by_name = {}

    def record_data(_, data, folder, name):
        data_by_name[name] = data
        return [folder / f"{name}.json"]

    monkeypatch.setattr(indicator, "save_with_data", record_data)
    return data_by_name


def drawing(run, folder, choice=CHOICE):
    runs = {} if run is None else {run.recipe.key: run}
    return Drawing(Ledger("nowhere"), choice, folder, lambda recipe: runs.get(recipe.key), device="cpu")


def read_figure(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_plan_prefers_mnist_then_fashion_mnist_then_digits(monkeypatch):
    plan = Indicator().plan
    for missing, expected_data in (
        ((), "mnist"),
        (("mnist",), "fashion_mnist"),
        (("mnist", "fashion_mnist"), "digits"),
    ):
        monkeypatch.setattr(
            indicator, "_at_hand", lambda recipe, _, missing_data=missing: recipe.data not in missing_data
        )
        (item,) = plan(Choice(), Ledger("nowhere"))
        assert item.recipe == recipe_for(expected_data, "small_cnn", "ce", protocol="small", seed=1)
        assert item.protocol == "small"


@pytest.mark.parametrize("available_data", ["digits", "mnist"])  # the recorded run has neither
def test_plan_keeps_recorded_runs_whose_data_is_missing(monkeypatch, tmp_path, available_data):
    monkeypatch.setattr(indicator, "_at_hand", lambda recipe, _: recipe.data == available_data)
    recorded = recipe_for("fashion_mnist", "small_cnn", "ce", protocol="small", seed=1)
    (item,) = Indicator().plan(Choice(), minimal_ledger(tmp_path, [minimal_line(recorded, "small")]))
    assert item.recipe == recorded


def test_figures_retrain_a_network_whose_run_folder_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    short_choice = replace(CHOICE, changes={**CHANGES, "epochs": "1"})
    (planned_run,) = Indicator().plan(short_choice, Ledger("nowhere"))
    ledger = minimal_ledger(tmp_path / "results", [minimal_line(planned_run.recipe, "small")])
    arguments = ["reproduce", "indicator", "--data", "digits", "--seeds", "4,5", "--ledger", str(ledger.folder)]
    arguments += ["--device", "cpu", "--runs", str(tmp_path / "runs")]
    arguments += [text for setting in short_choice.changes.items() for text in ("--set", "=".join(setting))]
    plan_result = CliRunner().invoke(app, arguments)
    assert plan_result.exit_code == 0, plan_result.output
    assert re.search(r"1 run\b.*\b1\b.*\(1 .*\).*\b0\b", plan_result.stderr)
    before = (ledger.folder / "x.jsonl").read_bytes()
    out = tmp_path / "figures"
    monkeypatch.setattr(indicator, "save_with_data", lambda _, data, folder, name: [folder / f"{name}.json"])
    figure_result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert figure_result.exit_code == 0, figure_result.output
    assert re.search(r"1 run\b.*\b1\b.*\(1 .*\).*\b1\b.*\b1\b", figure_result.stderr)
    names = [Path(line).stem for line in figure_result.stdout.splitlines()]
    assert names == ["indicator-digits", "indicator-activations-digits", "indicator-theorem-digits"]
    assert (ledger.folder / "x.jsonl").read_bytes() == before, "recorded measurements are unchanged"
    (tmp_path / "runs" / planned_run.recipe.name / "checkpoint.pt").unlink()
    failed_result = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert failed_result.exit_code == 1
    assert str(tmp_path / "runs") in failed_result.stderr


def test_run_folder_that_is_a_symlink_raises(tmp_path):
    (planned_run,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / planned_run.recipe.name).symlink_to(tmp_path / "elsewhere")
    options = {"ledger": Ledger("nowhere"), "runs": tmp_path / "runs", "folder": tmp_path / "figures"}
    with pytest.raises(RunError, match="link"):
        save_results(Indicator(), CHOICE, **options)


def test_planning_downloads_no_data(monkeypatch, tmp_path):
    from fedlas.data.base import fetching
    from fedlas.data.fashion_mnist import FashionMNIST

    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr(FashionMNIST, "folders", ("fashion-mnist",))
    monkeypatch.setattr(fetching, "_fetch_from_any", lambda source, *_: pytest.fail(f"{source.name} is fetched"))
    state = torch.get_rng_state()
    (item,) = Indicator().plan(Choice(), Ledger("nowhere"))
    assert item.recipe.data == "digits"
    assert "download" not in item.recipe.data_options
    assert torch.equal(torch.get_rng_state(), state)


def test_plan_searches_data_in_the_given_root(monkeypatch, tmp_path):
    """Regression: only $FEDLAS_DATA was searched when choosing data."""
    from fedlas.data.digits import Digits
    from fedlas.data.mnist import MNIST

    def read_from_root(data, part):
        if data.root != tmp_path:
            raise FileNotFoundError(data.root)
        return Digits().read(part)

    monkeypatch.setattr(MNIST, "read", read_from_root)
    monkeypatch.setattr(MNIST, "check", lambda *_: None)
    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "empty"))
    (item,) = Indicator().plan(Choice(data_root=tmp_path), Ledger("nowhere"))
    assert item.recipe.data == "mnist"
    arguments = ["reproduce", "indicator", "--dry-run", "--data-root", str(tmp_path), "--ledger", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert "mnist-small_cnn-ce" in result.output
    assert "fashion" not in result.output


def test_choice_sets_data_seed_and_changes():
    names = [
        planned_run.recipe.data for planned_run in Indicator().plan(Choice(data=("digits", "mnist")), Ledger("nowhere"))
    ]
    assert names == ["mnist", "digits"]
    (planned_run,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    assert (planned_run.recipe.seed, planned_run.recipe.epochs) == (4, 3)
    for invalid_choice, name in (
        (Choice(data=("cifar10",)), "cifar10"),
        (Choice(models=("resnet50",)), "resnet50"),
        (Choice(losses=("ls",)), "ls"),
    ):
        with pytest.raises(ValueError, match=f"'{name}'"):
            Indicator().plan(invalid_choice, Ledger("nowhere"))


def test_no_figure_is_drawn_without_a_run(tmp_path):
    assert Indicator().draw(drawing(None, tmp_path / "figures")) == []
    assert Indicator().tables(Ledger("nowhere"), CHOICE) == []
    assert not (tmp_path / "figures").exists()


def test_trained_network_gives_three_figures_with_their_data(trained, figures):
    folder, files = figures
    names = ["indicator-digits", "indicator-activations-digits", "indicator-theorem-digits"]
    assert [path.name for path in files] == [f"{name}.{end}" for name in names for end in ("pdf", "png", "json")]
    assert all(path.stat().st_size > 1000 for path in files)
    predictions = trained.predictions("best-test")

    scatter = read_figure(folder, names[0])
    assert "Digits" in scatter["title"]
    assert scatter["confidence"] == pytest.approx(predictions.confidence.tolist(), rel=1e-6)
    assert scatter["correct"] == predictions.correct.tolist()

    activations = read_figure(folder, names[1])
    norms = predictions.features[:, 0].tolist()
    assert activations["high"][0]["norm"] == pytest.approx(max(norms), rel=1e-5)
    assert activations["low"][0]["norm"] == pytest.approx(min(norms), rel=1e-5)
    from sklearn.datasets import load_digits

    highest = activations["high"][0]
    pixels = load_digits().images[highest["index"]] * (255 / 16)
    assert highest["pixels"] == pixels.round().astype(int).tolist()
    assert sum(highest["features"]) == pytest.approx(highest["norm"], rel=1e-5)


def test_the_theorem_holds_on_every_test_sample_of_a_trained_network(trained, figures):
    folder, _ = figures
    theorem = read_figure(folder, "indicator-theorem-digits")
    predictions = trained.predictions("best-test")
    for state in ("trained", "initial"):
        assert theorem[state]["pairs"] == 797 * 10
        assert theorem[state]["violations"] == 0
        assert theorem[state]["largest_violation"] < 1e-5
        assert theorem[state]["negative"] == 0
        (note,) = theorem[state]["remarks"]
        assert "bias" in note
    assert theorem["trained"]["norm"] == pytest.approx(predictions.features[:, 0].tolist(), rel=1e-6)
    assert theorem["trained"]["norm"] != pytest.approx(theorem["initial"]["norm"], rel=1e-2)
    weight = load(trained.checkpoint)["best"]["fc.weight"]
    lowest = read_figure(folder, "indicator-activations-digits")["low"][0]
    hidden = [sum(a if w > 0 else -a for a, w in zip(lowest["features"], row, strict=True)) for row in weight.tolist()]
    position = predictions.index.tolist().index(lowest["index"])
    assert theorem["trained"]["hidden"][position] == pytest.approx(max(hidden), rel=1e-4)


def test_incorrect_stored_features_violate_the_theorem(run, figure_data, tmp_path):
    predictions = run.predictions("best-test")
    scaled = Predictions(
        predictions.logits, predictions.labels, features=predictions.features / 5, index=predictions.index
    )
    write_predictions(scaled, run.predictions_file("best-test"))
    Indicator().draw(drawing(run, tmp_path))
    theorem = figure_data["indicator-theorem-digits"]
    assert theorem.trained.violations > 0
    assert theorem.trained.largest_violation > 0.1
    assert theorem.initial.violations == 0


def test_predictions_of_another_test_split_raise(run, tmp_path):
    predictions = run.predictions("best-test")
    reordered = Predictions(
        predictions.logits, predictions.labels, features=predictions.features, index=predictions.index.flip(0)
    )
    write_predictions(reordered, run.predictions_file("best-test"))
    with pytest.raises(RunError, match="digits"):
        Indicator().draw(drawing(run, tmp_path / "figures"))
    assert not (tmp_path / "figures").exists()


def test_figures_use_the_first_available_run(trained, figure_data, tmp_path):
    choice = Choice(seeds=(4,), changes=CHANGES)  # `train_samples` is invalid for MNIST, whose run is only looked up
    files = Indicator().draw(drawing(trained, tmp_path, choice))
    assert [path.stem for path in files] == list(figure_data)
    assert all(name.endswith("digits") for name in figure_data)
    assert all(re.fullmatch(Indicator().file_names, name) for name in figure_data)


def test_figures_use_the_weights_of_the_best_epoch(run, figure_data, tmp_path):
    checkpoint = torch.load(run.checkpoint, weights_only=True)
    checkpoint["model"] = {name: torch.zeros_like(value) for name, value in checkpoint["model"].items()}
    torch.save(checkpoint, run.checkpoint)
    Indicator().draw(drawing(run, tmp_path))
    assert figure_data["indicator-theorem-digits"].trained.violations == 0
    assert figure_data["indicator-activations-digits"].high[0].norm > 0
