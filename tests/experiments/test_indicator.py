"""The paper's first figure, and its theorem on a trained network."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from little_drawn import bare_ledger, bare_line
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
    (wanted,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    return fit(wanted.recipe, out=tmp_path_factory.mktemp("runs") / "run", device="cpu", progress=False)


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
def kept(monkeypatch):
    """Return the figure data that would be written, without drawing."""
    pytest.importorskip("matplotlib")
    found = {}

    def keep(_, data, folder, name):
        found[name] = data
        return [folder / f"{name}.json"]

    monkeypatch.setattr(indicator, "save_with_data", keep)
    return found


def drawing(run, folder, choice=CHOICE):
    found = {} if run is None else {run.recipe.key: run}
    return Drawing(Ledger("nowhere"), choice, folder, lambda recipe: found.get(recipe.key), device="cpu")


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_plan_prefers_mnist_then_fashion_mnist_then_digits(monkeypatch):
    plan = Indicator().plan
    for missing, wanted in (((), "mnist"), (("mnist",), "fashion_mnist"), (("mnist", "fashion_mnist"), "digits")):
        monkeypatch.setattr(indicator, "_at_hand", lambda recipe, _, away=missing: recipe.data not in away)
        (item,) = plan(Choice(), Ledger("nowhere"))
        assert item.recipe == recipe_for(wanted, "small_cnn", "ce", protocol="small", seed=1)
        assert item.protocol == "small"


@pytest.mark.parametrize("there", ["digits", "mnist"])  # beside what was trained on, which is neither
def test_plan_keeps_recorded_runs_whose_data_is_missing(monkeypatch, tmp_path, there):
    monkeypatch.setattr(indicator, "_at_hand", lambda recipe, _: recipe.data == there)
    done = recipe_for("fashion_mnist", "small_cnn", "ce", protocol="small", seed=1)
    (item,) = Indicator().plan(Choice(), bare_ledger(tmp_path, [bare_line(done, "small")]))
    assert item.recipe == done


def test_figures_retrain_a_network_whose_run_folder_is_missing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    few = replace(CHOICE, changes={**CHANGES, "epochs": "1"})
    (wanted,) = Indicator().plan(few, Ledger("nowhere"))
    book = bare_ledger(tmp_path / "results", [bare_line(wanted.recipe, "small")])
    words = ["reproduce", "indicator", "--data", "digits", "--seeds", "4,5", "--ledger", str(book.folder)]
    words += ["--device", "cpu", "--runs", str(tmp_path / "runs")]
    words += [text for setting in few.changes.items() for text in ("--set", "=".join(setting))]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert re.search(r"1 run\b.*\b1\b.*\(1 .*\).*\b0\b", told.stderr)
    before = (book.folder / "x.jsonl").read_bytes()
    out = tmp_path / "figures"
    monkeypatch.setattr(indicator, "save_with_data", lambda _, data, folder, name: [folder / f"{name}.json"])
    drawn = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert drawn.exit_code == 0, drawn.output
    assert re.search(r"1 run\b.*\b1\b.*\(1 .*\).*\b1\b.*\b1\b", drawn.stderr)
    names = [Path(line).stem for line in drawn.stdout.splitlines()]
    assert names == ["indicator-digits", "indicator-activations-digits", "indicator-theorem-digits"]
    assert (book.folder / "x.jsonl").read_bytes() == before, "what was measured stays as it is"
    (tmp_path / "runs" / wanted.recipe.name / "checkpoint.pt").unlink()
    nothing = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert nothing.exit_code == 1
    assert str(tmp_path / "runs") in nothing.stderr


def test_run_folder_that_is_a_symlink_raises(tmp_path):
    (wanted,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / wanted.recipe.name).symlink_to(tmp_path / "elsewhere")
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

    def found(data, part):
        if data.root != tmp_path:
            raise FileNotFoundError(data.root)
        return Digits().read(part)

    monkeypatch.setattr(MNIST, "read", found)
    monkeypatch.setattr(MNIST, "check", lambda *_: None)
    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "empty"))
    (item,) = Indicator().plan(Choice(data_root=tmp_path), Ledger("nowhere"))
    assert item.recipe.data == "mnist"
    words = ["reproduce", "indicator", "--dry-run", "--data-root", str(tmp_path), "--ledger", str(tmp_path)]
    shown = CliRunner().invoke(app, words)
    assert "mnist-small_cnn-ce" in shown.output
    assert "fashion" not in shown.output


def test_choice_sets_data_seed_and_changes():
    names = [planned.recipe.data for planned in Indicator().plan(Choice(data=("digits", "mnist")), Ledger("nowhere"))]
    assert names == ["mnist", "digits"]
    (planned,) = Indicator().plan(CHOICE, Ledger("nowhere"))
    assert (planned.recipe.seed, planned.recipe.epochs) == (4, 3)
    for wrong, name in (
        (Choice(data=("cifar10",)), "cifar10"),
        (Choice(models=("resnet50",)), "resnet50"),
        (Choice(losses=("ls",)), "ls"),
    ):
        with pytest.raises(ValueError, match=f"'{name}'"):
            Indicator().plan(wrong, Ledger("nowhere"))


def test_no_figure_is_drawn_without_a_run(tmp_path):
    assert Indicator().draw(drawing(None, tmp_path / "figures")) == []
    assert Indicator().tables(Ledger("nowhere"), CHOICE) == []
    assert not (tmp_path / "figures").exists()


def test_trained_network_gives_three_figures_with_their_data(trained, figures):
    folder, files = figures
    names = ["indicator-digits", "indicator-activations-digits", "indicator-theorem-digits"]
    assert [path.name for path in files] == [f"{name}.{end}" for name in names for end in ("pdf", "png", "json")]
    assert all(path.stat().st_size > 1000 for path in files)
    written = trained.predictions("best-test")

    cloud = read(folder, names[0])
    assert "Digits" in cloud["title"]
    assert cloud["confidence"] == pytest.approx(written.confidence.tolist(), rel=1e-6)
    assert cloud["correct"] == written.correct.tolist()

    activations = read(folder, names[1])
    norms = written.features[:, 0].tolist()
    assert activations["high"][0]["norm"] == pytest.approx(max(norms), rel=1e-5)
    assert activations["low"][0]["norm"] == pytest.approx(min(norms), rel=1e-5)
    from sklearn.datasets import load_digits

    shown = activations["high"][0]
    pixels = load_digits().images[shown["index"]] * (255 / 16)
    assert shown["pixels"] == pixels.round().astype(int).tolist()
    assert sum(shown["features"]) == pytest.approx(shown["norm"], rel=1e-5)


def test_the_theorem_holds_on_every_test_sample_of_a_trained_network(trained, figures):
    folder, _ = figures
    found = read(folder, "indicator-theorem-digits")
    written = trained.predictions("best-test")
    for state in ("trained", "initial"):
        assert found[state]["pairs"] == 797 * 10
        assert found[state]["violations"] == 0
        assert found[state]["largest_violation"] < 1e-5
        assert found[state]["negative"] == 0
        (remark,) = found[state]["remarks"]
        assert "bias" in remark
    assert found["trained"]["norm"] == pytest.approx(written.features[:, 0].tolist(), rel=1e-6)
    assert found["trained"]["norm"] != pytest.approx(found["initial"]["norm"], rel=1e-2)
    weight = load(trained.checkpoint)["best"]["fc.weight"]
    shown = read(folder, "indicator-activations-digits")["low"][0]
    hidden = [sum(a if w > 0 else -a for a, w in zip(shown["features"], row, strict=True)) for row in weight.tolist()]
    position = written.index.tolist().index(shown["index"])
    assert found["trained"]["hidden"][position] == pytest.approx(max(hidden), rel=1e-4)


def test_incorrect_stored_features_violate_the_theorem(run, kept, tmp_path):
    written = run.predictions("best-test")
    wrong = Predictions(written.logits, written.labels, features=written.features / 5, index=written.index)
    write_predictions(wrong, run.predictions_file("best-test"))
    Indicator().draw(drawing(run, tmp_path))
    found = kept["indicator-theorem-digits"]
    assert found.trained.violations > 0
    assert found.trained.largest_violation > 0.1
    assert found.initial.violations == 0


def test_predictions_of_another_test_split_raise(run, tmp_path):
    written = run.predictions("best-test")
    wrong = Predictions(written.logits, written.labels, features=written.features, index=written.index.flip(0))
    write_predictions(wrong, run.predictions_file("best-test"))
    with pytest.raises(RunError, match="digits"):
        Indicator().draw(drawing(run, tmp_path / "figures"))
    assert not (tmp_path / "figures").exists()


def test_figures_use_the_first_available_run(trained, kept, tmp_path):
    choice = Choice(seeds=(4,), changes=CHANGES)  # MNIST takes no train_samples, but a run of it is only looked for
    files = Indicator().draw(drawing(trained, tmp_path, choice))
    assert [path.stem for path in files] == list(kept)
    assert all(name.endswith("digits") for name in kept)
    assert all(re.fullmatch(Indicator().file_names, name) for name in kept)


def test_figures_use_the_weights_of_the_best_epoch(run, kept, tmp_path):
    saved = torch.load(run.checkpoint, weights_only=True)
    saved["model"] = {name: torch.zeros_like(value) for name, value in saved["model"].items()}
    torch.save(saved, run.checkpoint)
    Indicator().draw(drawing(run, tmp_path))
    assert kept["indicator-theorem-digits"].trained.violations == 0
    assert kept["indicator-activations-digits"].high[0].norm > 0
